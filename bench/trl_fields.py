"""Every field of every config of TRL 1.16, set to another value, in TRL and in rather.trl.

    python bench/trl_fields.py TRL [--match NAME] [--json FILE]

TRL is a folder with the package `trl` of version 1.16. A tiny model trains two epochs in float32
with each value. The outcome of a field is one of

- same: log_history, the sum of each weight and the names of the files are those of TRL; "and
  differs from the default" if the value changes them,
- refused: rather.trl names the field,
- both refuse: TRL or transformers raises an error, and rather.trl does, too,
- only TRL refuses: there are no numbers to compare,
- DIFFERENT: anything else. The exit code is then 1.

Fields of transformers' TrainingArguments are tried with DPO only: all trainers inherit them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
RESULTS = HERE / "results" / "trl_fields.json"
TIMES = (
    "runtime",
    "per_second",
    "total_flos",
    "_mem_",
    "train_memory",
)  # of the machine, or of padding
NOT_COMPARED = {"ORPO": ("logits/",), "CPO": ("logits/",)}
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 3,
    "learning_rate": 3e-3,
    "num_train_epochs": 2,
    "max_length": 20,
    "logging_steps": 1,
    "bf16": False,
    "use_cpu": True,
    "save_strategy": "epoch",
    "eval_strategy": "epoch",
    "report_to": "none",
    "disable_tqdm": True,
}
# Other values -> what else has to be set for them to count. A list of several values is a tuple.
VALUES: dict[str, Any] = {
    "lr_scheduler_type": ("cosine", "constant_with_warmup"),
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "optim": ("adamw_torch", "sgd", "adafactor"),
    "optim_args": "beta1=0.5",
    "optim_target_modules": "all-linear",
    "warmup_steps": 3,
    "bf16": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "torch_empty_cache_steps": 1,
    "logging_strategy": ("epoch", "no"),
    "logging_steps": 0.5,
    "log_level": "debug",
    "log_level_replica": "error",
    "disable_tqdm": False,
    "report_to": "none_such",
    "run_name": "a name",
    "project": "another",
    "trackio_space_id": "space",
    "trackio_bucket_id": "bucket",
    "trackio_static_space_id": "static",
    "eval_strategy": ("steps", "no"),
    "eval_steps": 2,
    "eval_delay": 2,
    "eval_on_start": True,
    "save_strategy": ("steps", "best", "no"),
    "save_steps": 2,
    "save_total_limit": 1,
    "hub_token": "token",
    "hub_private_repo": True,
    "hub_model_id": "org/name",
    "hub_strategy": "end",
    "hub_revision": "branch",
    "metric_for_best_model": "eval_runtime",
    "greater_is_better": True,
    "accelerator_config": (
        {"even_batches": False}, {"split_batches": True}, {"use_seedable_sampler": False},
    ),
    "dataloader_num_workers": 1,
    "dataloader_prefetch_factor": 2,
    "dataloader_multiprocessing_context": "spawn",
    "train_sampling_strategy": ("sequential", "group_by_length"),
    "length_column_name": "size",
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 5,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "ddp_backend": "gloo",
    "ddp_timeout": 60,
    "debug": "underflow_overflow",
    "resume_from_checkpoint": "folder",
    "local_rank": 0,
    "seed": 7,
    "data_seed": 7,
    "max_steps": 3,
    "num_train_epochs": 1.5,
    "output_dir": "",
    "tf32": False,
    "fp16": True,
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2},
    "include_for_metrics": ["loss"],
    "label_names": ["labels"],
    "liger_kernel_config": {"rope": True},
    "include_num_input_tokens_seen": "all",
    "parallelism_config": {"tp_size": 2},
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
    "neftune_noise_alpha": 5.0,
    "eval_accumulation_steps": 1,
    # TRL's
    "model_init_kwargs": ({"dtype": "bfloat16"}, {"attn_implementation": "eager"}),
    "router_aux_loss_coef": 0.01,
    "dataset_num_proc": 2,
    "max_length": (8, None),
    "truncation_mode": "keep_end",
    "pad_to_multiple_of": 8,
    "precompute_ref_batch_size": 2,
    "loss_type": (
        "hinge", "ipo", ["sigmoid", "sft"], "sigmoid_norm", "apo_zero_unpaired", "simpo", "dft",
        "chunked_nll", "discopop", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
        "aot", "aot_unpaired", "apo_zero", "apo_down",
    ),
    "loss_weights": [0.5],
    "ld_alpha": 0.5,
    "f_divergence_type": ("forward_kl", "js_divergence", "alpha_divergence"),
    "f_alpha_divergence_coef": 0.7,
    "label_smoothing": 0.2,
    "ref_model_sync_steps": 2,
    "pad_token": ("<unk>", "none of them"),
    "eos_token": ("<|im_end|>", "none of them"),
    "chat_template_path": "template.jinja",
    "center_rewards_coefficient": 0.1,
    "dataset_text_field": "other",
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "packing_strategy": "wrapped",
    "eval_packing": True,
    "completion_only_loss": (True, False),
    "max_completion_length": 4,
    "padding_value": 5,
    "is_encoder_decoder": True,
}  # fmt: skip
# A field -> what it needs to have an effect. Without it, rather.trl may refuse.
TOGETHER: dict[str, dict[str, Any]] = {
    "loss_weights": {"loss_type": ["ipo"]},
    "f_alpha_divergence_coef": {"f_divergence_type": "alpha_divergence"},
    "label_smoothing": {"loss_type": "robust"},
    "discopop_tau": {"loss_type": "discopop"},
    "ref_model_mixup_alpha": {"sync_ref_model": True, "ref_model_sync_steps": 2},
    "ref_model_sync_steps": {"sync_ref_model": True},
    "sync_ref_model": {"ref_model_sync_steps": 2},
    "precompute_ref_batch_size": {"precompute_ref_log_probs": True},
    "simpo_gamma": {"loss_type": "simpo"},
    "alpha": {"loss_type": "simpo"},
    "eval_steps": {"eval_strategy": "steps"},
    "save_steps": {"save_strategy": "steps"},
    "padding_free": {"max_length": None},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
    "dataloader_persistent_workers": {"dataloader_num_workers": 1},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_restarts"},
    "metric_for_best_model": {"load_best_model_at_end": True},
    "greater_is_better": {"load_best_model_at_end": True, "metric_for_best_model": "loss"},
}  # fmt: skip
SKIPPED = {"push_to_hub": "asks the hub", "hub_always_push": "counts only with push_to_hub"}


def run_with(package: str, trainer: str, settings: dict[str, Any], model: str) -> dict[str, Any]:
    """Return what a training gave, or its error."""
    import torch

    from tests.trl.cases import PATHS, Case, rows_of

    columns = {"SFT": "completion"}.get(trainer, "")
    case = Case(trainer, columns=columns)
    rows = rows_of(case)
    with tempfile.TemporaryDirectory() as name:
        try:
            trained = _trained(package, trainer, settings, model, Path(name), rows, PATHS)
        except BaseException as error:  # what a script would end with
            text = f"{type(error).__name__}: {' '.join(str(error).split())}".replace(name, "OUT")
            return {"error": text[:300], "refused": type(error).__module__.startswith("rather")}
        files = sorted(
            str(file.relative_to(name)) for file in Path(name).rglob("*") if file.is_file()
        )
        weights = trained.model.state_dict()
        return {
            "history": trained.state.log_history,
            "weights": {key: float(value.double().sum()) for key, value in weights.items()},
            "kinds": sorted(
                {str(value.dtype) for value in weights.values() if torch.is_tensor(value)}
            ),
            "files": files,
        }


def _trained(
    package: str,
    trainer: str,
    settings: dict[str, Any],
    model: str,
    folder: Path,
    rows: Any,
    paths: Any,
) -> Any:
    import importlib

    from transformers import AutoTokenizer, PrinterCallback

    module = importlib.import_module(".".join([package, *filter(None, [paths.get(trainer)])]))
    values = {"output_dir": str(folder / "out"), **SETTINGS, **settings}
    if values.get("chat_template_path"):
        template = folder / "template.jinja"
        template.write_text("{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}")
        values["chat_template_path"] = str(template)
    args = getattr(module, f"{trainer}Config")(**values)
    made = getattr(module, f"{trainer}Trainer")(
        model, args=args, train_dataset=rows, eval_dataset=rows.select(range(5)),
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    made.remove_callback(PrinterCallback)
    made.train()
    return made


def differences(
    theirs: dict[str, Any], ours: dict[str, Any], trainer: str, *, rough: bool
) -> list[str]:
    """Return what is not the same in two trainings."""
    found = []
    skipped = (*TIMES, *NOT_COMPARED.get(trainer, ()))
    if len(theirs["history"]) != len(ours["history"]):
        found.append(f"{len(theirs['history'])} and {len(ours['history'])} lines")
    for number, (a, b) in enumerate(zip(theirs["history"], ours["history"], strict=False)):
        if set(a) != set(b):
            found.append(f"line {number}: keys {sorted(set(a) ^ set(b))}")
        for key in set(a) & set(b):
            if not any(word in key for word in skipped) and not is_near(a[key], b[key], rough):
                found.append(f"line {number}: {key} {a[key]} and {b[key]}")
    if theirs["files"] != ours["files"]:
        found.append(f"files {sorted(set(theirs['files']) ^ set(ours['files']))}")
    if theirs["kinds"] != ours["kinds"]:
        found.append(f"dtypes {theirs['kinds']} and {ours['kinds']}")
    for key, value in theirs["weights"].items():
        if not is_near(value, ours["weights"].get(key, float("nan")), rough, 2e-3):
            found.append(f"weight {key}")
    return found


def is_near(a: Any, b: Any, rough: bool, slack: float = 5e-5) -> bool:
    if not isinstance(a, float | int) or not isinstance(b, float | int):
        return bool(a == b)
    slack = 0.3 if rough else slack
    return abs(a - b) <= slack * max(1.0, abs(a)) or (a != a and b != b)


def values_of(name: str, default: Any) -> tuple[Any, ...]:
    if name in VALUES:
        value = VALUES[name]
        return value if isinstance(value, tuple) else (value,)
    if isinstance(default, bool) or default is None:
        return (not default,)
    return (default * 2,) if default else (0.25 if isinstance(default, float) else 1,)


def outcome(
    name: str, theirs: dict[str, Any], ours: dict[str, Any], plain: dict[str, Any], trainer: str
) -> tuple[str, Any]:
    """Return what became of a value, and why."""
    if ours.get("refused") and "error" not in theirs:
        is_named = name in ours["error"]
        return ("refused" if is_named else "DIFFERENT"), ours["error"]
    if "error" in theirs or "error" in ours:
        kind = "DIFFERENT" if "error" not in theirs else "both refuse"
        kind = kind if "error" in ours else "only TRL refuses"
        return kind, {"trl": theirs.get("error"), "rather": ours.get("error")}
    rough = "torch.bfloat16" in theirs["kinds"] or name in (
        "bf16",
        "fp16",
        "bf16_full_eval",
        "fp16_full_eval",
    )
    if found := differences(theirs, ours, trainer, rough=rough):
        return "DIFFERENT", found[:6]
    effect = differences(plain, theirs, trainer, rough=False)
    return ("same, and differs from the default" if effect else "same"), effect[:2]


def others_of(trainer: str, name: str) -> dict[str, Any]:
    """Return what has to be set, too, for a field to have an effect."""
    if name == "label_smoothing" and trainer != "DPO":
        return {}
    return TOGETHER.get(name, {})


def cells(match: str) -> list[tuple[str, str, Any]]:
    """Return trainer, field and value of all runs."""
    import transformers

    from tests.trl.cases import TRAINERS

    stored = json.loads((HERE.parent / "tests/trl/expected_1_16.json").read_text(encoding="utf-8"))
    inherited = {argument.name for argument in fields(transformers.TrainingArguments)}
    found = []
    for trainer in TRAINERS:
        for name, default in stored["arguments"][trainer].items():
            if (
                (name in inherited and trainer != "DPO")
                or name in SKIPPED
                or not re.search(match, f"{trainer}.{name}")
            ):
                continue
            found += [(trainer, name, value) for value in values_of(name, default)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trl", type=Path)
    parser.add_argument("--match", default="", help="a pattern of TRAINER.FIELD")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    sys.path.insert(0, str(args.trl))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TQDM_DISABLE": "1"}
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from datasets.utils.logging import disable_progress_bar

    from tests.golden.trl_run import make_model

    disable_progress_bar()
    table: list[dict[str, Any]] = []
    plain: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        model = str(make_model(Path(name)))
        for trainer, field, value in cells(args.match):
            if trainer not in plain:
                plain[trainer] = run_with("trl", trainer, {}, model)
                assert "error" not in plain[trainer], plain[trainer]
            settings = {**others_of(trainer, field), field: value}
            ours = run_with("rather.trl", trainer, settings, model)
            error = ours.get("error", "")
            is_named = error.startswith("ConfigError") and field in error
            theirs = {} if is_named else run_with("trl", trainer, settings, model)
            kind, why = outcome(field, theirs, ours, plain[trainer], trainer)
            table.append(
                {"field": f"{trainer}.{field}", "value": value, "outcome": kind, "why": why}
            )
            print(f"{trainer}.{field} = {value!r}: {kind} {why}", flush=True)
    counts = Counter(row["outcome"] for row in table)
    print(json.dumps(counts))
    if not args.match:
        content = {"counts": counts, "fields": table}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(bool(counts["DIFFERENT"]))


if __name__ == "__main__":
    sys.exit(main())
