"""Runs TRL's trainers for single answers with labels, and stores log-probs and losses.

python -m tests.golden.make_trl_unpaired # TRL 1.16: KTO; TRL 1.10: BCO, which 1.16 has not

Each run replaces the cases of its TRL in trl_unpaired.json. The rows are the answers of
make_trl.py, each alone; `partners` is the permutation by which TRL's KTO pairs prompts with
answers to other prompts: a rotation by one within a batch.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset

from tests.golden.make_trl import (
    arguments,
    text_rows,
    token_numbers,
    token_rows,
    tokenizer,
    two_models,
)

OUT = Path(__file__).with_name("trl_unpaired.json")
KTO_CASES: list[dict[str, Any]] = [
    {"loss_type": loss, "beta": beta, "desirable_weight": good, "undesirable_weight": bad}
    for loss in ("kto", "apo_zero_unpaired")
    for beta, good, bad in ((0.3, 1.0, 1.0), (0.1, 1.0, 1.0), (0.3, 1.5, 0.4))
]
BCO_CASES: list[dict[str, Any]] = [{"beta": 0.3}, {"beta": 0.1}]


def rows_of(tokens: Any) -> list[dict[str, Any]]:
    """Each answer alone, good and bad ones in turn; one more good than bad."""
    texts = text_rows()
    ids = token_rows(texts, tokens)
    rows = [
        {
            "prompt": text["prompt"], "completion": text[side], "label": side == "chosen",
            "prompt_ids": row["prompt_ids"], "answer_ids": row[f"{side}_ids"],
        }
        for text, row in zip(texts, ids, strict=True)
        for side in ("chosen", "rejected")
    ]  # fmt: skip
    return rows[:-1]


def main() -> None:
    tokens, (policy, reference) = tokenizer(), two_models()
    rows = rows_of(tokens)
    partners = [len(rows) - 1, *range(len(rows) - 1)]
    stored = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {"cases": []}
    is_kto = trl.__version__.startswith("1.16.")
    kind, cases = ("kto", KTO_CASES) if is_kto else ("bco", BCO_CASES)
    module: Any = importlib.import_module("trl" if is_kto else "trl.experimental.bco")
    names = ("KTOConfig", "KTOTrainer") if is_kto else ("BCOConfig", "BCOTrainer")
    config, trainer_class = (getattr(module, name) for name in names)
    found = [case for case in stored["cases"] if case["trainer"] != kind]
    with tempfile.TemporaryDirectory() as folder:
        for swapped in (False, True):  # the KL term is positive one way, and clamped the other
            models = (reference, policy) if swapped else (policy, reference)
            for settings in cases:
                common = arguments(folder) | {"per_device_train_batch_size": len(rows)}
                common |= {"train_sampling_strategy": "sequential"} if is_kto else {}
                start = "" if kind == "bco" else tokens.bos_token  # BCO adds it
                data = [
                    {
                        "prompt": start + row["prompt"],
                        **{k: row[k] for k in ("completion", "label")},
                    }
                    for row in rows
                ]
                trainer = trainer_class(
                    models[0], models[1], args=config(**common, **settings, max_length=None),
                    train_dataset=Dataset.from_list(data), processing_class=tokens,
                )  # fmt: skip
                batch = trainer.data_collator(list(trainer.train_dataset))
                check_ids(
                    batch, rows, partners if is_kto and "kto" in settings["loss_type"] else []
                )
                trainer.model.eval()
                loss = float(trainer.compute_loss(trainer.model, batch).detach())
                found.append(
                    {"trainer": kind, "trl": trl.__version__, "settings": settings}
                    | {"swapped": swapped, "loss": loss}
                )
    numbers = []
    for row, partner in zip(rows, partners, strict=True):
        prompt, answers = row["prompt_ids"], (row["answer_ids"], rows[partner]["answer_ids"])
        own = {"label": row["label"], "length": [len(answer) for answer in answers]}
        for name, model in (("policy", policy), ("reference", reference)):
            own[name] = [sum(token_numbers(model, prompt, answer)[0]) for answer in answers]
        numbers.append(own)
    text = '{"rows": [\n' + ",\n".join(map(json.dumps, numbers)) + "\n],\n"
    text += '"cases": [\n' + ",\n".join(map(json.dumps, found)) + "\n]}\n"
    OUT.write_text(text, encoding="utf-8")


def check_ids(batch: Any, rows: list[dict[str, Any]], partners: list[int]) -> None:
    """What TRL scores is what is stored."""
    ids = batch["input_ids"] if "input_ids" in batch else batch["completion_input_ids"]
    for row, found in zip(rows, ids, strict=True):
        full = row["prompt_ids"] + row["answer_ids"]
        assert found[: len(full)].tolist() == full, (found, full)
    for i, partner in enumerate(partners):
        full = rows[i]["prompt_ids"] + rows[partner]["answer_ids"]
        assert batch["KL_input_ids"][i][: len(full)].tolist() == full, i
    assert torch.as_tensor(batch["label"]).tolist() == [row["label"] for row in rows]


if __name__ == "__main__":
    main()
