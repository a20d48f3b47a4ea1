"""OpenRLHF: the flags of train_dpo. Newer versions group them with dots; the last part counts."""

from __future__ import annotations

from typing import Any

from rather.migrate.engine import Peer
from rather.migrate.peers.shared import (
    DATA,
    DETAILS,
    MACHINERY,
    MODEL,
    SCHEDULES,
    TRAINING,
    adapter,
    bf16,
    dataset,
    length,
    positive,
    recompute,
    run_folder,
    tracker,
    zero_stage,
)
from rather.migrate.rules import (
    CHANGED,
    NOT_NEEDED,
    RENAMED,
    Given,
    Outcome,
    Rule,
    each,
    needless,
    never,
    to,
)


def betas(value: Any, given: Given) -> Outcome:
    first, second = value
    return Outcome(RENAMED, {TRAINING + "adam_beta1": first, TRAINING + "adam_beta2": second})


def schedule(value: Any, given: Given) -> Outcome:
    """Its cosine ends at a tenth of the peak."""
    values: dict[str, Any] = {TRAINING + "lr_scheduler_type": SCHEDULES[value]}
    if value == "cosine_with_min_lr":
        values[TRAINING + "lr_scheduler_kwargs.min_lr_rate"] = 0.1
    return Outcome(RENAMED, values)


def ipo(value: Any, given: Given) -> Outcome:
    note = "OpenRLHF's IPO sums log-probs; Rather averages them over tokens, as the paper does"
    return Outcome(CHANGED, {"pref_loss": "ipo"}, note) if value else NOT_NEEDED


RULES: dict[str, Rule] = {
    **adapter("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save",
              off=("lora_rank", (0, None))),
    "pretrain": to("pretrain"),
    "ref_pretrain": to("reference.model_args.model_name_or_path"),
    "ref_offload": to("reference.offload", {True: "on", False: "auto"}),
    "dataset": dataset(),
    "eval_dataset": dataset("validation.data_args.file_name"),
    "prompt_key": lambda value, given: Outcome(RENAMED, {DATA + "columns": {"prompt": value}} if value else {}),
    "chosen_key": to("chosen_key"),
    "rejected_key": to("rejected_key"),
    "tokenizer_chat_template": never("name a template or a Jinja file: global_template"),
    "input_template": never("write a Jinja file and name it: global_template"),
    "max_len": length(cut="truncate_response", note="OpenRLHF writes EOS over the last token of a cut answer"),
    "max_samples": never("cut the file instead", unless=(1e8, 100000000, 1000000)),
    "beta": to("beta"),
    "ipo": ipo,
    "label_smoothing": to("label_smoothing"),
    "nll_loss_coef": to("rpo_alpha", note="a mean over the tokens of the step; prompt tokens are never in it"),
    "learning_rate": to(TRAINING + "learning_rate"),
    "lr_scheduler": schedule,
    "lr_warmup_ratio": to(TRAINING + "warmup_ratio"),
    "adam_betas": betas,
    "l2": to(TRAINING + "weight_decay"),
    "max_norm": to("max_grad_norm"),
    "max_epochs": to(TRAINING + "num_train_epochs", float),
    "train_batch_size": to("train_batch_size"),
    "micro_train_batch_size": needless("micro-batches follow a token budget"),
    "zero_stage": zero_stage,
    "adam_offload": never("strategy_name: zero2_cpu keeps the optimizer on the host"),
    "ds_tensor_parallel_size": to(DETAILS + "tp_size"),
    "ring_attn_size": to(DETAILS + "cp_size"),
    "bf16": bf16,
    "param_dtype": to(MODEL + "dtype"),
    "gradient_checkpointing": recompute,
    "save_path": run_folder,
    "save_steps": lambda value, given: Outcome(RENAMED, {"save_steps": value if value and value > 0 else None}),
    "logging_steps": to("logging_steps"),
    "eval_steps": positive("eval_steps"),
    "max_ckpt_num": to("max_ckpt_to_keep"),
    "load_checkpoint": to("resume_from_checkpoint", {True: "auto", False: "auto"}),
    "seed": to("seed"),
    "use_wandb": tracker("wandb"),
    "use_tensorboard": tracker("tensorboard"),
    "packing_samples": needless("pairs are always packed"),
    **each("flash_attn attn_implementation use_liger_kernel", needless("Rather has its own attention and head")),
    "apply_chat_template": needless("the tokenizer's template is always applied, where it has one"),
    "aux_loss_coef": never("mixtures of experts are not supported", unless=(0, 0.0)),
    **each("ckpt_path save_hf_ckpt disable_ds_ckpt max_ckpt_mem use_ds_universal_ckpt overlap_comm zpg "
           "grad_accum_dtype disable_fast_tokenizer local_rank deepcompile dataset_split eval_split "
           "wandb_org wandb_group wandb_project wandb_run_name disable_trace_cache full_determinism "
           "gradient_checkpointing_use_reentrant torch_compile "
           "use_ms dataset_probs ring_head_stride", needless(MACHINERY)),
}  # fmt: skip

OPENRLHF = Peer(
    "openrlhf",
    RULES,
    defaults={
        "max_len": 512, "learning_rate": 1e-5, "lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": 0.03,
        "adam_betas": [0.9, 0.95], "train_batch_size": 128, "beta": 0.1, "bf16": True, "save_steps": -1,
    },
    marks=("micro_train_batch_size", "max_len", "zero_stage", "nll_loss_coef", "lr_warmup_ratio", "ref_pretrain",
           "packing_samples", "max_ckpt_num", "adam_offload"),
    words=("openrlhf",),
    always=(
        "OpenRLHF writes a space and EOS after each answer; here the chat template, or EOS alone, ends it.",
        "A step holds train_batch_size pairs on any number of devices.",
    ),
)  # fmt: skip
