"""Rules that several tools share: TrainingArguments, adapters, data sets, sizes, DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rather.config.keys import table
from rather.files import HUB_NAME, JsonObject
from rather.tools.migrate.rules import (
    LEFT_OUT,
    NEEDLESS,
    NOT_NEEDED,
    NOTHING,
    OPEN,
    Given,
    Outcome,
    Rules,
    Unsupported,
    facts,
    gives,
    names_of,
    one_or_all,
)

STRATEGY = "actor_train.strategy_args.strategy_name"
SAMPLES, HELD_OUT = "data.file_name", "held_out.file_name"
READABLE = (".json", ".jsonl", ".parquet", ".arrow", ".gz", ".feather")
DTYPES = "bfloat16=bf16 bf16=bf16 float16=fp16 fp16=fp16"
COPIES = "weights have exact float32 copies"
TRACKERS = table()["track_with"].choices
SCHEDULES = " ".join(
    f"{name}={name}" for name in table()["actor_train.training_args.lr_scheduler_type"].choices
)
NO_WARMUP = "transformers' constant schedule has no warm-up"
IMAGES = "video and audio are not read; rows with them are dropped and counted"
FULL_SEQUENCES = (
    "a step has a number of full sequences there, here a number of pairs or answers; set "
    "train_batch_size"
)


# ---- data


def address(name: str, split: Any = None, config: Any = None, revision: Any = None) -> str | None:
    """Return the address of a data set of Hugging Face's hub; None if the name is not one."""
    is_path = name.startswith(".") or name.endswith(READABLE) or Path(name).exists()
    if is_path or "/" not in name or not HUB_NAME.fullmatch(name):
        return None
    if "[" in str(split):
        raise Unsupported(f"{split}: save these rows to a file of their own")
    subset = [str(word) for word in (config, split or "train") if word]
    at = f"@{revision}" if revision else ""
    return f"hf://datasets/{name}{at}" + (f":{'/'.join(subset)}" if subset != ["train"] else "")


def dataset(names: list[str], path: str = SAMPLES) -> Outcome:
    """Accept local files and addresses; other data sets have to be saved to a file first."""
    files, remote = [], []
    for name in names:
        if "#" in name:
            raise Unsupported(f"{name} draws rows at random; save them to a file of their own")
        if name.startswith("hf://") or name.endswith(READABLE):
            files.append(name)
        else:
            remote.append(name)
            files.append(f"{Path(name).name}.jsonl")
    outcome = gives({path: one_or_all(files)})
    if not remote:
        return outcome
    note = f"only local files are read: save {', '.join(remote)} as JSON lines there"
    return outcome._replace(status=OPEN, note=note)


def columns_of_all(path: str, columns: list[dict[str, str]]) -> JsonObject:
    """Return the renamed columns of the files at `path`, which have to be the same in all."""
    if any(columns_of_file != columns[0] for columns_of_file in columns):
        raise Unsupported("the files have columns of different names; rename them")
    return {path.replace("file_name", "columns"): columns[0]} if columns[0] else {}


# ---- the run


def run_folder(value: Any, given: Given) -> Outcome:
    """Split `out/my-run` into the folder `out` and the run `my-run`."""
    if not value:
        return NOT_NEEDED
    path = Path(str(value))
    parent = "./" if str(path.parent) == "." else str(path.parent)
    note = "the run is written to this folder; the model is in its subfolder model/"
    return gives({"output_dir": parent, "exp_name": path.name})._replace(note=note)


def trackers(value: Any, given: Given) -> Outcome:
    names = names_of(value)
    values = {"track_with": one_or_all([name for name in names if name in TRACKERS]) or None}
    lost = [name for name in names if name not in (*TRACKERS, "none", "None", "all")]
    if not lost:
        return gives(values)
    note = f"no tracker {', '.join(lost)}; supported: {', '.join(TRACKERS)}"
    return Outcome(LEFT_OUT, values, note)


def evaluated(value: Any, given: Given) -> Outcome:
    """Set eval_steps; eval_strategy: steps without it means every logging_steps."""
    if value != "steps" or given.get("eval_steps"):
        return Outcome(NEEDLESS, note="evaluation is always after each epoch and at the end")
    return gives({"eval_steps": int(given.get("logging_steps") or 1)}, "as often as logging_steps")


def save_strategy(value: Any, given: Given) -> Outcome:
    """Translate `epoch` into a fraction of the run, if the run has whole epochs."""
    if value == "no":
        return gives({"save_steps": None})
    if value == "steps":
        return NOT_NEEDED
    epochs = given.get("num_epochs", given.get("num_train_epochs"))
    if value != "epoch" or not epochs or epochs % 1 or (given.get("max_steps") or 0) > 0:
        raise Unsupported(
            "checkpoints follow a number of steps, or a fraction of the run: save_steps"
        )
    return gives({"save_steps": 1 / epochs if epochs > 1 else None})


# ---- devices


def processes(value: Any, given: Given) -> Outcome:
    """Set the devices of a launcher; none means one."""
    return gives({"actor_train.device_mapping": f"0-{value - 1}"} if (value or 1) > 1 else {})


def deepspeed(value: Any, given: Given) -> Outcome:
    """Read a DeepSpeed file that exists here; otherwise take the stage from its name."""
    if value in NOTHING:
        return NOT_NEEDED
    if isinstance(value, dict):
        return gives({STRATEGY: "deepspeed_train", STRATEGY.replace("_name", "_config"): value})
    path = Path(str(value))
    if path.expanduser().is_file():
        return gives({STRATEGY: "deepspeed_train", "strategy.config_file": str(value)})
    for stage in "123":
        if f"zero{stage}" in path.name or f"z{stage}" in path.name:
            cpu = "_cpu" if "offload" in path.name and stage == "2" else ""
            note = f"{value} is not here; stage {stage} is taken from its name"
            return gives({STRATEGY: f"zero{stage}{cpu}"}, note)
    raise Unsupported(f"{value} is not here, and its name has no stage; set {STRATEGY}")


# ---- transformers' TrainingArguments

# transformers trains for max_steps, however many epochs that takes; Rather stops at either.
HF: Rules = facts(f"""
    learning_rate = training.learning_rate
    num_train_epochs if max_steps>0 ~ max_steps counts alone
    num_train_epochs = training.num_train_epochs
    max_steps if >0 = max_steps training.num_train_epochs
    warmup_ratio if warmup_steps set ~ warmup_steps wins
    warmup_ratio warmup_steps if set if lr_scheduler_type=constant = ; {NO_WARMUP}
    warmup_ratio = training.warmup_ratio
    warmup_steps if set if <1 = training.warmup_ratio
    warmup_steps = training.warmup_steps
    lr_scheduler_type = training.lr_scheduler_type: {SCHEDULES} warmup_stable_decay=wsd
    lr_scheduler_kwargs = training.lr_scheduler_kwargs
    optim if =adamw_bnb_8bit or adamw_8bit or paged_adamw_8bit or paged_adamw_32bit = ; its \
        states are exact here; precision: lean makes them smaller
    optim @ adamw_torch adamw_torch_fused adamw_hf adamw adam AdamW torch.optim.AdamW; the \
        optimizer is AdamW
    weight_decay = training.weight_decay
    adam_beta1 = training.adam_beta1
    adam_beta2 = training.adam_beta2
    adam_epsilon = training.adam_epsilon
    per_device_train_batch_size = training.per_device_train_batch_size
    gradient_accumulation_steps = training.gradient_accumulation_steps
    data_seed = training.data_seed
    max_grad_norm = max_grad_norm
    gradient_checkpointing = model.disable_gradient_checkpointing: true=false false=true
    seed = seed
    full_determinism = deterministic
    logging_dir = logging_dir
    per_device_eval_batch_size = actor_train.infer_batch_size
    use_cpu no_cuda = platform: true=cpu false=auto
    bf16 if =true if fp16=true or auto ! bf16 and fp16 are both on; choose one
    bf16 if fp16=true or auto = model.dtype=fp16; {COPIES}, sums are float32 or better
    bf16 = model.dtype: true=bf16 auto=bf16 false=fp32 none=fp32; {COPIES}, sums are float32 or \
        better
    fp16 if set = model.dtype: true=fp16 auto=fp16
    torch_compile = compile: true=on false=off
    logging_steps if >0 = logging_steps
    eval_steps if eval_strategy!=steps or none ~ eval_strategy is not steps
    eval_steps if evaluation_strategy!=steps or none ~ evaluation_strategy is not steps
    eval_steps if >0 = eval_steps
    save_steps if save_strategy!=steps or none ~ save_strategy decides
    save_steps if >0 = save_steps
    save_total_limit if =none = max_ckpt_to_keep=0
    save_total_limit = max_ckpt_to_keep
    load_best_model_at_end = save_best; the best model is saved next to the last one
    resume_from_checkpoint = resume_from_checkpoint
    overwrite_output_dir = overwrite; true starts an existing run from scratch and never resumes it
    fsdp if ~hybrid ! set strategy_name: hsdp and strategy_config.shard_size (ranks per replica)
    fsdp if ~shard_grad_op = {STRATEGY}=zero2
    fsdp if set = {STRATEGY}=fsdp2_train
    dataset_num_proc preprocessing_num_workers = data.preprocessing_num_workers
    push_to_hub hub_model_id hub_token hub_strategy hub_private_repo
    hub_revision ? nothing is uploaded; the run folder has the model and its card
    neftune_noise_alpha label_smoothing_factor ! not supported
    accelerator_config ! a file of its own; set the sizes yourself
    accelerator_config.split_batches ! split_batches makes per_device_train_batch_size that of \
        all devices
    save_only_model ~ checkpoints are always complete; model/ is the model alone
    run_name project ~ a run is named after its folder
    use_liger_kernel ~ the full logits are never kept in memory
    group_by_length auto_find_batch_size ~ micro-batches follow a token budget
    do_train do_eval do_predict logging_strategy logging_first_step logging_nan_inf_filter log_level
    disable_tqdm remove_unused_columns dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_drop_last ddp_timeout
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_backend local_rank fsdp_config
    gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode
    torch_empty_cache_steps greater_is_better eval_delay eval_on_start eval_accumulation_steps
    include_num_input_tokens_seen tf32 average_tokens_across_devices save_safetensors bf16_full_eval
    fp16_full_eval attn_implementation batch_eval_metrics dataloader_in_order
    dataloader_multiprocessing_context ddp_broadcast_buffers ddp_static_graph debug
    eval_do_concat_batches eval_use_gather_object include_for_metrics length_column_name
    liger_kernel_config log_level_replica log_on_each_node prediction_loss_only save_on_each_node
    skip_memory_metrics trackio_bucket_id trackio_space_id trackio_static_space_id use_cache
    label_names hub_always_push enable_jit_checkpoint accelerator_config.dispatch_batches
    accelerator_config.even_batches accelerator_config.use_seedable_sampler
    accelerator_config.non_blocking ~
    ignore_data_skip optim_args optim_target_modules parallelism_config
    restore_callback_states_from_checkpoint train_sampling_strategy !
""") | {
    "output_dir": run_folder,
    "eval_strategy": evaluated,
    "evaluation_strategy": evaluated,
    "save_strategy": save_strategy,
    "metric_for_best_model": lambda value, given: gives(
        {"metric_for_best_model": f"eval/{value.removeprefix('eval_')}"} if value else {}
    ),
    "report_to": trackers,
    "deepspeed": deepspeed,
}  # fmt: skip
HF_DEFAULTS = """
    num_train_epochs=3.0 per_device_train_batch_size=8 gradient_accumulation_steps=1
    save_steps=500 save_total_limit=none
    eval_strategy=no if evaluation_strategy=none
"""


def adapter(rank: str, alpha: str, dropout: str, target: str, saved: str, is_on: str) -> Rules:
    """Return the rules of an adapter, whose keys count under a condition."""
    return facts(f"""
        {rank} if {is_on} if >0 = model.lora_rank
        {alpha} if {is_on} = model.lora_alpha
        {dropout} if {is_on} if set = model.lora_dropout=0.0; dropout is off in preference training
        {target} if {is_on} = model.lora_target:: all=all-linear
        {saved} if {is_on} = model.modules_to_save
        use_rslora if {is_on} = model.use_rslora
        use_dora if {is_on} = model.use_dora
        load_in_8bit if set = ; the frozen weights are not rounded to 8 bits: more exact, and up \
            to twice the memory (quantization: 4bit needs less)
        load_in_4bit = model.quantization: true=4bit false=none
        bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage
        bnb_4bit_compute_dtype lora_task_type ~
    """)
