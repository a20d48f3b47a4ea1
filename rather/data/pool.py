"""Child processes that read rows, render templates and tokenise, within limits of time and memory.

They are children because a template is data: one that loops forever or fills the memory must die
alone. They import neither torch nor transformers: a child is ready in half a second.

A message is a JSON head and the Arrow table that belongs to it; nothing is pickled. A small shared
file holds the number of the current row, so that the parent can name a row that killed its child.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
import unicodedata
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, cycle
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

import pyarrow as pa

from rather.child import start_child
from rather.config import plugins
from rather.data.formats import EXTRAS, FormatError, RowLayout, TextPair, read_row
from rather.data.image_tokens import ImageFacts, ImageRecipe
from rather.data.images import content_of
from rather.data.json_rows import DropReason
from rather.data.messages import Content, Json, as_turns
from rather.data.pairs import IMAGE_SCHEMA, SCHEMA, stored_numbers
from rather.data.read import TOO_DEEP, Chunk, DataFile, as_message, parsed_rows
from rather.data.report import MEANINGS
from rather.data.template import ChatTemplate
from rather.data.tokens import (
    COLUMNS,
    SIDES,
    Encoded,
    Encoder,
    Ids,
    TokenRecipe,
    is_tokenised,
    read_tokenised,
)
from rather.errors import DataError
from rather.files import limit_memory

ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
ROW_SECONDS = 30.0  # of computing, for one row
MEMORY = 2 << 30  # bytes of a child on top of what it needs to start
ENVIRONMENT = {
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
EXAMPLES = 5  # details kept per chunk and kind; numbers of rows are kept for all

# ---- in the parent


class ChunkResult(NamedTuple):
    """What a child made of a chunk."""

    chunk: Chunk
    head: Json
    batch: Any  # a record batch of pairs


class Child:
    """A process that renders and tokenises within limits. It answers one question at a time."""

    def __init__(self, recipe: TokenRecipe, layout: RowLayout) -> None:
        self.template = recipe.template.name if recipe.template else "none"
        setup = {
            "recipe": asdict(recipe),
            "layout": asdict(layout),
            "imports": plugins.loaded("data format"),
            "memory": MEMORY,
            "seconds": ROW_SECONDS,
        }
        self.unsent = [json.dumps(setup).encode()]  # sent later, so that children start together
        self.progress = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the child
        self.connection, theirs = Pipe()
        handles = theirs.fileno(), self.progress.fileno()
        with theirs:
            self.process = start_child(__name__, handles, **ENVIRONMENT)

    def send(self, head: Json, table: bytes = b"") -> None:
        """Send a question. If the child has died, `receive` reports it."""
        with suppress(OSError):
            question = json.dumps(head, default=str)  # a date becomes text
            for message in (*self.unsent, question.encode(), table):
                self.connection.send_bytes(message)
        self.unsent = []

    def receive(self, name: str, unit: str | None = None) -> tuple[Json, bytes]:
        """Return the answer. An error starts with the name, and the row if given a unit."""
        code = 0
        used = ""
        try:
            head = json.loads(self.connection.recv_bytes())
            table = self.connection.recv_bytes()
            if "error" in head:
                raise DataError(f"{name}: {head['error']}")
            if "memory" not in head:
                return head, table
            used = f"more than {MEMORY >> 20} MiB of memory"
        except (EOFError, OSError):
            code = self.process.wait()
        if unit is not None:
            number = int(os.pread(self.progress.fileno(), 20, 0) or 0)
            name += f":{number} ({unit} {number})" if number else " (before its first row)"
        if code == -signal.SIGPROF:
            used = f"more than {ROW_SECONDS:g} s of computing"
        elif code in (-signal.SIGABRT, -signal.SIGKILL, -signal.SIGSEGV):
            used = f"too much memory, or failed (signal {-code})"
        if not used:
            raise DataError(
                f"{name}: the tokenising process ended with exit code {code}; see its output above."
            )
        raise DataError(
            f"{name}: chat template {self.template} and tokenizer took {used}; look for an "
            "endless loop or a huge repetition in the template, or for a gigantic text."
        )

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.progress.close()


def encode_chunks(
    chunks: Iterable[Chunk],
    recipe: TokenRecipe,
    layout: RowLayout,
    sources: list[DataFile],
    processes: int,
) -> Iterator[ChunkResult]:
    """Yield the results of all chunks in order, the same for any number of processes.

    One chunk per child is under way: memory does not grow with the input.
    """
    with ExitStack() as stack:
        children = [stack.enter_context(closing(Child(recipe, layout))) for _ in range(processes)]
        busy: deque[tuple[Child, Chunk]] = deque()

        def next_result() -> ChunkResult:
            child, chunk = busy.popleft()
            source = sources[chunk.source]
            head, table = child.receive(str(source.path), source.unit)
            return ChunkResult(chunk, head, pa.ipc.open_stream(table).read_next_batch())

        for chunk, child in zip(chunks, cycle(children), strict=False):
            finished = next_result() if len(busy) == processes else None
            rows = [(number, _sendable(raw)) for number, raw in chunk.rows]
            child.send({"source": chunk.source, "first": chunk.first, "rows": rows}, chunk.table)
            busy.append((child, chunk))
            if finished:
                yield finished
        while busy:
            yield next_result()


def _sendable(raw: bytes | DropReason) -> Any:
    """Return a row for JSON: Latin-1 keeps each byte as one character."""
    return raw.decode("latin-1") if isinstance(raw, bytes) else raw.args


def _received(sent: Any) -> bytes | DropReason:
    return sent.encode("latin-1") if isinstance(sent, str) else DropReason(*sent)


def encoder_of(recipe: TokenRecipe, name: str) -> Encoder | LimitedEncoder:
    """Return an encoder for single texts; only a template, a program of others, needs a child."""
    return LimitedEncoder(recipe, name) if recipe.template else Encoder(recipe)


@dataclass(eq=False)
class LimitedEncoder:
    """An Encoder in a child process, which starts with the first question."""

    recipe: TokenRecipe
    name: str

    @cached_property
    def _child(self) -> Child:
        child = Child(self.recipe, RowLayout())
        weakref.finalize(self, child.close)
        return child

    @property
    def end_of_turn(self) -> int | None:
        token: int | None = self._ask("end_of_turn")
        return token

    def prompt_ids(self, pair: TextPair, *, as_trained: bool = False) -> Ids:
        ids: Ids = self._ask("prompt_ids", pair, as_trained=as_trained)
        return ids

    def encode(self, pair: TextPair) -> Encoded:
        fields: Json = self._ask("encode", pair)
        for name in ("chosen_scored", "rejected_scored"):
            fields[name] = tuple(map(tuple, fields[name]))
        fields["images"] = _images(fields["images"])
        return Encoded(**fields)

    def image_facts(self, pair: TextPair) -> tuple[ImageFacts, ...]:
        return _images(self._ask("image_facts", pair)) if pair.images else ()

    def _ask(self, name: str, pair: TextPair | None = None, **options: bool) -> Any:
        try:
            self._child.send({"ask": name, "pair": pair and asdict(pair), "options": options})
            head, _ = self._child.receive(self.name)
        except BaseException:  # after Ctrl-C, the next question would get the answer to this one
            if "_child" in vars(self):
                vars(self).pop("_child").close()
            raise
        if "dropped" in head:
            raise DropReason(*head["dropped"])
        return head["found"]


def _images(received: Iterable[Any]) -> tuple[ImageFacts, ...]:
    return tuple(ImageFacts(digest, path, tuple(grid), n) for digest, path, grid, n in received)


# ---- in the child


@dataclass
class ChunkEncoder:
    """Turns the rows of a chunk into one Arrow table, and reports what happened to them."""

    encoder: Encoder
    layout: RowLayout
    at_row: Callable[[int], object]

    def encode(self, chunk: Chunk) -> tuple[Json, bytes]:
        """Return the report as a JSON head, and the table as an Arrow message."""
        self.pairs: list[Json] = []
        self.events: dict[str, list[tuple[str, int, str]]] = {"dropped": [], "noted": []}
        self.seen: Counter[str] = Counter()  # events by kind
        self.ignored: set[str] = set()
        rows = 0
        for number, row in parsed_rows(chunk):
            rows += 1
            self.at_row(number)
            try:
                self._read(chunk.source, number, row)
            except FormatError as error:
                raise DataError(f"row {number}: {error}") from error
            except RecursionError:
                self._add_event("dropped", number, row, *TOO_DEEP)
        head = {"rows": rows, **self.events, "ignored": sorted(self.ignored)[:100]}
        schema = IMAGE_SCHEMA if self.encoder.recipe.images else SCHEMA
        return head, as_message(pa.RecordBatch.from_pylist(self.pairs, schema=schema))

    def _read(self, source: int, number: int, row: Json | DropReason) -> None:
        pairs: list[tuple[TextPair, Encoded]] = []
        dropped: list[DropReason] = []
        texts: list[TextPair] = []
        skipped: Mapping[str, int] = {}
        try:
            if isinstance(row, DropReason):
                raise row
            if is_tokenised(row, self.layout):
                self.ignored.update(set(row).difference(COLUMNS, EXTRAS))
                pairs.append(read_tokenised(row, self.layout, self.encoder))
            else:
                texts, dropped, skipped, ignored = read_row(row, self.layout)
                self.ignored.update(ignored)
        except DropReason as reason:
            dropped.append(reason)
        for pair in texts:
            if pair.images:
                pair = replace(pair, image_dir=self.layout.image_dirs[source])
            try:
                pairs.append((pair, self.encoder.encode(pair)))
            except DropReason as reason:
                dropped.append(reason)
        for fault in dropped:
            self._add_event("dropped", number, row, fault.reason, fault.detail)
        for kind, count in skipped.items():
            for _ in range(count):
                self._add_event("noted", number, row, kind, MEANINGS[kind])
        limit = self.layout.max_length_gap
        for pair, encoded in pairs:
            gap = abs(len(encoded.chosen) - len(encoded.rejected))
            if limit is not None and gap > limit:
                detail = f"{MEANINGS['length_gap']}: {gap} tokens"
                self._add_event("noted", number, row, "length_gap", detail)
                continue
            for note in encoded.notes.items():
                self._add_event("noted", number, row, *note)
            self.pairs.append({**_columns(pair, encoded), "source": source, "number": number})

    def _add_event(self, group: str, number: int, row: Any, kind: str, detail: str) -> None:
        """Add an event; the first of a kind with a detail, and the id of the row if it has one."""
        if isinstance(row, dict):
            row_id = row.get(self.layout.columns.get("id", "id"))
            if row_id is not None:
                detail = f"{detail} (id {str(row_id)[:80]})"
        self.seen[kind] += 1
        is_example = self.seen[kind] <= EXAMPLES
        self.events[group].append((kind, number, detail[:300] if is_example else ""))


def _columns(pair: TextPair, encoded: Encoded) -> Json:
    contents = {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
    prompt, chosen, rejected = map(_digest, contents.values())
    normal = {f"normal_{name}": _normal(text, ROLES[name]) for name, text in contents.items()}
    images = []
    for reference, image in zip(pair.images, encoded.images, strict=True):
        prompt += bytes.fromhex(image.digest)  # the same question about another image is another
        normal["normal_prompt"] = _number(b"%d %s" % (normal["normal_prompt"], prompt[16:]))
        content = b"" if image.path else content_of(reference)
        images.append({**image._asdict(), "content": content})
    return {
        **{name: getattr(encoded, name) for name in contents},
        **{f"{name}_scored": list(chain(*getattr(encoded, f"{name}_scored"))) for name in SIDES},
        **stored_numbers(pair),
        "id": pair.id,
        "prompt_hash": _number(prompt),
        "pair_hash": _number(prompt + chosen + rejected),
        "swapped_hash": _number(prompt + rejected + chosen),
        **normal,
        "images": images,
    }


def _digest(text: Content) -> bytes:
    content = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, default=str)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _normal(part: Content, role: str) -> int:
    """Return one number for texts that differ only in case, white space or ways of writing."""
    turns = []
    for turn in as_turns(part, role):
        text = unicodedata.normalize("NFKC", turn["content"]).casefold()
        turns.append({**turn, "content": " ".join(text.split())})
    return _number(_digest(tuple(turns)))


def _number(digest: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(digest, digest_size=8).digest(), "little")


def _answer(encoder: Encoder, head: Json) -> Json:
    """Return an attribute of the encoder, or what its method makes of a pair."""
    attribute = getattr(encoder, head["ask"])
    if head["pair"] is None:
        return {"found": attribute}
    try:
        answer = attribute(TextPair(**head["pair"]), **head["options"])
    except DropReason as reason:
        return {"dropped": reason.args}
    return {"found": asdict(answer) if isinstance(answer, Encoded) else answer}


def _make_arrow_do_without_pandas() -> None:
    """Let the first array find no pandas, which Arrow would import: half of the child's start."""
    sys.modules["pandas"] = None  # type: ignore[assignment]
    with suppress(AttributeError, ImportError):
        pa.array([0])
    del sys.modules["pandas"]  # a format in a user's file may still import it


def main(connection: int, progress: int) -> None:
    """Answer the parent's questions until it closes the connection."""
    _make_arrow_do_without_pandas()
    parent = Connection(connection)
    setup = json.loads(parent.recv_bytes())

    def at_row(number: int) -> None:
        """Store the row, and give it a limit of computing at which the system ends this process."""
        os.pwrite(progress, b"%20d" % number, 0)
        signal.setitimer(signal.ITIMER_PROF, setup["seconds"])

    def reply(head: Json, table: bytes = b"") -> None:
        parent.send_bytes(json.dumps(head).encode())
        parent.send_bytes(table)

    limit_memory(setup["memory"])
    chunks: ChunkEncoder | None = None
    try:
        while True:
            signal.setitimer(signal.ITIMER_PROF, 0)  # waiting is not computing
            head = json.loads(parent.recv_bytes())
            table = parent.recv_bytes()
            at_row(0)
            if chunks is None:
                plugins.load_sources(setup["imports"])
                recipe = setup["recipe"]
                template = ChatTemplate(**recipe["template"]) if recipe["template"] else None
                images = ImageRecipe(**recipe["images"]) if recipe["images"] else None
                recipe |= {"template": template, "images": images}
                encoder = Encoder(TokenRecipe(**recipe))
                chunks = ChunkEncoder(encoder, RowLayout(**setup["layout"]), at_row)
            if "ask" in head:
                reply(_answer(chunks.encoder, head))
            else:
                rows = tuple((number, _received(sent)) for number, sent in head["rows"])
                chunk = Chunk(head["source"], rows, table, head["first"])
                reply(*chunks.encode(chunk))
    except EOFError:
        return
    except DataError as error:
        reply({"error": str(error)})
    except MemoryError:
        reply({"memory": True})
