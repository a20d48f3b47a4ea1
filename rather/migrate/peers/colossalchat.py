"""ColossalChat: the flags of train_dpo.py and train_orpo.py.

Facts of ColossalAI 0.5.0 (applications/ColossalChat/examples/training_scripts).
"""

from __future__ import annotations

from typing import Any

from rather.migrate.engine import PROGRAM, Peer
from rather.migrate.peers.shared import (
    DETAILS,
    DTYPES,
    MACHINERY,
    MODEL,
    SAMPLES,
    STRATEGY,
    TRAINING,
    length,
    recompute,
    run_folder,
    tracker,
)
from rather.migrate.rules import (
    CHANGED,
    RENAMED,
    UNSET,
    Given,
    Outcome,
    Rule,
    Unsupported,
    algorithm,
    by,
    each,
    left_out,
    needless,
    never,
    to,
    when,
)

PLUGINS = ("ddp", "zero2", "zero2_cpu", "gemini", "gemini_auto", "3d")


def of_3d(path: str) -> Rule:
    """Set a degree, which ColossalChat reads for one plugin only."""
    return when(
        lambda value, given: given.get("plugin") == "3d" and value not in (None, False, 1),
        to(path),
    )


def loss(value: Any, given: Given) -> Outcome:
    """simpo_loss normalises by length and sets a margin; it keeps the reference unless disabled."""
    if value == "dpo_loss":
        return Outcome(RENAMED, {"pref_loss": "sigmoid"})
    if value != "simpo_loss":
        raise Unsupported("loss_type is dpo_loss or simpo_loss")
    if given.get("disable_reference_model"):
        return Outcome(RENAMED, {"pref_loss": "simpo", "gamma": given.get("gamma") or 1.4})
    note = "with its reference this is length-normalised DPO with a margin, not SimPO"
    margin = given.get("gamma") or 1.4
    values = {"pref_loss": "sigmoid", "length_normalization": True, "gamma": margin}
    return Outcome(CHANGED, values, note)


def unless_simpo(path: str) -> Rule:
    return when(lambda value, given: value and given.get("loss_type") != "simpo_loss", to(path))


def warmup(value: Any, given: Given) -> Outcome:
    values = {"warmup_ratio": 0.025} if value is None else {"warmup_steps": value}
    return Outcome(RENAMED, {TRAINING + name: number for name, number in values.items()})


def files(path: str) -> Rule:
    return when(
        lambda value, given: value,
        to(path, lambda v: v if isinstance(v, list) else [v], note="folders of prepare_dataset.py"),
    )


def accumulation(value: Any, given: Given) -> Outcome:
    note = "the loss is a mean over the step; ColossalChat sums micro-batches and so clips harder"
    path = TRAINING + "gradient_accumulation_steps"
    return to(path, note=note if value > 1 else "")(value, given)


RULES: dict[str, Rule] = {
    "pretrain": to("pretrain"),
    "tokenizer_dir": to(MODEL + "tokenizer_name_or_path"),
    "plugin": to(STRATEGY, {name: name for name in PLUGINS}),
    "tp": of_3d(DETAILS + "tp_size"),
    "pp": of_3d(DETAILS + "pp_size"),
    "sp": of_3d(DETAILS + "cp_size"),
    "zero_stage": of_3d(DETAILS + "zero_stage"),
    "enable_sequence_parallelism": of_3d(DETAILS + "sequence_parallel"),
    "sp_mode": needless("sp becomes context parallel, or norms by sequence under tp"),
    "zero_cpu_offload": left_out("plugin zero2_cpu keeps the optimizer on the host"),
    "ref_tp": to("ref_tp"),
    "loss_type": loss,
    "beta": to("beta"),
    "gamma": unless_simpo("gamma"),
    "length_normalization": to("length_normalization"),
    "disable_reference_model": unless_simpo("reference_free"),
    "disable_loss_mask": to("apply_loss_mask", {True: False, False: True}),
    "dataset": files(SAMPLES),
    "eval_dataset": files("validation.data_args.file_name"),
    "max_length": length(),
    "lr": to(TRAINING + "learning_rate"),
    "weight_decay": to(TRAINING + "weight_decay"),
    "warmup_steps": warmup,
    "max_epochs": to(TRAINING + "num_train_epochs", float),
    "batch_size": to(TRAINING + "per_device_train_batch_size"),
    "accumulation_steps": accumulation,
    "grad_clip": to("max_grad_norm"),
    "mixed_precision": to(MODEL + "dtype", DTYPES),
    "lora_config": lambda value, given: Outcome(RENAMED, {MODEL + ("lora_config" if value else "lora_rank"): value or None}),
    PROGRAM: algorithm({"train_dpo": None, "train_orpo": "orpo"}),
    "lam": when(lambda value, given: given.get(PROGRAM) == "train_orpo", to("beta")),
    "grad_checkpoint": recompute,
    "save_dir": run_folder,
    "save_interval": to("save_steps", lambda value: value or None, note="counts optimizer steps; there it counts "
                        "micro-batches and is looked at once an epoch"),
    "log_dir": to("logging_dir"),
    "use_wandb": tracker("wandb"),
    "checkpoint_path": never("its checkpoints are of another kind; name its folder modeling as pretrain"),
    # Hard-coded there, so that their defaults are written out.
    "(adam_beta2)": to(TRAINING + "adam_beta2"),
    "(schedule)": lambda value, given: Outcome(RENAMED, {
        TRAINING + "lr_scheduler_type": "cosine", TRAINING + "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}),
    **each("model_type config_file use_flash_attn microbatch_size", needless(MACHINERY)),
}  # fmt: skip

COLOSSALCHAT = Peer(
    "colossalchat",
    RULES,
    version="0.5.0",
    programs=("train_dpo", "train_orpo"),
    defaults={
        "loss_type": by(PROGRAM, {"train_dpo": "dpo_loss"}), "lam": by(PROGRAM, {"train_orpo": 0.1}),
        "beta": by(PROGRAM, {"train_orpo": UNSET}, 0.1), "accumulation_steps": by(PROGRAM, {"train_orpo": 8}, 1),
        "lora_config": None, "plugin": "gemini", "weight_decay": 0.1, "warmup_steps": None, "max_length": 2048, "max_epochs": 3,
        "batch_size": 4, "mixed_precision": "fp16", "save_interval": 1000, "lr": 5e-6, "(adam_beta2)": 0.95,
        "(schedule)": "cosine",
    },
    marks=("plugin", "accumulation_steps", "grad_clip", "mixed_precision", "disable_loss_mask", "ref_tp",
           "save_interval", "length_normalization", "disable_reference_model", "microbatch_size", "zero_cpu_offload",
           "save_dir"),
    words=("coati", "colossalai run"),
    always=(
        "gamma is SimPO's target margin in units of reward, never label smoothing.",
        "Log-probs are summed in float32 or better; ColossalChat sums them in half precision.",
        "Each epoch has its own order; ColossalChat repeats one.",
    ),
)  # fmt: skip
