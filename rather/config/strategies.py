"""strategy_name and strategy_config of a role -> its layout: degrees, what is sharded, what goes to the host.

Sizes may be written as `tp_size` in `strategy_args` or `strategy_config`, or with Megatron's long names. Whatever the
name, torch.distributed runs it: a name stands for degrees and a sharding stage, no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rather.config.deepspeed import deepspeed_problems, deepspeed_settings, is_deepspeed
from rather.config.pipelines import SCHEDULES, Pipeline
from rather.config.plugins import did_you_mean
from rather.errors import ConfigError

if TYPE_CHECKING:
    from rather.config.schema import RoleConfig, StrategyArgs

# Sharded over the data-parallel ranks: 0 nothing, 1 the optimizer's state, 2 gradients as well, 3 weights as well.
# None: a key of strategy_config says it.
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
INFER_STRATEGIES = tuple(name for name in STRATEGIES if name.endswith("_infer"))
TRAIN_STRATEGIES = tuple(name for name in STRATEGIES if name not in INFER_STRATEGIES)
ON_THE_HOST = ("zero2_cpu", "gemini_auto")
DEFAULT = "zero2"  # of several devices; one device has nothing to divide
LANES = (
    4  # of determinism: canonical: gradients are added up in so many, however many ranks there are
)
SHARDED = (
    "",
    "the optimizer's state",
    "the optimizer's state and gradients",
    "weights, gradients and optimizer",
)

# Every spelling of a degree that may stand in strategy_config.
DEGREES = {
    "tp": ("tp_size", "tensor_model_parallel_size"),
    "pp": ("pp_size", "pipeline_model_parallel_size"),
    "cp": ("cp_size", "context_parallel_size"),
}
VIRTUAL = "virtual_pipeline_model_parallel_size"  # stages that each pipeline rank holds
SWITCHES = ("use_distributed_optimizer", "sequence_parallel", "offload_activations")
RECOMPUTED = ("half", "selective", "full")
# Keys that only some strategies know.
OWN_KEYS = {
    "use_distributed_optimizer": ("megatron_train", "megatron_infer"),
    "zero_stage": ("3d",),
    "shard_size": ("hsdp",),
}
STRATEGY_KEYS = (
    *(name for names in DEGREES.values() for name in names),
    VIRTUAL,
    "pipeline_schedule",
    "expert_model_parallel_size",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "zero_stage",
    "shard_size",
    *SWITCHES,
)


@dataclass(frozen=True)
class Layout:
    """How a role lies on its dp x tp x pp x cp devices, and what becomes of its activations.

    `recompute` trades time for memory; None leaves the choice to what fits. `offload` moves activations to the host.
    The dp ranks are `dp // shard` replicas of `shard` ranks, over which `stage` says what is divided. `host` keeps
    what is divided in host memory. `canonical`: results do not depend on dp, to the bit.
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
        """Which share of the pairs a rank sees. Ranks count tp fastest, then cp, then dp, then pp."""
        return rank // (self.tp * self.cp) % self.dp

    def told(self) -> str:
        """What the name became."""
        sizes = [
            f"{axis} {size}"
            for axis in ("dp", "tp", "pp", "cp")
            if (size := getattr(self, axis)) > 1
        ]
        parts = [
            f"{self.name} on {self.devices} device{'s' * (self.devices > 1)}: {' x '.join(sizes) or 'one rank'}"
        ]
        if self.shard > 1:
            replicas = self.dp // self.shard
            where = (
                f"{replicas} replicas of {self.shard}" if replicas > 1 else f"{self.shard} ranks"
            )
            parts.append(f"{SHARDED[self.stage]} divided over {where}")
        elif self.dp > 1:
            parts.append("each dp rank holds everything")
        if self.pp > 1:
            parts.append(f"{self.pipeline.stages} pipeline stages by schedule '{self.schedule}'")
        if self.sequence_parallel:
            parts.append("norms by sequence")
        if self.canonical:
            parts.append("gradients added up in canonical order")
        if self.host:
            parts.append("what is divided lies in host memory")
        if self.name.startswith(("megatron", "deepspeed", "gemini", "3d")):
            parts.append("run by torch.distributed")
        return "; ".join(parts)


def strategy_problems(args: StrategyArgs, *, trains: bool, devices: int) -> list[tuple[str, str]]:
    """(key inside strategy_args, sentence) for everything that cannot be laid out on so many devices."""
    found = _name_problems(args.strategy_name, trains)
    if is_deepspeed(args.strategy_name):
        found += [
            (f"strategy_config.{key}", text)
            for key, text in deepspeed_problems(args.strategy_config)
        ]
    else:
        for key, value in args.strategy_config.items():
            text = _key_problem(key, value) or _stranger(key, args.strategy_name)
            if text:
                found.append((f"strategy_config.{key}", text))
    found = found or list(_recompute_problems(args.strategy_config))
    if found:
        return found
    for axis in DEGREES:
        given = _given(args, axis)
        if len(set(given.values())) > 1:
            listing = ", ".join(f"{key}={size}" for key, size in given.items())
            found.append(
                (list(given)[-1], f"the same degree has two values ({listing}); keep one of them")
            )
    return found or list(_size_problems(args, devices))


def _size_problems(args: StrategyArgs, devices: int) -> Iterator[tuple[str, str]]:
    tp, pp, cp = (_degree(args, axis) for axis in DEGREES)
    if devices % (tp * pp * cp):
        sizes = f"tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp}"
        text = f"{sizes} does not divide the {devices} devices of device_mapping"
        yield ("strategy_config" if args.strategy_config else "tp_size"), text
        return
    dp, shard = devices // (tp * pp * cp), args.strategy_config.get("shard_size")
    if args.strategy_name == "hsdp" and devices > 1 and shard is None:
        yield (
            "strategy_config",
            "hsdp needs shard_size: the ranks of one replica, usually the devices of a node",
        )
    elif shard is not None and dp % shard:
        yield "strategy_config.shard_size", f"{shard} does not divide the {dp} data-parallel ranks"
    yield from _pipeline_problems(args, pp)
    if args.strategy_config.get("sequence_parallel") and tp == 1:
        yield (
            "strategy_config.sequence_parallel",
            "divides norms over tensor-parallel ranks, and tp is 1; remove it",
        )


def _pipeline_problems(args: StrategyArgs, pp: int) -> Iterator[tuple[str, str]]:
    details = args.strategy_config
    for key in (VIRTUAL, "pipeline_schedule"):
        if pp == 1 and details.get(key) not in (None, 1):
            yield f"strategy_config.{key}", "is about pipeline stages, and pp is 1; remove it"
            return
    pipeline = _pipeline(args, pp)
    if pipeline.problem:
        yield (
            f"strategy_config.{VIRTUAL if VIRTUAL in details else 'pipeline_schedule'}",
            pipeline.problem,
        )
    elif pipeline.rule.splits_backward and details.get("recompute_granularity") == "selective":
        text = f"selective goes backward once, and schedule '{pipeline.schedule}' twice; set it to full or null"
        yield "strategy_config.recompute_granularity", text


def _pipeline(args: StrategyArgs, pp: int) -> Pipeline:
    return Pipeline.of(
        pp, args.strategy_config.get("pipeline_schedule"), args.strategy_config.get(VIRTUAL)
    )


def _name_problems(name: str | None, trains: bool) -> list[tuple[str, str]]:
    if name is None or name in (TRAIN_STRATEGIES if trains else STRATEGIES):
        return []
    if name in STRATEGIES:
        return [
            ("strategy_name", f"'{name}' cannot train; choose one of {', '.join(TRAIN_STRATEGIES)}")
        ]
    known = TRAIN_STRATEGIES if trains else STRATEGIES
    return [("strategy_name", f"unknown strategy '{name}'{did_you_mean(name, known)}")]


def _key_problem(key: str, value: Any) -> str | None:
    if key not in STRATEGY_KEYS:
        return f"unknown key{did_you_mean(str(key), STRATEGY_KEYS)}"
    if key in SWITCHES:
        return None if isinstance(value, bool) else f"{value!r} is not true or false"
    if key == "recompute_granularity":
        return (
            None
            if value in (*RECOMPUTED, None)
            else f"{value!r} is not 'full', 'selective', 'half' or null"
        )
    if key == "recompute_method":
        return (
            None
            if value in ("uniform", None)
            else f"{value!r} is not offered; every layer is recomputed: uniform"
        )
    if key == "zero_stage":
        return (
            None
            if value in (0, 1, 2, 3) and not isinstance(value, bool)
            else f"{value!r} is not 0, 1, 2 or 3"
        )
    if key == "pipeline_schedule":
        known = tuple(SCHEDULES)
        return (
            None
            if value in (*known, None)
            else f"unknown schedule '{value}'{did_you_mean(str(value), known)}"
        )
    if key == VIRTUAL and value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return f"{value!r} is not a whole number >= 1"
    if key == "expert_model_parallel_size" and value != 1:
        return f"{value} experts in parallel are not offered; set it to 1"
    if key == "recompute_num_layers" and value != 1:
        return f"{value} layers at a time are not offered; each layer is recomputed by itself: 1"
    return None


def _stranger(key: str, name: str | None) -> str | None:
    """A key that means something to other strategies only."""
    owners = OWN_KEYS.get(key)
    if owners is None or name in owners:
        return None
    return f"is a key of {' and '.join(owners)}, and strategy_name is {name or 'not given'}; remove one of them"


def _recompute_problems(details: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("recompute_method", "recompute_num_layers"):
        if details.get(key) is not None and details.get("recompute_granularity") != "full":
            yield (
                f"strategy_config.{key}",
                "says how layers are recomputed; set recompute_granularity: full as well",
            )


def _given(args: StrategyArgs, axis: str) -> dict[str, int]:
    """Every place that states this degree, by its key inside strategy_args."""
    short = f"{axis}_size"
    own = getattr(args, short)
    given = {} if own is None else {short: own}
    return given | {
        f"strategy_config.{key}": args.strategy_config[key]
        for key in DEGREES[axis]
        if key in args.strategy_config
    }


def _degree(args: StrategyArgs, axis: str) -> int:
    return next(iter(_given(args, axis).values()), 1)


def layout(role: RoleConfig, devices: int | None = None) -> Layout:
    """The layout a role asks for on `devices` devices (those of its device_mapping when not given)."""
    args, count = role.strategy_args, devices or len(role.device_mapping or [0])
    found = strategy_problems(args, trains=role.trains, devices=count)
    if found:
        raise ConfigError([f"strategy_args.{key}: {text}" for key, text in found])
    tp, pp, cp = (_degree(args, axis) for axis in DEGREES)
    details, name = args.strategy_config, args.strategy_name or DEFAULT
    recompute = details.get("recompute_granularity")
    told = role.model_args.disable_gradient_checkpointing
    if recompute is None and role.trains and told is not None:
        recompute = "none" if told else "full"
    dp, (stage, host) = count // (tp * pp * cp), _sharding(name, details, trains=role.trains)
    shard, pipeline = details.get("shard_size", dp) if stage else 1, _pipeline(args, pp)
    return Layout(
        dp, tp, pp, cp, recompute, bool(details.get("offload_activations")), name,
        stage=stage if shard > 1 else 0, shard=shard, host=host,
        sequence_parallel=bool(details.get("sequence_parallel")), schedule=pipeline.schedule, virtual=pipeline.virtual,
        canonical=role.is_canonical,
    )  # fmt: skip


def _sharding(name: str, details: dict[str, Any], *, trains: bool) -> tuple[int, bool]:
    """(stage, whether what is divided lies on the host). A frozen model has only weights to divide."""
    stage, host = STAGES[name], name in ON_THE_HOST
    if is_deepspeed(name):
        settings = deepspeed_settings(details)
        stage, host = settings.stage, settings.host
    elif name == "3d":
        stage = details.get("zero_stage", 0)
    elif name == "megatron_train":
        stage = 1 if details.get("use_distributed_optimizer") else 0
    assert stage is not None
    if not trains and stage < 3:
        return 0, False
    return stage, host
