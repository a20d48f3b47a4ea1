"""Axolotl: its YAML with `rl: dpo | ipo | simpo | orpo | kto`, or without rl (SFT).

Facts of 0.18 (src/axolotl/utils/schemas, src/axolotl/core/builders).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rather.data.messages import KNOWN_ROLES, ROLES
from rather.files import JsonObject
from rather.tools.migrate.engine import Peer
from rather.tools.migrate.peers.shared import (
    FULL_SEQUENCES,
    HELD_OUT,
    HF,
    NO_WARMUP,
    SAMPLES,
    adapter,
    address,
    columns_of_all,
    dataset,
    processes,
)
from rather.tools.migrate.rules import (
    NOT_NEEDED,
    Given,
    Outcome,
    Rules,
    Unsupported,
    facts,
    gives,
    one_or_all,
    pairs,
)

HARMLESS = ("LigerPlugin", "KernelsPlugin", "CutCrossEntropyPlugin", "SwanLabPlugin")  # for speed
TRACKERS = pairs("wandb_project=wandb use_tensorboard=tensorboard use_mlflow=mlflow "
                 "use_swanlab=swanlab")  # fmt: skip
# What a `type` does: its first word names the template, the second the columns.
KINDS = pairs("chatml=chatml llama3=llama3 chat_template=none passthrough=none user_defined=none")
SHAPES = ("", "default", "argilla", "argilla_chat", "icr", "intel", "prompt_pairs", "ultra")
OF_ENTRY = {"path", "name", "split", "revision", "data_files", "ds_type", "type", "roles",
            "message_property_mappings"}  # fmt: skip
# Of rows for SFT: the assistant's turns are trained, each with its end-of-turn token.
TURNS = {"roles_to_train": ["assistant"], "train_on_eos": "turn"}


def read_as(entry: JsonObject, given: Given) -> tuple[str | None, dict[str, str]]:
    """Return the template that an entry's type names, and the columns that have other names."""
    kind, names = entry.get("type"), entry
    if not given.get("rl"):
        if kind != "chat_template":
            raise Unsupported(f"rows of type {kind} are not read; save them as messages")
        entry = {key: v for key, v in entry.items() if TURNS.get(key, ...) != v}
    if isinstance(kind, dict):
        names, kind = kind, "user_defined"
    template, _, shape = str(kind or "chat_template").partition(".")
    if template not in KINDS or shape not in SHAPES:
        raise Unsupported(
            f"rows of type {kind} are not read; save them as prompt, chosen, rejected"
        )
    if unread_settings := unread(entry):
        raise Unsupported(f"rows with {', '.join(sorted(unread_settings))} are not read")
    columns = {}
    for key, name in names.items():
        column = key.removeprefix("field_")
        if column.endswith("_format") and name not in ("", None, f"{{{column[:-7]}}}"):
            raise Unsupported(
                "a format of its own; write a Jinja file and name it: global_template"
            )
        if key.startswith("field_") and name and name != column:
            columns[column] = name
    return KINDS[template], columns


def unread(entry: JsonObject) -> set[str]:
    """Return the settings, the keys of messages and the roles of an entry that are not read."""
    settings = {key for key in entry if not key.startswith("field_")}
    mapped = set((entry.get("message_property_mappings") or {}).values())
    roles = set().union(*(entry.get("roles") or {}).values())
    keys_of_messages = {"role", "content", "from", "value"}
    return (settings - OF_ENTRY) | (mapped - keys_of_messages) | (roles - {*KNOWN_ROLES, *ROLES})


def entries(value: Any) -> list[JsonObject]:
    return [entry if isinstance(entry, dict) else {"path": entry} for entry in value or ()]


def datasets(value: Any, given: Given, *, path: str) -> Outcome:
    """Translate a list of {path, split, type, ...}; data sets of a hub must be saved first."""
    if not value:
        return NOT_NEEDED
    names: list[str] = []
    for entry in entries(value):
        name, files = entry["path"], entry.get("data_files")
        if not files and not entry.get("ds_type"):
            name = address(name, *map(entry.get, ("split", "name", "revision"))) or name
        names += files if isinstance(files, list) else [files or name]
    templates, columns = zip(*(read_as(entry, given) for entry in entries(value)), strict=True)
    if len(set(templates)) > 1:
        raise Unsupported("the files have rows of different types; save them in one")
    outcome = dataset(names, path)
    template = {"global_template": templates[0]} if templates[0] else {}
    values = {**outcome.values, **template, **columns_of_all(path, list(columns))}
    return outcome._replace(values=values)


def template(value: Any, given: Given) -> Outcome:
    """Set the template, unless the type of the rows names one, which wins."""
    templates = [read_as(entry, given)[0] for entry in entries(given.get("datasets"))]
    return NOT_NEEDED if any(templates) else TEMPLATE["chat_template"](value, given)


def per_epoch(value: Any, given: Given, *, path: str) -> Outcome:
    """Convert a number per epoch, which Axolotl turns into a fraction of the run."""
    if not value:
        return NOT_NEEDED
    share = 1 / (value * given["num_epochs"])
    return gives({path: share if share < 1 else None})


def tracker(value: Any, given: Given) -> Outcome:
    """Set the trackers of all keys that switch one on."""
    names = [name for key, name in TRACKERS.items() if given.get(key)]
    return gives({"track_with": one_or_all(names)} if value else {})


def ray_workers(value: Any, given: Given) -> Outcome:
    return processes(value, given) if given.get("use_ray") else NOT_NEEDED


def plugins(value: Any, given: Given) -> Outcome:
    if not all(str(name).endswith(HARMLESS) for name in value or ()):
        raise Unsupported("not supported")
    return NOT_NEEDED


TEMPLATE = facts("""
    chat_template = global_template: chatml=chatml llama3=llama3 gemma=gemma qwen_25=qwen2_5 \
        qwen3=qwen3 phi_3=phi3 tokenizer_default=native
""")
END = "? answers end with it in the template; the tokenizer keeps its own"
RULES: Rules = {
    **HF,
    **adapter(
        "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules if lora_target_linear unset",
        "lora_modules_to_save", is_on="adapter set if lora_model_dir unset",
    ),
    **facts(f"""
        rl if =ipo or simpo or orpo = pref_loss
        rl if =kto = task=unpaired pref_loss=kto
        rl if =none = task=sft pref_loss=sft data.score=assistant
        rl if !=dpo !! is not a training that Rather offers; it converts dpo, ipo, simpo, orpo, kto.
        adapter if unset = model.lora_rank=none
        adapter if =qlora = model.quantization=4bit
        adapter @ lora; adapters are LoRA or QLoRA
        peft_use_rslora = model.use_rslora
        peft_use_dora = model.use_dora
        lora_model_dir = model.adapter_name_or_path; the adapter as it is here is the reference
        lora_target_linear if set = model.lora_target: true=all-linear
        base_model = pretrain
        (tower) = model.freeze
        sequence_len if set = sequence_length
        val_set_size if set = held_out.split
        (warm-up) ?? by default 3 % of all steps and at most 100, which depends on the data; set \
            warmup_steps
        warmup_ratio warmup_steps if set if lr_scheduler=constant = ; {NO_WARMUP}
        warmup_steps = training.warmup_steps
        warmup_ratio if warmup_steps!=none ~ warmup_steps wins
        warmup_ratio = training.warmup_ratio; rounded to a whole step, where Axolotl rounds down
        num_epochs if max_steps>0 ~ max_steps counts alone
        num_epochs = training.num_train_epochs
        tokenizer_config = model.tokenizer_name_or_path
        revision = model.revision
        trust_remote_code = model.trust_remote_code
        dpo_loss_weights = loss_weights
        rl_beta dpo_beta trl.beta orpo_alpha if rl!=none = beta
        dpo_loss_type if rl=dpo = pref_loss:: kto_pair=none
        simpo_gamma if rl=simpo = gamma
        cpo_alpha if rl=simpo = rpo_alpha
        excess_length_strategy = data.overlong: drop=drop truncate=truncate_response raise=error
        auto_resume_from_checkpoints = resume_from_checkpoint: true=auto false=false
        tensor_parallel_size context_parallel_size sequence_parallel_degree dp_shard_size
        dp_replicate_size @ 1 none false; set strategy_args
        dpo_label_smoothing = label_smoothing; Axolotl's TRL 1.x ignores it for rl: dpo; here it \
            counts
        dpo_use_weighting = use_weighting
        kto_desirable_weight = desirable_weight
        kto_undesirable_weight = undesirable_weight
        rpo_alpha = rpo_alpha
        dataset_processes = data.preprocessing_num_workers
        micro_batch_size = training.per_device_train_batch_size
        eval_batch_size = actor_train.infer_batch_size
        early_stopping_patience = early_stopping_patience
        special_tokens.pad_token ~ nothing is padded
        special_tokens.eos_token if chat_template=chatml or qwen_25 or qwen3 if =<|im_end|> {END}
        special_tokens.eos_token if chat_template=llama3 if =<|eot_id|> {END}
        special_tokens.eos_token if chat_template=gemma if =<end_of_turn> {END}
        special_tokens.eos_token if chat_template=phi_3 if =<|end|> {END}
        special_tokens special_tokens.eos_token special_tokens.bos_token special_tokens.unk_token
        special_tokens.additional_special_tokens tokens ! change the tokenizer's folder instead
        reward_model process_reward_model ! Rather has no rule for Axolotl's reward models; task: \
            reward trains one
        bfloat16 float16 ! weights in half precision without copies; choose model_args.dtype
        max_prompt_len ! the prompt alone has no limit
        unfrozen_parameters ! not supported
        push_dataset_to_hub ? nothing is uploaded
        precompute_ref_log_probs ~ the reference is always computed once and kept on disk
        dataset_prepared_path ~ tokenised data are in <output_dir>/.cache; see cache_dir
        flash_attention sdp_attention xformers_attention eager_attention
        flex_attention ~ Rather has its own attention
        sample_packing if rl=none ! {FULL_SEQUENCES}
        train_on_inputs if rl=none ! set actor_train.data_args.score
        sample_packing pad_to_sequence_len eval_sample_packing dpo_padding_free ~ pairs are \
            always packed
        model_type tokenizer_type wandb_entity wandb_watch wandb_name wandb_log_model strict
        is_llama_derived_model debug local_rank train_on_inputs group_by_length
        loss_watchdog_threshold loss_watchdog_patience liger_rope liger_rms_norm
        liger_glu_activation flash_attn_cross_entropy eval_max_new_tokens eval_table_size
        shuffle_merged_datasets fsdp_version lora_mlp_kernel lora_qkv_kernel lora_o_kernel
        lora_embedding_kernel lora_on_cpu low_cpu_mem_usage gc_steps gc_collect_steps include_tkps
        include_tokens_per_second use_ray ray_run_name world_size
        axolotl_config_path is_falcon_derived_model is_mistral_derived_model is_qwen_derived_model
        profiler_steps profiler_steps_start tokenizer_use_fast tokenizer_save_jinja_files
        dataset_keep_in_memory num_dataset_shards_to_save preprocess_iterable dpo_use_liger_kernel
        dpo_use_logits_to_keep chunked_cross_entropy chunked_cross_entropy_num_chunks
        sage_attention experimental_skip_move_to_device ddp deepcompile flash_optimum use_wandb
        trackio_project_name trackio_run_name heads_k_stride ring_attn_func gpu_memory_limit
        max_memory device device_map swanlab_project swanlab_experiment_name swanlab_description
        swanlab_mode swanlab_workspace swanlab_log_completions swanlab_completion_log_interval
        swanlab_completion_max_buffer swanlab_log_model use_kernels use_scattermoe use_sonicmoe ~
        processor_type ~ the model's own processor is used
    """),
    **dict.fromkeys(TRACKERS, tracker),
    "datasets": partial(datasets, path=SAMPLES),
    "test_datasets": partial(datasets, path=HELD_OUT),
    "chat_template": template,
    "saves_per_epoch": partial(per_epoch, path="save_steps"),
    "evals_per_epoch": partial(per_epoch, path="eval_steps"),
    "ray_num_workers": ray_workers,
    "optimizer": HF["optim"],
    "lr_scheduler": HF["lr_scheduler_type"],
    "plugins": plugins,
}  # fmt: skip

PEER = Peer(
    "axolotl",
    RULES,
    version="0.18",
    defaults="""
        gradient_accumulation_steps=1 save_total_limit=4 rl=none dpo_loss_type=sigmoid
        micro_batch_size=1 adapter=none bf16=auto simpo_gamma=0.5 cpo_alpha=1.0
        sequence_len=512 num_epochs=1.0 lr_scheduler=cosine
        (tower)=[] if vision base_model if adapter unset if lora_model_dir unset
        (warm-up)=none if warmup_steps=none if warmup_ratio=none if lr_scheduler!=constant
        save_strategy=epoch if save_steps unset if saves_per_epoch unset
        rl_beta=0.1 if orpo_alpha unset if trl.beta unset
    """,
    marks="base_model rl sequence_len micro_batch_size num_epochs val_set_size sample_packing "
          "dataset_prepared_path pad_to_sequence_len lora_target_linear flash_attention",
    whole="lr_scheduler_kwargs fsdp_config deepspeed gradient_checkpointing_kwargs",
    always=(
        "Pairs that are too long are dropped and counted, as in Axolotl.",
        "TRL's other differences hold here too: see the page on TRL.",
    ),
)  # fmt: skip
