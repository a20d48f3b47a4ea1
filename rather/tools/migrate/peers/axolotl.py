"""Axolotl: its YAML with `rl: dpo | ipo | simpo | orpo | kto`, or without rl (SFT).

Facts of 0.18 (src/axolotl/utils/schemas, src/axolotl/core/builders).
"""

from __future__ import annotations

from typing import Any

from rather.data.messages import KNOWN_ROLES, ROLES
from rather.files import JsonObject
from rather.tools.migrate.engine import Peer
from rather.tools.migrate.peers.shared import (
    HELD_OUT,
    HF,
    SAMPLES,
    SCHEDULES,
    SPLIT,
    adapter,
    address,
    dataset,
    length,
    optimizer,
    processes,
    switches,
)
from rather.tools.migrate.rules import (
    KTO,
    LEFT_OUT,
    MISSING,
    NEEDLESS,
    NOT_NEEDED,
    SFT,
    UNSET,
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
          "kto": {**KTO, "pref_loss": "kto"}, None: {**SFT, "data.score": "assistant"}}  # fmt: skip
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
# Of rows for SFT: the assistant's turns are trained, each with its end-of-turn token.
TURNS = {"roles_to_train": ["assistant"], "train_on_eos": "turn"}


def read_as(entry: JsonObject, given: Given) -> tuple[str | None, dict[str, str]]:
    """Return the template that an entry's type names, and the columns that have other names."""
    kind, columns_of_entry = entry.get("type"), entry
    if not given.get("rl"):
        if kind != "chat_template":
            raise Unsupported(f"rows of type {kind} are not read; save them as messages")
        entry = {key: v for key, v in entry.items() if TURNS.get(key, ...) != v}
    if isinstance(kind, dict):
        columns_of_entry, kind = kind, "user_defined"
        refuse_formats(columns_of_entry)
    template, _, shape = str(kind or "chat_template").partition(".")
    if template not in KINDS or shape not in SHAPES:
        raise Unsupported(
            f"rows of type {kind} are not read; save them as prompt, chosen, rejected"
        )
    if unread_settings := unread(entry):
        raise Unsupported(f"rows with {', '.join(sorted(unread_settings))} are not read")
    columns = {}
    for key, name in columns_of_entry.items():
        column = key.removeprefix("field_")
        if column != key and name and name != column:
            columns[column] = name
    return KINDS[template], columns


def refuse_formats(kind: JsonObject) -> None:
    """Refuse formats other than the column alone, such as prompt_format: "{prompt}"."""
    for key, text in kind.items():
        column = key.removesuffix("_format")
        if column != key and text and text != f"{{{column}}}":
            raise Unsupported(
                "a format of its own; write a Jinja file and name it: global_template"
            )


def unread(entry: JsonObject) -> set[str]:
    """Return the settings, the keys of messages and the roles of an entry that are not read."""
    settings = {key for key in entry if not key.startswith("field_")}
    mapped = set((entry.get("message_property_mappings") or {}).values())
    roles = set().union(*(entry.get("roles") or {}).values())
    keys_of_messages = {"role", "content", "from", "value"}
    return (settings - OF_ENTRY) | (mapped - keys_of_messages) | (roles - {*KNOWN_ROLES, *ROLES})


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
            hub = None
            if not files and not entry.get("ds_type"):
                of_hub = (entry.get("split"), entry.get("name"), entry.get("revision"))
                hub = address(entry["path"], *of_hub)
            names += files if isinstance(files, list) else [files or hub or entry["path"]]
        first, *other_types = (read_as(entry, given) for entry in entries(value))
        if any(other_type != first for other_type in other_types):
            raise Unsupported("the files have rows of different types; save them in one")
        outcome = dataset(names, given, path)
        template, columns = first
        values = {**outcome.values, **({"global_template": template} if template else {})}
        if columns:
            values[path.replace("file_name", "columns")] = columns
        return Outcome(outcome.status, values, outcome.note)

    return rule


def template(value: Any, given: Given) -> Outcome:
    """Set the template, unless the type of the rows names one, which wins."""
    templates = [read_as(entry, given)[0] for entry in entries(given.get("datasets"))]
    return NOT_NEEDED if any(templates) else to("global_template", TEMPLATES)(value, given)


def special_tokens(value: Any, given: Given) -> Outcome:
    tokens = {name: token for name, token in (value or {}).items() if name != "pad_token"}
    if tokens and tokens == {"eos_token": ENDS.get(str(given.get("chat_template")))}:
        return Outcome(
            LEFT_OUT, note="answers end with it in the template; the tokenizer keeps its own"
        )
    return never("change the tokenizer's folder instead")(tokens, given)


def warmup_steps(given: Given) -> Any:
    """Return the default: 3 % of the steps, at most 100, never 1; known only with max_steps."""
    steps = given.get("max_steps") or 0
    if given.get("warmup_ratio") is not None or steps <= 0:
        return UNSET
    warmup = min(int(0.03 * steps), 100)
    return 2 if warmup == 1 else warmup


def no_warmup(given: Given) -> Any:
    """Return a mark if the number of steps, and so the default, is not known."""
    is_set = any(given.get(key) is not None for key in ("warmup_steps", "warmup_ratio"))
    return UNSET if is_set else True


def ratio(value: Any, given: Given) -> Outcome:
    steps = given.get("max_steps") or 0
    if value is None or given.get("warmup_steps") is not None:
        return NOT_NEEDED
    if steps > 0:
        warmup = int(value * steps)
        return gives({"training.warmup_steps": 2 if warmup == 1 else warmup})
    return gives({"training.warmup_ratio": value}, "rounded to a whole step; Axolotl rounds down")


def per_epoch(path: str) -> Rule:
    """Convert a number per epoch, which Axolotl turns into a fraction of the run."""

    def rule(value: Any, given: Given) -> Outcome:
        share = 1 / (value * given["num_epochs"]) if value else 0
        if path == "eval_steps" and not (given.get("val_set_size") or given.get("test_datasets")):
            return Outcome(NEEDLESS, note="there are no held-out pairs")
        if share >= 1:
            return gives({path: None})
        return gives({path: share}) if share else NOT_NEEDED

    return rule


def adapter_kind(value: Any, given: Given) -> Outcome:
    if value == "qlora" or not value:
        return gives({"model.quantization": "4bit"} if value else {"model.lora_rank": None})
    return only("lora", why="adapters are LoRA or QLoRA")(value, given)


ADAPTER = adapter(
    "lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save",
    "adapter",
    None,
    "",
    resumed="lora_model_dir",
)
RULES: Rules = {
    **HF,
    **ADAPTER,
    **facts("""
        peft_use_rslora = model.use_rslora
        peft_use_dora = model.use_dora
        lora_model_dir = model.adapter_name_or_path; the adapter as it is here is the reference
        base_model = pretrain
        num_epochs if max_steps>0 ~ max_steps counts alone
        num_epochs = training.num_train_epochs
        tokenizer_config = model.tokenizer_name_or_path
        revision = model.revision
        trust_remote_code = model.trust_remote_code
        dpo_loss_weights = loss_weights
        rl_beta dpo_beta trl.beta orpo_alpha = beta if rl!=none
        dpo_loss_type = pref_loss:: kto_pair=none if rl=dpo
        simpo_gamma = gamma if rl=simpo
        cpo_alpha = rpo_alpha if rl=simpo
        lora_target_linear = model.lora_target: true=all-linear if set
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
        reward_model process_reward_model ! Rather has no rule for Axolotl's reward models; task: \
            reward trains one
        bfloat16 float16 ! weights in half precision without copies; choose model_args.dtype
        max_prompt_len ! the prompt alone has no limit
        tokens ! change the tokenizer's folder instead
        unfrozen_parameters ! not supported
        push_dataset_to_hub ? nothing is uploaded
        precompute_ref_log_probs ~ the reference is always computed once and kept on disk
        dataset_prepared_path ~ tokenised data are in <output_dir>/.cache; see cache_dir
        flash_attention sdp_attention xformers_attention eager_attention
        flex_attention ~ Rather has its own attention
        sample_packing if rl=none ! a step has a number of full sequences there, here a number of \
            answers; set train_batch_size
        train_on_inputs if rl=none ! set actor_train.data_args.score
        sample_packing pad_to_sequence_len eval_sample_packing dpo_padding_free ~ pairs are always \
            packed
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
    **switches("wandb_project use_tensorboard use_mlflow use_swanlab"),
    "adapter": adapter_kind,
    "rl": algorithm(LOSSES),
    "lora_target_modules": when(
        lambda value, given: not given.get("lora_target_linear"), ADAPTER["lora_target_modules"]
    ),
    "datasets": datasets(SAMPLES),
    "test_datasets": datasets(HELD_OUT),
    "val_set_size": SPLIT,
    "chat_template": template,
    "sequence_len": when(all_of(["set"]), length),
    "(warm-up)": lambda *_: Outcome(
        MISSING,
        note=(
            "by default 3 % of all steps and at most 100; how many that are depends on the data: "
            "set warmup_steps"
        ),
    ),
    "warmup_ratio": ratio,
    "saves_per_epoch": per_epoch("save_steps"),
    "evals_per_epoch": per_epoch("eval_steps"),
    "ray_num_workers": when(all_of(["use_ray=true"]), processes),
    "optimizer": optimizer,
    "lr_scheduler": to("training.lr_scheduler_type", SCHEDULES),
    "special_tokens": special_tokens,
    "plugins": when(
        lambda value, given: [name for name in value or () if not str(name).endswith(HARMLESS)],
        never("not supported"),
    ),
}

PEER = Peer(
    "axolotl",
    RULES,
    version="0.18",
    defaults={
        **pairs("gradient_accumulation_steps=1 save_total_limit=4 rl=none dpo_loss_type=sigmoid "
                "micro_batch_size=1 adapter=none bf16=auto simpo_gamma=0.5 cpo_alpha=1.0 "
                "sequence_len=512 num_epochs=1.0 lr_scheduler=cosine"),
        "warmup_steps": warmup_steps, "(warm-up)": no_warmup,
        **defaults("""
            save_strategy=epoch if save_steps=none|0 if saves_per_epoch=none|0
            rl_beta=0.1 if orpo_alpha=none|0 if trl.beta=none|0
        """),
    },
    marks="base_model rl sequence_len micro_batch_size num_epochs val_set_size sample_packing "
          "dataset_prepared_path pad_to_sequence_len lora_target_linear flash_attention",
    whole="special_tokens lr_scheduler_kwargs fsdp_config deepspeed gradient_checkpointing_kwargs "
          "accelerator_config",
    always=(
        "Pairs that are too long are dropped and counted, as in Axolotl.",
        "TRL's other differences hold here too: see the page on TRL.",
    ),
)  # fmt: skip
