"""strategy_args of a role -> its layout: degrees, what is sharded, what is in host memory.

Degrees are `tp_size` and so on in `strategy_args`; compat.py has other words for them. A
strategy's name only selects a sharding stage; torch.distributed runs it, or the engine that
`actor_train.engine` names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rather.config.compat import (
    DEGREES,
    Problems,
    deepspeed_problems,
    deepspeed_sharding,
    is_deepspeed,
)
from rather.config.plugins import did_you_mean
from rather.config.schema import ActorConfig, RoleConfig, RunConfig, StrategyArgs
from rather.config.values import Count, Section, section_problems
from rather.errors import ConfigError, counted

# What is sharded over the data-parallel ranks: 0 nothing, 1 the optimizer's state, 2 also
# gradients, 3 also weights. None: a key of strategy_config decides.
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
Recompute = Literal["none", "half", "selective", "full"]
DEFAULT = "zero2"  # on several devices; one device has nothing to shard
SHARDED = (
    "",
    "optimizer state",
    "optimizer state and gradients",
    "weights, gradients and optimizer state",
)
OWN_KEYS = {  # keys that only some strategies have
    "use_distributed_optimizer": ("megatron_train", "megatron_infer"),
    "zero_stage": ("3d",),
    "shard_size": ("hsdp",),
}


class ScheduleRule(NamedTuple):
    """The requirements of a schedule; `virtual` is the number of stages per rank."""

    least_virtual: int
    most_virtual: int | None
    v_shaped: bool = False  # the first rank holds the first stage and the last
    splits_backward: bool = False  # gradients of inputs first, those of weights when there is time


SCHEDULES = {
    "gpipe": ScheduleRule(1, 1),
    "1f1b": ScheduleRule(1, 1),
    "interleaved": ScheduleRule(2, None),
    "zero_bubble": ScheduleRule(1, None, splits_backward=True),
    "zbv": ScheduleRule(2, 2, v_shaped=True, splits_backward=True),
    "dualpipev": ScheduleRule(2, 2, v_shaped=True, splits_backward=True),
}


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of `ranks` ranks with `virtual` stages each."""

    ranks: int
    schedule: str = "1f1b"
    virtual: int = 1

    @staticmethod
    def of(ranks: int, schedule: str | None, virtual: int | None) -> Pipeline:
        """Return a pipeline; virtual stages are interleaved by default, others run 1f1b."""
        name = schedule or ("interleaved" if (virtual or 1) > 1 else "1f1b")
        return Pipeline(ranks, name, virtual or SCHEDULES[name].least_virtual)

    @property
    def rule(self) -> ScheduleRule:
        return SCHEDULES[self.schedule]

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    @property
    def problem(self) -> str | None:
        """Return why the schedule cannot have this many stages per rank."""
        low = self.rule.least_virtual
        high = self.rule.most_virtual
        if low <= self.virtual <= (high or self.virtual):
            return None
        return f"'{self.schedule}' takes {low} to {high or 'any'} stages a rank, not {self.virtual}"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in the order of the model."""
        if self.rule.v_shaped:
            return rank, 2 * self.ranks - 1 - rank
        return tuple(range(rank, self.stages, self.ranks))

    def rank_of(self, stage: int) -> int:
        return next(rank for rank in range(self.ranks) if stage in self.stages_of(rank))

    def layers_of(self, stage: int, layers: int) -> range:
        """Return equal shares; the first stages get the remainder, for the last has the head."""
        share, over = divmod(layers, self.stages)
        first = stage * share + min(stage, over)
        return range(first, first + share + (stage < over))

    @property
    def multiple(self) -> int:
        """A step whose micro-batches are a multiple of this needs no empty ones."""
        return self.stages if self.rule.v_shaped else self.ranks

    def microbatches(self, bins: int) -> int:
        """Return the smallest number >= `bins` that the schedule takes."""
        number = max(bins, self.multiple)
        if self.schedule in ("interleaved", "zero_bubble"):
            # Each of the number // ranks rounds takes a whole number of micro-batches.
            while number % (number // self.ranks):
                number += 1
        return number


class StrategyDetails(Section):
    """The keys of strategy_config, except for those of a DeepSpeed configuration."""

    tp_size: Count | None = None
    tensor_model_parallel_size: Count | None = None
    pp_size: Count | None = None
    pipeline_model_parallel_size: Count | None = None
    cp_size: Count | None = None
    context_parallel_size: Count | None = None
    ep_size: Count | None = None
    expert_model_parallel_size: Count | None = None
    expert_tensor_parallel_size: Literal[1] | None = None  # experts are whole on their ranks
    efsdp_size: Count | None = None  # follows: dp / ep
    shard_size: Count | None = None
    virtual_pipeline_model_parallel_size: Count | None = None
    pipeline_schedule: (
        Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"] | None
    ) = None
    use_distributed_optimizer: bool = False
    zero_stage: Literal[0, 1, 2, 3] = 0
    sequence_parallel: bool = False
    offload_activations: bool = False
    recompute_granularity: Literal["full", "selective", "half"] | None = None
    recompute_method: Literal["uniform"] | None = None  # every layer is recomputed
    recompute_num_layers: Literal[1] | None = None

    def pipeline(self, pp: int) -> Pipeline:
        return Pipeline.of(pp, self.pipeline_schedule, self.virtual_pipeline_model_parallel_size)


@dataclass(frozen=True)
class Layout:
    """How a role is laid out on its dp x tp x pp x cp devices; ep divides dp.

    `recompute` trades time for memory; None decides by the available memory. `offload` moves
    activations to the host. The dp ranks are `dp // shard` replicas of `shard` ranks, over which
    `stage` says what is sharded. `host` keeps the shards in host memory.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    recompute: Recompute | None = None
    offload: bool = False
    name: str = "ddp"
    stage: int = 0
    shard: int = 1
    host: bool = False
    sequence_parallel: bool = False
    schedule: str = "1f1b"  # of a pipeline
    virtual: int = 1  # stages of a pipeline rank
    engine: str = "torch"  # without the folder of its file

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.pp, self.schedule, self.virtual)

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def bins(self) -> int:
        """A step has a multiple of so many micro-batches."""
        return self.dp * (self.pipeline.multiple if self.pp > 1 else 1)

    def dp_rank(self, rank: int) -> int:
        """Return which share of the pairs a rank sees. Ranks count tp fastest, then cp, dp, pp."""
        return rank // (self.tp * self.cp) % self.dp

    @property
    def engine_identity(self) -> str | list[str]:
        """What a checkpoint knows of its engine; only torch resumes on other layouts."""
        return "torch" if self.engine == "torch" else [self.engine, self.describe()]

    def describe(self) -> str:
        """Return one line for the log."""
        sizes = {axis: getattr(self, axis) for axis in ("dp", "tp", "pp", "cp", "ep")}
        degrees = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        replicas = self.dp // self.shard
        groups = f"{replicas} replicas of {self.shard}" if replicas > 1 else f"{self.shard} ranks"
        devices = counted(self.devices, "devices")
        facts = [f"{self.name} on {devices}: {degrees or 'one rank'}"]
        if self.shard > 1:
            facts.append(f"{SHARDED[self.stage]} sharded over {groups}")
        if self.dp > self.shard == 1 == self.ep:
            facts.append("each dp rank holds everything")
        if self.ep > 1:
            facts.append(f"experts divided over {self.ep} of the dp ranks")
        if self.pp > 1:
            facts.append(f"{self.pipeline.stages} stages with schedule '{self.schedule}'")
        if self.sequence_parallel:
            facts.append("norms by sequence")
        if self.host:
            facts.append("shards in host memory")
        if self.engine != "torch":
            facts.append(f"run by the engine {self.engine} (experimental)")
        elif self.name.startswith(("megatron", "deepspeed", "gemini", "3d")):
            facts.append("run by torch.distributed")
        return "; ".join(facts)


_NO_DETAILS = StrategyDetails()


def details_of(args: StrategyArgs) -> StrategyDetails:
    is_own = args.strategy_config and not is_deepspeed(args.strategy_name)
    return StrategyDetails.model_validate(args.strategy_config) if is_own else _NO_DETAILS


class _Degrees(NamedTuple):
    tp: int
    pp: int
    cp: int
    ep: int

    @property
    def devices_per_replica(self) -> int:
        return self.tp * self.pp * self.cp


def _degrees(args: StrategyArgs) -> _Degrees:
    return _Degrees(*(getattr(args, name) or 1 for name in DEGREES))


def strategy_problems(role: RoleConfig, devices: int | None = None) -> Problems:
    """Yield (key inside strategy_args, sentence) for what is impossible on this many devices."""
    args = role.strategy_args
    name = args.strategy_name or DEFAULT
    allowed = [stage for stage in STAGES if not (role.trains and stage.endswith("_infer"))]
    if name not in allowed:
        hint = did_you_mean(name, allowed)
        yield "strategy_name", f"'{name}' is not a strategy of this role{hint}"
        return
    wrong: list[tuple[str, str]] = []
    if is_deepspeed(name):
        wrong += deepspeed_problems(args.strategy_config)
    elif args.strategy_config:
        wrong += section_problems(StrategyDetails, args.strategy_config)
    yield from ((f"strategy_config.{key}", text) for key, text in wrong)
    if not wrong:
        yield from _layout_problems(args, devices or len(role.devices))


def _layout_problems(args: StrategyArgs, devices: int) -> Problems:
    yield from _detail_problems(args)
    degrees = _degrees(args)
    if devices % degrees.devices_per_replica:
        product = f"tp {degrees.tp} x pp {degrees.pp} x cp {degrees.cp}"
        largest = max(("tp_size", "pp_size", "cp_size"), key=lambda name: getattr(args, name) or 1)
        yield (
            largest,
            f"{product} = {degrees.devices_per_replica} does not divide the {devices} devices of "
            "device_mapping",
        )
        return
    yield from _data_parallel_problems(args, devices, degrees)
    yield from _pipeline_problems(args, degrees.pp)
    if details_of(args).sequence_parallel and degrees.tp == 1:
        text = "shards norms over tensor-parallel ranks, and tp is 1; remove it"
        yield "strategy_config.sequence_parallel", text


def _detail_problems(args: StrategyArgs) -> Problems:
    """Yield keys of strategy_config that another key excludes."""
    details = details_of(args)
    name = args.strategy_name
    for key, owners in OWN_KEYS.items():
        if key in details.model_fields_set and name not in owners:
            text = f"is a key of {' and '.join(owners)}, and strategy_name is {name or 'not set'}"
            yield f"strategy_config.{key}", f"{text}; remove one of them"
    for key in ("recompute_method", "recompute_num_layers"):
        if getattr(details, key) and details.recompute_granularity != "full":
            yield f"strategy_config.{key}", "needs recompute_granularity: full"


def _data_parallel_problems(args: StrategyArgs, devices: int, degrees: _Degrees) -> Problems:
    """Yield shards and groups of experts that do not divide the data-parallel ranks."""
    details = details_of(args)
    dp = devices // degrees.devices_per_replica
    ep = degrees.ep
    needs_shard_size = args.strategy_name == "hsdp" and devices > 1
    if dp % (details.shard_size or 1) or (needs_shard_size and details.shard_size is None):
        text = f"hsdp needs a divisor of the {dp} data-parallel ranks"
        yield "strategy_config.shard_size", text
    shards = min(details.shard_size or dp, dp)
    if dp % ep or (shards % ep and ep % shards):
        groups = f", which are {dp // shards} replicas of {shards}" if shards < dp else ""
        yield (
            "ep_size",
            f"expert parallel {ep} does not divide the {dp} data-parallel ranks{groups}",
        )
    elif details.efsdp_size not in (None, dp // ep if ep > 1 else 1):
        yield "strategy_config.efsdp_size", f"is dp {dp} / ep {ep}; remove it"


def _pipeline_problems(args: StrategyArgs, pp: int) -> Problems:
    details = details_of(args)
    pipeline = details.pipeline(pp)
    if pp == 1 and details.pipeline_schedule:
        yield "strategy_config.pipeline_schedule", "needs pp_size > 1; remove it"
    elif pp == 1 and pipeline.virtual > 1:
        yield "strategy_config.virtual_pipeline_model_parallel_size", "needs pp_size > 1; remove it"
    elif pipeline.problem:
        yield "strategy_config.pipeline_schedule", pipeline.problem
    elif pipeline.rule.splits_backward and details.recompute_granularity == "selective":
        text = f"selective needs one backward pass, and '{pipeline.schedule}' has two"
        yield "strategy_config.recompute_granularity", f"{text}; set full or null"


def layout(role: RoleConfig, devices: int | None = None) -> Layout:
    """Return the layout of a role on its own devices, or on this many."""
    args = role.strategy_args
    device_count = devices or len(role.devices)
    problems = strategy_problems(role, device_count)
    texts = [f"strategy_args.{key}: {text}" for key, text in problems]
    if texts:
        raise ConfigError(texts)
    details = details_of(args)
    degrees = _degrees(args)
    dp = device_count // degrees.devices_per_replica
    pipeline = details.pipeline(degrees.pp)
    sharding = _sharding(role)
    shard = (details.shard_size or dp) if sharding.stage else 1
    engine = role.engine if isinstance(role, ActorConfig) else "torch"
    return Layout(
        dp, *degrees, _recompute(role), details.offload_activations,
        args.strategy_name or DEFAULT,
        stage=sharding.stage if shard > 1 else 0, shard=shard, host=sharding.host,
        sequence_parallel=details.sequence_parallel, schedule=pipeline.schedule,
        virtual=pipeline.virtual, engine=engine.rpartition("/")[2],
    )  # fmt: skip


def _recompute(role: RoleConfig) -> Recompute | None:
    granularity = details_of(role.strategy_args).recompute_granularity
    keeps_activations = role.model_args.disable_gradient_checkpointing
    if granularity is None and role.trains and keeps_activations is not None:
        return "none" if keeps_activations else "full"
    return granularity


class _Sharding(NamedTuple):
    stage: int
    host: bool  # the shards are in host memory


def _sharding(role: RoleConfig) -> _Sharding:
    args = role.strategy_args
    name = args.strategy_name or DEFAULT
    if is_deepspeed(name):
        sharding = _Sharding(*deepspeed_sharding(args.strategy_config))
    else:
        stage = STAGES[name]
        if stage is None:  # 3d, megatron_train
            details = details_of(args)
            stage = details.zero_stage or int(details.use_distributed_optimizer)
        sharding = _Sharding(stage, host=name in ("zero2_cpu", "gemini_auto"))
    if sharding.stage < 3 and not role.trains:  # a frozen model has only weights to shard
        return _Sharding(0, host=False)
    return sharding


def keeps_state_on_host(layout: Layout, kind: str) -> bool:
    """Return whether a single GPU leaves its optimizer's state in host memory.

    A CPU has no other memory than the host's, so there the setting changes nothing.
    """
    return layout.host and layout.devices == 1 and kind == "cuda"


def refuse_host_offload(role: RoleConfig, kind: str, precision: str, key: str) -> None:
    """Refuse host memory on one GPU for what has no state that could be there."""
    found = layout(role)
    args = role.model_args
    if not keeps_state_on_host(found, kind):
        return
    reason = None
    if not role.trains:
        reason = "a frozen model has no optimizer; set offload: on, or another strategy_name"
    elif args.has_adapter:
        reason = "the state of an adapter is small; remove strategy_name"
    elif precision == "lean":
        reason = "precision: lean keeps little beside the weights; use one of the two"
    elif args.dtype not in (None, "bf16"):
        reason = f"on one GPU that is for dtype: bf16, and it is {args.dtype}"
    if reason:
        raise ConfigError(f"{key}: '{found.name}' keeps state in host memory, and {reason}.")


def possible_layout(role: RoleConfig) -> Layout | None:
    """Return the layout of a role; None if it is impossible, which is reported separately."""
    return None if any(strategy_problems(role)) else layout(role)


def data_parallel(role: RoleConfig) -> int:
    """Return the dp degree; 1 if the layout is impossible."""
    role_layout = possible_layout(role)
    return role_layout.dp if role_layout else 1


def reference_is_policy(config: RunConfig) -> bool:
    """Whether the policy without its adapter, or with its initial one, is the reference."""
    actor = config.actor_train
    reference = config.reference
    policy_args = actor.model_args
    reference_args = reference.model_args
    return (
        policy_args.has_adapter
        and reference.worker_cls is None
        and actor.devices == reference.devices
        and _layout_degrees(actor) == _layout_degrees(reference)
        and policy_args.model_name_or_path == reference_args.model_name_or_path
        and policy_args.revision == reference_args.revision
        and policy_args.dtype == reference_args.dtype
        and policy_args.quantization == reference_args.quantization
        and reference_args.adapter_name_or_path in (None, policy_args.adapter_name_or_path)
    )


def _layout_degrees(role: RoleConfig) -> tuple[int, ...] | None:
    role_layout = possible_layout(role)
    if role_layout is None:
        return None
    return role_layout.dp, role_layout.tp, role_layout.pp, role_layout.cp, role_layout.ep
