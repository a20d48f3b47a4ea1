"""Rules that several tools share: TrainingArguments, adapters, data sets, sizes, DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rather.config.keys import table
from rather.errors import ConfigError
from rather.migrate.rules import (
    CHANGED,
    IMPOSSIBLE,
    LEFT_OUT,
    NEEDLESS,
    NOT_NEEDED,
    NOTHING,
    OPEN,
    RENAMED,
    Given,
    Outcome,
    Rule,
    Unsupported,
    each,
    keys,
    left_out,
    needless,
    never,
    only,
    to,
    when,
)

TRAINING, MODEL, DATA = (
    "actor_train.training_args.",
    "actor_train.model_args.",
    "actor_train.data_args.",
)
STRATEGY, DETAILS = (
    "actor_train.strategy_args.strategy_name",
    "actor_train.strategy_args.strategy_config.",
)
SAMPLES = "actor_train.data_args.file_name"
LENGTH, OVERLONG = "sequence_length", DATA + "overlong"
READABLE = (".json", ".jsonl", ".parquet", ".arrow", ".gz", ".feather")
DTYPES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "float32": "fp32",
    "fp32": "fp32",
}
SCHEDULES = {"warmup_stable_decay": "wsd"} | {
    name: name for name in table()["actor_train.training_args.lr_scheduler_type"].choices
}
ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw",
    "adam",
    "AdamW",
    "torch.optim.AdamW",
)
EIGHT_BITS = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
MACHINERY = "internal to that tool; no result depends on it"
UPLOAD = "nothing is uploaded; the run folder has the model and its card"
NO_LIMIT = 32768


# ---- values


def positive(path: str) -> Rule:
    """Treat -1 and 0 as not set."""
    return when(lambda value, given: value and value > 0, to(path))


def optimizer(value: Any, given: Given) -> Outcome:
    """AdamW whose states are stored in 8 bits is AdamW."""
    if str(value) in EIGHT_BITS:
        note = "its states are exact here; precision: lean makes them smaller"
        return Outcome(CHANGED, {}, note)
    return only(*ADAMW, why="the optimizer is AdamW")(value, given)


def whole_steps(path: str) -> Rule:
    def rule(value: Any, given: Given) -> Outcome:
        if isinstance(value, float) and not value.is_integer():
            raise Unsupported(f"{value} is a share of the run; write a number of steps")
        return positive(path)(int(value or 0), given)

    return rule


def length(*, cut: str = "", note: str = "") -> Rule:
    """Set the tokens of prompt and answer, and what happens to longer pairs."""

    def rule(value: Any, given: Given) -> Outcome:
        more = {OVERLONG: cut} if cut else {}
        if value is None:
            text = f"Rather needs a length; pairs above {NO_LIMIT} tokens are dropped and counted"
            return Outcome(CHANGED, {LENGTH: NO_LIMIT}, text)
        return Outcome(CHANGED if note else RENAMED, {LENGTH: value, **more}, note)

    return rule


def run_folder(value: Any, given: Given) -> Outcome:
    """Split `out/my-run` into the folder `out` and the run `my-run`."""
    if not value:
        return NOT_NEEDED
    path = Path(str(value))
    parent = "./" if str(path.parent) == "." else str(path.parent)
    note = "the run is written to this folder; the model is in its subfolder model/"
    return Outcome(CHANGED, {"output_dir": parent, "exp_name": path.name}, note)


def most_rows(named: Rule, *unlimited: int) -> Rule:
    """The file that is to be saved needs no more rows; one that exists would be used whole."""

    def rule(value: Any, given: Given) -> Outcome:
        if value is None or value in unlimited:
            return NOT_NEEDED
        is_open = named(given.get("dataset"), given).status == OPEN
        return Outcome(OPEN if is_open else IMPOSSIBLE, note=f"save at most {value} rows of each")

    return rule


def dataset(path: str = SAMPLES) -> Rule:
    """Accept local files; a data set of a hub has to be saved to a file first."""

    def rule(value: Any, given: Given) -> Outcome:
        if value in NOTHING:
            return NOT_NEEDED
        names = [str(name) for name in value] if isinstance(value, list) else str(value).split(",")
        if counted := [
            name for name in names if name.partition("#")[0].endswith(READABLE) and "#" in name
        ]:
            raise Unsupported(f"save the rows of {counted[0]} to a file of their own")
        files = [
            name if name.endswith(READABLE) else f"{Path(name.partition('#')[0]).name}.jsonl"
            for name in names
        ]
        remote = [name for name, file in zip(names, files, strict=True) if name != file]
        values = {path: files[0] if len(files) == 1 else files}
        if not remote:
            return Outcome(RENAMED, values)
        note = f"only local files are read: save {', '.join(remote)} as JSON lines there"
        return Outcome(OPEN, values, note)

    return rule


def trackers(value: Any, given: Given) -> Outcome:
    names = value if isinstance(value, list) else str(value).split(",")
    wanted = [name for name in names if name not in ("none", "None", "all")]
    known = table()["track_with"].choices
    kept = [name for name in wanted if name in known]
    lost = [name for name in wanted if name not in known]
    values = {"track_with": kept[0] if len(kept) == 1 else kept or None}
    if lost:
        note = f"no tracker {', '.join(lost)}; supported: {', '.join(known)}"
        return Outcome(LEFT_OUT, values, note)
    return Outcome(RENAMED, values)


def tracker(name: str) -> Rule:
    """Translate the switch of one tracker; several may be on."""

    def rule(value: Any, given: Given) -> Outcome:
        switches = {
            key.removesuffix("_enabled").rpartition(".")[2]: on for key, on in given.items()
        }
        others = [other for other in table()["track_with"].choices if switches.get(other)]
        return trackers(others if len(others) > 1 else name, given)

    return when(lambda value, given: value, rule)


def loss_name(path: str = "pref_loss", **others: str | None) -> Rule:
    """Translate the name of a loss; None marks a loss that Rather does not have."""

    def rule(value: Any, given: Given) -> Outcome:
        names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
        if lost := [name for name in names if name in others and others[name] is None]:
            raise Unsupported(f"Rather has no loss {lost[0]}")
        ours = [others.get(name) or name for name in names]
        return Outcome(RENAMED, {path: ours[0] if len(ours) == 1 else ours})

    return rule


def images(value: Any, given: Given) -> Outcome:
    """Refuse a setting that only training on images, video or audio has."""
    raise ConfigError("a setting for images, video or audio; Rather trains language models only.")


# ---- precision, memory, devices


def bf16(value: Any, given: Given) -> Outcome:
    """Choose bf16, fp16 or neither."""
    other = given.get("fp16") in (True, "true", "auto")
    dtype = "fp16" if other else "bf16" if value in (True, "auto") else "fp32"
    note = "weights have exact float32 copies, sums are float32 or better"
    return Outcome(CHANGED, {MODEL + "dtype": dtype}, note)


def fp16(value: Any, given: Given) -> Outcome:
    return Outcome(RENAMED, {MODEL + "dtype": "fp16"}) if value is True else NOT_NEEDED


def recompute(value: Any, given: Given) -> Outcome:
    return Outcome(RENAMED, {MODEL + "disable_gradient_checkpointing": not value})


def deepspeed(value: Any, given: Given) -> Outcome:
    """Read a DeepSpeed file that exists here; otherwise take the stage from its name."""
    if value in NOTHING:
        return NOT_NEEDED
    if isinstance(value, dict):
        return Outcome(RENAMED, {STRATEGY: "deepspeed_train", DETAILS[:-1]: value})
    if Path(str(value)).expanduser().is_file():
        return Outcome(RENAMED, {STRATEGY: "deepspeed_train", DETAILS + "config_file": str(value)})
    name = Path(str(value)).name
    stage = next((stage for stage in "123" if f"zero{stage}" in name or f"z{stage}" in name), None)
    if stage is None:
        raise Unsupported(f"{value} is not here, and its name has no stage; set {STRATEGY}")
    cpu = "offload" in name and stage == "2"
    note = f"{value} is not here; stage {stage} is taken from its name"
    return Outcome(CHANGED, {STRATEGY: f"zero{stage}" + ("_cpu" if cpu else "")}, note)


def megatron(path: str) -> Rule:
    """Set a degree of Megatron."""
    return when(
        lambda value, given: value and value > 1,
        lambda value, given: Outcome(RENAMED, {STRATEGY: "megatron_train", DETAILS + path: value}),
    )


def zero_stage(value: Any, given: Given) -> Outcome:
    return Outcome(RENAMED, {STRATEGY: f"zero{value}" if value else "ddp"})


def fsdp(value: Any, given: Given) -> Outcome:
    if value in NOTHING:
        return NOT_NEEDED
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if "hybrid" in text:
        raise Unsupported(
            "set strategy_name: hsdp and strategy_config.shard_size (ranks per replica)"
        )
    return Outcome(RENAMED, {STRATEGY: "zero2" if "shard_grad_op" in text else "fsdp2_train"})


# ---- transformers' TrainingArguments


def warmup(value: Any, given: Given) -> Outcome:
    if given.get("lr_scheduler_type") == "constant" and value:
        return Outcome(CHANGED, {}, "transformers' constant schedule has no warm-up")
    share = isinstance(value, float) and 0 < value < 1
    values = {"warmup_ratio": value} if share else {"warmup_steps": int(value)}
    return Outcome(RENAMED, {TRAINING + name: number for name, number in values.items()})


def warmup_ratio(value: Any, given: Given) -> Outcome:
    if given.get("warmup_steps"):
        return Outcome(NEEDLESS, note="warmup_steps wins")
    constant = given.get("lr_scheduler_type") == "constant" and value
    return (warmup if constant else to(TRAINING + "warmup_ratio"))(value, given)


def evaluated(value: Any, given: Given) -> Outcome:
    """eval_strategy: steps without eval_steps means every logging_steps."""
    if str(value) != "steps" or given.get("eval_steps"):
        return Outcome(NEEDLESS, note="evaluation is always after each epoch and at the end")
    steps = int(given.get("logging_steps") or 1)
    return Outcome(CHANGED, {"eval_steps": steps}, "as often as logging_steps")


def eval_steps(value: Any, given: Given) -> Outcome:
    strategy = given.get("eval_strategy") or given.get("evaluation_strategy")
    if str(strategy) not in ("steps", "None"):  # None: a tool that has no such key
        return Outcome(NEEDLESS, note=f"eval_strategy is {strategy}")
    return whole_steps("eval_steps")(value, given)


def save_strategy(value: Any, given: Given) -> Outcome:
    if str(value) == "steps":
        return NOT_NEEDED
    if str(value) == "no":
        return Outcome(RENAMED, {"save_steps": None})
    note = "checkpoints are counted in steps; the last one is always written"
    return Outcome(CHANGED, {"save_steps": None}, note)


def save_steps(value: Any, given: Given) -> Outcome:
    if str(given.get("save_strategy") or "steps") != "steps":
        return Outcome(NEEDLESS, note="save_strategy decides")
    return whole_steps("save_steps")(value, given)


def best_metric(value: Any, given: Given) -> Outcome:
    path = "metric_for_best_model"
    return to(path)(f"eval/{str(value).removeprefix('eval_')}", given) if value else NOT_NEEDED


HF: dict[str, Rule] = {
    "output_dir": run_folder,
    "learning_rate": to(TRAINING + "learning_rate"),
    "lr_scheduler_type": to(TRAINING + "lr_scheduler_type", SCHEDULES),
    "lr_scheduler_kwargs": to(TRAINING + "lr_scheduler_kwargs"),
    "weight_decay": to(TRAINING + "weight_decay"),
    "adam_beta1": to(TRAINING + "adam_beta1"),
    "adam_beta2": to(TRAINING + "adam_beta2"),
    "adam_epsilon": to(TRAINING + "adam_epsilon"),
    "per_device_train_batch_size": to(TRAINING + "per_device_train_batch_size"),
    "gradient_accumulation_steps": to(TRAINING + "gradient_accumulation_steps"),
    "num_train_epochs": to(TRAINING + "num_train_epochs", float),
    "max_steps": positive("max_steps"),
    "warmup_steps": warmup,
    "warmup_ratio": warmup_ratio,
    "max_grad_norm": to("max_grad_norm"),
    "seed": to("seed"),
    "data_seed": to(TRAINING + "data_seed"),
    "optim": optimizer,
    "bf16": bf16,
    "fp16": fp16,
    "gradient_checkpointing": recompute,
    "torch_compile": to("compile", {True: "on", False: "off"}),
    "use_cpu": to("platform", {True: "cpu", False: "auto"}),
    "no_cuda": to("platform", {True: "cpu", False: "auto"}),
    "full_determinism": to("deterministic"),
    "logging_steps": whole_steps("logging_steps"),
    "logging_dir": to("logging_dir"),
    "eval_strategy": evaluated,
    "evaluation_strategy": evaluated,
    "eval_steps": eval_steps,
    "save_strategy": save_strategy,
    "save_steps": save_steps,
    "save_total_limit": lambda value, given: Outcome(RENAMED, {"max_ckpt_to_keep": value or 0}),
    "per_device_eval_batch_size": to("actor_train.infer_batch_size"),
    "load_best_model_at_end": to("save_best", note="the best model is saved next to the last one"),
    "metric_for_best_model": best_metric,
    "resume_from_checkpoint": to("resume_from_checkpoint"),
    "overwrite_output_dir": to(
        "overwrite", note="true starts an existing run from scratch and never resumes it"
    ),
    "report_to": trackers,
    "deepspeed": deepspeed,
    "fsdp": fsdp,
    "dataset_num_proc": to(DATA + "preprocessing_num_workers"),
    "preprocessing_num_workers": to(DATA + "preprocessing_num_workers"),
    **each(
        "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_revision",
        left_out(UPLOAD),
    ),
    **each("neftune_noise_alpha label_smoothing_factor", never("not supported", unless=(0, 0.0))),
    "save_only_model": needless("checkpoints are always complete; model/ is the model alone"),
    **each("run_name project", needless("a run is named after its folder")),
    "use_liger_kernel": needless("the full logits are never kept in memory"),
    **each("group_by_length auto_find_batch_size", needless("micro-batches follow a token budget")),
    **each(
        "do_train do_eval do_predict logging_strategy logging_first_step logging_nan_inf_filter log_level disable_tqdm "
        "remove_unused_columns dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_drop_last ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb "
        "ddp_backend local_rank fsdp_config accelerator_config gradient_checkpointing_kwargs torch_compile_backend "
        "torch_compile_mode torch_empty_cache_steps greater_is_better eval_delay eval_on_start "
        "eval_accumulation_steps include_num_input_tokens_seen tf32 average_tokens_across_devices save_safetensors "
        "bf16_full_eval fp16_full_eval attn_implementation "
        "batch_eval_metrics dataloader_in_order dataloader_multiprocessing_context "
        "ddp_broadcast_buffers ddp_static_graph debug eval_do_concat_batches eval_use_gather_object "
        "include_for_metrics length_column_name liger_kernel_config log_level_replica "
        "log_on_each_node prediction_loss_only save_on_each_node skip_memory_metrics "
        "trackio_bucket_id trackio_space_id trackio_static_space_id use_cache label_names "
        "hub_always_push enable_jit_checkpoint",
        needless(MACHINERY),
    ),
}
HF_KNOWN = keys(
    """
    ignore_data_skip optim_args optim_target_modules parallelism_config
    restore_callback_states_from_checkpoint train_sampling_strategy
    """
)
HF_DEFAULTS = {
    "eval_strategy": lambda given: given.get("evaluation_strategy", "no"),
    "num_train_epochs": 3.0, "learning_rate": 5e-5, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "logging_steps": 500, "save_steps": 500, "save_total_limit": None,
}  # fmt: skip


# ---- adapters


def trained(value: Any, given: Given) -> Outcome:
    """The weights are trained whole, or by a LoRA adapter."""
    if value == "full":
        return Outcome(RENAMED, {MODEL + "lora_rank": None})
    return only("lora", why="weights are trained whole or by a LoRA adapter")(value, given)


def adapter(
    rank: str,
    alpha: str,
    dropout: str,
    target: str,
    modules: str,
    *,
    off: tuple[str, Any] | None = None,
) -> dict[str, Rule]:
    """Return rules for the keys of an adapter, by the tool's names.

    `off`: a key and the values with which there is no adapter.
    """

    def wanted(rule: Rule) -> Rule:
        return when(
            lambda value, given: value is not None and not (off and given.get(off[0]) in off[1]),
            rule,
        )

    no_dropout = to(
        MODEL + "lora_dropout", lambda _: 0.0, note="dropout is off in preference training"
    )

    return {
        rank: wanted(positive(MODEL + "lora_rank")),
        alpha: wanted(to(MODEL + "lora_alpha", float)),
        dropout: wanted(when(lambda value, given: value, no_dropout)),
        target: wanted(to(MODEL + "lora_target", _targets)),
        modules: wanted(to(MODEL + "modules_to_save")),
        "use_rslora": wanted(to(MODEL + "use_rslora")),
        "use_dora": wanted(to(MODEL + "use_dora")),
        "load_in_4bit": to(MODEL + "quantization", {True: "4bit", False: None}),
        "load_in_8bit": never("only 4-bit weights are supported: model_args.quantization"),
        **each(
            "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage bnb_4bit_compute_dtype lora_task_type",
            needless(MACHINERY),
        ),
    }


def _targets(value: Any) -> Any:
    names = value if isinstance(value, list) else str(value).replace(" ", "").split(",")
    if names in (["all"], ["all-linear"]):
        return "all-linear"
    return names if len(names) > 1 else names[0]
