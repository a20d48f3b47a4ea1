"""strategy_name and strategy_config of a role -> its layout: degrees, what is sharded, what is in
host memory.

Degrees can be written as `tp_size` in `strategy_args` or `strategy_config`, or with Megatron's long
names. Whatever the name, torch.distributed runs it: a name only stands for degrees and a sharding
stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rather.config.deepspeed import deepspeed_problems, deepspeed_sharding, is_deepspeed
from rather.config.pipelines import SCHEDULES, Pipeline
from rather.config.plugins import did_you_mean
from rather.errors import ConfigError

if TYPE_CHECKING:
    from rather.config.schema import RoleConfig, StrategyArgs

# What is sharded over the data-parallel ranks: 0 nothing, 1 the optimizer's state, 2 also
# gradients, 3 also weights.
# None: a key of strategy_config decides.
STAGES: dict[str, int | None] = {
    "ddp": 0,
    "zero1": 1,
    "zero2": 2,
    "zero2_cpu": 2,
    "zero3": 3,
    "fsdp2_train": 3,
    "hsdp": 3,
    "gemini": 3,
    "gemini_auto": 3,
    "3d": None,  # zero_stage
    "megatron_train": None,  # use_distributed_optimizer
    "deepspeed_train": None,  # zero_optimization.stage
    "hf_infer": 0,
    "fsdp2_infer": 3,
    "megatron_infer": 0,
    "deepspeed_infer": None,
}
STRATEGIES = tuple(STAGES)
TRAIN_STRATEGIES = tuple(name for name in STRATEGIES if not name.endswith("_infer"))
ON_THE_HOST = ("zero2_cpu", "gemini_auto")
DEFAULT = "zero2"  # on several devices; one device has nothing to shard
LANES = (
    4  # of determinism: canonical: gradients are summed in 4 partial sums on any number of ranks
)
SHARDED = (
    "",
    "optimizer state",
    "optimizer state and gradients",
    "weights, gradients and optimizer state",
)

# Every spelling of a degree in strategy_config.
DEGREES = {
    "tp": ("tp_size", "tensor_model_parallel_size"),
    "pp": ("pp_size", "pipeline_model_parallel_size"),
    "cp": ("cp_size", "context_parallel_size"),
}
VIRTUAL = "virtual_pipeline_model_parallel_size"  # stages per pipeline rank
COUNTS = (*(key for keys in DEGREES.values() for key in keys), "shard_size", VIRTUAL)
CHOICES: dict[str, tuple[Any, ...]] = {
    "use_distributed_optimizer": (True, False),
    "sequence_parallel": (True, False),
    "offload_activations": (True, False),
    "zero_stage": (0, 1, 2, 3),
    "pipeline_schedule": (*SCHEDULES, None),
    "recompute_granularity": ("full", "selective", "half", None),
    "recompute_method": ("uniform", None),  # every layer is recomputed
    "recompute_num_layers": (1,),
    "expert_model_parallel_size": (1,),
}
OWN_KEYS = {  # keys that only some strategies have
    "use_distributed_optimizer": ("megatron_train", "megatron_infer"),
    "zero_stage": ("3d",),
    "shard_size": ("hsdp",),
}


@dataclass(frozen=True)
class Layout:
    """How a role is laid out on its dp x tp x pp x cp devices.

    `recompute` trades time for memory; None decides by the memory that is there. `offload` moves
    activations to the host. The dp ranks are `dp // shard` replicas of `shard` ranks, over which
    `stage` says what is sharded. `host` keeps the shards in host memory. `canonical`: the bits of
    the results do not depend on dp.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    recompute: Literal["none", "half", "selective", "full"] | None = None
    offload: bool = False
    name: str = "ddp"
    stage: int = 0
    shard: int = 1
    host: bool = False
    sequence_parallel: bool = False
    schedule: str = "1f1b"  # of a pipeline
    virtual: int = 1  # stages of a pipeline rank
    canonical: bool = False

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.pp, self.schedule, self.virtual)

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def bins(self) -> int:
        """A step has a multiple of so many micro-batches."""
        if self.canonical:
            return LANES
        return self.dp * (self.pipeline.multiple if self.pp > 1 else 1)

    def dp_rank(self, rank: int) -> int:
        """Which share of the pairs a rank sees. Ranks count tp fastest, then cp, then dp, then
        pp."""
        return rank // (self.tp * self.cp) % self.dp

    def describe(self) -> str:
        """Return one line for the log."""
        sizes = {axis: getattr(self, axis) for axis in ("dp", "tp", "pp", "cp")}
        degrees = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        plural, replicas = "s" * (self.devices > 1), self.dp // self.shard
        groups = f"{replicas} replicas of {self.shard}" if replicas > 1 else f"{self.shard} ranks"
        stages = f"{self.pipeline.stages} pipeline stages with schedule '{self.schedule}'"
        parts = {
            f"{SHARDED[self.stage]} sharded over {groups}": self.shard > 1,
            "each dp rank holds everything": self.dp > self.shard == 1,
            stages: self.pp > 1,
            "norms by sequence": self.sequence_parallel,
            "gradients summed in canonical order": self.canonical,
            "shards in host memory": self.host,
            "run by torch.distributed": self.name.startswith(
                ("megatron", "deepspeed", "gemini", "3d")
            ),
        }
        first = f"{self.name} on {self.devices} device{plural}: {degrees or 'one rank'}"
        return "; ".join([first, *(part for part, applies in parts.items() if applies)])


def strategy_problems(role: RoleConfig, devices: int | None = None) -> list[tuple[str, str]]:
    """Return (key inside strategy_args, sentence) for everything that is impossible on this many
    devices."""
    args, name = role.strategy_args, role.strategy_args.strategy_name
    details, known = args.strategy_config, TRAIN_STRATEGIES if role.trains else STRATEGIES
    found: list[tuple[str, str]] = []
    if name in STRATEGIES and name not in known:
        found.append(("strategy_name", f"'{name}' cannot train; choose one of {', '.join(known)}"))
    elif name is not None and name not in known:
        found.append(("strategy_name", f"unknown strategy '{name}'{did_you_mean(name, known)}"))
    wrong = deepspeed_problems(details) if is_deepspeed(name) else _key_problems(args)
    found += [(f"strategy_config.{key}", text) for key, text in wrong]
    found = found or [
        (
            list(given)[-1],
            f"the same degree has two values ({', '.join(f'{key}={size}' for key, size in given.items())}); keep one of them",
        )
        for given in (_given(args, axis) for axis in DEGREES)
        if len(set(given.values())) > 1
    ]
    return found or list(_size_problems(args, devices or len(role.devices)))


def _key_problems(args: StrategyArgs) -> Iterator[tuple[str, str]]:
    details, name = args.strategy_config, args.strategy_name
    for key, value in details.items():
        owners, choices = OWN_KEYS.get(key), CHOICES.get(key)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if key in COUNTS and not is_count and (key, value) != (VIRTUAL, None):
            yield key, f"{value!r} is not a whole number >= 1"
        elif key not in COUNTS and choices is None:
            yield key, f"unknown key{did_you_mean(str(key), (*COUNTS, *CHOICES))}"
        elif choices and not any(type(value) is type(each) and value == each for each in choices):
            words = ["null" if each is None else str(each) for each in choices]
            yield key, f"{value!r} is not supported{did_you_mean(str(value), words)}"
        elif owners and name not in owners:
            text = f"is a key of {' and '.join(owners)}, and strategy_name is {name or 'not set'}"
            yield key, f"{text}; remove one of them"
        elif key in ("recompute_method", "recompute_num_layers") and (
            value is not None and details.get("recompute_granularity") != "full"
        ):
            yield key, "needs recompute_granularity: full"


def _size_problems(args: StrategyArgs, devices: int) -> Iterator[tuple[str, str]]:
    details, (tp, pp, cp) = args.strategy_config, _degrees(args)
    if devices % (tp * pp * cp):
        text = f"tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp} does not divide the {devices} devices of device_mapping"
        yield ("strategy_config" if details else "tp_size"), text
        return
    dp, shard, pipeline = devices // (tp * pp * cp), details.get("shard_size"), _pipeline(args, pp)
    if args.strategy_name == "hsdp" and devices > 1 and shard is None:
        text = "hsdp needs shard_size: the ranks per replica, usually the devices of a node"
        yield "strategy_config", text
    elif shard is not None and dp % shard:
        yield "strategy_config.shard_size", f"{shard} does not divide the {dp} data-parallel ranks"
    pipeline_keys = [
        key for key in (VIRTUAL, "pipeline_schedule") if details.get(key) not in (None, 1)
    ]
    if pp == 1 and pipeline_keys:
        yield (
            f"strategy_config.{pipeline_keys[0]}",
            "is for pipeline stages, and pp is 1; remove it",
        )
    elif pipeline.problem:
        key = VIRTUAL if VIRTUAL in details else "pipeline_schedule"
        yield f"strategy_config.{key}", pipeline.problem
    elif pipeline.rule.splits_backward and details.get("recompute_granularity") == "selective":
        text = f"selective needs one backward pass, and '{pipeline.schedule}' has two; set full or null"
        yield "strategy_config.recompute_granularity", text
    if details.get("sequence_parallel") and tp == 1:
        text = "shards norms over tensor-parallel ranks, and tp is 1; remove it"
        yield "strategy_config.sequence_parallel", text


def _pipeline(args: StrategyArgs, pp: int) -> Pipeline:
    details = args.strategy_config
    return Pipeline.of(pp, details.get("pipeline_schedule"), details.get(VIRTUAL))


def _given(args: StrategyArgs, axis: str) -> dict[str, int]:
    """Return every key inside strategy_args that sets this degree."""
    details = {f"strategy_config.{key}": args.strategy_config.get(key) for key in DEGREES[axis]}
    sizes = {f"{axis}_size": getattr(args, f"{axis}_size"), **details}
    return {key: size for key, size in sizes.items() if size is not None}


def _degrees(args: StrategyArgs) -> list[int]:
    return [next(iter(_given(args, axis).values()), 1) for axis in DEGREES]


def layout(role: RoleConfig, devices: int | None = None) -> Layout:
    """Return the layout of a role on its own devices, or on this many."""
    args, count = role.strategy_args, devices or len(role.devices)
    if found := strategy_problems(role, count):
        raise ConfigError([f"strategy_args.{key}: {text}" for key, text in found])
    tp, pp, cp = _degrees(args)
    details, name, dp = args.strategy_config, args.strategy_name or DEFAULT, count // (tp * pp * cp)
    recompute, keeps = (
        details.get("recompute_granularity"),
        role.model_args.disable_gradient_checkpointing,
    )
    if recompute is None and role.trains and keeps is not None:
        recompute = "none" if keeps else "full"
    stage, host = _sharding(name, details, trains=role.trains)
    shard, pipeline = details.get("shard_size", dp) if stage else 1, _pipeline(args, pp)
    return Layout(
        dp, tp, pp, cp, recompute, bool(details.get("offload_activations")), name,
        stage=stage if shard > 1 else 0, shard=shard, host=host,
        sequence_parallel=bool(details.get("sequence_parallel")), schedule=pipeline.schedule, virtual=pipeline.virtual,
        canonical=role.is_canonical,
    )  # fmt: skip


def data_parallel(role: RoleConfig) -> int:
    """Return the dp degree; 1 if the layout is impossible, which is reported separately."""
    try:
        return layout(role).dp
    except ConfigError:
        return 1


def _sharding(name: str, details: dict[str, Any], *, trains: bool) -> tuple[int, bool]:
    """Return the stage, and whether shards are in host memory. A frozen model has only weights
    to shard."""
    stage, host = STAGES[name] or 0, name in ON_THE_HOST
    if is_deepspeed(name):
        stage, host = deepspeed_sharding(details)
    elif STAGES[name] is None:  # 3d, megatron_train
        stage = details.get("zero_stage", int(details.get("use_distributed_optimizer", False)))
    return (stage, host) if trains or stage == 3 else (0, False)
