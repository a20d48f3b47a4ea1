"""The peak memory of one device by part, and the micro-batches that a run would choose.

Activations are counted from what autograd keeps of a decoder layer: rows as wide as the residual
stream (hidden), queries, keys and the MLP (inner). They were checked against the saved tensors on
a CPU and against measured peaks of an H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product, takewhile
from math import ceil, inf, prod
from operator import attrgetter, mul
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from rather.checkpoint.sharded_tensors import ShardedFiles
from rather.config.run_config import DPOConfig
from rather.config.schema import ActorModelArgs, LossKeys, ModelArgs, RoleConfig, split_names
from rather.config.strategies import (
    Layout,
    keeps_state_on_host,
    layout,
    refuse_host_offload,
)
from rather.data.pack import pack
from rather.errors import ConfigError, RatherError
from rather.losses.objective import from_config
from rather.model.budget import (
    LADDER,
    LEAST,
    PARKING_PAYS,
    REHEARSED,
    SHARE,
    TOKENS,
    default_tokens,
    tokens_in,
)
from rather.model.head import CHUNK_BYTES, KEEP_BYTES
from rather.model.layer_trial import LayerTrial
from rather.model.layers import LEVELS, Recompute
from rather.model.sizes import LAYER, Shapes, Sizes, sizes_of, stacked
from rather.optim.adamw import BLOCK
from rather.optim.host import KEPT, LOTS, SLOTS
from rather.parallel.load import compute_dtype, stored_dtype

if TYPE_CHECKING:
    from rather.data.batch import PairBatch, TokenPair

FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes of a weight, with its scales
ONE_RANK = Layout(1)
KEYS_GATHERED = 1.25  # on a CPU keys and values are copied for each answer, the prompt's again
# Of the libraries: products, random numbers, pinned batches.
WORKSPACE = {"cuda": 64 << 20, "cpu": 40 << 20}
PEFT = 56 << 20  # on a CPU; it is imported with the first adapter


# --- weights, gradients and optimizer of one rank ---


class WeightBytes(NamedTuple):
    """Bytes of one weight, by purpose."""

    weights: float
    gradients: float = 0.0
    master: float = 0.0
    moments: float = 0.0


EVERYTHING, NOTHING = WeightBytes(1, 1, 1, 1), WeightBytes(0)


class Part(NamedTuple):
    """Weights that are treated alike: their number, their bytes, and extra bytes on every rank.

    They are `cut` by tp and pp, experts by ep and pp, with the optimizer in `shards`. Of a
    pipeline, the share of one rank counts.
    """

    number: int
    each: WeightBytes
    gathered: float
    shards: int = 1
    cut: float = 1


@dataclass(frozen=True)
class RoleState:
    """What the ranks of a role hold, and which share of each purpose is in which memory."""

    parts: tuple[Part, ...]
    device_shares: WeightBytes = EVERYTHING
    host_shares: WeightBytes = NOTHING

    @property
    def total(self) -> float:
        """The bytes of all ranks together, if nothing is held twice."""
        return sum(part.number * sum(part.each) for part in self.parts)

    @property
    def gathered(self) -> float:
        return sum(part.number / part.cut * part.gathered for part in self.parts)

    @property
    def by_purpose(self) -> WeightBytes:
        """The bytes of one rank by purpose, without what is gathered."""
        parts = [[p.number / p.shards / p.cut * x for x in p.each] for p in self.parts]
        return WeightBytes(*map(sum, zip(*parts, strict=True)))

    @property
    def on_device(self) -> WeightBytes:
        """Return the bytes of one rank by purpose that are in its device's memory."""
        return WeightBytes(*map(mul, self.by_purpose, self.device_shares))

    @property
    def on_host(self) -> float:
        """The bytes that a GPU's rank keeps in host memory."""
        return sum(x * share for x, share in zip(self.by_purpose, self.host_shares, strict=True))

    def weights(self, *, trained: bool = False, shard: bool = False) -> float:
        """Return how many weights one rank computes with, or has in its shard."""
        wanted = [part for part in self.parts if part.each.moments or not trained]
        return sum(p.number / p.cut / (p.shards if shard else 1) for p in wanted)


def role_state(
    keys: LossKeys,
    role: RoleConfig,
    kind: str,
    shapes: Shapes,
    args: ModelArgs,
    *,
    narrow: bool = False,
    stage: int | None = None,
    tower: int = 0,
) -> RoleState:
    """Return the state of a role, of a pipeline on the rank `stage` or the one that holds most.

    `narrow`: gradients are summed in bfloat16, as a last resort. `tower`: the weights of vision and
    projector, if there are images.
    """
    found, compute = layout(role), stored_dtype(args, kind).itemsize
    # In a step zero1 and zero2 hold all weights, zero1 also all gradients.
    gathered = compute * (0, 2, 1, 0)[found.stage]
    each = WeightBytes(compute, 0, 2 if keys.sync_ref_model and _is_rounded(args, kind) else 0)
    if role.trains:
        each = _bytes_of_weight(
            found, kind, args, precision=keys.precision, rounding=keys.rounding, narrow=narrow
        )
    shards = found.shard * found.cp if found.stage else 1
    expert_shards = max(1, found.shard // found.ep) * found.cp if found.stage else 1
    whole = _counts(shapes, found, shards)
    dense, norms, experts = whole
    ranks = range(found.pp) if stage is None else [stage]
    held = [_counts(on_pipeline_rank(shapes, found, rank), found, shards) for rank in ranks]
    # How many ranks like this one would hold the whole.
    pp = [number / max(1, part) for number, part in zip(whole, max(held, key=sum), strict=True)]
    frozen = WeightBytes(compute)
    base, kept = (frozen, min(compute, gathered)) if args.has_adapter else (each, gathered)
    linears = _in_4_bits(shapes) if args.quantization else 0
    parts = [
        Part(linears, WeightBytes(FOUR_BITS), 0),
        Part(dense - linears, base, kept, shards, found.tp * pp[0]),
        Part(norms, base, kept, shards, pp[1]),
        Part(experts, base, kept, expert_shards, found.ep * pp[2]),
    ]
    if args.has_adapter:
        cut = found.tp * found.pp
        parts.append(Part(adapter_weights(args, shapes), each, gathered, shards, cut))
    parts.append(Part(tower, each if trains_tower(args) else frozen, gathered, shards))
    return RoleState(tuple(part for part in parts if part.number), *_places(found, kind, shapes))


def _places(found: Layout, kind: str, shapes: Shapes) -> tuple[WeightBytes, WeightBytes]:
    """Return which share of each purpose is on the device, and which is in host memory."""
    if not keeps_state_on_host(found, kind):
        return (NOTHING, EVERYTHING) if found.host and kind == "cuda" else (EVERYTHING, NOTHING)
    layers = _layers_by_weight(shapes)
    weights = sum(map(prod, shapes.values()))
    inner = sum(prod(shapes[name]) for name in layers) / weights
    summed_here = 1 - inner + SLOTS * inner / len(set(layers.values()))
    return WeightBytes(1, summed_here), WeightBytes(0, inner, 1, 1)


def _layers_by_weight(shapes: Shapes) -> dict[str, int]:
    """Return the number of the decoder layer of each weight that is in one."""
    layers = {}
    for name in shapes:
        if match := LAYER.search(name):
            layers[name] = int(match[1])
    return layers


def _in_4_bits(shapes: Shapes) -> int:
    """Return the weights of the linear layers of decoder layers; stacks of experts are none."""
    return sum(
        prod(shape)
        for name, shape in shapes.items()
        if LAYER.search(name) and len(shape) == 2 and ".experts." not in name
    )


def trains_tower(args: ModelArgs) -> bool:
    """Return whether the vision tower of a policy trains on images."""
    is_free = isinstance(args, ActorModelArgs) and "vision" not in args.frozen_parts
    return is_free and not args.has_adapter


def _is_rounded(args: ModelArgs, kind: str) -> bool:
    """Return whether a weight has the low bits of a master."""
    return compute_dtype(args, kind) == torch.bfloat16


def _bytes_of_weight(
    found: Layout, kind: str, args: ModelArgs, *, precision: str, rounding: str, narrow: bool
) -> WeightBytes:
    """Return what a weight that is trained costs, with its gradient, master and moments."""
    compute = stored_dtype(args, kind).itemsize
    if precision == "lean":
        return WeightBytes(compute, compute, 0, 2 + 4 / BLOCK)
    if compute == 4 or found.dp * found.cp > 1:  # shards are float32
        low = _is_rounded(args, kind) and (compute == 4 or rounding == "dithered")
        return WeightBytes(4, 4, 2 if low else 0, 8)
    if args.dtype == "fp16":  # has a whole master
        return WeightBytes(2, 4, 4, 8)
    # bfloat16 has the remainder of a master
    narrow &= found.devices == 1 and not found.host  # sums on the host are float32
    return WeightBytes(2, 2 if narrow else 4, 2, 8)


def _counts(shapes: Shapes, found: Layout, shards: int) -> tuple[int, int, int]:
    """Return how many weights tensor parallel divides, those of norms, and those of experts."""
    dense = norms = 0
    for name, shape in shapes.items():
        if "norm" in name and found.tp > 1:
            norms += prod(shape)
        elif ".experts." not in name:
            parts = found.tp * shards  # rows are dealt out whole
            dense += ceil(shape[0] / parts) * parts * prod(shape[1:])
    return dense, norms, stacked(shapes)


def on_pipeline_rank(shapes: Shapes, found: Layout, rank: int) -> Shapes:
    """Return the shapes of the weights that one rank of a pipeline holds."""
    if found.pp == 1:
        return shapes
    pipeline = found.pipeline
    stages = pipeline.stages_of(rank)
    layers = _layers_by_weight(shapes)
    before = list(takewhile(lambda name: name not in layers, shapes))
    after = [name for name in shapes if name not in layers and name not in before]
    count = 1 + max(layers.values())
    held = {layer for stage in stages for layer in pipeline.layers_of(stage, count)}
    names = [name for name, layer in layers.items() if layer in held]
    is_last = pipeline.stages - 1 in stages
    is_tied = all(len(shapes[name]) == 1 for name in after)  # no head: the embedding is one
    if 0 in stages or (is_last and is_tied):
        names += before
    if is_last:
        names += after
    return {name: shapes[name] for name in names}


def adapter_weights(args: ModelArgs, shapes: Shapes) -> int:
    """Return how many weights the adapter of a role has, given the shapes of the base."""
    if args.adapter_name_or_path is not None:
        folder = Path(args.adapter_name_or_path).expanduser()
        with suppress(OSError, RatherError):
            saved = ShardedFiles([folder / "adapter_model.safetensors"])
            return sum(prod(saved.shape(name)) for name in saved)
        return 0
    assert isinstance(args, ActorModelArgs)
    targets = split_names(args.lora_target or "all-linear")
    copied = split_names(args.modules_to_save or [])
    # With experts, no other linear layers than those of attention have adapters by themselves.
    inside = ".layers." if stacked(shapes) == 0 else "attn"
    whole = adapted = 0
    for name, shape in shapes.items():
        if any(f".{module}." in f".{name}" for module in copied):
            whole += prod(shape)
        is_target = name.removesuffix(".weight").endswith(tuple(f".{each}" for each in targets))
        if ".layers." in name and (is_target or ("all-linear" in targets and inside in name)):
            adapted += _factors(shape, is_target=is_target)
    return (args.lora_rank or 8) * adapted + whole


def _factors(shape: tuple[int, ...], *, is_target: bool) -> int:
    """Return the rows and columns of a linear layer, or of a stack of experts that is named."""
    if len(shape) == 3:
        return shape[0] * (shape[1] + shape[2]) if is_target else 0
    return sum(shape) if len(shape) == 2 else 0


def known_shapes(name: str, args: ModelArgs) -> Shapes | None:
    """Return the shapes of a model's weights; None if its config.json cannot be used."""
    with suppress(ConfigError):
        return sizes_of(name, args).shapes
    return None


# --- what a micro-batch adds ---


@dataclass(frozen=True)
class LayerBytes:
    """The bytes per token of a rank's decoder layers that run in this way, and of its head."""

    sizes: Sizes
    kind: str  # of the device: cpu or cuda
    itemsize: int
    recompute: Recompute = "none"
    compiled: bool = False
    adapter: bool = False  # the base is frozen, and its linear layers have adapters
    layout: Layout = ONE_RANK
    factor: float = 1.0  # of a family that is not a plain decoder: see layer_trial.py
    passing: float = 0.0  # beyond what is kept, that trial needed so much for a moment
    quantized: bool = False  # the base has weights of 4 bits

    @cached_property
    def part(self) -> Sizes:
        """The widths of one tp rank; with sequence parallelism the residual stream is divided."""
        sizes, tp = self.sizes, self.layout.tp
        by_sequence = self.layout.sequence_parallel
        return replace(
            sizes,
            hidden=sizes.hidden // tp if by_sequence else sizes.hidden,
            heads=sizes.heads // tp,
            key_heads=max(1, sizes.key_heads // tp),
            inner=sizes.inner if sizes.experts and not by_sequence else sizes.inner // tp,
        )

    def kept_by_rank(self, tokens: float, batches: int, stage: int = 0) -> float:
        """Return what all layers of a rank keep of micro-batches of so many tokens."""
        shape = self.layout
        own = shape.pipeline.stages_of(stage)
        layers = sum(len(shape.pipeline.layers_of(each, self.sizes.layers)) for each in own)
        layers *= min(shape.pp, batches)  # a pipeline rank holds those of several micro-batches
        kept = 0.0 if shape.offload else self.kept * layers
        return tokens / shape.cp * (kept + self.outside)

    @property
    def outside(self) -> float:
        """What embedding and last norm keep."""
        return (4 / self.itemsize + 2) * self.part.hidden * self.itemsize

    @property
    def kept(self) -> float:
        """What is kept until the backward pass."""
        if self.recompute == "none":
            return self.factor * self.plain
        sizes = self.part
        numbers = float(sizes.hidden)  # the input of the layer
        if self.recompute != "full":
            numbers += sizes.query  # attention
            if not self.quantized:  # products of 4-bit weights are always computed again
                numbers += sizes.query + 2 * sizes.key + (1 if self.compiled else 2) * sizes.hidden
        if self.recompute == "half" and not sizes.experts:  # grouped products are not kept
            numbers += sizes.inner
            # Every second wide product. Those inside an adapter are wide as well.
            if self.adapter:
                numbers += sizes.query + sizes.key + sizes.hidden
        return numbers * self.itemsize

    @property
    def plain(self) -> float:
        """What is kept if nothing is recomputed; a compiler recomputes norms and a wide product."""
        sizes = self.part
        # Ranks from which attention and MLP gather their inputs, and keep them.
        gathered = self.layout.tp if self.layout.sequence_parallel else 1
        attention, mlp = 2 * sizes.query + 2.0 * sizes.key, (3 if sizes.gated else 2) * sizes.inner
        mlp += 2 * sizes.chosen * sizes.hidden  # rows of a token before and after its experts
        if self.compiled:
            hidden = (2 + 2 * gathered) * sizes.hidden
            return (hidden + attention + mlp) * self.itemsize
        # A norm keeps its input (in float32), its normalised rows if its weight is trained, and its
        # result.
        norm = 4 / self.itemsize + 1 + (not self.adapter)
        if self.kind == "cpu":
            attention = 3 * sizes.query + 2 * KEYS_GATHERED * sizes.key
        inputs = 2 * (gathered - 1) * sizes.hidden
        return (norm * sum(sizes.norms) + inputs + attention + mlp + sizes.inner) * self.itemsize

    @property
    def backward(self) -> float:
        """What the layer needs in its backward pass: recomputed rows and gradients."""
        sizes, rows = self.part, 2 + 2 * self.sizes.chosen
        # Recomputed rows of the MLP are freed one by one as their gradients appear.
        inner = 3 if self.recompute == "none" else 1
        gradients = (inner * sizes.inner + rows * sizes.hidden) * self.itemsize
        kept = self.kept if self.recompute != "full" else 0.0
        return max(0.0, self.factor * self.plain - kept) + max(gradients, self.passing)

    def head(self, rows: float) -> tuple[float, float]:
        """Return the bytes of (logits, gradients of the head) for scored tokens.

        Logits above the limit are computed again in chunks, which are summed in float32.
        """
        words, hidden = self.sizes.vocabulary / self.layout.tp, self.sizes.hidden
        logits, both = rows * words * self.itemsize, 2 * rows * hidden * self.itemsize
        weights = 0.0 if self.adapter else words * hidden
        if logits <= KEEP_BYTES[self.kind]:
            return logits, both + weights * self.itemsize
        chunk = min(logits, CHUNK_BYTES[self.kind])
        return chunk, both + weights * (4 + (self.itemsize if self.itemsize < 4 else 0))


# --- everything of one device ---


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of one device at the peak of a step."""

    weights: float = 0.0
    gradients: float = 0.0
    master: float = 0.0
    moments: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    reference: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


@dataclass(frozen=True)
class Work:
    """The largest micro-batch of one rank, and how many with gradients a step has."""

    tokens: int
    rows: int
    batches: int
    seen: int  # tokens of the largest one without gradients
    patches: int = 0  # of the images of a micro-batch that a trained tower sees


@dataclass(frozen=True)
class Chosen:
    """What a run would train with."""

    tokens: int  # of a micro-batch, at most
    recompute: Recompute
    narrow: bool  # gradients in bfloat16
    parked: bool  # the reference waits on the host
    fits: bool = True


@dataclass(frozen=True)
class Device:
    """One device: cpu or cuda, and the bytes of its memory that this run may use.

    `host`: the bytes of host memory that the rank of a GPU may use; infinite if unknown.
    """

    kind: str
    memory: float
    host: float = inf


class MemoryForecast:
    """The memory of the policy's device, which the reference may share."""

    def __init__(
        self,
        config: DPOConfig,
        sizes: Sizes,
        device: Device,
        *,
        reference: bool,
        compiled: bool,
        stage: int | None = None,
        images: bool = False,
        layers: LayerTrial | None = None,
    ) -> None:
        """`stage` is a rank of a pipeline; default: the one with most weights.

        With `images`, a vision tower is part of the model. `layers`: of a family that is not plain.
        """
        self.stage, self.layers = stage, layers
        self.tower = sum(map(prod, sizes.tower.values())) if images else 0
        self.config, self.sizes, self.device, self.kind = config, sizes, device, device.kind
        actor = config.actor_train
        self.layout, self.args = layout(actor), actor.model_args
        refuse_host_offload(actor, self.kind, config.precision, "actor_train.strategy_args")
        self.keeps_state_on_host = keeps_state_on_host(self.layout, self.kind)
        # Several devices, or a CPU, do not try what fits.
        self.rehearses = self.kind == "cuda" and self.layout.devices == 1
        self.compute, self.compiled = stored_dtype(self.args, self.kind).itemsize, compiled
        self.workspace = WORKSPACE[self.kind]
        if self.kind == "cpu" and self.args.has_adapter:
            self.workspace += PEFT
        self.with_reference = reference and from_config(config).needs_reference
        self.reference_bytes = 0.0  # of a device of its own, or shared with the policy
        if self.with_reference and not config.reference_is_policy:
            role = config.reference
            refuse_host_offload(role, self.kind, config.precision, "reference.strategy_args")
            state = role_state(
                config, role, self.kind, sizes.shapes, role.model_args, tower=self.tower
            )
            self.reference_bytes = sum(state.by_purpose)

    def state(self, *, narrow: bool = False) -> RoleState:
        given = self.config, self.config.actor_train, self.kind, self.sizes.shapes, self.args
        return role_state(*given, narrow=narrow, stage=self.stage, tower=self.tower)

    def resting(self, chosen: Chosen) -> MemoryParts:
        """Return weights and optimizer between two steps, and gradients as they are in one."""
        state = self.state(narrow=chosen.narrow)
        shares = self.config.shares_devices and not chosen.parked
        return MemoryParts(
            *state.on_device,
            reference=self.reference_bytes if shares else 0.0,
            buffers=self._gathered_bytes(state),
        )

    def _gathered_bytes(self, state: RoleState) -> float:
        """Return copies in the computing precision, and layers in transit between ranks."""
        found, compute = self.layout, self.compute
        if found.dp * found.cp == 1:
            return 0.0
        if found.stage == 0:
            return state.weights() * compute if compute < 4 else 0.0
        if found.stage < 3:
            # With zero1 the gradients that wait are float32.
            waiting = found.stage == 1 and compute < 4
            late = state.weights(trained=True) * (4 - compute) if waiting else 0.0
            return state.gathered + late
        experts = self.sizes.of_experts
        layer = (self.sizes.in_layers - experts) / found.tp + experts / found.ep
        layer /= self.sizes.layers
        outside = (self.sizes.weights - self.sizes.in_layers) / found.tp + self.tower
        return (2 * layer + outside) * compute + layer * 4

    def _summed_share(self, *, narrow: bool) -> float:
        """Return the share of gradients that a GPU's products of linear layers add up."""
        wide = self.compute == 2 and self.layout.dp * self.layout.cp == 1
        if not wide or narrow or self.config.precision == "lean":
            return 0.0
        if self.args.has_adapter:
            return 1.0
        return (self.sizes.in_layers - self.sizes.of_experts) / self.sizes.weights

    def peak(self, chosen: Chosen, work: Work) -> MemoryParts:
        """Return the parts at the moment that needs most."""
        moments = [*self.in_training(chosen, work), self._reference_turn(chosen, work)]
        if self.keeps_state_on_host:  # an update brings the state of two layers, or of the head
            resting = self.resting(chosen)
            largest = max(self.sizes.of_head, self.sizes.in_layers / self.sizes.layers)
            moments.append(replace(resting, buffers=resting.buffers + LOTS * KEPT * largest))
        return max(moments, key=attrgetter("total"))

    def _reference_turn(self, chosen: Chosen, work: Work) -> MemoryParts:
        """Return the parts while the reference runs, or an evaluation."""
        here = self.resting(replace(chosen, parked=False))
        part, column = self.layer("none").part, work.seen / self.layout.cp * self.compute
        chunk = min(column * self.sizes.vocabulary / self.layout.tp, CHUNK_BYTES[self.kind])
        busy = 3 * column * (part.inner + part.hidden) + self.workspace
        return replace(here, gradients=0.0, logits=chunk, buffers=here.buffers + busy)

    def in_training(self, chosen: Chosen, work: Work) -> Iterator[MemoryParts]:
        """Yield the parts at the head, in a layer, and at the end of backward."""
        found, sizes = self.layout, self.sizes
        layer, resting = self.layer(chosen.recompute), self.resting(chosen)
        # The first micro-batch finds no gradients but the sums of linear layers. On a CPU freed
        # activations stay with the process, in pieces, and gradients come on top.
        before = resting
        if work.batches == 1 and self.kind != "cpu":
            early = self._summed_share(narrow=chosen.narrow)
            before = replace(resting, gradients=resting.gradients * early)
        tokens = work.tokens / found.cp
        kept = layer.kept_by_rank(work.tokens, work.batches, self.stage or 0)
        kept += work.patches * self._tower_bytes
        logits, gradients = layer.head(work.rows / found.cp)
        buffers = before.buffers + gradients + self.workspace
        yield replace(before, activations=kept, logits=logits, buffers=buffers)
        busy = tokens * layer.backward + self.workspace
        head = 0.0 if layer.adapter else sizes.of_head / found.tp * self.compute
        busy += head if sizes.tied else 0.0  # waits for the gradient of the embedding
        yield replace(before, activations=kept, buffers=before.buffers + busy)
        first = tokens * (layer.kept + layer.outside)  # whose backward is the last
        yield replace(resting, activations=first, buffers=resting.buffers + busy + head)

    def layer(self, recompute: Recompute) -> LayerBytes:
        eager = LayerBytes(
            self.sizes, self.kind, self.compute, recompute, adapter=self.args.has_adapter,
            quantized=bool(self.args.quantization),
        )  # fmt: skip
        layer = replace(eager, compiled=self.compiled, layout=self.layout)
        if not self.layers:
            return layer
        more = self.layers.kept / eager.plain  # than a plain decoder's
        return replace(layer, factor=more, passing=self.layers.passing)

    @property
    def _tower_bytes(self) -> float:
        """What a trained tower keeps of one patch: the inputs of its products, and its norms."""
        widths = [sum(shape[:2]) for shape in self.sizes.tower.values() if len(shape) == 2]
        return sum(widths) * self.compute

    def chosen(self, steps: Sequence[Sequence[TokenPair]], largest_pair: int) -> Chosen:
        """Return what `choose_budget` finds by rehearsals, computed here by the same rules."""
        tokens_set = self.config.actor_train.max_tokens_per_microbatch_in_train
        router_loss = self.args.moe_aux_loss_coef
        if router_loss is None:
            router_loss = self.sizes.router_loss
        most = tokens_set or default_tokens(self.kind, router_loss)
        level = self.layout.recompute
        if not self.rehearses:
            usual: Recompute = "full" if self.kind == "cuda" else "none"
            return Chosen(most, level or usual, narrow=False, parked=False)
        needed = max(tokens_set or min(LEAST, most), largest_pair)
        real = sum(batch.real_tokens for batch in self.pack_forward(steps[0]))
        offload = self.config.reference.offload
        may_park = self.config.shares_devices and not self.config.sync_ref_model
        may_park &= self.reference_bytes > 0
        parked = may_park and offload == "on"
        parks = parked or (may_park and offload == "auto" and real > PARKING_PAYS)
        levels = (level,) if level else LEVELS
        may_narrow = (False,) if self.keeps_state_on_host else (False, True)
        for narrow, recompute, host in product(may_narrow, levels, dict.fromkeys((parked, parks))):
            fitting = self._tokens_that_fit(Chosen(REHEARSED[0], recompute, narrow, host))
            if fitting >= needed:
                return Chosen(min(most, fitting), recompute, narrow, host)
        return Chosen(needed, level or "full", narrow=may_narrow[-1], parked=parks, fits=False)

    def _tokens_that_fit(self, trial: Chosen) -> int:
        few, many = REHEARSED
        works = [Work(n, n, batches=2, seen=0) for n in REHEARSED]
        first, second = (
            max(parts.total for parts in self.in_training(trial, work)) for work in works
        )
        if second > self.device.memory:
            return 0  # a rehearsal runs out of memory
        each = max(1.0, (second - first) / (many - few))
        resting = self.resting(trial)
        held = resting.total - resting.gradients
        room = SHARE * (self.device.memory - held) + held  # what rests there was not free
        return tokens_in(room - first, few, each, self.sizes.vocabulary * self.compute)

    def work(self, chosen: Chosen, steps: Sequence[Sequence[TokenPair]]) -> Work:
        """Return the work of the first steps, packed as the run packs them."""
        packed = [self.pack(step, chosen) for step in steps]
        batches = [batch for each in packed for batch in each]
        return Work(
            tokens=max(len(batch.ids_N) for batch in batches),
            rows=max(len(batch.rows_U) for batch in batches),
            batches=max(1, max(map(len, packed)) // max(1, self.layout.dp)),
            seen=max(len(b.ids_N) for step in steps for b in self.pack_forward(step)),
            patches=max(map(_patches, batches)) if trains_tower(self.args) else 0,
        )

    def pack(self, step: Sequence[TokenPair], chosen: Chosen) -> list[PairBatch]:
        return pack(step, chosen.tokens, ladder=LADDER[self.kind], ranks=self.layout.bins)

    def pack_forward(self, step: Sequence[TokenPair]) -> list[PairBatch]:
        """Pack a step for the reference, without gradients."""
        role = self.config.reference
        budget = role.max_tokens_per_microbatch_in_infer or 2 * TOKENS[self.kind]
        return pack(
            step, budget, role.infer_batch_size, ladder=LADDER[self.kind], ranks=layout(role).bins
        )


def _patches(batch: PairBatch) -> int:
    """Return the patches of a micro-batch's images; Qwen's processors report them."""
    return sum(
        prod(image.grid) if len(image.grid) == 3 else 4 * image.tokens for image in batch.images
    )
