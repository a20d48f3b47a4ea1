"""Runs real TRL on a tiny seeded policy and stores numbers: ids, log-probs of every scored token,
TRL's loss per case.

python -m tests.golden.make_trl # needs the `bench` extra (trl, accelerate, datasets)

The tests read the numbers only. Log-probs are computed here by a plain padded forward, not by TRL:
what is compared is the whole way from token ids to TRL's loss.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

OUT = Path(__file__).parent / "trl_1_16.json"
WORDS = [f"w{i}" for i in range(60)]
SCORED = ("chosen", "rejected")
# Words of prompt, chosen and rejected answer; those of equal length let the two models sort the
# pairs differently.
SIZES = [
    (3, 5, 9),
    (6, 12, 4),
    (2, 1, 7),
    (8, 7, 7),
    (4, 10, 2),
    (5, 3, 11),
    (4, 6, 6),
    (3, 6, 6),
    (7, 5, 5),
]

SMOOTHED = {"exo_pair": 1e-3, "robust": 0.1}
DIVERGENT = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")
PAIRWISE = (
    *DIVERGENT, "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "sft",
)  # fmt: skip


def dpo_cases() -> dict[str, dict[str, Any]]:
    """Name -> fields of TRL's DPOConfig."""

    def case(loss: str, **more: Any) -> dict[str, Any]:
        return {
            "loss_type": [loss],
            "beta": 0.3,
            "label_smoothing": SMOOTHED.get(loss, 0.0),
            **more,
        }

    cases = {loss: case(loss) for loss in PAIRWISE}
    cases |= {
        f"{loss} smoothed": case(loss, label_smoothing=0.2)
        for loss in ("sigmoid", "aot", "aot_unpaired")
    }
    cases |= {"discopop tau": case("discopop", discopop_tau=0.4)}
    for kind in ("forward_kl", "js_divergence", "alpha_divergence"):
        cases |= {f"{loss} {kind}": case(loss, f_divergence_type=kind) for loss in DIVERGENT}
    cases["sigmoid alpha 2"] = case(
        "sigmoid", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=2.0
    )
    damped = [loss for loss in PAIRWISE if loss != "sft"]
    cases |= {f"{loss} ld": case(loss, ld_alpha=0.4) for loss in damped}
    weighted = [loss for loss in damped if not loss.startswith("aot")]
    cases |= {f"{loss} wpo": case(loss, use_weighting=True) for loss in weighted}
    mpo = {
        "loss_type": ["sigmoid", "bco_pair", "sft"],
        "loss_weights": [0.8, 0.2, 1.0],
        "beta": 0.3,
    }
    cases["mpo"] = mpo
    cases["mpo ld"] = {**mpo, "ld_alpha": 0.4}
    rpo = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7], "beta": 0.3}
    cases["rpo"] = rpo
    cases["rpo forward_kl"] = {**rpo, "f_divergence_type": "forward_kl"}
    cases["ld wpo"] = case("sigmoid", ld_alpha=0.4, use_weighting=True)
    return cases


CPO_CASES: dict[str, dict[str, Any]] = {
    "cpo": {"loss_type": "sigmoid", "beta": 0.3, "cpo_alpha": 0.7},
    "cpo smoothed": {"loss_type": "sigmoid", "beta": 0.3, "cpo_alpha": 0.7, "label_smoothing": 0.2},
    "cpo hinge": {"loss_type": "hinge", "beta": 0.3, "cpo_alpha": 0.7},
    "cpo ipo": {"loss_type": "ipo", "beta": 0.3, "cpo_alpha": 0.7},
    "simpo": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.8, "cpo_alpha": 0.0},
    "simpo smoothed": {
        "loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.8, "cpo_alpha": 0.0, "label_smoothing": 0.2
    },
    "simpo with nll": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.8, "cpo_alpha": 1.0},
    "alphapo": {"loss_type": "alphapo", "beta": 2.0, "simpo_gamma": 0.1, "alpha": 0.25},
    "alphapo negative": {"loss_type": "alphapo", "beta": 2.0, "simpo_gamma": 0.1, "alpha": -0.5},
}  # fmt: skip
ORPO_CASES: dict[str, dict[str, Any]] = {"orpo": {"beta": 0.3}}


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "<pad>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **names)


def two_models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A reference wide enough that its log-probs vary, and a policy some way from it."""
    config = LlamaConfig(
        vocab_size=len(WORDS) + 4,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    policy, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
    with torch.no_grad():
        for ours, theirs in zip(policy.parameters(), reference.parameters(), strict=True):
            if ours.ndim > 1:
                theirs.normal_(0, 0.15)
            ours.copy_(theirs + 0.04 * torch.randn_like(theirs))
    return policy.eval(), reference.eval()


def text_rows() -> list[dict[str, str]]:
    torch.manual_seed(1)

    def words(count: int) -> str:
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,)).tolist())

    return [
        {"prompt": words(p), "chosen": " " + words(c), "rejected": " " + words(r)}
        for p, c, r in SIZES
    ]


def token_rows(
    rows: list[dict[str, str]], tokens: PreTrainedTokenizerFast
) -> list[dict[str, list[int]]]:
    """BOS, prompt, answer, EOS: what all three trainers must see."""

    def ids(text: str) -> list[int]:
        return list(tokens(text)["input_ids"])

    return [
        {
            "prompt_ids": [tokens.bos_token_id, *ids(row["prompt"])],
            "chosen_ids": [*ids(row["chosen"]), tokens.eos_token_id],
            "rejected_ids": [*ids(row["rejected"]), tokens.eos_token_id],
        }
        for row in rows
    ]


@torch.no_grad()
def token_numbers(
    model: LlamaForCausalLM, prompt: list[int], answer: list[int]
) -> tuple[list[float], list[float]]:
    """log p of each answer token, and log sum of p^2 over the vocabulary, by a plain forward of
    one sequence."""
    logits: Tensor = (
        model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
    )
    logps = torch.log_softmax(logits, dim=-1)
    own = logps.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return own.tolist(), torch.logsumexp(2 * logps, dim=-1).tolist()


def arguments(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "per_device_train_batch_size": len(SIZES),
    }


def main() -> None:
    tokens = tokenizer()
    policy, reference = two_models()
    texts = text_rows()
    rows = token_rows(texts, tokens)
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:

        def run(
            kind: str, settings: Mapping[str, Mapping[str, Any]], build: Callable[..., Any]
        ) -> None:
            for name, fields in settings.items():
                trainer = build(dict(fields), arguments(folder))
                batch = trainer.data_collator(list(trainer.train_dataset))
                check_ids(kind, batch, rows)
                trainer.model.eval()
                loss = trainer.compute_loss(trainer.model, batch)
                case = {
                    "name": name,
                    "trainer": kind,
                    "settings": fields,
                    "loss": float(loss.detach()),
                }
                if kind == "orpo":
                    case["nll_loss"] = trainer._stored_metrics["train"]["nll_loss"][-1]
                    case["log_odds_ratio"] = trainer._stored_metrics["train"]["log_odds_ratio"][-1]
                cases.append(case)

        def dpo(fields: dict[str, Any], common: dict[str, Any]) -> DPOTrainer:
            args = DPOConfig(**common, **fields, max_length=None)
            with_bos = [
                {**row, "prompt": tokens.bos_token + row["prompt"]} for row in texts
            ]  # CPO and ORPO add it
            data = Dataset.from_list(with_bos)
            return DPOTrainer(
                policy, reference, args=args, train_dataset=data, processing_class=tokens
            )

        def cpo(fields: dict[str, Any], common: dict[str, Any]) -> CPOTrainer:
            args = CPOConfig(**common, **fields)
            return CPOTrainer(
                policy, args, train_dataset=Dataset.from_list(texts), processing_class=tokens
            )

        def orpo(fields: dict[str, Any], common: dict[str, Any]) -> ORPOTrainer:
            args = ORPOConfig(**common, **fields)
            return ORPOTrainer(
                policy, args, train_dataset=Dataset.from_list(texts), processing_class=tokens
            )

        run("dpo", dpo_cases(), dpo)
        run("cpo", CPO_CASES, cpo)
        run("orpo", ORPO_CASES, orpo)
    OUT.write_text(as_json(rows, policy, reference, cases), encoding="utf-8")


def check_ids(kind: str, batch: Mapping[str, Tensor], rows: list[dict[str, list[int]]]) -> None:
    """What TRL scores is what we store."""
    for i, row in enumerate(rows):
        for side, offset in (("chosen", 0), ("rejected", len(rows))):
            if kind == "dpo":
                ids, scored = (
                    batch["input_ids"][offset + i],
                    batch["completion_mask"][offset + i].bool(),
                )
            else:
                ids, scored = batch[f"{side}_input_ids"][i], batch[f"{side}_labels"][i] != -100
            full = row["prompt_ids"] + row[f"{side}_ids"]
            assert ids[: len(full)].tolist() == full, (kind, i, side)
            assert ids[scored].tolist() == row[f"{side}_ids"], (kind, i, side)


def as_json(
    rows: list[dict[str, list[int]]],
    policy: LlamaForCausalLM,
    reference: LlamaForCausalLM,
    cases: list[dict[str, Any]],
) -> str:
    """One line per pair and per case."""
    pairs: list[dict[str, Any]] = []
    for row in rows:
        pair: dict[str, Any] = dict(row)
        for side in SCORED:
            prompt, answer = row["prompt_ids"], row[f"{side}_ids"]
            pair[f"policy_{side}"], pair[f"squares_{side}"] = token_numbers(policy, prompt, answer)
            pair[f"reference_{side}"], _ = token_numbers(reference, prompt, answer)
        pairs.append(pair)
    versions = {each.__name__: each.__version__ for each in (trl, transformers, torch, accelerate)}
    lines = [
        '{"versions": ' + json.dumps(versions) + ",",
        '"pairs": [\n' + ",\n".join(map(json.dumps, pairs)) + "\n],",
        '"cases": [\n' + ",\n".join(map(json.dumps, cases)) + "\n]}",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
