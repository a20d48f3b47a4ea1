"""LLaMA-Factory: the YAML of `llamafactory-cli train`, stage dpo."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from rather.migrate.engine import Peer
from rather.migrate.peers.shared import (
    DATA,
    HF,
    HF_DEFAULTS,
    MACHINERY,
    MODEL,
    SAMPLES,
    adapter,
    deepspeed,
    length,
    loss_name,
)
from rather.migrate.rules import (
    NOT_NEEDED,
    OPEN,
    Given,
    Outcome,
    Rule,
    each,
    if_given,
    needless,
    never,
    only,
    to,
)

TEMPLATES = {
    "qwen": "qwen2_5", "qwen2_5": "qwen2_5", "qwen3": "qwen3", "llama3": "llama3", "chatml": "chatml", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3": "gemma3", "mistral": "mistral", "phi": "phi3", "zephyr": "zephyr", "vicuna": "vicuna",
}  # fmt: skip


def registered(path: str) -> Rule:
    """Data sets are names from dataset_info.json, which is not read."""

    def rule(value: Any, given: Given) -> Outcome:
        if not value:
            return NOT_NEEDED
        given_names = value if isinstance(value, list) else str(value).split(",")
        names = [name.strip() for name in given_names]
        files = [name if PurePath(name).suffix else f"{name}.json" for name in names]
        note = "names from dataset_info.json; write the files they stand for"
        return Outcome(OPEN, {path: files[0] if len(files) == 1 else files}, note)

    return rule


RULES: dict[str, Rule] = {
    **HF,
    **adapter("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target",
              off=("finetuning_type", ("full", "freeze"))),
    "stage": only("dpo", why="only stage dpo is preference training"),
    "finetuning_type": only("lora", "full", why="weights are trained whole or by a LoRA adapter"),
    "model_name_or_path": to("pretrain"),
    "adapter_name_or_path": to(MODEL + "adapter_name_or_path", note="the adapter as it is here is the reference; "
                               "LLaMA-Factory takes the base model"),
    "trust_remote_code": to(MODEL + "trust_remote_code"),
    "ref_model": to("reference.model_args.model_name_or_path"),
    "ref_model_adapters": never("the reference has the policy's starting adapter, or none"),
    "ref_model_quantization_bit": never("the reference is not quantised by itself"),
    "quantization_bit": to(MODEL + "quantization", {4: "4bit"}),
    "pissa_init": to(MODEL + "init_lora_weights", {True: "pissa", False: True}),
    "pref_loss": loss_name(kto_pair=None),
    "pref_beta": to("beta"),
    "pref_ftx": to("pref_ftx"),
    "pref_bco_weight": never("not supported; pref_loss takes a list with loss_weights", unless=(0, 0.0)),
    "dpo_label_smoothing": to("label_smoothing"),
    "simpo_gamma": if_given("pref_loss", "simpo", "gamma"),
    "ld_alpha": to("ld_alpha"),
    "dataset": registered(SAMPLES),
    "eval_dataset": registered("validation.data_args.file_name"),
    "dataset_dir": to(DATA + "dataset_dir"),
    "val_size": to("validation.data_args.split", lambda value: int(value) if value >= 1 else value or None),
    "template": to("global_template", TEMPLATES),
    "cutoff_len": length(cut="truncate_prompt", note="LLaMA-Factory shortens prompt and answers in proportion; here "
                         "the prompt is cut from its left"),
    "max_samples": never("cut the file instead"),
    "mix_strategy": only("concat", why="data_args.weights mixes files"),
    "deepspeed": deepspeed,
    "flash_attn": needless("Rather has its own attention"),
    "packing": needless("pairs are always packed, which changes no result"),
    "mask_history": to(DATA + "score", {True: "last", False: "last"}),
    **each("overwrite_cache plot_loss use_fast_tokenizer low_cpu_mem_usage enable_liger_kernel "
           "enable_thinking cache_dir upcast_layernorm preprocessing_batch_size use_swanlab tokenized_path "
           "double_quantization quantization_method ray_run_name ray_storage_path", needless(MACHINERY)),
    **each("use_galore use_badam use_apollo use_muon use_adam_mini loraplus_lr_ratio freeze_trainable_layers "
           "train_on_prompt resize_vocab rope_scaling neat_packing use_unsloth use_mca", never("not supported")),
}  # fmt: skip

LLAMA_FACTORY = Peer(
    "llama-factory",
    RULES,
    defaults={
        **HF_DEFAULTS, "cutoff_len": 2048, "dataset_dir": "data", "finetuning_type": "lora", "lora_rank": 8,
        "lora_target": "all",
    },
    marks=("stage", "finetuning_type", "pref_beta", "pref_loss", "pref_ftx", "cutoff_len", "dpo_label_smoothing",
           "quantization_bit", "plot_loss", "overwrite_cache"),
    words=("llamafactory-cli", "llamafactory"),
    whole=("lr_scheduler_kwargs", "deepspeed"),
    always=("Only the last turn is scored, as in LLaMA-Factory.", "The order of the pairs is another one."),
)  # fmt: skip
