"""ColossalChat: the flags of train_dpo.py, train_orpo.py and train_kto.py.

Facts of ColossalAI 0.5.0 (applications/ColossalChat/examples/training_scripts).
"""

from __future__ import annotations

from typing import Any

from rather.tools.migrate.engine import Peer
from rather.tools.migrate.peers.shared import (
    DTYPES,
    HELD_OUT,
    SAMPLES,
    length,
    run_folder,
    switches,
)
from rather.tools.migrate.rules import (
    KTO,
    Given,
    Outcome,
    Rule,
    Rules,
    Unsupported,
    all_of,
    defaults,
    facts,
    gives,
    to,
    when,
)


def loss(value: Any, given: Given) -> Outcome:
    """simpo_loss normalises by length and sets a margin; it keeps the reference unless disabled."""
    if value == "dpo_loss":
        return gives({"pref_loss": "sigmoid"})
    if value != "simpo_loss":
        raise Unsupported("loss_type is dpo_loss or simpo_loss")
    margin = {"gamma": given.get("gamma") or 1.4}
    if given.get("disable_reference_model"):
        return gives({"pref_loss": "simpo", **margin})
    note = "with its reference this is length-normalised DPO with a margin, not SimPO"
    return gives({"pref_loss": "sigmoid", "length_normalization": True, **margin}, note)


def warmup(value: Any, given: Given) -> Outcome:
    return gives(
        {"training.warmup_ratio": 0.025} if value is None else {"training.warmup_steps": value}
    )


def files(path: str) -> Rule:
    note = "folders of prepare_dataset.py"
    as_list = to(path, lambda value: value if isinstance(value, list) else [value], note=note)
    return when(all_of(["set"]), as_list)


RULES: Rules = facts("""
    pretrain = pretrain
    plugin = actor_train.strategy_args.strategy_name: ddp=ddp zero2=zero2 zero2_cpu=zero2_cpu \
        gemini=gemini gemini_auto=gemini_auto 3d=3d
    tokenizer_dir = model.tokenizer_name_or_path
    ref_tp = ref_tp
    beta = beta
    gamma = gamma if set if loss_type!=simpo_loss
    disable_reference_model = reference_free if set if loss_type!=simpo_loss
    disable_loss_mask = apply_loss_mask: true=false false=true
    max_epochs = training.num_train_epochs
    tp = strategy.tp_size if >1 if plugin=3d
    pp = strategy.pp_size if >1 if plugin=3d
    sp = strategy.cp_size if >1 if plugin=3d
    zero_stage = strategy.zero_stage if >1 if plugin=3d
    enable_sequence_parallelism = strategy.sequence_parallel if set if plugin=3d
    lam = beta if (program)=train_orpo
    desirable_weight = desirable_weight
    undesirable_weight = undesirable_weight
    auto_weight ! the weights follow from the data there; set desirable_weight or undesirable_weight
    length_normalization = length_normalization
    lr = training.learning_rate
    weight_decay = training.weight_decay
    batch_size = training.per_device_train_batch_size
    grad_clip = max_grad_norm
    grad_checkpoint = model.disable_gradient_checkpointing: true=false false=true
    accumulation_steps = training.gradient_accumulation_steps if >1; the loss is a mean over the \
        step; ColossalChat sums micro-batches and so clips harder
    accumulation_steps = training.gradient_accumulation_steps
    log_dir = logging_dir
    (adam_beta2) = training.adam_beta2
    checkpoint_path ! its checkpoints are of another kind; name its folder modeling as pretrain
    zero_cpu_offload ? plugin zero2_cpu keeps the optimizer on the host
    sp_mode ~ sp becomes context parallel, or norms by sequence under tp
    model_type config_file use_flash_attn microbatch_size ~
""") | {
    **switches("use_wandb"),
    "loss_type": loss,
    "dataset": files(SAMPLES),
    "eval_dataset": files(HELD_OUT),
    "max_length": length,
    "warmup_steps": warmup,
    "mixed_precision": to("model.dtype", DTYPES),
    "lora_config": lambda value, given: gives(
        {"model.lora_config" if value else "model.lora_rank": value or None}
    ),
    "save_dir": run_folder,
    "save_interval": to(
        "save_steps",
        lambda value: value or None,
        note="counts optimizer steps; there it counts micro-batches and is looked at once an epoch",
    ),
    # Hard-coded there, so that its default is written out.
    "(schedule)": lambda value, given: gives(
        {
            "training.lr_scheduler_type": "cosine",
            "training.lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        }
    ),
}

PEER = Peer(
    "colossalchat",
    RULES,
    version="0.5.0",
    programs={"train_dpo": None, "train_orpo": "orpo", "train_kto": {**KTO, "pref_loss": "kto"}},
    defaults=defaults("""
        loss_type=dpo_loss accumulation_steps=1 if (program)=train_dpo
        lam=0.1 if (program)=train_orpo
        beta=0.1 if (program)!=train_orpo
        accumulation_steps=8 lora_config=none plugin=gemini weight_decay=0.1 warmup_steps=none
        max_length=2048 max_epochs=3 batch_size=4 mixed_precision=fp16 save_interval=1000 lr=5e-6
        (adam_beta2)=0.95 (schedule)=cosine
    """),
    marks="plugin accumulation_steps grad_clip mixed_precision disable_loss_mask ref_tp "
          "save_interval length_normalization disable_reference_model microbatch_size "
          "zero_cpu_offload save_dir",
    words=("coati", "colossalai run"),
    always=(
        "gamma is SimPO's target margin in units of reward, never label smoothing.",
        "Log-probs are summed in float32 or better; ColossalChat sums them in half precision.",
        "Each epoch has its own order; ColossalChat repeats one.",
    ),
)  # fmt: skip
