"""LLaMA-Factory: the YAML of `llamafactory-cli train`, stages dpo, kto, rm and sft.

Facts of 0.9.6 (src/llamafactory/hparams).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rather.data.messages import KNOWN_ROLES, ROLES
from rather.files import JsonObject, parse_json, yaml_text
from rather.migrate.engine import FOLDER, Peer
from rather.migrate.peers.shared import (
    HELD_OUT,
    HF,
    HF_DEFAULTS,
    IMAGES,
    SAMPLES,
    SPLIT,
    adapter,
    length,
    most_rows,
    trained,
)
from rather.migrate.rules import (
    KTO,
    NOT_NEEDED,
    OPEN,
    RENAMED,
    REWARD,
    SFT,
    Given,
    Outcome,
    Rule,
    Rules,
    Unsupported,
    algorithm,
    defaults,
    facts,
    gives,
    names_of,
    one_or_all,
    pairs,
    to,
)

# Columns by their names in dataset_info.json: Rather's own, and another that it finds by itself.
COLUMNS = {
    "prompt": ("instruction", "prompt"), "query": ("input",), "messages": ("conversations", "messages"),
    "response": ("output",), "kto_tag": ("kto_tag", "label"), "chosen": ("chosen",), "rejected": ("rejected",), "system": ("system",), "history": ("history",), "tools": ("tools",),
}  # fmt: skip
TAGS = {"from", "role", "value", "content", *KNOWN_ROLES, *ROLES}
TEMPLATES = pairs(
    "qwen=qwen2_5 qwen2_5=qwen2_5 qwen3=qwen3 qwen3_nothink=chatml llama3=llama3 chatml=chatml gemma=gemma gemma2=gemma2 "
    "gemma3=gemma3 mistral=mistral phi=phi3 zephyr=zephyr vicuna=vicuna"
)  # fmt: skip


def registered(path: str) -> Rule:
    """Look up names in dataset_info.json, if it is here; otherwise leave files to write."""

    def rule(value: Any, given: Given) -> Outcome:
        if not value:
            return NOT_NEEDED
        names, known = names_of(value), registry(given)
        entries = [known.get(name) or {} for name in names]
        files = [entry.get("file_name") for entry in entries]
        renamed = [columns(entry, given) for entry in entries if entry.get("file_name")]
        if any(each != renamed[0] for each in renamed):
            raise Unsupported("the files have columns of different names; rename them")
        named = [str(file or f"{name}.json") for file, name in zip(files, names, strict=True)]
        values = {path: one_or_all(named)}
        if renamed and renamed[0]:
            values[path.replace("file_name", "columns")] = renamed[0]
        note = "dataset_info.json does not name a local file; save the rows there"
        return Outcome(RENAMED, values) if all(files) else Outcome(OPEN, values, note)

    return rule


def registry(given: Given) -> JsonObject:
    folder = Path(given.get("dataset_dir") or "data")
    for place in (given[FOLDER] / folder, folder, given[FOLDER]):
        file = place / "dataset_info.json"
        if file.is_file():
            found = parse_json(yaml_text(file))
            return found if isinstance(found, dict) else {}
    return {}


def columns(entry: JsonObject, given: Given) -> dict[str, str]:
    """Return the columns of a file that have other names; other kinds of rows are refused."""
    file, named = entry["file_name"], entry.get("columns") or {}
    if given.get("stage") in ("dpo", "rm") and not entry.get("ranking"):
        raise Unsupported(f"{file} has no pairs (ranking is not true)")
    if other := [name for name in named if name not in COLUMNS]:
        raise Unsupported(f"{file} has columns that are not read ({', '.join(other)})")
    if tags := set((entry.get("tags") or {}).values()) - TAGS:
        raise Unsupported(f"rename roles or keys in the messages of {file} ({', '.join(tags)})")
    return {COLUMNS[key][0]: name for key, name in named.items() if name not in COLUMNS[key]}


RULES: Rules = {
    **HF,
    **adapter("lora_rank lora_alpha lora_dropout lora_target additional_target", "finetuning_type", "full", "freeze"),
    **facts(f"""
        model_name_or_path = pretrain
        adapter_name_or_path = model.adapter_name_or_path; the adapter as it is here is the reference; LLaMA-Factory takes the base model
        trust_remote_code = model.trust_remote_code
        ref_model = reference.model_args.model_name_or_path
        pref_beta = beta if stage=dpo|kto
        moe_aux_loss_coef = model.moe_aux_loss_coef if stage=sft
        (router) = model.moe_aux_loss_coef
        quantization_bit = model.quantization: 4=4bit
        quantization_method @ bnb; weights are rounded by bitsandbytes
        quantization_type @ nf4; weights are rounded to nf4
        enable_thinking @ true none; an empty thought is part of the answers
        pissa_init = model.init_lora_weights: true=pissa false=true
        pref_loss = pref_loss:: kto_pair=none if stage=dpo
        packing if stage=sft ! a step has a number of full sequences there, here a number of pairs or answers; set train_batch_size
        simpo_gamma = gamma if pref_loss=simpo
        pure_bf16 = model.dtype: true=bf16; weights have exact float32 copies
        mix_strategy @ concat; data_args.weights mixes files
        kto_chosen_weight = desirable_weight
        kto_rejected_weight = undesirable_weight
        pref_ftx = pref_ftx
        dpo_label_smoothing = label_smoothing
        ld_alpha = ld_alpha
        dataset_dir = data.dataset_dir
        disable_gradient_checkpointing = model.disable_gradient_checkpointing
        model_revision = model.revision
        ref_model_adapters ! the reference has the policy's starting adapter, or none
        ref_model_quantization_bit ! the reference is not quantised by itself
        pref_bco_weight ! not supported; pref_loss takes a list with loss_weights
        use_galore use_badam use_apollo use_muon use_adam_mini loraplus_lr_ratio freeze_trainable_layers
        train_on_prompt resize_vocab rope_scaling neat_packing use_unsloth use_mca ! not supported
        tokenized_path ! tokenised rows of LLaMA-Factory; name the files of the rows
        hf_hub_token ms_hub_token om_hub_token ? set it in the environment
        flash_attn ~ Rather has its own attention
        overwrite_cache plot_loss use_fast_tokenizer low_cpu_mem_usage enable_liger_kernel
        cache_dir upcast_layernorm preprocessing_batch_size use_swanlab
        double_quantization ray_run_name ray_storage_path print_param_status
        include_effective_tokens_per_second eval_num_beams infer_backend infer_dtype offload_folder
        use_kv_cache use_reentrant_gc use_unsloth_gc master_addr master_port compute_accuracy
        data_shared_file_system ray_num_workers ray_init_kwargs ignore_pad_token_for_loss
        swanlab_project swanlab_mode use_v1_kernels ~
        image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen
        audio_sampling_rate freeze_vision_tower freeze_multi_modal_projector media_dir !! {IMAGES}
        model_class peft_config train_dataset !! a setting of the new version 1, whose examples do not name the algorithm.
        adapter_folder add_special_tokens add_tokens asft_alpha block_diag_attn buffer_size
        compute_dtype create_new_adapter crop_to_patches default_system device_map
        disable_shuffling early_stopping_steps enable_torch_profiler eval_on_each_dataset fp8
        freeze_extra_modules freeze_language_model freeze_trainable_modules hyper_parallel_args
        hyper_parallel_cp_size image_do_pan_and_scan init_special_tokens interleave_probs
        loraplus_lr_embedding megatron_bridge_args mixture_of_depths model_max_length
        module_dropout new_special_tokens_config oft_block_size oft_rank oft_target
        pissa_convert pissa_iter preserve_thinking profile_modules profiler_active_steps
        profiler_output_dir profiler_profile_memory profiler_record_shapes profiler_repeat
        profiler_wait_steps profiler_warmup_steps profiler_with_stack quantization_device_map
        reward_model reward_model_adapters reward_model_quantization_bit reward_model_type
        shift_attn split_special_tokens streaming tool_format train_from_scratch
        upcast_lmhead_output use_asft_loss use_audio_in_video use_dft_loss use_eaft_loss
        use_hyper_parallel use_kt use_llama_pro use_megatron_bridge -
    """),
    "stage": algorithm({"dpo": None, "kto": {**KTO, "pref_loss": "kto"}, "sft": SFT, "rm": REWARD}),
    "finetuning_type": trained,
    "dataset": registered(SAMPLES),
    "eval_dataset": registered(HELD_OUT),
    "val_size": SPLIT,
    "template": to("global_template", TEMPLATES),
    "cutoff_len": length(cut="truncate_prompt", note="LLaMA-Factory shortens prompt and answers in proportion; here "
                         "the prompt is cut from its left"),
    "max_samples": most_rows(registered(SAMPLES)),
    "mask_history": lambda value, given: gives(
        {"data.score": "assistant" if given.get("stage") == "sft" and not value else "last"}),
}  # fmt: skip

PEER = Peer(
    "llama-factory",
    RULES,
    version="0.9.6",
    programs={"llamafactory-cli train": None, "lmf train": None},
    defaults={
        **HF_DEFAULTS,
        **defaults("""
            stage=sft cutoff_len=2048 dataset_dir=data finetuning_type=lora lora_rank=8 lora_target=all pref_beta=0.1 pref_loss=sigmoid mask_history=false simpo_gamma=0.5
            (router)=0.0 if mixture model_name_or_path
        """),
        "lora_alpha": lambda given: 2 * given["lora_rank"],
    },
    marks="stage finetuning_type pref_beta pref_loss pref_ftx cutoff_len dpo_label_smoothing quantization_bit plot_loss "
          "overwrite_cache",
    words=("llamafactory", " lmf "),
    whole="lr_scheduler_kwargs deepspeed gradient_checkpointing_kwargs accelerator_config",
    always=("Only the last turn is scored, as in LLaMA-Factory.", "The order of the pairs is another one."),
)  # fmt: skip
