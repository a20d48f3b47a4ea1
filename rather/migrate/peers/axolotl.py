"""Axolotl: its YAML with `rl: dpo | ipo | simpo | orpo | kto`.

Facts of 0.18 (src/axolotl/utils/schemas, src/axolotl/core/builders).
"""

from __future__ import annotations

from typing import Any

from rather.data.messages import KNOWN_ROLES, ROLES
from rather.files import JsonObject
from rather.migrate.engine import Peer
from rather.migrate.peers.shared import (
    HELD_OUT,
    HF,
    IMAGES,
    SAMPLES,
    SCHEDULES,
    SPLIT,
    adapter,
    address,
    dataset,
    epochs,
    length,
    optimizer,
    switches,
)
from rather.migrate.rules import (
    KTO,
    LEFT_OUT,
    NOT_NEEDED,
    Given,
    Outcome,
    Rule,
    Rules,
    Unsupported,
    algorithm,
    all_of,
    defaults,
    facts,
    gives,
    keys,
    never,
    only,
    pairs,
    to,
    when,
)

HARMLESS = ("LigerPlugin", "KernelsPlugin", "CutCrossEntropyPlugin", "SwanLabPlugin")  # for speed
LOSSES = {"dpo": None, "ipo": "ipo", "simpo": "simpo", "orpo": "orpo",
          "kto": {**KTO, "pref_loss": "kto"}}  # fmt: skip
TEMPLATES = pairs("chatml=chatml llama3=llama3 gemma=gemma qwen_25=qwen2_5 qwen3=qwen3 phi_3=phi3 "
                  "tokenizer_default=native")  # fmt: skip
ENDS = pairs("chatml=<|im_end|> qwen_25=<|im_end|> qwen3=<|im_end|> llama3=<|eot_id|> "
             "gemma=<end_of_turn> phi_3=<|end|>")  # of answers, in these templates  # fmt: skip
# What a `type` does: its first word names the template, the second the columns.
KINDS = pairs("chatml=chatml llama3=llama3 chat_template=none passthrough=none user_defined=none")
SHAPES = ("", "default", "argilla", "argilla_chat", "icr", "intel", "prompt_pairs", "ultra")
OF_ENTRY = {
    *keys("path name split revision data_files ds_type type roles message_property_mappings")
}


def read_as(entry: JsonObject) -> tuple[str | None, dict[str, str]]:
    """Return the template that an entry's type names, and the columns that have other names."""
    kind, own = entry.get("type"), entry
    if isinstance(kind, dict):
        own, kind = kind, "user_defined"
        formats = {key: v for key, v in own.items() if key.endswith("_format") and v}
        if any(v != "{" + key.removesuffix("_format") + "}" for key, v in formats.items()):
            raise Unsupported(
                "a format of its own; write a Jinja file and name it: global_template"
            )
    template, _, shape = str(kind or "chat_template").partition(".")
    if template not in KINDS or shape not in SHAPES:
        raise Unsupported(
            f"rows of type {kind} are not read; save them as prompt, chosen, rejected"
        )
    mapped = set((entry.get("message_property_mappings") or {}).values())
    roles = {role for names in (entry.get("roles") or {}).values() for role in names}
    fields = {key.removeprefix("field_"): v for key, v in own.items() if key.startswith("field_")}
    other = (mapped - {"role", "content", "from", "value"}) | (roles - {*KNOWN_ROLES, *ROLES})
    other |= {key for key in entry if not key.startswith("field_")} - OF_ENTRY
    if other:
        raise Unsupported(f"rows with {', '.join(sorted(other))} are not read")
    return KINDS[template], {key: name for key, name in fields.items() if name and name != key}


def entries(value: Any) -> list[JsonObject]:
    return [entry if isinstance(entry, dict) else {"path": entry} for entry in value or ()]


def datasets(path: str) -> Rule:
    """Translate a list of {path, split, type, ...}; data sets of a hub must be saved first."""

    def rule(value: Any, given: Given) -> Outcome:
        if not value:
            return NOT_NEEDED
        names: list[Any] = []
        for entry in entries(value):
            files = entry.get("data_files")
            split, part, at = (entry.get(key) for key in ("split", "name", "revision"))
            hub = None if files or entry.get("ds_type") else address(entry["path"], split, part, at)
            names += files if isinstance(files, list) else [files or hub or entry["path"]]
        first, *others = map(read_as, entries(value))
        if any(other != first for other in others):
            raise Unsupported("the files have rows of different types; save them in one")
        found = dataset(path)(names, given)
        template, columns = first
        values = {**found.values, **({"global_template": template} if template else {})}
        if columns:
            values[path.replace("file_name", "columns")] = columns
        return Outcome(found.status, values, found.note)

    return rule


def template(value: Any, given: Given) -> Outcome:
    """Several types of rows name a template, which wins."""
    named = [read_as(entry)[0] for entry in entries(given.get("datasets"))]
    return NOT_NEEDED if any(named) else to("global_template", TEMPLATES)(value, given)


def special_tokens(value: Any, given: Given) -> Outcome:
    rest = {name: token for name, token in (value or {}).items() if name != "pad_token"}
    if rest and rest == {"eos_token": ENDS.get(str(given.get("chat_template")))}:
        return Outcome(
            LEFT_OUT, note="answers end with it in the template; the tokenizer keeps its own"
        )
    return never("change the tokenizer's folder instead")(rest, given)


def adapter_kind(value: Any, given: Given) -> Outcome:
    if value == "qlora" or not value:
        return gives({"model.quantization": "4bit"} if value else {"model.lora_rank": None})
    return only("lora", why="adapters are LoRA or QLoRA")(value, given)


ADAPTER = adapter(
    "lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save", "adapter", None, ""
)
RULES: Rules = {
    **HF,
    **ADAPTER,
    **facts(f"""
        peft_use_rslora = model.use_rslora
        peft_use_dora = model.use_dora
        lora_model_dir = model.adapter_name_or_path; the adapter as it is here is the reference
        base_model = pretrain
        tokenizer_config = model.tokenizer_name_or_path
        revision = model.revision
        trust_remote_code = model.trust_remote_code
        dpo_loss_weights = loss_weights
        rl_beta dpo_beta trl.beta orpo_alpha = beta
        dpo_loss_type = pref_loss:: kto_pair=none if rl=dpo
        simpo_gamma = gamma if rl=simpo
        cpo_alpha = rpo_alpha if rl=simpo
        lora_target_linear = model.lora_target: true=all-linear if set
        excess_length_strategy = data.overlong: drop=drop truncate=truncate_response raise=error
        auto_resume_from_checkpoints = resume_from_checkpoint: true=auto false=false
        tensor_parallel_size context_parallel_size sequence_parallel_degree dp_shard_size
        dp_replicate_size @ 1 none false; set strategy_args
        dpo_label_smoothing = label_smoothing; Axolotl's TRL 1.x ignores it for rl: dpo; here it counts
        dpo_use_weighting = use_weighting
        kto_desirable_weight = desirable_weight
        kto_undesirable_weight = undesirable_weight
        rpo_alpha = rpo_alpha
        dataset_processes = data.preprocessing_num_workers
        micro_batch_size = training.per_device_train_batch_size
        eval_batch_size = actor_train.infer_batch_size
        early_stopping_patience = early_stopping_patience
        reward_model process_reward_model ! reward models are not trained
        bfloat16 float16 ! weights in half precision without copies; choose model_args.dtype
        max_prompt_len ! the prompt alone has no limit
        tokens ! change the tokenizer's folder instead
        unfrozen_parameters ! not supported
        push_dataset_to_hub ? nothing is uploaded
        precompute_ref_log_probs ~ the reference is always computed once and kept on disk
        dataset_prepared_path ~ tokenised data are in <output_dir>/.cache; see cache_dir
        saves_per_epoch evals_per_epoch ~ counted in steps: save_steps, eval_steps
        flash_attention sdp_attention xformers_attention eager_attention
        flex_attention ~ Rather has its own attention
        sample_packing pad_to_sequence_len eval_sample_packing dpo_padding_free ~ pairs are always packed
        model_type tokenizer_type wandb_entity wandb_watch wandb_name wandb_log_model strict
        is_llama_derived_model debug local_rank train_on_inputs group_by_length
        loss_watchdog_threshold loss_watchdog_patience liger_rope liger_rms_norm
        liger_glu_activation flash_attn_cross_entropy eval_max_new_tokens eval_table_size
        shuffle_merged_datasets fsdp_version lora_mlp_kernel lora_qkv_kernel lora_o_kernel
        lora_embedding_kernel lora_on_cpu low_cpu_mem_usage gc_steps gc_collect_steps include_tkps
        include_tokens_per_second use_ray ray_num_workers ray_run_name world_size
        axolotl_config_path is_falcon_derived_model is_mistral_derived_model is_qwen_derived_model
        profiler_steps profiler_steps_start tokenizer_use_fast tokenizer_save_jinja_files
        dataset_keep_in_memory num_dataset_shards_to_save preprocess_iterable dpo_use_liger_kernel
        dpo_use_logits_to_keep chunked_cross_entropy chunked_cross_entropy_num_chunks
        sage_attention experimental_skip_move_to_device ddp deepcompile flash_optimum use_wandb
        trackio_project_name trackio_run_name heads_k_stride ring_attn_func gpu_memory_limit
        max_memory device device_map swanlab_project swanlab_experiment_name swanlab_description
        swanlab_mode swanlab_workspace swanlab_log_completions swanlab_completion_log_interval
        swanlab_completion_max_buffer swanlab_log_model use_kernels use_scattermoe use_sonicmoe ~
        processor_type !! {IMAGES}
        activation_offloading adam_beta3 adam_epsilon2 adaptive_max_tokens
        added_tokens_overrides additional_special_tokens advantage_estimator alignment_coef
        base_model_config batch_flattening batch_size bench_dataset bench_split
        bnb_config_kwargs bos_token ce_coef center_rewards_coefficient chat_template_jinja
        chat_template_kwargs cls_model_config cosine_constant_lr_ratio curriculum_sampling
        dataset_exact_deduplication dataset_shard_idx dataset_shard_num default_system_message
        dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of diversity_coef
        do_bench_eval do_causal_lm_eval dpo_generate_during_eval dpo_norm_loss
        dynamic_checkpoint ebft embedding_lr embedding_lr_scale embeddings_skip_upcast eos_token
        eot_tokens eval_causal_lm_metrics eval_sequence_len experts_implementation
        fix_untrained_tokens flex_attn_compile_kwargs float32 fp32_norm_classes fp32_norms fp8
        freeze_mm_modules fsdp_final_state_dict_type fused_attn_kernel gemma4_hybrid_attn_impl
        generate_max_len generate_samples gptq gradio_max_new_tokens gradio_server_name
        gradio_server_port gradio_share gradio_temperature gradio_title gt_length_multiplier
        hf_mlflow_log_artifacts hf_use_auth_token is_preprocess jagged_restart_anneal_steps
        jagged_restart_steps jagged_restart_warmup_steps large_head_attention layer_offloading
        llama4_linearized_experts loftq_bits loftq_config lora_alpha_pattern lora_fan_in_fan_out
        lora_rank_pattern lora_target_parameters loraplus_lr_embedding loraplus_lr_ratio
        lr_div_factor lr_groups lr_quadratic_warmup max_packed_sequence_len
        mean_resizing_embeddings merge_lora merge_method min_completion_prefix min_sample_len
        model_quantization_config model_quantization_config_kwargs multipack_real_batches
        n_samples_per_prompt noisy_embedding_alpha num_generation_samples num_labels optim_args
        optim_target_modules otel_metrics_host otel_metrics_port overrides_of_model_config
        overrides_of_model_kwargs pad_to_multiple_of pad_token peft peft_autocast_adapter_dtype
        peft_ensure_weight_tying peft_init_lora_weights peft_layer_replication
        peft_layers_pattern peft_layers_to_transform peft_trainable_token_indices
        pretraining_dataset pretraining_sample_concatenation processor_kwargs qat
        qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits qgalore_proj_group_size
        qgalore_proj_quant qgalore_proj_type qgalore_queue_size qgalore_rank qgalore_scale
        qgalore_update_proj_gap qlora_sharded_model_loading quantization quantize_moe_experts
        recompute_layer_types reinit_weights relora relora_cpu_offload relora_prune_method
        relora_prune_ratio resize_token_embeddings_to_32x resources_per_worker revision_of_model
        rl_coef rope_scaling s2_attention sample_packing_bin_size sample_packing_eff_est
        sample_packing_group_size sample_packing_mp_start_method sample_packing_sequentially
        save_first_step save_sliding_window scaling_softmax scaling_softmax_bias
        scaling_softmax_factor sdpa_varlen selective_checkpointing shrink_embeddings
        shuffle_before_merging_datasets skip_prepare_dataset streaming tokenizer_legacy
        tokenizer_use_mistral_common torch_compile_options torchdistx_path total_num_tokens
        total_supervised_tokens trainer_cls trl unk_token use_comet use_eaft use_onebitllms
        use_otel_metrics use_pose use_trackio use_whitening vllm -
    """),
    **switches("wandb_project use_tensorboard use_mlflow use_swanlab"),
    "adapter": adapter_kind,
    "rl": algorithm(LOSSES),
    "lora_target_modules": when(
        lambda value, given: not given.get("lora_target_linear"), ADAPTER["lora_target_modules"]),
    "datasets": datasets(SAMPLES),
    "test_datasets": datasets(HELD_OUT),
    "val_set_size": SPLIT,
    "chat_template": template,
    "sequence_len": when(all_of(["set"]), length()),
    "num_epochs": epochs,
    "optimizer": optimizer,
    "lr_scheduler": to("training.lr_scheduler_type", SCHEDULES),
    "special_tokens": special_tokens,
    "plugins": when(lambda value, given: [name for name in value or () if not str(name).endswith(HARMLESS)],
                    never("not supported")),
}  # fmt: skip

PEER = Peer(
    "axolotl",
    RULES,
    version="0.18",
    programs={"axolotl train": None, "train": None},
    defaults={
        **pairs("gradient_accumulation_steps=1 save_total_limit=4 rl=none dpo_loss_type=sigmoid micro_batch_size=1 "
                "adapter=none bf16=auto simpo_gamma=0.5 cpo_alpha=1.0 sequence_len=512 num_epochs=1.0 lr_scheduler=cosine"),
        **defaults("""
            warmup_ratio=0.03 if warmup_steps=none|0
            rl_beta=0.1 if orpo_alpha=none|0 if trl.beta=none|0
        """),
    },
    marks="base_model rl sequence_len micro_batch_size num_epochs val_set_size sample_packing "
          "dataset_prepared_path pad_to_sequence_len lora_target_linear flash_attention",
    words=(" axolotl ", "axolotl.cli."),
    whole="special_tokens lr_scheduler_kwargs fsdp_config deepspeed gradient_checkpointing_kwargs accelerator_config",
    always=(
        "Pairs that are too long are dropped and counted, as in Axolotl.",
        "TRL's other differences hold here too: see the page on TRL.",
    ),
)  # fmt: skip
