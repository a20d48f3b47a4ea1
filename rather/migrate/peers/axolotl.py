"""Axolotl: its YAML with `rl: dpo | ipo | simpo | orpo`."""

from __future__ import annotations

from typing import Any

from rather.migrate.engine import Peer
from rather.migrate.peers.shared import (
    ADAMW,
    DATA,
    HF,
    HF_DEFAULTS,
    MACHINERY,
    MODEL,
    READABLE,
    SAMPLES,
    SCHEDULES,
    TRAINING,
    UPLOAD,
    adapter,
    dataset,
    length,
    tracker,
)
from rather.migrate.rules import (
    CHANGED,
    NOT_NEEDED,
    OPEN,
    RENAMED,
    Given,
    Outcome,
    Rule,
    Unsupported,
    each,
    if_given,
    needless,
    never,
    only,
    to,
)

LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo"}
TEMPLATES = {
    "chatml": "chatml", "llama3": "llama3", "gemma": "gemma", "qwen_25": "qwen2_5", "qwen3": "qwen3", "phi_3": "phi3",
    "tokenizer_default": "native",
}  # fmt: skip


def datasets(path: str) -> Rule:
    """Translate a list of {path, split, type, ...}; data sets of a hub must be saved first."""

    def rule(value: Any, given: Given) -> Outcome:
        if not value:
            return NOT_NEEDED
        entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in value]
        names: list[Any] = []
        for entry in entries:
            files = entry.get("data_files")
            names += files if isinstance(files, list) else [files or entry["path"]]
        found = dataset(path)(names, given)
        kinds = sorted({str(entry["type"]) for entry in entries if entry.get("type")})
        if not kinds:
            return found
        note = f"the format of the rows is detected (type: {', '.join(kinds)})"
        status = found.status if found.status == OPEN else CHANGED
        return Outcome(status, found.values, "; ".join(filter(None, (found.note, note))))

    return rule


def loss(value: Any, given: Given) -> Outcome:
    if value not in LOSSES:
        raise Unsupported(f"not preference training on pairs; supported: {', '.join(LOSSES)}")
    return Outcome(RENAMED, {"pref_loss": LOSSES[value]})


def adapter_kind(value: Any, given: Given) -> Outcome:
    if value == "qlora":
        return Outcome(RENAMED, {MODEL + "quantization": "4bit"})
    return only("lora", None, "", why="adapters are LoRA or QLoRA")(value, given)


def target_linear(value: Any, given: Given) -> Outcome:
    return Outcome(RENAMED, {MODEL + "lora_target": "all-linear"}) if value else NOT_NEEDED


RULES: dict[str, Rule] = {
    **HF,
    **adapter("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save",
              off=("adapter", (None, ""))),
    "adapter": adapter_kind,
    "lora_target_linear": target_linear,
    "peft_use_rslora": to(MODEL + "use_rslora"),
    "peft_use_dora": to(MODEL + "use_dora"),
    "lora_model_dir": to(MODEL + "adapter_name_or_path", note="the adapter as it is here is the reference"),
    "base_model": to("pretrain"),
    "tokenizer_config": to(MODEL + "tokenizer_name_or_path"),
    "revision": to(MODEL + "revision"),
    "trust_remote_code": to(MODEL + "trust_remote_code"),
    "rl": loss,
    "rl_beta": to("beta"),
    "dpo_beta": to("beta"),
    "trl.beta": to("beta"),
    "dpo_label_smoothing": to("label_smoothing", note="Axolotl's TRL 1.x ignores it for rl: dpo; here it counts"),
    "dpo_use_weighting": to("use_weighting"),
    "rpo_alpha": to("rpo_alpha"),
    "simpo_gamma": if_given("rl", "simpo", "gamma"),
    "cpo_alpha": if_given("rl", "simpo", "rpo_alpha"),
    "orpo_alpha": if_given("rl", "orpo", "beta"),
    "datasets": datasets(SAMPLES),
    "test_datasets": datasets("validation.data_args.file_name"),
    "val_set_size": to("validation.data_args.split", lambda value: int(value) if value >= 1 else value or None),
    "chat_template": to("global_template", TEMPLATES),
    "dataset_prepared_path": needless("tokenised data are in <output_dir>/.cache; see cache_dir"),
    "dataset_processes": to(DATA + "preprocessing_num_workers"),
    "sequence_len": length(),
    "excess_length_strategy": to(DATA + "overlong", {"drop": "drop", "truncate": "truncate_response",
                                                     "raise": "error"}),
    "max_prompt_len": never("the prompt alone has no limit"),
    "micro_batch_size": to(TRAINING + "per_device_train_batch_size"),
    "eval_batch_size": to("actor_train.infer_batch_size"),
    "num_epochs": to(TRAINING + "num_train_epochs", float),
    "optimizer": only(*ADAMW, why="the optimizer is AdamW; its memory is a third with precision: lean"),
    "lr_scheduler": to(TRAINING + "lr_scheduler_type", SCHEDULES),
    "auto_resume_from_checkpoints": to("resume_from_checkpoint", {True: "auto", False: False}),
    "early_stopping_patience": to("early_stopping_patience"),
    **each("saves_per_epoch evals_per_epoch", needless("counted in steps: save_steps, eval_steps")),
    **each("flash_attention sdp_attention xformers_attention eager_attention flex_attention",
           needless("Rather has its own attention")),
    **each("sample_packing pad_to_sequence_len eval_sample_packing", needless("pairs are always packed")),
    "wandb_project": tracker("wandb"),
    "use_tensorboard": tracker("tensorboard"),
    "use_mlflow": tracker("mlflow"),
    **each("hub_model_id hub_strategy", never(UPLOAD)),
    **each("special_tokens tokens", never("change the tokenizer's folder instead")),
    **each("plugins unfrozen_parameters", never("not supported")),
    **each("model_type tokenizer_type wandb_entity wandb_watch wandb_name wandb_log_model strict "
           "is_llama_derived_model debug local_rank train_on_inputs group_by_length loss_watchdog_threshold "
           "loss_watchdog_patience liger_rope liger_rms_norm liger_glu_activation flash_attn_cross_entropy "
           "dataloader_num_workers remove_unused_columns save_safetensors eval_max_new_tokens "
           "eval_table_size shuffle_merged_datasets fsdp_version", needless(MACHINERY)),
}  # fmt: skip

AXOLOTL = Peer(
    "axolotl",
    RULES,
    defaults={
        **{key: value for key, value in HF_DEFAULTS.items() if key not in ("num_train_epochs", "learning_rate")},
        "rl_beta": 0.1, "sequence_len": 2048, "num_epochs": 1.0, "lr_scheduler": "cosine",
    },
    marks=("base_model", "rl", "sequence_len", "micro_batch_size", "num_epochs", "val_set_size", "sample_packing",
           "dataset_prepared_path", "pad_to_sequence_len", "lora_target_linear", "flash_attention"),
    words=("axolotl train", "axolotl.cli.train"),
    whole=("special_tokens", "lr_scheduler_kwargs", "fsdp_config", "deepspeed", "gradient_checkpointing_kwargs"),
    always=(
        f"Only local files are read ({', '.join(READABLE)}).",
        "Pairs that are too long are dropped and counted, as in Axolotl.",
        "TRL's other differences hold here too: see the page on TRL.",
    ),
)  # fmt: skip
