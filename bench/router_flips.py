"""How often routers choose other experts in another layout, and how far that moves log-probs.

    python bench/router_flips.py --json          # CPU; about two minutes

Rounding differs with the shape of a matrix product, so the same token can get another expert where two
are almost equal. The same pairs are scored in one micro-batch and one by one, with free choices and with those of
the first pass replayed: what replay takes away is what flips cost. Random weights are the worst case: their routers
hardly prefer any expert.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from common import RESULTS, machine, table, told, write_facts
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rather.data.batch import PairBatch
from rather.data.pack import pack
from rather.model.attention import IMPLEMENTATION
from rather.model.check import random_pairs, routers_of
from rather.model.policy import PolicyModel, pair_columns

Choices = list[Tensor]  # of each layer: [tokens, experts per token]
VOCABULARY, LAYERS, EXPERTS, CHOSEN = 500, 6, 16, 2


def make_policy(dtype: torch.dtype, sharpness: float) -> PolicyModel:
    """A small qwen3_moe; `sharpness` multiplies the weights of its routers."""
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=512,
        moe_intermediate_size=64, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        norm_topk_prob=True, initializer_range=0.06, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=IMPLEMENTATION
    )
    with torch.no_grad():
        for _, router in routers_of(model):
            router.weight.normal_(0, 0.06 * sharpness)
    return PolicyModel(model.to(dtype).eval())


def watch(policy: PolicyModel) -> tuple[Choices, Choices]:
    """(where choices are recorded, where those to replay are put: none are by default)."""
    seen: Choices = []
    replayed: Choices = []

    def forward(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, chosen = type(router).forward(router, hidden)
        if replayed:
            chosen = replayed[len(seen) % LAYERS]
            own = logits.float().softmax(-1).gather(1, chosen)
            scores = (own / own.sum(-1, keepdim=True)).to(logits.dtype)
        seen.append(chosen)
        return logits, scores, chosen

    for _, router in routers_of(policy):
        router.forward = MethodType(forward, router)
    return seen, replayed


@torch.no_grad()
def score(policy: PolicyModel, batch: PairBatch, seen: Choices) -> tuple[Tensor, Tensor]:
    """(log-probs [P, 2], choices [tokens, layers, chosen], sorted)."""
    seen.clear()
    logps = pair_columns(policy, batch)["sum"]
    return logps, torch.stack([each.sort(1).values for each in seen], 1)


def measure(dtype: torch.dtype, sharpness: float, pairs: int) -> dict[str, float]:
    policy = make_policy(dtype, sharpness)
    seen, replayed = watch(policy)
    lengths = [(40 + 7 * i % 90, 60 + 11 * i % 120, 50 + 13 * i % 130) for i in range(pairs)]
    rows = random_pairs(VOCABULARY, lengths)
    singles = [pack([row], 10**6)[0] for row in rows]
    (together,) = pack(rows, 10**6)
    order = together.pair_P.tolist()
    assert torch.equal(together.ids_N, torch.cat([singles[i].ids_N for i in order]))
    whole, chosen = score(policy, together, seen)
    found: dict[str, list[Tensor]] = {"free": [], "replayed": []}
    flips, start = [], 0
    for place, i in enumerate(order):
        own = chosen[start : (start := start + len(singles[i].ids_N))]
        logps, other = score(policy, singles[i], seen)
        flips.append((own != other).any(2).float().flatten())
        found["free"].append(logps[0] - whole[place])
        replayed[:] = list(own.unbind(1))
        found["replayed"].append(score(policy, singles[i], seen)[0][0] - whole[place])
        replayed.clear()
    answers = torch.cat([together.length_P2]).double()
    facts: dict[str, float] = {"flips": float(torch.cat(flips).mean())}
    for name, each in found.items():
        off = torch.stack(each)
        facts[f"token_{name}"] = float((off / answers).abs().max())
        facts[f"margin_{name}"] = float((off[:, 0] - off[:, 1]).square().mean().sqrt())
        facts[f"bias_{name}"] = float((off[:, 0] - off[:, 1]).mean())
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=RESULTS / "router_flips.json",
        help="write the results",
    )
    args = parser.parse_args()
    print(told(machine()), flush=True)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for sharpness in (1.0, 8.0):
            name = str(dtype).removeprefix("torch.")
            facts = measure(dtype, sharpness, args.pairs)
            results.append({"dtype": name, "router_scale": sharpness, **facts})
    columns = list(results[0])
    table(
        "one micro-batch against one pair at a time", columns, [list(r.values()) for r in results]
    )
    if args.json:
        write_facts(args.json, "router_flips", results=results)


if __name__ == "__main__":
    main()
