"""Rules that several tools share: TrainingArguments, adapters, data sets, sizes, DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rather.config.keys import table
from rather.files import HUB_NAME, JsonObject
from rather.tools.migrate.rules import (
    CONVERTED,
    LEFT_OUT,
    NEEDLESS,
    NOT_NEEDED,
    NOTHING,
    OPEN,
    Given,
    Outcome,
    Rules,
    Unsupported,
    all_of,
    facts,
    gives,
    keys,
    names_of,
    one_or_all,
    only,
    pairs,
    to,
    when,
)

STRATEGY = "actor_train.strategy_args.strategy_name"
SAMPLES, HELD_OUT = "data.file_name", "held_out.file_name"
READABLE = (".json", ".jsonl", ".parquet", ".arrow", ".gz", ".feather")
DTYPES = pairs("bfloat16=bf16 bf16=bf16 float16=fp16 fp16=fp16 float32=fp32 fp32=fp32")
SCHEDULES = {"warmup_stable_decay": "wsd"} | {
    name: name for name in table()["actor_train.training_args.lr_scheduler_type"].choices
}
ADAMW = keys("adamw_torch adamw_torch_fused adamw_hf adamw adam AdamW torch.optim.AdamW")
EIGHT_BITS = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
NO_LIMIT = 32768
NO_WARMUP = "transformers' constant schedule has no warm-up"
IMAGES = "video and audio are not read; rows with them are dropped and counted"


# ---- values


def optimizer(value: Any, given: Given) -> Outcome:
    """Accept AdamW, also with states stored in 8 bits."""
    if str(value) in EIGHT_BITS:
        return gives({}, "its states are exact here; precision: lean makes them smaller")
    return only(*ADAMW, why="the optimizer is AdamW")(value, given)


def interval(path: str, value: Any) -> Outcome:
    """Set a number of steps; below 1 it is a fraction of the run, as in transformers."""
    if not value or value < 0:
        return NOT_NEEDED
    if value < 1 and path != "logging_steps":
        return gives({path: value})
    if int(value) != value:
        raise Unsupported(f"{value} is not a number of steps")
    return gives({path: int(value)})


def length(value: Any, given: Given, *, cut: str = "", note: str = "") -> Outcome:
    """Set the tokens of prompt and answer, and what happens to longer pairs."""
    if value is None:
        text = f"Rather needs a length; pairs above {NO_LIMIT} tokens are dropped and counted"
        return gives({"sequence_length": NO_LIMIT}, text)
    overlong = {"data.overlong": cut} if cut else {}
    return gives({"sequence_length": value, **overlong}, note)


def run_folder(value: Any, given: Given) -> Outcome:
    """Split `out/my-run` into the folder `out` and the run `my-run`."""
    if not value:
        return NOT_NEEDED
    path = Path(str(value))
    parent = "./" if str(path.parent) == "." else str(path.parent)
    note = "the run is written to this folder; the model is in its subfolder model/"
    return Outcome(CONVERTED, {"output_dir": parent, "exp_name": path.name}, note)


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


def dataset(
    value: Any, given: Given, path: str = SAMPLES, *, split: str = "", config: str = ""
) -> Outcome:
    """Accept local files, and names of the hub if `split` is the key that names the split.

    Other data sets have to be saved to a file first.
    """
    if value in NOTHING:
        return NOT_NEEDED
    files, remote = [], []
    for name in names_of(value):
        if "#" in name:
            raise Unsupported(f"{name} draws rows at random; save them to a file of their own")
        is_file = name.startswith("hf://") or name.endswith(READABLE)
        hub = address(name, given.get(split), given.get(config)) if split else None
        file = name if is_file else hub
        if not file:
            remote.append(name)
        files.append(file or f"{Path(name).name}.jsonl")
    values = {path: one_or_all(files)}
    if not remote:
        return gives(values)
    note = f"only local files are read: save {', '.join(remote)} as JSON lines there"
    return Outcome(OPEN, values, note)


def trackers(value: Any, given: Given) -> Outcome:
    names, supported = names_of(value), table()["track_with"].choices
    usable = [name for name in names if name in supported]
    lost = [name for name in names if name not in (*supported, "none", "None", "all")]
    note = f"no tracker {', '.join(lost)}; supported: {', '.join(supported)}" if lost else ""
    return Outcome(
        LEFT_OUT if lost else CONVERTED, {"track_with": one_or_all(usable) or None}, note
    )


def switches(keys: str) -> Rules:
    """Return the rules of keys that each switch on the tracker of their name; several may be on."""
    owners = {key: name for key in keys.split() for name in table()["track_with"].choices
              if name in key}  # fmt: skip

    def rule(value: Any, given: Given) -> Outcome:
        return trackers([name for key, name in owners.items() if given.get(key)], given)

    return dict.fromkeys(owners, when(all_of(["set"]), rule))


SPLIT = to("held_out.split", lambda value: int(value) if value >= 1 else value or None)


# ---- precision, memory, devices


def bf16(value: Any, given: Given) -> Outcome:
    """Choose bf16, fp16 or neither."""
    is_fp16 = given.get("fp16") in (True, "true", "auto")
    if is_fp16 and value is True:
        raise Unsupported("bf16 and fp16 are both on; choose one")
    dtype = "fp16" if is_fp16 else "bf16" if value in (True, "auto") else "fp32"
    return gives(
        {"model.dtype": dtype}, "weights have exact float32 copies, sums are float32 or better"
    )


def devices(count: int) -> JsonObject:
    return {"actor_train.device_mapping": f"0-{count - 1}"} if count > 1 else {}


def processes(value: Any, given: Given) -> Outcome:
    """Set the devices of a launcher; none means one."""
    return gives(devices(value or 1))


def deepspeed(value: Any, given: Given) -> Outcome:
    """Read a DeepSpeed file that exists here; otherwise take the stage from its name."""
    if value in NOTHING:
        return NOT_NEEDED
    if isinstance(value, dict):
        return gives({STRATEGY: "deepspeed_train", STRATEGY.replace("_name", "_config"): value})
    if Path(str(value)).expanduser().is_file():
        return gives({STRATEGY: "deepspeed_train", "strategy.config_file": str(value)})
    name = Path(str(value)).name
    stage = next((stage for stage in "123" if f"zero{stage}" in name or f"z{stage}" in name), None)
    if stage is None:
        raise Unsupported(f"{value} is not here, and its name has no stage; set {STRATEGY}")
    cpu = "_cpu" if "offload" in name and stage == "2" else ""
    note = f"{value} is not here; stage {stage} is taken from its name"
    return gives({STRATEGY: f"zero{stage}{cpu}"}, note)


def fsdp(value: Any, given: Given) -> Outcome:
    if value in NOTHING:
        return NOT_NEEDED
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if "hybrid" in text:
        raise Unsupported(
            "set strategy_name: hsdp and strategy_config.shard_size (ranks per replica)"
        )
    return gives({STRATEGY: "zero2" if "shard_grad_op" in text else "fsdp2_train"})


# ---- transformers' TrainingArguments


def warmup(value: Any, given: Given) -> Outcome:
    if given.get("lr_scheduler_type") == "constant" and value:
        return gives({}, NO_WARMUP)
    share = isinstance(value, float) and 0 < value < 1
    return gives(
        {"training.warmup_ratio": value} if share else {"training.warmup_steps": int(value)}
    )


def evaluated(value: Any, given: Given) -> Outcome:
    """Set eval_steps; eval_strategy: steps without it means every logging_steps."""
    if str(value) != "steps" or given.get("eval_steps"):
        return Outcome(NEEDLESS, note="evaluation is always after each epoch and at the end")
    return gives({"eval_steps": int(given.get("logging_steps") or 1)}, "as often as logging_steps")


def eval_steps(value: Any, given: Given) -> Outcome:
    strategy = given.get("eval_strategy") or given.get("evaluation_strategy")
    if str(strategy) not in ("steps", "None"):  # None: a tool that has no such key
        return Outcome(NEEDLESS, note=f"eval_strategy is {strategy}")
    return interval("eval_steps", value)


def save_strategy(value: Any, given: Given) -> Outcome:
    """Translate `epoch` into a fraction of the run, if the run has whole epochs."""
    if str(value) == "steps":
        return NOT_NEEDED
    if str(value) == "no":
        return gives({"save_steps": None})
    count = given.get("num_epochs", given.get("num_train_epochs"))
    if str(value) != "epoch" or not count or (given.get("max_steps") or 0) > 0 or count % 1:
        raise Unsupported(
            "checkpoints follow a number of steps, or a fraction of the run: save_steps"
        )
    return gives({"save_steps": 1 / count if count > 1 else None})


def save_steps(value: Any, given: Given) -> Outcome:
    if str(given.get("save_strategy") or "steps") != "steps":
        return Outcome(NEEDLESS, note="save_strategy decides")
    return interval("save_steps", value)


def best_metric(value: Any, given: Given) -> Outcome:
    path = "metric_for_best_model"
    return to(path)(f"eval/{str(value).removeprefix('eval_')}", given) if value else NOT_NEEDED


def split_batches(value: Any, given: Given) -> Outcome:
    if not isinstance(value, dict | None):
        raise Unsupported("a file of its own; set the sizes yourself")
    if value and value.get("split_batches"):
        raise Unsupported("split_batches makes per_device_train_batch_size that of all devices")
    return NOT_NEEDED


# transformers trains for max_steps, however many epochs that takes; Rather stops at either.
HF: Rules = facts(f"""
    learning_rate = training.learning_rate
    num_train_epochs if max_steps>0 ~ max_steps counts alone
    num_train_epochs = training.num_train_epochs
    max_steps = max_steps training.num_train_epochs if >0
    warmup_ratio if warmup_steps set ~ warmup_steps wins
    warmup_ratio if set if lr_scheduler_type=constant = ; {NO_WARMUP}
    warmup_ratio = training.warmup_ratio
    lr_scheduler_kwargs = training.lr_scheduler_kwargs
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
    fp16 = model.dtype: true=fp16 if fp16=true
    torch_compile = compile: true=on false=off
    load_best_model_at_end = save_best; the best model is saved next to the last one
    resume_from_checkpoint = resume_from_checkpoint
    overwrite_output_dir = overwrite; true starts an existing run from scratch and never resumes it
    dataset_num_proc preprocessing_num_workers = data.preprocessing_num_workers
    push_to_hub hub_model_id hub_token hub_strategy hub_private_repo
    hub_revision ? nothing is uploaded; the run folder has the model and its card
    neftune_noise_alpha label_smoothing_factor ! not supported
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
    label_names hub_always_push enable_jit_checkpoint ~
    ignore_data_skip optim_args optim_target_modules parallelism_config
    restore_callback_states_from_checkpoint train_sampling_strategy -
""") | {
    "output_dir": run_folder,
    "lr_scheduler_type": to("training.lr_scheduler_type", SCHEDULES),
    "accelerator_config": split_batches,
    "warmup_steps": warmup,
    "optim": optimizer,
    "bf16": bf16,
    "logging_steps": lambda value, given: interval("logging_steps", value),
    "eval_strategy": evaluated,
    "evaluation_strategy": evaluated,
    "eval_steps": eval_steps,
    "save_strategy": save_strategy,
    "save_steps": save_steps,
    "save_total_limit": lambda value, given: gives({"max_ckpt_to_keep": value or 0}),
    "metric_for_best_model": best_metric,
    "report_to": trackers,
    "deepspeed": deepspeed,
    "fsdp": fsdp,
}  # fmt: skip
HF_DEFAULTS = {
    "eval_strategy": lambda given: given.get("evaluation_strategy", "no"),
    **pairs("num_train_epochs=3.0 learning_rate=5e-5 per_device_train_batch_size=8 "
            "gradient_accumulation_steps=1 logging_steps=500 save_steps=500 save_total_limit=none"),
}  # fmt: skip


# ---- adapters


def adapter(names: str, switch: str, *off: Any, resumed: str = "") -> Rules:
    """Return rules for the keys of an adapter: rank, alpha, dropout, targets, modules to save.

    There is no adapter if the key `switch` has one of the values `off`. With the key `resumed` an
    adapter is trained further, whose own settings count.
    """
    rank, alpha, dropout, target, saved = names.split()
    rules = facts(f"""
        {rank} = model.lora_rank if >0
        {alpha} = model.lora_alpha
        {saved} = model.modules_to_save
        use_rslora = model.use_rslora
        use_dora = model.use_dora
    """) | {
        dropout: when(all_of(["set"]), lambda *_: gives(
            {"model.lora_dropout": 0.0}, "dropout is off in preference training")),
        target: to("model.lora_target", _targets),
    }  # fmt: skip

    def is_on(value: Any, given: Given) -> bool:
        return value is not None and given.get(switch) not in off and not given.get(resumed)

    return {name: when(is_on, rule) for name, rule in rules.items()} | {
        **facts("""
            load_in_8bit if set = ; the frozen weights are not rounded to 8 bits: more exact, and \
                up to twice the memory (quantization: 4bit needs less)
            load_in_4bit = model.quantization: true=4bit false=none
            bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage
            bnb_4bit_compute_dtype lora_task_type ~
        """),
    }  # fmt: skip


def _targets(value: Any) -> Any:
    names = names_of(value)
    if names in (["all"], ["all-linear"]):
        return "all-linear"
    return one_or_all(names)
