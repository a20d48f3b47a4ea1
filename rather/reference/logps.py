"""Reference log-probs of the pairs of a step: from the cache where it has them, else from the
model.

An entry is found by what decides its value: the model's digest, the precision, the tokens and which
of them are scored. So every run over the same weights and pairs shares it, whatever its loss,
numbers, seed or learning rate.

The last bit of a log-prob depends on the micro-batch it was computed in. Three rules keep a resumed
run equal to an uninterrupted one: a micro-batch with any unknown entry runs whole, what is known
wins over what was just computed, and the values that a step used lie in the run's own file before
the next checkpoint is saved.
"""

from __future__ import annotations

import json
import logging
import struct
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rather.config.schema import DPOConfig
from rather.data.batch import Columns, PairBatch, Span, TokenPair
from rather.data.cache import Cache, text_sha
from rather.errors import ConfigError
from rather.losses.objective import PairLoss
from rather.model.files import model_digest, model_folder
from rather.parallel.load import compute_dtype, device_of
from rather.reference.logprob_cache import (
    UNKNOWN,
    BlockFile,
    Found,
    Places,
    Records,
    Stored,
    Table,
    TokenLayout,
    cells_of,
    sum_by_cell,
    token_by_token,
)

log = logging.getLogger(__name__)

SCORER = 1  # raised when the same model and tokens would get other log-probs than before, beyond rounding
NO_ADAPTER = ""  # in the place of an adapter's digest in the key
SEGMENTS = "*.logps"
OFFSET_BITS = 44  # a place of token log-probs: the file's number above, the offset in it below

Compute = Callable[[Sequence[PairBatch]], Columns]


@dataclass
class Counts:
    """What the reference cost since the process started."""

    pairs_from_cache: int = 0
    pairs_computed: int = 0
    forwards: int = 0  # micro-batches that the model saw


@dataclass(frozen=True)
class _Asked:
    """What one call asked for and got, to be written down once the device has computed it."""

    keys: Sequence[bytes]  # chosen and rejected response of the first pair, of the second, ...
    lengths: Places  # scored tokens of each
    found: Found
    bins: Sequence[Places]  # for each micro-batch that ran, which of the keys it answered
    sums: Tensor | None  # by key, on its way to the host
    tokens: Tensor | None  # of all bins, one after another
    arrived: torch.cuda.Event | None


class ReferenceLogps:
    """Answers for the reference model. `compute` asks the model itself, and loads it if need be."""

    def __init__(self, config: DPOConfig, objective: PairLoss, compute: Compute) -> None:
        self.config, self.compute = config, compute
        self.device = device_of(config.reference)
        self.needs_tokens = "shared" in objective.token_columns
        self.keeps_tokens = self.needs_tokens or bool(config.reference.cache.per_token)
        self.counts = Counts()
        self.folder: Path | None = None  # of the entries of this model
        self._table: Table | None = None
        self._files: list[BlockFile] = []  # by their number in places of token log-probs
        self._own: BlockFile | None = None  # in the run folder
        self._segment: BlockFile | None = (
            None  # in the cache: one file per process, so that no lock is needed
        )
        self._asked: list[_Asked] = []
        self._waiting: list[Records] = []  # for room on the disk
        self._opened = False

    # --- what is known ---

    def open(self, own_file: Path | None = None) -> None:
        """Reads what is known of this model; `own_file` holds the values that the run used and
        wins.
        """
        self._opened = True
        config = self.config
        if config.sync_ref_model:
            log.info("sync_ref_model: the reference moves, so its log-probs are not cached")
        elif config.reference.worker_cls is not None:
            log.info("reference.worker_cls: what a worker of your own computes is not cached")
        elif config.reference.cache.enabled and (digest := self._digest()):
            dtype = str(compute_dtype(config.reference.model_args, self.device)).removeprefix(
                "torch."
            )
            adapter = self._adapter()
            identity = f"{digest} {adapter} {dtype} {SCORER}"
            self._start = blake2b(identity.encode(), digest_size=16)
            suffix = f"-{adapter[:12]}" if adapter else ""
            self.folder = config.reference_cache_dir / f"{digest[:24]}{suffix}-{dtype}-{SCORER}"
            self._read(own_file)
            self._segment = self._numbered(self.folder / f"{uuid.uuid4().hex}.logps")

    def _digest(self) -> str | None:
        role, root = self.config.reference, self.config.reference_cache_dir
        folder = model_folder(role.model_path, role.model_args.revision)
        try:
            digest = model_digest(folder, Cache(root).sha) if folder else None
        except OSError as error:
            raise ConfigError(
                f"reference.cache.path: {root} cannot be used ({error.strerror}); name another folder, or set "
                "reference.cache.enabled: false"
            ) from error
        if digest is None:
            log.info(
                "reference.cache: the files of %s are not here yet; nothing is cached",
                role.model_path,
            )
        return digest

    def _adapter(self) -> str:
        """What else than the model's files decides the log-probs, as a digest."""
        config, args = self.config, self.config.reference.model_args
        facts: list[Any] = []
        if args.adapter_name_or_path is not None:
            from rather.model.adapters import adapter_digest, adapter_folder

            facts.append(adapter_digest(adapter_folder(args.adapter_name_or_path)))
        elif config.keeps_start:  # PiSSA: the sum of its two parts is the base but for rounding
            facts += [config.actor_train.model_args.adapter_settings, config.seed]
        if args.quantization:
            facts.append(args.quantization)
        return text_sha(json.dumps(facts)) if facts else NO_ADAPTER

    def _read(self, own_file: Path | None) -> None:
        assert self.folder is not None
        self._table = Table(with_places=self.needs_tokens)
        if own_file:
            self._own = self._numbered(own_file)
            self._load([self._own], kept=True)
        self._load(
            [self._numbered(path) for path in sorted(self.folder.glob(SEGMENTS))], kept=False
        )

    def _numbered(self, path: Path) -> BlockFile:
        file = BlockFile(path)
        self._files.append(file)
        return file

    def _load(self, files: Sequence[BlockFile], *, kept: bool) -> None:
        assert self._table is not None
        parts = []
        for file in files:
            stored = file.read()
            if stored.damaged:
                damaged = f"{stored.damaged} bytes are damaged"
                log.warning(
                    "%s: %s; the log-probs they held are computed again", file.path, damaged
                )
            if self.needs_tokens:  # an entry without them is of no use
                stored = self._located(file, stored.only(stored.places >= 0))
            parts.append(stored.only(np.isfinite(stored.sums)))
        if parts:
            self._table.load(Stored.joined(parts), kept=kept)

    def _located(self, file: BlockFile, stored: Stored) -> Stored:
        return stored._replace(places=stored.places | self._files.index(file) << OFFSET_BITS)

    @property
    def is_empty(self) -> bool:
        return not self._table

    def knows(self, pairs: Sequence[TokenPair]) -> bool:
        """Whether no pair needs the model."""
        return (
            self._table is not None
            and not (self._table.find(self._keys(pairs)).rows == UNKNOWN).any()
        )

    def _keys(self, pairs: Sequence[TokenPair]) -> list[bytes]:
        keys = []
        for pair in pairs:
            begun = self._start.copy()
            begun.update(pair.prompt.data)
            for response, scored in (
                (pair.chosen, pair.chosen_scored),
                (pair.rejected, pair.rejected_scored),
            ):
                key = begun.copy()
                key.update(response.data)
                numbers = [number for span in scored for number in span]
                sizes = (
                    len(pair.prompt) + len(response),
                    len(numbers),
                )  # so that no two inputs are the same bytes
                key.update(struct.pack(f"<{len(numbers) + 2}I", *numbers, *sizes))
                keys.append(key.digest())
        return keys

    # --- the log-probs of a step ---

    def columns(self, pairs: Sequence[TokenPair], batches: Sequence[PairBatch]) -> Columns:
        """Log-probs of the pairs in their order, on the device. Only micro-batches with an unknown
        entry run.
        """
        if not self._opened:
            self.open()
        if self._table is None:
            self._count(pairs=len(pairs), known=0, forwards=len(batches))
            return self.compute(batches)
        keys = self._keys(pairs)
        found = self._table.find(keys)
        lengths = np.array(
            [scored_tokens(s) for p in pairs for s in (p.chosen_scored, p.rejected_scored)],
            np.int64,
        )
        unknown = found.rows == UNKNOWN
        pair_is_unknown = unknown.reshape(-1, 2).any(axis=1)
        running = [batch for batch in batches if pair_is_unknown[batch.pair_P.numpy()].any()]
        self._count(pairs=len(pairs), known=int((~pair_is_unknown).sum()), forwards=len(running))
        columns = {"sum": self._moved(torch.from_numpy(found.sums))}
        if self.needs_tokens:
            columns["shared"] = self._moved(torch.from_numpy(self._stored_shared(found, lengths)))
        bins = [cells_of(batch) for batch in running]
        sums = tokens = None
        if running:
            fresh, tokens = self._computed(keys, lengths, running, bins)
            is_unknown = self._moved(torch.from_numpy(unknown))
            columns = {
                name: torch.where(is_unknown, fresh[name], known) for name, known in columns.items()
            }
            sums = columns["sum"]
        self._asked.append(_on_its_way(keys, lengths, found, bins, sums, tokens))
        return {name: column.view(-1, 2) for name, column in columns.items()}

    def _count(self, *, pairs: int, known: int, forwards: int) -> None:
        self.counts.pairs_from_cache += known
        self.counts.pairs_computed += pairs - known
        self.counts.forwards += forwards

    def _computed(
        self,
        keys: Sequence[bytes],
        lengths: Places,
        running: Sequence[PairBatch],
        bins: Sequence[Places],
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Columns by key, and token log-probs if they are kept. A response that occurs twice has
        one value.
        """
        first: dict[bytes, int] = {}
        computed = np.concatenate(bins)
        for cell in computed.tolist():
            first.setdefault(keys[cell], cell)
        source = np.array([first.get(key, 0) for key in keys], np.int64)
        if not self.keeps_tokens:
            answer = self._asked_model(running).reshape(-1)  # by pair, ascending
            by_key = torch.zeros(len(keys), dtype=torch.float64, device=self.device)
            by_key.index_copy_(0, self._moved(torch.from_numpy(np.sort(computed))), answer)
            return {"sum": by_key[self._moved(torch.from_numpy(source))]}, None
        tokens = self._asked_model(token_by_token(running))[:, 0]
        layout = TokenLayout.of(lengths, bins, source)
        values = tokens[self._moved(layout.token)]
        cell, within = self._moved(layout.cell), self._moved(layout.within)
        columns = {
            "sum": sum_by_cell(values, cell, len(keys)),
            "shared": sum_by_cell(values * within, cell, len(keys)),
        }
        return columns, tokens

    def _asked_model(self, batches: Sequence[PairBatch]) -> Tensor:
        return self.compute(batches)["sum"].to(self.device, non_blocking=True)

    def _stored_shared(self, found: Found, lengths: Places) -> NDArray[np.float64]:
        """Sums within the shorter length of each pair, from token log-probs on disk; 0 where there
        are none.
        """
        shorter = lengths.reshape(-1, 2).min(axis=1).repeat(2)
        sums = np.zeros(len(lengths))
        for cell in np.flatnonzero((found.rows != UNKNOWN) & (shorter > 0)):
            tokens = self._tokens(int(found.places[cell]), int(shorter[cell]))
            sums[cell] = tokens.astype(np.float64).cumsum()[
                -1
            ]  # one after another, as the model's own are added
        return sums

    def _tokens(self, place: int, count: int) -> NDArray[np.float32]:
        return self._files[place >> OFFSET_BITS].tokens(place & ((1 << OFFSET_BITS) - 1), count)

    def _moved(self, tensor: Tensor) -> Tensor:
        """On the device, without waiting for it."""
        if self.device == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    # --- what is written ---

    def keep(self) -> None:
        """Writes down every value that was given since the last call: first for this run, then for
        all.
        """
        asked, self._asked = self._asked, []
        for each in asked:
            if each.arrived:
                each.arrived.synchronize()
            self._keep_known(each)
        for each in asked:
            for records in self._new_records(each):
                self._keep_new(records)

    def sync(self) -> None:
        """All that was kept for this run is on the disk: a checkpoint may rely on it."""
        if self._own:
            self._write_waiting(self._own)
            self._own.sync()

    def _keep_known(self, each: _Asked) -> None:
        """Copies into the run's file what only the cache knew."""
        assert self._table is not None
        if self._own is None:
            return
        cells = np.flatnonzero(self._table.unkept(each.found.rows))
        if not len(cells):
            return
        lengths = each.lengths[cells]
        tokens = None
        if self.needs_tokens:
            places = each.found.places[cells].tolist()
            tokens = np.concatenate(
                [self._tokens(p, n) for p, n in zip(places, lengths.tolist(), strict=True)]
            )
        keys = [each.keys[cell] for cell in cells.tolist()]
        self._write_own(Records(keys, each.found.sums[cells], lengths.astype(np.uint32), tokens))
        self._table.mark_kept(each.found.rows[cells])

    def _new_records(self, each: _Asked) -> list[Records]:
        """One block of records for each micro-batch that ran."""
        if each.sums is None:
            return []
        sums, tokens = each.sums.numpy(), None if each.tokens is None else each.tokens.numpy()
        written: set[bytes] = set()
        blocks, start = [], 0
        for cells in each.bins:
            starts = start + each.lengths[cells].cumsum() - each.lengths[cells]
            start += int(each.lengths[cells].sum())
            new = []
            for i, cell in enumerate(cells.tolist()):
                if each.found.rows[cell] != UNKNOWN or not np.isfinite(sums[cell]):
                    continue  # known; or no number, which a passing fault made and which must not outlive it
                if each.keys[cell] not in written:
                    written.add(each.keys[cell])
                    new.append(i)
            mine, counts = cells[new], each.lengths[cells[new]]
            own_tokens = None
            if tokens is not None and new:
                own_tokens = np.concatenate(
                    [tokens[at : at + n] for at, n in zip(starts[new], counts, strict=True)]
                )
            if new:
                keys = [each.keys[cell] for cell in mine.tolist()]
                blocks.append(Records(keys, sums[mine], counts.astype(np.uint32), own_tokens))
        return blocks

    def _keep_new(self, records: Records) -> None:
        assert self._table is not None
        written = [
            stored for stored in (self._write_own(records), self._write_shared(records)) if stored
        ]
        if written:
            self._table.add(records.keys, records.sums, written[0].places)

    def _write_own(self, records: Records) -> Stored | None:
        """Write what waits. If the disk is full the run continues, but saves no checkpoint."""
        if self._own is None:
            return None
        self._waiting.append(records)
        try:
            stored = self._write_waiting(self._own)
        except OSError as error:
            if len(self._waiting) == 1:
                log.warning(
                    "%s: cannot be written (%s); its values wait.", self._own.path, error.strerror
                )
            return None if self.needs_tokens else Stored.unplaced(records)
        return self._located(self._own, stored) if stored else None

    def _write_waiting(self, own: BlockFile) -> Stored | None:
        """The last one as it is stored."""
        stored = None
        while self._waiting:
            stored = own.append(self._waiting[0])
            del self._waiting[0]
        return stored

    def _write_shared(self, records: Records) -> Stored | None:
        """Write to the shared cache; if the disk is full the run continues without it."""
        if self._segment is None:
            return None
        try:
            stored = self._segment.append(records)
            return self._located(self._segment, stored)
        except OSError as error:
            log.warning(
                "%s: cannot be written (%s); nothing more is cached", self.folder, error.strerror
            )
            self._segment = None
            return None

    # --- checks and numbers ---

    def recheck(
        self, pairs: Sequence[TokenPair], batches: Sequence[PairBatch], tolerance: float
    ) -> None:
        """Compares known values of pairs with the model; stops where one differs by more per token
        than rounding.
        """
        assert self._table is not None
        known = torch.from_numpy(self._table.find(self._keys(pairs)).sums).view(-1, 2)
        lengths = [
            [scored_tokens(pair.chosen_scored), scored_tokens(pair.rejected_scored)]
            for pair in pairs
        ]
        computed = self.compute(batches)["sum"].cpu()
        self.counts.forwards += len(batches)
        worst = float(((known - computed).abs() / torch.tensor(lengths).clamp(min=1)).max())
        if not worst <= tolerance:
            raise ConfigError(
                f"reference.cache.recheck: of {len(pairs)} cached pairs, one differs from the reference by {worst:.2g} "
                f"per token. The cache holds values of something else: delete {self.folder} and start again."
            )
        log.info(
            "reference.cache.recheck: %d cached pairs are as the reference computes them",
            len(pairs),
        )

    def report(self) -> dict[str, Any]:
        counts = self.counts
        return {
            "cache": str(self.folder) if self.folder else None,
            "pairs_from_cache": counts.pairs_from_cache,
            "pairs_computed": counts.pairs_computed,
            "forwards": counts.forwards,
        }

    def close(self) -> None:
        for file in self._files:
            file.close()


def _on_its_way(
    keys: Sequence[bytes],
    lengths: Places,
    found: Found,
    bins: Sequence[Places],
    sums: Tensor | None,
    tokens: Tensor | None,
) -> _Asked:
    """Starts the copy to the host, which `keep` waits for."""
    if sums is None or not sums.is_cuda:
        return _Asked(keys, lengths, found, bins, sums, tokens, None)
    sums = sums.to("cpu", non_blocking=True)
    tokens = None if tokens is None else tokens.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return _Asked(keys, lengths, found, bins, sums, tokens, arrived)


def scored_tokens(spans: Sequence[Span]) -> int:
    return sum(end - first for first, end in spans)
