"""The child process that turns rows into tokens.

A child because a template is data: one that loops forever or fills the memory must die alone. It is started with
`subprocess` rather than `multiprocessing`, so that it neither runs the user's main module again nor inherits threads,
and it imports neither torch nor transformers: it is ready in half a second.

Messages are a length and then bytes: a JSON head and the Arrow table that belongs to it. The number of the row under
work stands in a small shared file, so that the parent can name the row that killed its child.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import resource
import signal
import struct
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa

from rather.config import plugins
from rather.data.formats import EXTRAS, Layout, TextPair, read_row
from rather.data.json_rows import Bad
from rather.data.messages import Turns
from rather.data.read import Chunk, parsed_rows
from rather.data.tokenised import COLUMNS, is_tokenised, read_tokenised
from rather.data.tokens import Encoded, Encoder, Recipe
from rather.errors import DataError

PROMPTS = 2  # of a chunk that are compared with what generation starts from
EXAMPLES = 5  # full sentences kept per chunk and kind; places are kept for all
SCHEMA = pa.schema(
    [
        ("prompt", pa.list_(pa.int32())),
        ("chosen", pa.list_(pa.int32())),
        ("rejected", pa.list_(pa.int32())),
        ("chosen_scored", pa.list_(pa.int32())),
        ("rejected_scored", pa.list_(pa.int32())),
        ("weight", pa.float64()),
        ("margin", pa.float64()),
        ("soft_label", pa.float64()),
        ("id", pa.string()),
        ("source", pa.int32()),
        ("number", pa.int64()),
        ("prompt_hash", pa.uint64()),
        ("pair_hash", pa.uint64()),
        ("swapped_hash", pa.uint64()),
        ("normal_prompt", pa.uint64()),
        ("normal_chosen", pa.uint64()),
        ("normal_rejected", pa.uint64()),
    ]
)


class Event(NamedTuple):
    """Something to count: a drop, a change or a warning, and where."""

    kind: str
    number: int
    detail: str


def send(pipe: IO[bytes], head: dict[str, Any], body: bytes = b"") -> None:
    raw = json.dumps(head).encode()
    pipe.write(struct.pack("<QQ", len(raw), len(body)) + raw)
    pipe.write(body)
    pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    sizes = pipe.read(16)
    if len(sizes) < 16:
        return None
    head, body = struct.unpack("<QQ", sizes)
    return json.loads(pipe.read(head)), pipe.read(body)


def chunk_message(chunk: Chunk) -> tuple[dict[str, Any], bytes]:
    bad = {i: row for i, row in enumerate(chunk.rows) if isinstance(row, Bad)}
    rows = [b"" if isinstance(row, Bad) else row for row in chunk.rows]
    head = {
        "source": chunk.source,
        "numbers": chunk.numbers,
        "offsets": chunk.offsets,
        "sizes": [len(row) for row in rows],
        "bad": bad,
        "unfinished": chunk.unfinished,
        "table": bool(chunk.table),
    }
    return head, chunk.table or b"".join(rows)


def chunk_from_message(head: dict[str, Any], body: bytes) -> Chunk:
    if head["table"]:
        return Chunk(head["source"], tuple(head["numbers"]), table=body)
    ends = np.cumsum(head["sizes"]).tolist()
    rows: list[bytes | Bad] = [
        body[end - size : end] for end, size in zip(ends, head["sizes"], strict=True)
    ]
    for i, bad in head["bad"].items():
        rows[int(i)] = Bad(*bad)
    return Chunk(
        head["source"],
        tuple(head["numbers"]),
        tuple(head["offsets"]),
        tuple(rows),
        unfinished=head["unfinished"],
    )


def answer(encoder: Encoder, question: str, given: Any) -> dict[str, Any]:
    """What the encoder makes of one text or pair that lies in no file, for `limited.LimitedEncoder`."""
    found: Any = None
    match question:
        case "encode":
            found = encoder.encode(TextPair(**given))
        case "inference_prompt":
            found = encoder.inference_prompt(TextPair(**given))
        case "training_prompt":
            found = encoder.training_prompt(given)
        case "end_of_turn":
            found = encoder.end_of_turn
    if isinstance(found, Bad):
        return {"bad": found}
    return {"found": asdict(found) if isinstance(found, Encoded) else found}


class ChunkEncoder:
    """Rows of a chunk -> one Arrow table and the events that happened."""

    def __init__(self, encoder: Encoder, layout: Layout, at_row: Any = None) -> None:
        self.encoder, self.layout, self.at_row = encoder, layout, at_row or (lambda _: None)

    def encode(self, chunk: Chunk) -> tuple[dict[str, Any], bytes]:
        self.columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        self.dropped: list[Event] = []
        self.noted: list[Event] = []
        self.ignored: set[str] = set()
        self.prompts: dict[int, list[int]] = {}  # by number of the row
        self.source = chunk.source
        for number, row in parsed_rows(chunk):
            self.at_row(number)
            if isinstance(row, Bad):
                self.dropped.append(Event(row.reason, number, row.detail))
            else:
                self._row(number, row)
        head = {
            "rows": len(chunk.numbers),
            "dropped": _shortened(self.dropped),
            "noted": _shortened(self.noted),
            "ignored": sorted(self.ignored)[:100],
            "prompts": list(self.prompts.items()),
        }
        return head, _table(self.columns)

    def _row(self, number: int, row: dict[str, Any]) -> None:
        if is_tokenised(row, self.layout):
            self._tokenised_row(number, row)
            return
        try:
            read = read_row(row, self.layout)
            encoded = [(pair, self.encoder.encode(pair)) for pair in read.pairs]
        except RecursionError:
            self.dropped.append(Event("too_deep", number, "too many values inside each other"))
            return
        self.ignored.update(read.ignored)
        self.dropped += [
            Event(bad.reason, number, self._named(bad.detail, row)) for bad in read.refused
        ]
        self.noted += [
            Event("ties_skipped", number, "two answers of the same rank give no pair")
        ] * read.ties
        for pair, result in encoded:
            if isinstance(result, Bad):
                self.dropped.append(Event(result.reason, number, self._named(result.detail, row)))
            else:
                self.noted += [
                    Event(note.kind, number, self._named(note.detail, row)) for note in result.notes
                ]
                self._keep(number, pair, result)
                self._compare(number, pair, result)

    def _tokenised_row(self, number: int, row: dict[str, Any]) -> None:
        self.ignored.update(set(row).difference(COLUMNS, EXTRAS))
        read = read_tokenised(row, self.layout, self.encoder)
        if isinstance(read, Bad):
            self.dropped.append(Event(read.reason, number, self._named(read.detail, row)))
        else:
            self.noted += [
                Event(note.kind, number, self._named(note.detail, row)) for note in read[1].notes
            ]
            self._keep(number, *read)

    def _named(self, detail: str, row: dict[str, Any]) -> str:
        given = row.get(self.layout.columns.get("id", "id"))
        return detail if given is None else f"{detail} (id {str(given)[:80]})"

    def _compare(self, number: int, pair: TextPair, encoded: Encoded) -> None:
        if len(self.prompts) < PROMPTS and not any(
            note.kind == "truncated_prompt" for note in encoded.notes
        ):
            ids = self.encoder.inference_prompt(pair)
            if not isinstance(ids, Bad):
                self.prompts[number] = ids

    def _keep(self, number: int, pair: TextPair, encoded: Encoded) -> None:
        prompt, chosen, rejected = (
            _digest(pair.prompt),
            _digest(pair.chosen),
            _digest(pair.rejected),
        )
        values = (
            encoded.prompt,
            encoded.chosen,
            encoded.rejected,
            [place for span in encoded.chosen_scored for place in span],
            [place for span in encoded.rejected_scored for place in span],
            pair.weight,
            pair.margin,
            pair.soft_label,
            pair.id,
            self.source,
            number,
            _number(prompt),
            _number(prompt + chosen + rejected),
            _number(prompt + rejected + chosen),
            _normal(pair.prompt, "user"),
            _normal(pair.chosen, "assistant"),
            _normal(pair.rejected, "assistant"),
        )
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)


def _digest(text: str | Turns) -> bytes:
    content = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, default=str)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _normal(part: str | Turns, role: str) -> int:
    """The same for texts that differ only in case, white space, ways to write a character, or string and message."""
    turns = ({"role": role, "content": part},) if isinstance(part, str) else part
    return _number(
        _digest(tuple({**turn, "content": _normal_text(turn["content"])} for turn in turns))
    )


def _normal_text(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _number(digest: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(digest, digest_size=8).digest(), "little")


def _shortened(events: Sequence[Event]) -> list[tuple[str, int, str]]:
    """Every place, but only the first sentences of each kind: a million rows must not become a million sentences."""
    seen: dict[str, int] = {}
    short = []
    for event in events:
        seen[event.kind] = seen.get(event.kind, 0) + 1
        short.append(
            (event.kind, event.number, event.detail[:300] if seen[event.kind] <= EXAMPLES else "")
        )
    return short


def _table(columns: dict[str, list[Any]]) -> bytes:
    batch = pa.record_batch([pa.array(columns[f.name], f.type) for f in SCHEMA], schema=SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _limit_memory(extra: int) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = used + extra
    resource.setrlimit(
        resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
    )


def _next_job(jobs: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    signal.setitimer(signal.ITIMER_PROF, 0)  # waiting is not working
    return receive(jobs)


def main() -> None:
    jobs, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up between our messages
    opening = receive(jobs)
    assert opening is not None
    setup = opening[0]
    progress = mmap.mmap(setup["progress"], 8)

    def at_row(number: int) -> None:
        struct.pack_into("<q", progress, 0, number)
        signal.setitimer(
            signal.ITIMER_PROF, setup["seconds"]
        )  # of computing; at its end the system kills this process

    plugins.load_sources(setup.get("imports", ()))
    if sys.platform == "linux":
        _limit_memory(setup["memory"])
    try:
        at_row(0)
        encoder = ChunkEncoder(
            Encoder(Recipe.from_json(setup["recipe"])), Layout(**setup["layout"]), at_row
        )
        send(results, {"ready": True})
        while (job := _next_job(jobs)) is not None:
            at_row(0)
            if "ask" in job[0]:
                send(results, answer(encoder.encoder, job[0]["ask"], json.loads(job[1])))
            else:
                send(results, *encoder.encode(chunk_from_message(*job)))
    except DataError as error:
        send(results, {"error": str(error)})
    except MemoryError:
        send(results, {"memory": True})
