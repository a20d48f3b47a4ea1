"""The peak of one device, by part, and the micro-batches that a run would choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from rather.config.adapters import reference_is_policy
from rather.config.schema import DPOConfig
from rather.config.strategies import Layout, layout
from rather.data.pack import pack
from rather.losses.objective import from_config
from rather.model.budget import LADDER, LEAST, PARKING_PAYS, REHEARSED, SHARE, TOKENS
from rather.model.head import CHUNK_BYTES
from rather.model.layers import LEVELS, Recompute
from rather.plan.activations import Running, forward_only, head, kept, passing
from rather.plan.state import State, itemsize, state_of

if TYPE_CHECKING:
    from rather.data.batch import PairBatch, TokenPair
    from rather.model.sizes import Sizes

WORKSPACE = {
    "cuda": 64 << 20,
    "cpu": 32 << 20,
}  # of the libraries: products, random numbers, pinned batches
SCALES = 1 / 64 + 4 / (64 * 256)  # bytes beside a weight of four bits


@dataclass(frozen=True)
class Parts:
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
    """The largest micro-batch of one rank, with gradients and without, and how many with gradients a step has."""

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
    """One device: cpu or cuda, and its memory in bytes as far as it is for this run."""

    kind: str
    memory: float


class Memory:
    """Of the policy's device, where the reference may lie as well."""

    def __init__(
        self, config: DPOConfig, sizes: Sizes, device: Device, *, reference: bool, compiled: bool
    ) -> None:
        self.config, self.sizes, self.device, self.compiled = config, sizes, device, compiled
        self.layout: Layout = layout(config.actor_train)
        self.args = config.actor_train.model_args
        self.with_reference = reference and from_config(config).needs_reference
        tp = self.layout.tp
        between = (
            sizes.hidden // tp if self.layout.sequence_parallel else sizes.hidden
        )  # of the residual stream
        heads, keys = sizes.heads // tp, max(1, sizes.key_heads // tp)
        # Widths as one rank of tp has them.
        self.part = replace(
            sizes, hidden=between, heads=heads, key_heads=keys, inner=sizes.inner // tp
        )

    def state(self, *, narrow: bool = False) -> State:
        return state_of(
            self.config,
            self.config.actor_train,
            self.device.kind,
            self.sizes.shapes,
            self.args,
            narrow=narrow,
        )

    def running(self, recompute: Recompute) -> Running:
        return Running(
            self.device.kind,
            itemsize(self.args, self.device.kind),
            recompute,
            self.compiled and self.device.kind == "cuda",
            self.args.has_adapter,
            self.layout.offload,
        )

    # --- what lies there ---

    def reference_bytes(self) -> float:
        """Of a second model on the same device."""
        config = self.config
        shares = (config.reference.device_mapping or [0]) == (
            config.actor_train.device_mapping or [0]
        )
        if not self.with_reference or not shares or reference_is_policy(config):
            return 0.0
        return self.of_reference()

    def of_reference(self) -> float:
        """On a device of its role, wherever that is."""
        role = self.config.reference
        state = state_of(self.config, role, self.device.kind, self.sizes.shapes, role.model_args)
        return state.own + (state.gathered if state.shards > 1 else 0.0)

    def resting(self, *, narrow: bool, parked: bool) -> Parts:
        """Weights and optimizer between two steps, gradients as they are in one."""
        state = self.state(narrow=narrow)
        own, quantised = state.by_part, self._quantised()
        on_host = self.layout.host and self.device.kind == "cuda"
        held = (
            Parts()
            if on_host
            else Parts(own.weights + quantised, own.gradients, own.master, own.moments)
        )
        reference = 0.0 if parked else self.reference_bytes()
        return replace(held, reference=reference, buffers=self._gathered(state))

    def _quantised(self) -> float:
        """What a base of four bits holds more than that: scales, and embeddings, head and norms as they are."""
        if not self.args.quantization:
            return 0.0
        inner, all_of_them = self.sizes.in_layers, self.sizes.weights
        return inner * SCALES + (all_of_them - inner) * (
            itemsize(self.args, self.device.kind) - 0.5
        )

    def _gathered(self, state: State) -> float:
        """Copies in the precision that is computed in, and those of layers on their way from one rank to another."""
        found, compute = self.layout, itemsize(self.args, self.device.kind)
        if found.dp * found.cp == 1:
            return 0.0
        whole, trained = (number / state.cut for number in (self.sizes.weights, state.trained))
        wide = (
            4 * trained if found.stage == 1 and compute < 4 else 0.0
        )  # waiting gradients are float32
        if found.stage == 0:
            return whole * compute if compute < 4 else 0.0
        if found.stage < 3:
            return state.gathered + wide - (compute * trained if wide else 0.0)
        layer = self.sizes.in_layers / self.sizes.layers / found.tp
        outside = (self.sizes.weights - self.sizes.in_layers) / found.tp
        return (2 * layer + outside) * compute + layer * 4

    # --- what comes and goes ---

    def peak(self, chosen: Chosen, work: Work) -> Parts:
        """By the moment in which most is held: at the head, in a layer, at the end of backward, without gradients."""
        moments = list(self._moments(chosen, work))
        return max(moments, key=lambda parts: parts.total)

    def _moments(self, chosen: Chosen, work: Work) -> Iterator[Parts]:
        part, running, found = self.part, self.running(chosen.recompute), self.layout
        resting = self.resting(narrow=chosen.narrow, parked=chosen.parked)
        before = (
            resting if work.batches > 1 else replace(resting, gradients=0.0)
        )  # the first one finds none
        tokens, rows = work.tokens / found.cp, work.rows / found.cp
        layers = -(-part.layers // found.pp) * min(
            found.pp, work.batches
        )  # of all micro-batches in a pipeline stage
        each = 0.0 if running.offload else kept(part, running)
        outside = (
            (4 / running.itemsize + 2) * part.hidden * running.itemsize
        )  # embedding, last norm
        held = tokens * (each * layers + outside)
        at_head, extra = (
            head(self.sizes, rows, running, found.tp),
            float(WORKSPACE[self.device.kind]),
        )
        yield replace(
            before,
            activations=held,
            logits=at_head.logits,
            buffers=before.buffers + at_head.beside + extra,
        )
        layer = tokens * passing(part, running) + extra
        of_head = 0.0 if running.adapter else part.of_head / found.tp * running.itemsize
        waiting = of_head if part.tied else 0.0  # for the gradient of the embedding
        yield replace(before, activations=held, buffers=before.buffers + layer + waiting)
        first = tokens * (
            kept(part, running) + outside
        )  # of the first layer, whose backward is the last
        yield replace(
            resting, activations=first, buffers=resting.buffers + layer + waiting + of_head
        )
        yield self._without_gradients(chosen, work, running, extra)

    def _without_gradients(
        self, chosen: Chosen, work: Work, running: Running, extra: float
    ) -> Parts:
        """The reference's turn, or an evaluation's."""
        here = self.resting(narrow=chosen.narrow, parked=False)
        tokens = work.seen / self.layout.cp
        logits = tokens * self.sizes.vocabulary / self.layout.tp * running.itemsize
        passing_by = tokens * forward_only(self.part, running) + extra
        chunk = min(logits, CHUNK_BYTES[self.device.kind])
        return replace(here, gradients=0.0, logits=chunk, buffers=here.buffers + passing_by)

    # --- what a run chooses ---

    def chosen(self, steps: Sequence[Sequence[TokenPair]], largest_pair: int) -> Chosen:
        """As `choose_budget` does by rehearsals, here by the same line computed."""
        told = self.config.actor_train.max_tokens_per_microbatch_in_train
        kind, found = self.device.kind, self.layout
        wanted, level = told or TOKENS[kind], found.recompute
        parked = self.config.reference.offload == "on" and self._may_park
        if kind == "cpu" or found.devices > 1 or found.canonical:
            usual: Recompute = "full" if kind == "cuda" else "none"
            chosen = Chosen(wanted, level or usual, narrow=False, parked=parked, fits=True)
            peak = self.peak(chosen, self.work(chosen, steps))
            return replace(chosen, fits=peak.total <= SHARE * self.device.memory)
        least = max(min(LEAST, wanted), largest_pair)
        needed = max(told or least, largest_pair)
        real = sum(batch.real_tokens for batch in self.packed_to_look_at(steps[0]))
        pays = real > PARKING_PAYS and self.config.reference.offload == "auto"
        for narrow in (False, True):
            for each in (level,) if level else LEVELS:
                for parks in dict.fromkeys((parked, parked or (pays and self._may_park))):
                    fitting = self._tokens_that_fit(each, narrow=narrow, parked=parks)
                    if fitting >= needed:
                        return Chosen(min(wanted, fitting), each, narrow, parks, fits=True)
        return Chosen(needed, level or "full", narrow=True, parked=parks, fits=False)

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
        room = (
            SHARE * (self.device.memory - resting) + resting
        )  # what lies there already was not free
        return max(0, (int((room - first) / each) + few) // LADDER["cuda"] * LADDER["cuda"])

    def work(self, chosen: Chosen, steps: Sequence[Sequence[TokenPair]]) -> Work:
        """By packing the first steps as the run will."""
        with_gradients, without = [], []
        for step in steps:
            with_gradients.append(self.packed(step, chosen))
            without += self.packed_to_look_at(step)
        largest = max(
            (batch for each in with_gradients for batch in each), key=lambda batch: len(batch.ids_N)
        )
        rows = max(len(batch.rows_U) for each in with_gradients for batch in each)
        batches = max(map(len, with_gradients)) // max(1, self.layout.dp)
        seen = max(len(batch.ids_N) for batch in without)
        return Work(len(largest.ids_N), rows, max(1, batches), seen)

    def packed(self, step: Sequence[TokenPair], chosen: Chosen) -> list[PairBatch]:
        return pack(step, chosen.tokens, ladder=LADDER[self.device.kind], ranks=self.layout.bins)

    def packed_to_look_at(self, step: Sequence[TokenPair]) -> list[PairBatch]:
        role = self.config.reference
        budget = role.max_tokens_per_microbatch_in_infer or 2 * TOKENS[self.device.kind]
        return pack(
            step,
            budget,
            role.infer_batch_size,
            ladder=LADDER[self.device.kind],
            ranks=layout(role).bins,
        )
