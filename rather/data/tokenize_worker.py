"""The child process that turns rows into tokens.

It is a child because a template is data: one that loops forever or fills the memory must die
alone. It is started with `subprocess` rather than `multiprocessing`, so that it neither runs the
user's main module again nor inherits threads, and it imports neither torch nor transformers: it
is ready in half a second.

A message is a JSON head and the Arrow table that belongs to it; nothing is pickled. The number of
the current row is in a small shared file, so that the parent can name the row that killed its
child.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

from rather.config import plugins
from rather.data.formats import EXTRAS, RowLayout, TextPair, read_row
from rather.data.json_rows import DropReason, RawRow
from rather.data.messages import Turns, as_turns
from rather.data.pairs import SCHEMA
from rather.data.read import TOO_DEEP, Chunk, as_message, parsed_rows
from rather.data.tokenised import COLUMNS, is_tokenised, read_tokenised
from rather.data.tokens import Encoded, Encoder, TokenRecipe
from rather.errors import DataError

PROMPTS = 2  # prompts of a chunk that are compared with what generation starts from
EXAMPLES = 5  # details kept per chunk and kind; numbers of rows are kept for all

Event = tuple[str, int, str]  # kind, number of the row, detail


def chunk_to_json(chunk: Chunk) -> dict[str, Any]:
    """Return a chunk without its table. Latin-1 keeps each byte of a row as one character."""
    rows = [
        (number, raw.decode("latin-1") if isinstance(raw, bytes) else raw.args)
        for number, raw in chunk.rows
    ]
    return {"source": chunk.source, "first": chunk.first, "rows": rows}


def chunk_from_json(head: dict[str, Any], table: bytes) -> Chunk:
    """Return the chunk of which `chunk_to_json` made the head."""
    rows = (
        RawRow(number, raw.encode("latin-1") if isinstance(raw, str) else DropReason(*raw))
        for number, raw in head["rows"]
    )
    return Chunk(head["source"], tuple(rows), table, head["first"])


class ChunkEncoder:
    """Turns the rows of a chunk into one Arrow table, and reports what happened to them."""

    def __init__(
        self, encoder: Encoder, layout: RowLayout, at_row: Callable[[int], None] = lambda _: None
    ) -> None:
        self.encoder, self.layout, self.at_row = encoder, layout, at_row

    def encode(self, chunk: Chunk) -> tuple[dict[str, Any], bytes]:
        """Return the report as a JSON head, and the table as an Arrow message."""
        self.pairs: list[dict[str, Any]] = []
        self.events: dict[str, list[Event]] = {"dropped": [], "noted": []}
        self.ignored: set[str] = set()
        self.prompts: dict[int, list[int]] = {}  # by number of the row
        rows = 0
        for number, row in parsed_rows(chunk):
            rows += 1
            self.at_row(number)
            try:
                self._read(chunk.source, number, row)
            except RecursionError:
                self._add_event("dropped", number, row, *TOO_DEEP)
        head = {
            "rows": rows,
            **{group: _shorten(events) for group, events in self.events.items()},
            "ignored": sorted(self.ignored)[:100],
            "prompts": list(self.prompts.items()),
        }
        return head, as_message(pa.RecordBatch.from_pylist(self.pairs, schema=SCHEMA))

    def _read(self, source: int, number: int, row: dict[str, Any] | DropReason) -> None:
        found: list[tuple[TextPair, Encoded]] = []
        dropped: list[DropReason] = []
        ties, is_text = 0, False
        if isinstance(row, DropReason):
            dropped = [row]
        elif is_tokenised(row, self.layout):
            self.ignored.update(set(row).difference(COLUMNS, EXTRAS))
            try:
                found.append(read_tokenised(row, self.layout, self.encoder))
            except DropReason as reason:
                dropped.append(reason)
        else:
            pairs, dropped, ties, ignored = read_row(row, self.layout)
            is_text = True
            for pair in pairs:
                try:
                    found.append((pair, self.encoder.encode(pair)))
                except DropReason as reason:
                    dropped.append(reason)
            self.ignored.update(ignored)
        for each in dropped:
            self._add_event("dropped", number, row, each.reason, each.detail)
        for _ in range(ties):
            detail = "two answers of the same rank give no pair"
            self.events["noted"].append(("ties_skipped", number, detail))
        for pair, encoded in found:
            for note in encoded.notes:
                self._add_event("noted", number, row, *note)
            self.pairs.append({**_columns(pair, encoded), "source": source, "number": number})
            if is_text:
                self._keep_prompt(number, pair, encoded)

    def _add_event(self, group: str, number: int, row: Any, kind: str, detail: str) -> None:
        """Add an event, with the id of the row if it has one."""
        if isinstance(row, dict):
            given = row.get(self.layout.columns.get("id", "id"))
            detail = detail if given is None else f"{detail} (id {str(given)[:80]})"
        self.events[group].append((kind, number, detail))

    def _keep_prompt(self, number: int, pair: TextPair, encoded: Encoded) -> None:
        """Keep some prompts as generation has them, to be compared with those of training."""
        is_cut = any(note.kind == "truncated_prompt" for note in encoded.notes)
        if len(self.prompts) < PROMPTS and not is_cut:
            with suppress(DropReason):
                self.prompts[number] = self.encoder.inference_prompt(pair)


def _columns(pair: TextPair, encoded: Encoded) -> dict[str, Any]:
    prompt, chosen, rejected = map(_digest, (pair.prompt, pair.chosen, pair.rejected))
    return {
        "prompt": encoded.prompt,
        "chosen": encoded.chosen,
        "rejected": encoded.rejected,
        "chosen_scored": list(chain(*encoded.chosen_scored)),
        "rejected_scored": list(chain(*encoded.rejected_scored)),
        "weight": pair.weight,
        "margin": pair.margin,
        "soft_label": pair.soft_label,
        "id": pair.id,
        "prompt_hash": _number(prompt),
        "pair_hash": _number(prompt + chosen + rejected),
        "swapped_hash": _number(prompt + rejected + chosen),
        "normal_prompt": _normal(pair.prompt, "user"),
        "normal_chosen": _normal(pair.chosen, "assistant"),
        "normal_rejected": _normal(pair.rejected, "assistant"),
    }


def _digest(text: str | Turns) -> bytes:
    content = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, default=str)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _normal(part: str | Turns, role: str) -> int:
    """Return one number for texts that differ only in case, white space or ways of writing."""
    turns = []
    for turn in as_turns(part, role):
        text = unicodedata.normalize("NFKC", turn["content"]).casefold()
        turns.append({**turn, "content": " ".join(text.split())})
    return _number(_digest(tuple(turns)))


def _number(digest: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(digest, digest_size=8).digest(), "little")


def _shorten(events: list[Event]) -> list[Event]:
    """Return every event, but only the first details of each kind: there may be a million."""
    seen: Counter[str] = Counter()
    short = []
    for kind, number, detail in events:
        seen[kind] += 1
        short.append((kind, number, detail[:300] if seen[kind] <= EXAMPLES else ""))
    return short


# ---- the process


def answer(encoder: Encoder, question: str, given: Any) -> dict[str, Any]:
    """Return an attribute of the encoder, or what its method makes of one text or pair."""
    try:
        found = getattr(encoder, question)
        if given is not None:
            found = found(TextPair(**given) if isinstance(given, dict) else given)
    except DropReason as reason:
        return {"dropped": reason.args}
    return {"found": asdict(found) if isinstance(found, Encoded) else found}


def _limit_memory(extra: int) -> None:
    with open("/proc/self/statm") as file:
        wanted = int(file.read().split()[0]) * resource.getpagesize() + extra
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main(connection: int, progress: int) -> None:
    """Answer the parent's questions until it closes the connection."""
    parent = Connection(connection)
    setup = json.loads(parent.recv_bytes())

    def at_row(number: int) -> None:
        """Store the row, and give it a limit of computing at which the system ends this process."""
        os.pwrite(progress, b"%20d" % number, 0)
        signal.setitimer(signal.ITIMER_PROF, setup["seconds"])

    def reply(head: dict[str, Any], table: bytes = b"") -> None:
        parent.send_bytes(json.dumps(head).encode())
        parent.send_bytes(table)

    if sys.platform == "linux":
        _limit_memory(setup["memory"])
    chunks: ChunkEncoder | None = None
    try:
        while True:
            signal.setitimer(signal.ITIMER_PROF, 0)  # waiting is not computing
            head, table = json.loads(parent.recv_bytes()), parent.recv_bytes()
            at_row(0)
            if chunks is None:
                plugins.load_sources(setup["imports"])
                encoder = Encoder(TokenRecipe.from_json(setup["recipe"]))
                chunks = ChunkEncoder(encoder, RowLayout(**setup["layout"]), at_row)
            if "ask" in head:
                reply(answer(chunks.encoder, head["ask"], head["given"]))
            else:
                reply(*chunks.encode(chunk_from_json(head, table)))
    except EOFError:
        return
    except DataError as error:
        reply({"error": str(error)})
    except MemoryError:
        reply({"memory": True})
