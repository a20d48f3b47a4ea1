"""Axolotl: its YAML with `rl: dpo | ipo | simpo | orpo`.

Facts of 0.18 (src/axolotl/utils/schemas, src/axolotl/core/builders).
"""

from __future__ import annotations

from typing import Any

from rather.migrate.engine import PROGRAM, Peer
from rather.migrate.peers.shared import (
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
    images,
    length,
    loss_name,
    optimizer,
    tracker,
)
from rather.migrate.rules import (
    CHANGED,
    NOT_NEEDED,
    OPEN,
    RENAMED,
    UNSET,
    Given,
    Outcome,
    Rule,
    algorithm,
    each,
    if_given,
    keys,
    left_out,
    needless,
    never,
    only,
    to,
    when,
)

KNOWN = keys(
    """
    activation_offloading adam_beta3 adam_epsilon2 adaptive_max_tokens added_tokens_overrides
    additional_special_tokens advantage_estimator alignment_coef base_model_config
    batch_flattening batch_size bench_dataset bench_split bnb_config_kwargs bos_token ce_coef
    center_rewards_coefficient chat_template_jinja chat_template_kwargs cls_model_config
    cosine_constant_lr_ratio curriculum_sampling dataset_exact_deduplication dataset_shard_idx
    dataset_shard_num default_system_message dion_lr dion_momentum dion_rank_fraction
    dion_rank_multiple_of diversity_coef do_bench_eval do_causal_lm_eval
    dpo_generate_during_eval dpo_norm_loss dynamic_checkpoint ebft embedding_lr
    embedding_lr_scale embeddings_skip_upcast eos_token eot_tokens eval_causal_lm_metrics
    eval_sequence_len experts_implementation fix_untrained_tokens flex_attn_compile_kwargs
    float32 fp32_norm_classes fp32_norms fp8 freeze_mm_modules fsdp_final_state_dict_type
    fused_attn_kernel gemma4_hybrid_attn_impl generate_max_len generate_samples gptq
    gradio_max_new_tokens gradio_server_name gradio_server_port gradio_share gradio_temperature
    gradio_title gt_length_multiplier hf_mlflow_log_artifacts hf_use_auth_token is_preprocess
    jagged_restart_anneal_steps jagged_restart_steps jagged_restart_warmup_steps
    kto_desirable_weight kto_undesirable_weight large_head_attention layer_offloading
    llama4_linearized_experts loftq_bits loftq_config lora_alpha_pattern lora_fan_in_fan_out
    lora_rank_pattern lora_target_parameters loraplus_lr_embedding loraplus_lr_ratio
    lr_div_factor lr_groups lr_quadratic_warmup max_packed_sequence_len mean_resizing_embeddings
    merge_lora merge_method min_completion_prefix min_sample_len model_quantization_config
    model_quantization_config_kwargs multipack_real_batches n_samples_per_prompt
    noisy_embedding_alpha num_generation_samples num_labels optim_args optim_target_modules
    otel_metrics_host otel_metrics_port overrides_of_model_config overrides_of_model_kwargs
    pad_to_multiple_of pad_token peft peft_autocast_adapter_dtype peft_ensure_weight_tying
    peft_init_lora_weights peft_layer_replication peft_layers_pattern peft_layers_to_transform
    peft_trainable_token_indices pretraining_dataset pretraining_sample_concatenation
    processor_kwargs qat qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits
    qgalore_proj_group_size qgalore_proj_quant qgalore_proj_type qgalore_queue_size qgalore_rank
    qgalore_scale qgalore_update_proj_gap qlora_sharded_model_loading quantization
    quantize_moe_experts recompute_layer_types reinit_weights relora relora_cpu_offload
    relora_prune_method relora_prune_ratio resize_token_embeddings_to_32x resources_per_worker
    revision_of_model rl_coef rope_scaling s2_attention sample_packing_bin_size
    sample_packing_eff_est sample_packing_group_size sample_packing_mp_start_method
    sample_packing_sequentially save_first_step save_sliding_window scaling_softmax
    scaling_softmax_bias scaling_softmax_factor sdpa_varlen selective_checkpointing
    shrink_embeddings shuffle_before_merging_datasets skip_prepare_dataset streaming
    tokenizer_legacy tokenizer_use_mistral_common torch_compile_options torchdistx_path
    total_num_tokens total_supervised_tokens trainer_cls trl unk_token use_comet use_eaft
    use_kernels use_onebitllms use_otel_metrics use_pose use_trackio use_whitening vllm
    """
)
TOKENS = "change the tokenizer's folder instead"
HARMLESS = ("LigerPlugin", "CutCrossEntropyPlugin", "SwanLabPlugin")  # speed and reports
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


def adapter_kind(value: Any, given: Given) -> Outcome:
    if value == "qlora":
        return Outcome(RENAMED, {MODEL + "quantization": "4bit"})
    if not value:
        return Outcome(RENAMED, {MODEL + "lora_rank": None})
    return only("lora", why="adapters are LoRA or QLoRA")(value, given)


def loss_names(value: Any, given: Given) -> Outcome:
    return loss_name(kto_pair=None)(value, given) if given.get("rl") == "dpo" else NOT_NEEDED


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
    PROGRAM: algorithm({"axolotl train": None, "train": None}),
    "rl": algorithm(LOSSES),
    "dpo_loss_type": loss_names,
    "dpo_loss_weights": to("loss_weights"),
    **each("reward_model process_reward_model", never("reward models are not trained")),
    "processor_type": images,
    "precompute_ref_log_probs": needless("the reference is always computed once and kept on disk"),
    "dpo_padding_free": needless("pairs are always packed"),
    **each("bfloat16 float16", never("weights in half precision without copies; choose model_args.dtype")),
    **each("tensor_parallel_size context_parallel_size sequence_parallel_degree dp_shard_size dp_replicate_size",
           never("set strategy_args", unless=(1,))),
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
    "optimizer": optimizer,
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
    **each("hub_model_id hub_strategy push_dataset_to_hub", left_out(UPLOAD)),
    "special_tokens": when(lambda value, given: set(value or ()) - {"pad_token"}, never(TOKENS)),
    "tokens": never(TOKENS),
    "plugins": when(lambda value, given: [name for name in value or () if not str(name).endswith(HARMLESS)],
                    never("not supported")),
    "unfrozen_parameters": never("not supported"),
    **each("model_type tokenizer_type wandb_entity wandb_watch wandb_name wandb_log_model strict "
           "is_llama_derived_model debug local_rank train_on_inputs group_by_length loss_watchdog_threshold "
           "loss_watchdog_patience liger_rope liger_rms_norm liger_glu_activation flash_attn_cross_entropy "
           "dataloader_num_workers remove_unused_columns save_safetensors eval_max_new_tokens "
           "eval_table_size shuffle_merged_datasets fsdp_version "
           "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel lora_on_cpu "
           "low_cpu_mem_usage gc_steps gc_collect_steps include_tkps include_tokens_per_second use_ray "
           "ray_num_workers ray_run_name world_size axolotl_config_path is_falcon_derived_model "
           "is_mistral_derived_model is_qwen_derived_model profiler_steps profiler_steps_start "
           "tokenizer_use_fast tokenizer_save_jinja_files dataset_keep_in_memory num_dataset_shards_to_save "
           "preprocess_iterable dpo_use_liger_kernel dpo_use_logits_to_keep chunked_cross_entropy "
           "chunked_cross_entropy_num_chunks sage_attention experimental_skip_move_to_device ddp deepcompile "
           "flash_optimum use_wandb trackio_project_name trackio_run_name heads_k_stride ring_attn_func "
           "gpu_memory_limit max_memory "
           "device device_map", needless(MACHINERY)),
    "use_swanlab": tracker("swanlab"),
    **each("swanlab_project swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace "
           "swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer", needless(MACHINERY)),
}  # fmt: skip

AXOLOTL = Peer(
    "axolotl",
    RULES,
    version="0.18",
    programs=("axolotl train", "train"),
    known=KNOWN,
    defaults={
        **{key: value for key, value in HF_DEFAULTS.items() if key in ("logging_steps", "save_steps", "save_total_limit",
                                                                       "gradient_accumulation_steps")},
        "rl": None, "micro_batch_size": 1, "adapter": None, "bf16": "auto", "simpo_gamma": 0.5, "cpo_alpha": 1.0,
        "warmup_ratio": lambda given: UNSET if given.get("warmup_steps") else 0.03,
        "rl_beta": lambda given: UNSET if given.get("orpo_alpha") or given.get("trl.beta") else 0.1, "sequence_len": 2048, "num_epochs": 1.0, "lr_scheduler": "cosine",
    },
    marks=("base_model", "rl", "sequence_len", "micro_batch_size", "num_epochs", "val_set_size", "sample_packing",
           "dataset_prepared_path", "pad_to_sequence_len", "lora_target_linear", "flash_attention"),
    words=(" axolotl ", "axolotl.cli."),
    whole=("special_tokens", "lr_scheduler_kwargs", "fsdp_config", "deepspeed", "gradient_checkpointing_kwargs", "accelerator_config"),
    always=(
        f"Only local files are read ({', '.join(READABLE)}).",
        "Pairs that are too long are dropped and counted, as in Axolotl.",
        "TRL's other differences hold here too: see the page on TRL.",
    ),
)  # fmt: skip
