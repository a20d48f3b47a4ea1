"""How often routers choose other experts in another layout, and how far that moves log-probs.

    python bench/router_flips.py --json          # CPU; about a minute

Layouts add numbers up in different orders, so a token can get another expert where two are almost equal. Here the same
pairs are scored whole and as two tensor-parallel ranks would: each output of attention is a sum of two parts. This is
done with free choices, and with those of the first pass replayed: what replay takes away is what flips cost. Few CPUs
multiply bfloat16 numbers: products are float32 and their results rounded, as on a GPU. Random weights are the
worst case, because their routers hardly prefer any expert; larger weights of routers make them prefer some.
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


def nearest(value: Tensor) -> Tensor:
    return value.bfloat16().float()


def make_policy(rounded: bool, sharpness: float) -> PolicyModel:
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
        for parameter in model.parameters() if rounded else ():
            parameter.copy_(nearest(parameter))
    for name, module in model.named_modules() if rounded else ():
        if isinstance(module, torch.nn.Linear) or name.endswith(("norm", ".experts")):
            module.register_forward_hook(lambda _module, _args, output: nearest(output))
    return PolicyModel(model.eval())


def watch(policy: PolicyModel, rounded: bool) -> tuple[Choices, Choices]:
    """(where choices are recorded, where those to replay are put: none are by default)."""
    seen: Choices = []
    replayed: Choices = []

    def forward(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden, router.weight)
        shares = (nearest(logits) if rounded else logits).softmax(-1)
        chosen = replayed[len(seen)] if replayed else shares.topk(CHOSEN).indices
        own = shares.gather(1, chosen)
        seen.append(chosen)
        return logits, own / own.sum(-1, keepdim=True), chosen

    for _, router in routers_of(policy):
        router.forward = MethodType(forward, router)
    return seen, replayed


@torch.no_grad()
def score(policy: PolicyModel, batch: PairBatch, seen: Choices) -> tuple[Tensor, Tensor]:
    """(log-probs [P, 2], choices [tokens, layers, chosen], sorted)."""
    seen.clear()
    logps = pair_columns(policy, batch)["sum"]
    return logps, torch.stack([each.sort(1).values for each in seen], 1)


def divide(policy: PolicyModel, rounded: bool) -> None:
    """Add up attention's output from two halves of the heads, each rounded, as two ranks do."""

    def forward(linear: Any, x: Tensor) -> Tensor:
        halves = zip(x.chunk(2, -1), linear.weight.chunk(2, -1), strict=True)
        parts = [torch.nn.functional.linear(each, weight) for each, weight in halves]
        return sum(map(nearest, parts)) if rounded else sum(parts)

    for name, module in policy.named_modules():
        if name.endswith("o_proj"):
            module.forward = MethodType(forward, module)


def measure(rounded: bool, sharpness: float, pairs: int) -> dict[str, float]:
    policy = make_policy(rounded, sharpness)
    seen, replayed = watch(policy, rounded)
    lengths = [(40 + 7 * i % 90, 60 + 11 * i % 120, 50 + 13 * i % 130) for i in range(pairs)]
    (batch,) = pack(random_pairs(VOCABULARY, lengths), 10**6)
    whole, chosen = score(policy, batch, seen)
    divide(policy, rounded)
    found = {}
    found["free"], other = score(policy, batch, seen)
    replayed[:] = list(chosen.unbind(1))
    found["replayed"], _ = score(policy, batch, seen)
    facts: dict[str, float] = {
        "rows": other.shape[0] * LAYERS,
        "flips": float((chosen != other).any(2).double().mean()),
    }
    for name, each in found.items():
        off = each - whole
        facts[f"token_{name}"] = float((off / batch.length_P2).abs().max())
        facts[f"margin_{name}"] = float((off[:, 0] - off[:, 1]).square().mean().sqrt())
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
    for rounded in (False, True):
        for sharpness in (1.0, 8.0):
            name = "bfloat16" if rounded else "float32"
            facts = measure(rounded, sharpness, args.pairs)
            results.append({"dtype": name, "router_scale": sharpness, **facts})
    columns = list(results[0])
    table(
        "whole against two halves: flipped choices; log-probs per token (largest), margins of pairs (rms)",
        columns,
        [list(r.values()) for r in results],
    )
    if args.json:
        write_facts(args.json, "router_flips", results=results)


if __name__ == "__main__":
    main()
