"""Short trainings that TRL and rather.trl both run: what make_expected.py and test_numbers.py share."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback

from tests.golden.trl_run import make_rows

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-3,
    "warmup_steps": 1,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "num_train_epochs": 1,
    "max_length": 20,
    "logging_steps": 1,
    "bf16": False,
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
TRAINERS = ("DPO", "KTO", "Reward", "SFT", "ORPO", "CPO")
PATHS = {
    "ORPO": "experimental.orpo",
    "CPO": "experimental.cpo",
}


@dataclass
class Case:
    """A trainer, its settings, and its rows."""

    trainer: str
    shape: str = "chat"
    settings: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    columns: str = ""  # of SFT: messages, or prompt and completion
    evaluates: bool = False


CASES = {
    "dpo chat": Case("DPO", evaluates=True),
    "dpo plain": Case("DPO", "plain", {"num_train_epochs": 2}),
    "dpo turns, cut at the start": Case("DPO", "turns", {"truncation_mode": "keep_end"}),
    "dpo lora": Case("DPO", lora={"lora_dropout": 0.1}),
    "dpo ipo + sft": Case("DPO", settings={"loss_type": ["ipo", "sft"], "loss_weights": [1, 0.2]}),
    "dpo aot": Case("DPO", settings={"loss_type": "aot", "label_smoothing": 0.1}),
    "dpo ld, wpo, js": Case(
        "DPO",
        settings={"ld_alpha": 0.5, "use_weighting": True, "f_divergence_type": "js_divergence"},
    ),
    "dpo precomputed": Case("DPO", settings={"precompute_ref_log_probs": True}),
    "dpo moving reference": Case(
        "DPO",
        settings={"sync_ref_model": True, "ref_model_sync_steps": 2, "num_train_epochs": 3},
    ),
    "dpo bf16": Case("DPO", settings={"bf16": True}),
    "kto": Case("KTO", "plain", {"undesirable_weight": 0.7}, evaluates=True),
    "kto apo": Case(
        "KTO",
        settings={"loss_type": "apo_zero_unpaired", "train_sampling_strategy": "random"},
    ),
    "reward": Case("Reward", settings={"center_rewards_coefficient": 0.1}, evaluates=True),
    "reward plain": Case("Reward", "plain", evaluates=True),  # which ends with a padding token
    "sft completions": Case("SFT", columns="completion", evaluates=True),
    "sft messages": Case("SFT", columns="messages", settings={"shuffle_dataset": True}),
    "sft text": Case("SFT", "plain", columns="text"),
    "orpo": Case("ORPO"),
    "cpo": Case("CPO", "plain"),
    "cpo simpo": Case("CPO", settings={"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.5}),
    "cpo alphapo": Case("CPO", settings={"loss_type": "simpo", "alpha": 0.25}),
}


def config_of(kind: str, folder: Path, **settings: Any) -> Any:
    """Return a config of rather.trl for a CPU that reports to nobody."""
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none"}
    module = importlib.import_module("rather.trl")
    return getattr(module, f"{kind}Config")(str(folder), **quiet, **settings)


def rows_of(case: Case) -> Dataset:
    """Return the rows of a case, with the columns that its trainer reads."""
    rows = make_rows(case.shape) + make_rows(case.shape)[:3]
    if case.columns == "completion":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    elif case.columns == "messages":
        rows = [{"messages": row["prompt"] + row["chosen"]} for row in rows]
    elif case.columns == "text":
        rows = [{"text": row["prompt"] + row["chosen"]} for row in rows]
    return Dataset.from_list(rows)


def make_trainer(package: str, case: Case, model: Any, folder: Path, **more: Any) -> Any:
    """Make the trainer of a case from `trl` or `rather.trl`."""
    from transformers import AutoTokenizer

    module = importlib.import_module(".".join([package, *filter(None, [PATHS.get(case.trainer)])]))
    settings = {**SETTINGS, **case.settings}
    if case.evaluates:
        settings["eval_strategy"] = "epoch"
        more["eval_dataset"] = rows_of(case).select(range(5))
    if case.lora is not None:
        from peft import LoraConfig

        options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **case.lora}
        kind = "SEQ_CLS" if case.trainer == "Reward" else "CAUSAL_LM"
        more["peft_config"] = LoraConfig(task_type=kind, **options)
    args = getattr(module, f"{case.trainer}Config")(output_dir=str(folder), **settings)
    trainer = getattr(module, f"{case.trainer}Trainer")(
        model,
        args=args,
        train_dataset=rows_of(case),
        processing_class=AutoTokenizer.from_pretrained(model),
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
