"""Tokenised pairs in a memory-mapped Arrow file; nothing is loaded before it is needed.

This uses pyarrow without the `datasets` library. One file, rows by number, and memory that does
not grow with them are all that is needed; `datasets` adds its own cache and fingerprints, a
second of import, and a copy of each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rather.data.json_rows import DropReason
from rather.data.messages import Json
from rather.data.read import Row, find_sources, rows_of
from rather.data.sampler import Part, PicklesFields
from rather.errors import DataError
from rather.files import file_sha, text_sha

if TYPE_CHECKING:
    from rather.data.batch import PromptImage, TokenPair
    from rather.data.formats import TextPair

ROWS_OF_A_FILE = 1 << 36  # at most; 2^17 files are then exact in float64
Ints = NDArray[np.int64]
IDS = ("prompt", "chosen", "rejected")
LISTS = (*IDS, "chosen_scored", "rejected_scored")
NUMBERS = ("weight", "margin", "soft_label")
# Columns of a file hold these of single answers, which have neither margin nor soft label.
OF_SINGLE_ANSWERS = {"label": "soft_label", "score": "margin"}
HASHES = (
    "prompt_hash", "pair_hash", "swapped_hash", "normal_prompt", "normal_chosen", "normal_rejected",
)  # fmt: skip
SCHEMA = pa.schema(
    [
        *((name, pa.list_(pa.int32())) for name in LISTS),
        *((name, pa.float64()) for name in NUMBERS),
        ("id", pa.string()),
        ("source", pa.int32()),
        ("number", pa.int64()),
        *((name, pa.uint64()) for name in HASHES),
    ]
)

IMAGE = [  # a path, or the content of the file
    ("digest", pa.string()), ("path", pa.string()), ("content", pa.binary()),
    ("grid", pa.list_(pa.int32())), ("tokens", pa.int32()),
]  # fmt: skip
IMAGE_TOKEN = b"image_token"  # metadata of a file
IMAGE_SCHEMA = SCHEMA.append(pa.field("images", pa.list_(pa.struct(IMAGE))))  # of pairs with images


def stored_numbers(pair: TextPair | TokenPair) -> dict[str, float]:
    """Return the columns of numbers that a file has for a pair or a single answer."""
    numbers = {name: getattr(pair, name) for name in NUMBERS}
    if not len(pair.rejected):
        numbers |= {column: getattr(pair, name) for name, column in OF_SINGLE_ANSWERS.items()}
    return numbers


class Correction(NamedTuple):
    """A change of one pair that `data_args.corrections` asks for."""

    weight: float = 1.0  # times the pair's own; 0 drops it
    flip: bool = False  # the rejected answer is the better one

    def apply(self, pair: TokenPair) -> TokenPair:
        if self == NO_CORRECTION:
            return pair
        pair = replace(pair, weight=pair.weight * self.weight)
        if not self.flip:
            return pair
        return replace(
            pair,
            chosen=pair.rejected,
            rejected=pair.chosen,
            chosen_scored=pair.rejected_scored,
            rejected_scored=pair.chosen_scored,
            margin=-pair.margin,
            soft_label=1 - pair.soft_label,
        )


NO_CORRECTION = Correction()


def spans_of(scored: Any) -> tuple[tuple[int, int], ...]:
    """Return the half-open spans of a mask's ones; nothing predicts the first token."""
    edges = np.flatnonzero(np.diff([0, *scored[1:], 0])) + 1
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def predicted_spans(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the spans that are not empty, without token 0, which nothing predicts."""
    return tuple((max(first, 1), end) for first, end in spans if end > max(first, 1))


class _Batch:
    """A record batch as numpy views: row i of a list is values[offsets[i]:offsets[i + 1]]."""

    def __init__(self, batch: Any) -> None:
        lists = [batch.column(name) for name in LISTS]
        self.lists = [(column.offsets.to_numpy(), column.values.to_numpy()) for column in lists]
        self.numbers = [batch.column(name).to_numpy() for name in NUMBERS]
        self.ids = batch.column("id")
        self.digests = batch.column("pair_hash").to_numpy()
        source = batch.column("source").to_numpy().astype(np.int64)
        self.groups = source * ROWS_OF_A_FILE + batch.column("number").to_numpy()
        self.images = batch.column("images") if "images" in batch.schema.names else None

    @property
    def scored(self) -> Ints:
        """The number of scored tokens of both answers of each row, [rows, 2]."""
        columns = []
        for offsets, values in self.lists[len(IDS) :]:  # first, end, first, end, ...
            total = np.append(0, (values[1::2] - values[::2]).cumsum(dtype=np.int64))
            columns.append(np.diff(total[offsets // 2]))
        return np.stack(columns, axis=1)

    def check(self) -> None:
        """Raise ValueError for ids and spans that no tokeniser makes."""
        prompt, *answers, first, second = self.lists
        if any(len(ids) and ids.min() < 0 for _, ids in (prompt, *answers)):
            raise ValueError("a token id is negative")
        if not np.isfinite(self.numbers[NUMBERS.index("weight")]).all():
            raise ValueError("a weight is not finite")
        for answer, (offsets, edges) in zip(answers, (first, second), strict=True):
            if (offsets % 2).any():
                raise ValueError("a scored span has no end")
            lengths = np.diff(prompt[0]) + np.diff(answer[0])
            ends = np.repeat(lengths, np.diff(offsets) // 2)
            edges = edges[offsets[0] : offsets[-1]]
            starts = edges[::2]
            stops = edges[1::2]
            if (starts < 1).any() or (starts >= stops).any() or (stops > ends).any():
                raise ValueError("a scored span is outside its sequence")
        if self.images is not None:
            for name, _ in IMAGE:
                if self.images.flatten().field(name).null_count:
                    raise ValueError("an image has nulls")

    def pair(self, i: int) -> TokenPair:
        # Here, because only who takes pairs needs torch.
        from rather.data.batch import PromptImage, TokenPair

        rows = (values[offsets[i] : offsets[i + 1]] for offsets, values in self.lists)
        prompt, chosen, rejected, *scored = rows
        first, second = (tuple(zip(s[::2].tolist(), s[1::2].tolist(), strict=True)) for s in scored)
        numbers: dict[str, Any] = {
            name: float(column[i]) for name, column in zip(NUMBERS, self.numbers, strict=True)
        }
        if not len(rejected):
            for name, column in OF_SINGLE_ANSWERS.items():
                numbers[name] = numbers.pop(column)
        images = []
        for image in self.images[i].as_py() if self.images is not None else ():
            source = image["path"] or image["content"]
            grid = tuple(image["grid"])
            images.append(PromptImage(image["digest"], source, grid, image["tokens"]))
        return TokenPair(
            prompt, chosen, rejected, first, second,
            id=self.ids[i].as_py(), digest=int(self.digests[i]), group=int(self.groups[i]),
            images=tuple(images), **numbers,
        )  # fmt: skip


@dataclass(eq=False)
class PairFile(PicklesFields):
    """The Arrow file itself. Reading raises OSError or ArrowInvalid if it is damaged."""

    path: Path

    @cached_property
    def table(self) -> Any:
        return pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()  # maps, copies nothing

    @cached_property
    def batches(self) -> list[_Batch]:
        return [_Batch(batch) for batch in self.table.to_batches()]

    @cached_property
    def starts(self) -> Ints:
        """The first row of each batch, and the end of the last."""
        return np.cumsum([0, *(batch.num_rows for batch in self.table.to_batches())])

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def check(self) -> None:
        """Raise ValueError or ArrowInvalid unless every pair can be taken. Files may be crafted."""
        if self.table.nbytes > self.path.stat().st_size:  # compressed, or a batch listed twice
            raise ValueError("its columns are larger than the file")
        self.table.validate(full=True)
        for batch in self.table.to_batches():
            columns = [*batch.columns, *(batch.column(name).values for name in LISTS)]
            if any(column.null_count for column in columns):
                raise ValueError("a column has nulls")
            _Batch(batch).check()


def _joined(pair: TokenPair, other: TokenPair, limit: int) -> TokenPair:
    """Return a single answer with the answer of another as its partner, within a limit."""
    start = len(pair.prompt)
    shift = start - len(other.prompt)
    spans = [(max(a + shift, start), min(b + shift, limit)) for a, b in other.chosen_scored]
    scored = predicted_spans(spans)
    return replace(pair, partner=other.chosen[: limit - start], partner_scored=scored)


@dataclass(eq=False)
class PairDataset(PicklesFields):
    """Some or all pairs of a file, in the order of the data files.

    `corrections` have the digest of a pair. `take` applies them, columns do not have them.
    `partners` are, for each single answer, the one whose answer follows its prompt as `partner`,
    and the longest sequence.
    """

    file: PairFile
    fingerprint: str
    parts: tuple[Part, ...]
    rows: Ints | None = None
    corrections: Mapping[int, Correction] = field(default_factory=dict)
    partners: tuple[Ints, int] | None = None

    def __len__(self) -> int:
        return len(self.file) if self.rows is None else len(self.rows)

    @cached_property
    def tokens(self) -> Ints:
        """What each pair costs in a micro-batch: prompt once, both answers."""
        total = np.sum([self.lengths(name) for name in IDS], axis=0, dtype=np.int64)
        if self.partners:
            partners, _ = self.partners
            total = total + self.lengths("chosen")[partners]
        return np.asarray(total)

    @cached_property
    def digests(self) -> NDArray[np.uint64]:
        return self.column("pair_hash")

    @cached_property
    def has_images(self) -> bool:
        """Whether a pair of this set has an image."""
        return bool(self.image_tokens.any())

    @cached_property
    def image_tokens(self) -> Ints:
        """How many tokens of each prompt are of images."""
        if "images" not in self.file.table.schema.names:
            return np.zeros(len(self), np.int64)
        column = self.file.table.column("images").combine_chunks()
        tokens = column.flatten().field("tokens").to_numpy()
        total = np.append(0, tokens.cumsum(dtype=np.int64))
        return self._own(np.diff(total[np.append(0, self._lengths("images").cumsum())]))

    @cached_property
    def image_token(self) -> int | None:
        """The id that stands for each feature of an image; None in a set of text."""
        token = (self.file.table.schema.metadata or {}).get(IMAGE_TOKEN)
        return None if token is None else int(token)

    def images(self) -> Iterator[PromptImage]:
        """Yield the images of this set, each once."""
        seen: set[str] = set()
        for number in np.flatnonzero(self.image_tokens).tolist():
            for image in self._take([number])[0].images:
                if image.digest not in seen:
                    seen.add(image.digest)
                    yield image

    @cached_property
    def scored(self) -> Ints:
        """The number of scored tokens of both answers of each pair of a file, [pairs, 2]."""
        counts = np.concatenate([batch.scored for batch in self.file.batches])
        counts = self._own(counts)
        flipped = [digest for digest, correction in self.corrections.items() if correction.flip]
        is_flipped = np.isin(self.digests, np.array(flipped, np.uint64))
        counts[is_flipped] = counts[is_flipped, ::-1]
        return counts

    @cached_property
    def groups(self) -> Ints | None:
        """The first pair of each row of the data files; None if no row gave more than one."""
        begins = np.zeros(len(self.file), bool)
        for name in ("source", "number"):
            begins |= np.diff(self.file.table.column(name).to_numpy(), prepend=-1) != 0
        if self.rows is not None:
            begins = np.diff(np.cumsum(begins, dtype=np.int32)[self.rows], prepend=-1) != 0
        return None if begins.all() else np.flatnonzero(begins)

    def take(self, indices: Iterable[int]) -> list[TokenPair]:
        """Return the pairs with these numbers."""
        if self.partners is None:
            return self._take(indices)
        numbers = np.fromiter(indices, np.int64)
        partners, limit = self.partners
        couples = zip(self._take(numbers), self._take(partners[numbers]), strict=True)
        return [_joined(pair, partner, limit) for pair, partner in couples]

    def _take(self, indices: Iterable[int]) -> list[TokenPair]:
        numbers = np.fromiter(indices, np.int64)
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= len(self)):
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} of a set of {len(self)}")
        rows = numbers if self.rows is None else self.rows[numbers]
        batches = np.searchsorted(self.file.starts, rows, side="right") - 1
        rows_in_batch = rows - self.file.starts[batches]
        pairs = [
            self.file.batches[batch].pair(i)
            for batch, i in zip(batches.tolist(), rows_in_batch.tolist(), strict=True)
        ]
        return [self.corrections.get(pair.digest, NO_CORRECTION).apply(pair) for pair in pairs]

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of numbers; `label` and `score` are those of single answers."""
        name = OF_SINGLE_ANSWERS.get(name, name)
        return self._own(self.file.table.column(name).to_numpy())

    def lengths(self, name: str) -> NDArray[np.int32]:
        """Return how long each pair's list in a column is."""
        return self._own(self._lengths(name))

    def _lengths(self, name: str) -> NDArray[np.int32]:
        import pyarrow.compute as pc  # slow to import, and tokenising processes do without

        return np.asarray(pc.list_value_length(self.file.table.column(name)).to_numpy())

    def _own(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return those of this set from the values of all pairs of the file."""
        return np.asarray(values if self.rows is None else values[self.rows])

    @cached_property
    def largest_id(self) -> int:
        """The largest token id of the file."""
        largest = 0
        for batch in self.file.batches:
            for _, ids in batch.lists[: len(IDS)]:
                largest = max(largest, int(ids.max(initial=0)))
        return largest

    def with_partners(self, seed: int, limit: int) -> PairDataset:
        """Return single answers, each with an answer to another prompt as its partner.

        The partners are a permutation drawn by the seed. Rows are sorted by prompt, in a random
        order of prompts, and rotated by the size of the largest group: no row meets its own.
        """
        _, prompt_of, sizes = np.unique(
            self.column("prompt_hash"), return_inverse=True, return_counts=True
        )
        if 2 * sizes.max() > len(self):
            raise DataError(
                f"loss 'kto' pairs each prompt with an answer to another one, but {sizes.max()} of "
                f"{len(self)} answers belong to one prompt; take bco or apo_zero_unpaired."
            )
        draw = np.random.Generator(np.random.PCG64([seed, len(self)]))
        rank_of_prompt = draw.permutation(len(sizes))[prompt_of]
        order = np.lexsort((draw.permutation(len(self)), rank_of_prompt))
        partners = np.empty(len(self), np.int64)
        partners[order] = np.roll(order, -int(sizes.max()))
        return replace(self, partners=(partners, limit))

    def subset(self, rows: Ints, fingerprint: str) -> PairDataset:
        """Return the pairs with these (ascending) numbers."""
        parts: list[Part] = []
        for first, end, weight in self.parts:
            new_first, new_end = np.searchsorted(rows, (first, end)).tolist()
            parts.append((new_first, new_end, weight))
        rows_of_file = rows if self.rows is None else self.rows[rows]
        return replace(self, fingerprint=fingerprint, parts=tuple(parts), rows=rows_of_file)


# --- corrections: which pairs to drop, weight or flip, by the digest of their texts ---


def hex_id(digest: int) -> str:
    """Return the identity of a pair as people and JSON write it."""
    return f"{digest:016x}"


def corrected(train: PairDataset, files: Sequence[Path]) -> tuple[PairDataset, Json]:
    """Return the training pairs with the corrections of these files, and how many there are.

    Held-out pairs stay as they are: they are drawn before.
    """
    corrections: dict[int, Correction] = {}  # digest of a pair -> all its corrections in one
    for file in files:
        for digest, correction in _corrections(file):
            before = corrections.get(digest, NO_CORRECTION)
            weight = before.weight * correction.weight
            corrections[digest] = Correction(weight, before.flip != correction.flip)
    digests = train.column("pair_hash").tolist()
    if corrections.keys().isdisjoint(digests):
        names = ", ".join(map(str, files))
        raise DataError(
            f"actor_train.data_args.corrections: {names}: no id belongs to a training pair; were "
            "they written for other data files?"
        )
    correction_of_pair = [corrections.get(digest, NO_CORRECTION) for digest in digests]
    remaining = [i for i, correction in enumerate(correction_of_pair) if correction.weight != 0]
    if not remaining:
        raise DataError(
            "actor_train.data_args.corrections: they drop all training pairs "
            f"({len(digests)}); use action flip or weight, or correct fewer pairs."
        )
    shas = "".join(map(file_sha, files))
    name = text_sha(f"{train.fingerprint}:corrections={shas}")
    pairs = replace(train.subset(np.array(remaining, np.int64), name), corrections=corrections)
    applied = [correction_of_pair[i] for i in remaining]
    return pairs, {
        "files": [str(file) for file in files],
        "dropped": len(digests) - len(remaining),
        "flipped": sum(correction.flip for correction in applied),
        "weighted": sum(correction.weight != 1 for correction in applied),
        "unknown_ids": len(corrections.keys() - set(digests)),
    }


def _corrections(file: Path) -> Iterator[tuple[int, Correction]]:
    """Yield the digest and the correction of each line."""
    for source in find_sources(file):
        for number, row in rows_of(source):
            try:
                yield _correction(row)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{file}:{number}: expected an object with id (16 hex digits), and weight (0 or "
                    f"more) or flip (true or false): {error}"
                ) from None


def _correction(row: Row | DropReason) -> tuple[int, Correction]:
    if isinstance(row, DropReason):
        raise ValueError(row.detail)
    digest = row["id"]
    weight = row.get("weight", 1.0)
    flip = row.get("flip", False)
    if len(digest) != 16 or not isinstance(flip, bool) or not 0 <= weight < float("inf"):
        raise ValueError(f"got {str(row)[:100]}")
    if not {"weight", "flip"} & row.keys():
        raise ValueError("neither weight nor flip")
    return int(digest, 16), Correction(float(weight), flip)
