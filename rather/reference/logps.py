"""Reference log-probs of the pairs of a step: from the cache if it has them, else from the model.

An entry is found by what decides its value: the model's digest, the precision, the tokens and which
of them are scored. So every run over the same weights and pairs shares it, whatever its loss, seed
or learning rate.

The last bit of a log-prob depends on the micro-batch it was computed in. Three rules keep a resumed
run equal to an uninterrupted one: a micro-batch with any unknown entry runs whole, what is known
wins over what was just computed, and the values that a step used are in the run's own file before
the next checkpoint is saved.
"""

from __future__ import annotations

import json
import logging
import struct
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rather.config.run_config import DPOConfig
from rather.data.batch import Columns, TokenPair, scored_lengths
from rather.data.cache import Cache
from rather.data.shares import Batches, PairRows
from rather.errors import ConfigError
from rather.files import real_path, text_sha
from rather.losses.objective import PairLoss
from rather.model.files import model_digest, model_folder, tower_digest
from rather.parallel.load import precision_name
from rather.reference.logprob_cache import (
    NO_ENTRIES,
    BlockFile,
    Entries,
    Flags,
    Floats,
    Keys,
    Slots,
    Table,
    block_of,
    first_places,
    keys_of,
    refuse_foreign,
)

log = logging.getLogger(__name__)

SCORER = 1  # raise it when the same model and tokens would get other log-probs, beyond rounding
SEGMENTS = "*.logps"

# Asks the model for the log-probs of a step; what is returned waits for them.
Ask = Callable[[Batches], Callable[[], Columns]]
# Names a request, about so many pairs, to other processes.
Announce = Callable[["Request", int], object]


class Request(NamedTuple):
    """What the model is about to see of a step; a few bytes that name it to others."""

    wanted: bytes  # one bit for each pair
    shared: bool = False  # each pair is there twice, the second time with its shared tokens

    def of(self, batches: Batches) -> Batches:
        flags = np.unpackbits(np.frombuffer(self.wanted, np.uint8), count=len(batches.pairs))
        return batches.only(flags.astype(bool), shared=self.shared)


@dataclass
class Counts:
    """What the reference cost since the process started; the report stores these names."""

    pairs_from_cache: int = 0
    pairs_computed: int = 0
    forwards: int = 0  # steps, and parts of evaluation sets, that the model saw


# The values of one step, to be written once the device has computed them: their slots, those that
# were known before (else NaN), which of them are in the run's own file, all on their way to the
# host, and when they have arrived.
_Answer = tuple[Slots, Floats, Flags, Tensor, torch.cuda.Event | None]


def needed_columns(objective: PairLoss) -> list[str]:
    """Return the names of the columns that a loss needs of its reference."""
    return ["sum", "shared"] if "shared" in objective.token_columns else ["sum"]


class ReferenceLogps:
    """Returns reference log-probs, cached or computed. `ask` loads the model if needed."""

    def __init__(
        self,
        config: DPOConfig,
        objective: PairLoss,
        ask: Ask,
        device: str = "cpu",
        *,
        kind: str | None = None,
        announce: Announce = lambda _request, _pairs: None,
    ) -> None:
        """`device` is where columns are wanted, `kind` that of the devices which compute them.

        `announce` is called before `ask`, for other processes that compute along.
        """
        self.config = config
        self._ask_model = ask
        self.announce = announce
        self.device = device
        self.kind = kind or device
        self.needed = needed_columns(objective)
        self.counts = Counts()
        self.folder: Path | None = None  # the cache folder of this model
        self._table: Table | None = None
        self._own: BlockFile | None = None  # in the run folder
        # In the cache: one file per process, so that no lock is needed.
        self._segment: BlockFile | None = None
        self._answers: list[_Answer] = []
        self._waiting: list[bytes] = []  # blocks to write once the disk has space
        self._row_slots: dict[str, Slots] = {}  # of the pairs of sets; -1 if not yet known
        self._tower = b""
        self._opened = False
        self.is_empty = True  # nothing is cached

    # --- cached values ---

    def open(self, own_file: Path | None = None) -> None:
        """Read the cached values of this model; `own_file`, with those the run has used, wins."""
        self._opened = True
        config = self.config
        role = self.config.reference
        if config.sync_ref_model:
            log.info("sync_ref_model: the reference moves, so its log-probs are not cached")
        elif role.worker_cls is not None:
            log.info("reference.worker_cls: what a worker of your own computes is not cached")
        elif role.cache.enabled and (digest := self._digest()):
            dtype = precision_name(role, self.kind, config.rounding)
            adapter = self._adapter()
            identity = f"{digest} {adapter} {dtype} {SCORER}"
            self._key = blake2b(identity.encode(), digest_size=16)
            suffix = f"-{adapter[:12]}" if adapter else ""
            self.folder = config.reference_cache_dir / f"{digest[:24]}{suffix}-{dtype}-{SCORER}"
            self._own = BlockFile(own_file) if own_file else None
            self._segment = BlockFile(self.folder / f"{uuid.uuid4().hex}.logps")
            segments = sorted(self.folder.glob(SEGMENTS))
            for path in [self.folder, *segments]:
                refuse_foreign(path)
            shared = [BlockFile(path) for path in segments]
            self._table = Table()
            entries = [*map(self._read, [self._own, *shared])]
            self._table.load(np.concatenate(entries))
            self.is_empty = not any(map(len, entries))

    def _digest(self) -> str | None:
        role = self.config.reference
        root = self.config.reference_cache_dir
        folder = model_folder(role.model_path, role.model_args.revision)
        try:
            # Its memory of hashes as well: entries are found by them.
            refuse_foreign(real_path(root))
            root.mkdir(parents=True, exist_ok=True)
            if folder and (digest := model_digest(folder, Cache(root).sha)):
                # Of what only images reach: text pairs have the same keys with any tower.
                self._tower = (tower_digest(folder) or "").encode()
                return digest
        except OSError as error:
            raise ConfigError(
                f"reference.cache.path: {root} cannot be used ({error.strerror}); name another "
                "folder, or set reference.cache.enabled: false"
            ) from error
        name = role.model_path
        log.info("reference.cache: %s has no safetensors files here; nothing is cached", name)
        return None

    def _adapter(self) -> str:
        """Return a digest of what decides the log-probs besides the model's files, or ""."""
        config = self.config
        args = self.config.reference.model_args
        facts: list[Any] = []
        if args.adapter_name_or_path is not None:
            from rather.model.adapters import adapter_digest, adapter_folder

            facts.append(adapter_digest(adapter_folder(args.adapter_name_or_path)))
        elif config.keeps_start:  # PiSSA: the sum of its two parts is the base but for rounding
            facts += [config.actor_train.model_args.adapter_settings, config.seed]
        if args.quantization:
            facts.append(args.quantization)
        return text_sha(json.dumps(facts)) if facts else ""

    def _read(self, file: BlockFile | None) -> Entries:
        if file is None:
            return NO_ENTRIES
        # A run without a file of its own has nowhere to copy values to.
        entries, damaged = file.read(kept=self._own in (None, file))
        if damaged:
            log.warning(
                "%s: %s",
                file.path,
                f"{damaged} bytes are damaged; the log-probs they held are computed again",
            )
        return np.asarray(entries[np.isfinite(entries["sum"])])

    def knows(self, pairs: Sequence[TokenPair]) -> bool:
        """Return whether no pair needs the model."""
        return (
            self._table is not None
            and not self._unknown(self._table.get(self._slots(self._table, pairs))[0]).any()
        )

    def _unknown(self, known: Floats) -> Flags:
        """Return which pairs lack a value that the loss needs."""
        columns = known.reshape(len(self.needed), -1, 2)
        return np.asarray(np.isnan(columns).any(axis=(0, 2)))

    def _slots(self, table: Table, pairs: Sequence[TokenPair]) -> Slots:
        """Return the slots of "sum", chosen and rejected of each pair, then those of "shared".

        Those of a run's pairs are looked up once.
        """
        if not isinstance(pairs, PairRows):
            return table.slots(self._hashed(pairs))
        rows = pairs.rows
        columns = len(self.needed)
        if pairs.name not in self._row_slots:
            self._row_slots[pairs.name] = np.full((columns, len(pairs.dataset), 2), -1, np.int32)
        slots_of_rows = self._row_slots[pairs.name]
        slots = slots_of_rows.take(rows, axis=1)
        if len(missing := rows[slots[-1, :, 1] < 0]):
            new = table.slots(self._hashed(pairs.dataset.take(missing)))
            slots_of_rows[:, missing] = new.reshape(columns, -1, 2)
            slots = slots_of_rows.take(rows, axis=1)
        return np.asarray(slots.reshape(-1))

    def prepare(self, pairs: Sequence[TokenPair]) -> None:
        """Hash the keys of pairs before they are needed; may run in another thread."""
        if self._table is not None:
            self._slots(self._table, pairs)

    def _hashed(self, pairs: Sequence[TokenPair]) -> Keys:
        sums = []
        shared = []
        for pair, lengths in zip(pairs, scored_lengths(pairs), strict=True):
            prompt_key = self._key.copy()
            prompt_key.update(pair.prompt_key)
            if pair.images:
                prompt_key.update(self._tower)
            for response, scored in pair.answers:
                key = prompt_key.copy()
                key.update(response.data)
                numbers = [number for span in scored for number in span]
                # With the sizes, no two inputs are the same bytes.
                numbers += [len(pair.prompt) + len(response), len(numbers)]
                key.update(struct.pack(f"<{len(numbers)}I", *numbers))
                sums.append(key.digest())
                if "shared" in self.needed:
                    key.update(b"shared %d" % lengths.min())
                    shared.append(key.digest())
        return keys_of(b"".join(sums + shared))

    # --- the log-probs of a step ---

    def columns(self, batches: Batches) -> Columns:
        """Return log-probs of pairs in order, on the device; run batches with an unknown entry."""
        return self.ask(batches)()

    def ask(self, batches: Batches) -> Callable[[], Columns]:
        """Ask for the log-probs that are unknown; what is returned waits for them."""
        pairs = batches.pairs
        if not self._opened:
            self.open()
        if self._table is None:
            all_pairs = np.ones(len(pairs), bool)
            return partial(self._count, all_pairs, self._run(batches, all_pairs))
        slots = self._slots(self._table, pairs)
        sums, is_stored = self._table.get(slots)
        unknown = self._unknown(sums)
        computed: Callable[[], Columns] | None = None
        if unknown.any():
            computed = self._run(batches, unknown, shared="shared" in self.needed)
        answer = partial(self._answer, slots, sums, is_stored, computed)
        return partial(self._count, unknown, answer)

    def _count(self, unknown: Flags, answer: Callable[[], Columns]) -> Columns:
        columns = answer()
        self.counts.pairs_computed += int(unknown.sum())
        self.counts.pairs_from_cache += int((~unknown).sum())
        self.counts.forwards += int(unknown.any())
        return columns

    def _answer(
        self, slots: Slots, known: Floats, kept: Flags, asked: Callable[[], Columns] | None
    ) -> Columns:
        """Return known and computed values, and remember both for `keep`."""
        values = self._to_device(known)
        host = torch.from_numpy(known)
        arrived = None
        if asked:
            computed = self._computed(slots, asked()["sum"])
            is_new = np.isnan(known).all()  # as in a first epoch
            values = host = computed if is_new else torch.where(values.isnan(), computed, values)
            if values.is_cuda:
                host = values.to("cpu", non_blocking=True)
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record()  # `keep` waits for it
        self._answers.append((slots, known, kept, host, arrived))
        return dict(zip(self.needed, values.view(len(self.needed), -1, 2), strict=True))

    def _run(
        self, batches: Batches, wanted: Flags, *, shared: bool = False
    ) -> Callable[[], Columns]:
        request = Request(np.packbits(wanted).tobytes(), shared)
        self.announce(request, len(batches.pairs))
        return self._ask_model(request.of(batches))

    def _computed(self, slots: Slots, sums: Tensor) -> Tensor:
        """Return the values of slots, NaN for those that the model did not compute.

        A response that occurs twice has one value: that of the first pair.
        """
        sums = sums.to(self.device, non_blocking=True)
        values = sums.view(-1, len(self.needed), 2).transpose(0, 1).reshape(-1)
        first = first_places(slots)
        return values if first is None else values[self._to_device(first)]

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        """Copy to the device without waiting for it."""
        tensor = torch.from_numpy(array)
        if self.device == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    # --- writing ---

    def keep(self) -> None:
        """Write all values used since the last call to the run's file, then to the shared cache."""
        answers, self._answers = self._answers, []
        for slots, sums_before, is_stored, host, arrived in answers:
            if arrived:
                arrived.synchronize()
            values = host.numpy()
            # A value that is not finite may come from a transient fault and must not be stored.
            is_used = np.isfinite(values) & ~is_stored
            if is_used.any():
                self._write(slots[is_used], values[is_used], np.isnan(sums_before[is_used]))

    def _write(self, slots: Slots, values: Floats, is_new: Flags) -> None:
        """Write to the files. If the disk is full the run continues, but saves no checkpoint."""
        assert self._table is not None
        is_first = not self._waiting
        keys = self._table.keys(slots)
        block = block_of(keys, values)
        self._waiting.append(block)
        try:
            self._write_waiting()
        except OSError as error:
            if is_first and self._own:
                path = self._own.path
                reason = error.strerror
                log.warning(
                    "%s: cannot be written (%s); keeping the values in memory.", path, reason
                )
        try:
            if self._segment and is_new.any():
                all_new = is_new.all()
                self._segment.append(block if all_new else block_of(keys[is_new], values[is_new]))
        except OSError as error:
            reason = error.strerror
            log.warning("%s: cannot be written (%s); nothing more is cached", self.folder, reason)
            self._segment = None
        self._table.set(slots, values)

    def _write_waiting(self) -> None:
        if self._own and self._waiting:
            self._own.append(b"".join(self._waiting))
        self._waiting = []

    def sync(self) -> None:
        """Write all that the run has used to the disk: a checkpoint may rely on it."""
        self._write_waiting()
        if self._own:
            self._own.sync()

    def report(self) -> dict[str, Any]:
        return {"cache": str(self.folder) if self.folder else None, **asdict(self.counts)}

    def close(self) -> None:
        for file in (self._own, self._segment):
            if file:
                file.close()
