"""The peak memory of one device by part, and the micro-batches that a run would choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from rather.config.schema import DPOConfig
from rather.config.strategies import Layout, layout
from rather.data.pack import pack
from rather.losses.objective import from_config
from rather.model.budget import LADDER, LEAST, PARKING_PAYS, REHEARSED, SHARE, TOKENS
from rather.model.head import CHUNK_BYTES
from rather.model.layers import LEVELS, Recompute
from rather.plan.activations import (
    LayerSettings,
    backward_bytes,
    forward_bytes,
    head_bytes,
    kept_bytes,
)
from rather.plan.state import FOUR_BITS, RoleState, itemsize, role_state

if TYPE_CHECKING:
    from rather.data.batch import PairBatch, TokenPair
    from rather.model.sizes import Sizes

# Of the libraries: products, random numbers, pinned batches.
WORKSPACE = {"cuda": 64 << 20, "cpu": 32 << 20}
SCALES = 1 / 64 + 4 / (64 * 256)  # bytes of the scales of a four-bit weight


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


@dataclass(frozen=True)
class Chosen:
    """What a run would train with."""

    tokens: int  # of a micro-batch, at most
    recompute: Recompute
    narrow: bool  # gradients in bfloat16
    parked: bool  # the reference waits on the host
    fits: bool


@dataclass(frozen=True)
class Device:
    """One device: cpu or cuda, and the bytes of its memory that this run may use."""

    kind: str
    memory: float


class MemoryForecast:
    """The memory of the policy's device, which the reference may share."""

    def __init__(
        self, config: DPOConfig, sizes: Sizes, device: Device, *, reference: bool, compiled: bool
    ) -> None:
        self.config, self.sizes, self.device = config, sizes, device
        self.layout: Layout = layout(config.actor_train)
        self.args = config.actor_train.model_args
        self.compute = itemsize(self.args, device.kind)
        self.compiled = compiled and device.kind == "cuda"
        self.with_reference = reference and from_config(config).needs_reference
        # Widths of one tp rank; with sequence parallelism the residual stream is divided too.
        tp = self.layout.tp
        self.part = replace(
            sizes,
            hidden=sizes.hidden // tp if self.layout.sequence_parallel else sizes.hidden,
            heads=sizes.heads // tp,
            key_heads=max(1, sizes.key_heads // tp),
            inner=sizes.inner // tp,
        )

    def state(self, *, narrow: bool = False) -> RoleState:
        role, kind = self.config.actor_train, self.device.kind
        return role_state(self.config, role, kind, self.sizes.shapes, self.args, narrow=narrow)

    # --- between steps ---

    def reference_bytes(self) -> float:
        """Return the bytes of a reference on the same device."""
        config = self.config
        actor, reference = config.actor_train.device_mapping, config.reference.device_mapping
        shares = (reference or [0]) == (actor or [0])
        if not self.with_reference or not shares or config.reference_is_policy:
            return 0.0
        return self.own_reference_bytes()

    def own_reference_bytes(self) -> float:
        """Return the bytes of the reference on a device of its role."""
        role, kind = self.config.reference, self.device.kind
        state = role_state(self.config, role, kind, self.sizes.shapes, role.model_args)
        return state.own + (state.gathered if state.shards > 1 else 0.0)

    def resting(self, *, narrow: bool, parked: bool) -> MemoryParts:
        """Return weights and optimizer between two steps, and gradients as they are in one."""
        state = self.state(narrow=narrow)
        own, held = state.by_purpose, MemoryParts()
        if not (self.layout.host and self.device.kind == "cuda"):
            weights = own.weights + self._quantization_bytes()
            held = MemoryParts(weights, own.gradients, own.master, own.moments)
        reference = 0.0 if parked else self.reference_bytes()
        return replace(held, reference=reference, buffers=self._gathered_bytes(state))

    def _quantization_bytes(self) -> float:
        """Return what a four-bit base needs on top: scales; embeddings, head, norms as stored."""
        if not self.args.quantization:
            return 0.0
        inner = self.sizes.in_layers
        return inner * SCALES + (self.sizes.weights - inner) * (self.compute - FOUR_BITS)

    def _gathered_bytes(self, state: RoleState) -> float:
        """Return copies in the computing precision, and layers in transit between ranks."""
        found, compute = self.layout, self.compute
        if found.dp * found.cp == 1:
            return 0.0
        whole, trained = (number / state.cut for number in (self.sizes.weights, state.trained))
        if found.stage == 0:
            return whole * compute if compute < 4 else 0.0
        if found.stage < 3:
            # With zero1 the gradients that wait are float32.
            wide = (4 - compute) * trained if found.stage == 1 and compute < 4 else 0.0
            return state.gathered + wide
        layer = self.sizes.in_layers / self.sizes.layers / found.tp
        outside = (self.sizes.weights - self.sizes.in_layers) / found.tp
        return (2 * layer + outside) * compute + layer * 4

    # --- in a step ---

    def peak(self, chosen: Chosen, work: Work) -> MemoryParts:
        """Return the parts at the moment that needs most."""
        return max(self._moments(chosen, work), key=lambda parts: parts.total)

    def _moments(self, chosen: Chosen, work: Work) -> Iterator[MemoryParts]:
        """Yield the parts at the head, in a layer, at the end of backward, without gradients."""
        part, found, size = self.part, self.layout, self.compute
        settings = LayerSettings(
            self.device.kind, size, chosen.recompute, self.compiled, self.args.has_adapter,
            found.offload,
        )  # fmt: skip
        resting = self.resting(narrow=chosen.narrow, parked=chosen.parked)
        # The first micro-batch finds no gradients.
        before = resting if work.batches > 1 else replace(resting, gradients=0.0)
        tokens, rows = work.tokens / found.cp, work.rows / found.cp
        # A pipeline stage holds the layers of several micro-batches.
        layers = -(-part.layers // found.pp) * min(found.pp, work.batches)
        each = 0.0 if settings.offload else kept_bytes(part, settings)
        outside = (4 / size + 2) * part.hidden * size  # embedding, last norm
        kept = tokens * (each * layers + outside)
        extra = float(WORKSPACE[self.device.kind])
        logits, gradients = head_bytes(self.sizes, rows, settings, found.tp)
        buffers = before.buffers + gradients + extra
        yield replace(before, activations=kept, logits=logits, buffers=buffers)
        layer = tokens * backward_bytes(part, settings) + extra
        head = 0.0 if settings.adapter else part.of_head / found.tp * size
        waiting = head if part.tied else 0.0  # for the gradient of the embedding
        yield replace(before, activations=kept, buffers=before.buffers + layer + waiting)
        first = tokens * (kept_bytes(part, settings) + outside)  # whose backward is the last
        yield replace(resting, activations=first, buffers=resting.buffers + layer + waiting + head)
        # The reference's turn, or an evaluation.
        here = self.resting(narrow=chosen.narrow, parked=False)
        tokens = work.seen / found.cp
        logits = tokens * self.sizes.vocabulary / found.tp * size
        buffers = here.buffers + (tokens * forward_bytes(part, settings) + extra)
        chunk = min(logits, CHUNK_BYTES[self.device.kind])
        yield replace(here, gradients=0.0, logits=chunk, buffers=buffers)

    # --- what a run chooses ---

    def chosen(self, steps: Sequence[Sequence[TokenPair]], largest_pair: int) -> Chosen:
        """Return what `choose_budget` finds by rehearsals, computed here by the same rules."""
        given = self.config.actor_train.max_tokens_per_microbatch_in_train
        kind, found, offload = self.device.kind, self.layout, self.config.reference.offload
        wanted, level = given or TOKENS[kind], found.recompute
        parked = offload == "on" and self._may_park
        if kind == "cpu" or found.devices > 1 or found.canonical:
            usual: Recompute = "full" if kind == "cuda" else "none"
            chosen = Chosen(wanted, level or usual, narrow=False, parked=parked, fits=True)
            peak = self.peak(chosen, self.work(chosen, steps))
            return replace(chosen, fits=peak.total <= SHARE * self.device.memory)
        needed = max(given or min(LEAST, wanted), largest_pair)
        real = sum(batch.real_tokens for batch in self.pack_forward(steps[0]))
        parks = real > PARKING_PAYS and offload == "auto" and self._may_park
        for narrow in (False, True):
            for each in (level,) if level else LEVELS:
                for host in dict.fromkeys((parked, parked or parks)):
                    fitting = self._tokens_that_fit(each, narrow=narrow, parked=host)
                    if fitting >= needed:
                        return Chosen(min(wanted, fitting), each, narrow, host, fits=True)
        return Chosen(needed, level or "full", narrow=True, parked=parked or parks, fits=False)

    @property
    def _may_park(self) -> bool:
        alone = self.layout.devices == 1 and self.device.kind == "cuda"
        return alone and self.reference_bytes() > 0 and not self.config.sync_ref_model

    def _tokens_that_fit(self, level: Recompute, *, narrow: bool, parked: bool) -> int:
        few, many = REHEARSED
        trial = Chosen(few, level, narrow, parked, fits=True)
        first, second = (self.peak(trial, Work(n, n, batches=2, seen=0)).total for n in REHEARSED)
        each = max(1.0, (second - first) / (many - few))
        resting = replace(self.resting(narrow=narrow, parked=parked), gradients=0.0).total
        room = SHARE * (self.device.memory - resting) + resting  # what rests there was not free
        return max(0, (int((room - first) / each) + few) // LADDER["cuda"] * LADDER["cuda"])

    def work(self, chosen: Chosen, steps: Sequence[Sequence[TokenPair]]) -> Work:
        """Return the work of the first steps, packed as the run packs them."""
        packed = [self.pack(step, chosen) for step in steps]
        batches = [batch for each in packed for batch in each]
        return Work(
            tokens=max(len(batch.ids_N) for batch in batches),
            rows=max(len(batch.rows_U) for batch in batches),
            batches=max(1, max(map(len, packed)) // max(1, self.layout.dp)),
            seen=max(len(b.ids_N) for step in steps for b in self.pack_forward(step)),
        )

    def pack(self, step: Sequence[TokenPair], chosen: Chosen) -> list[PairBatch]:
        return pack(step, chosen.tokens, ladder=LADDER[self.device.kind], ranks=self.layout.bins)

    def pack_forward(self, step: Sequence[TokenPair]) -> list[PairBatch]:
        """Pack a step for the reference, without gradients."""
        role, ladder = self.config.reference, LADDER[self.device.kind]
        budget = role.max_tokens_per_microbatch_in_infer or 2 * TOKENS[self.device.kind]
        return pack(step, budget, role.infer_batch_size, ladder=ladder, ranks=layout(role).bins)
