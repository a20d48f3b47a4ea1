"""What is worth knowing about the pairs of a run before it trains on them, found in their tokens and hashes.

The hashes were made beside the tokens, so nothing is read or tokenised again. What takes time is kept beside the
tokens too, under the fingerprints of all sets: a second start, or a resumed run, reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from rather.data.cache import Cache, text_sha
from rather.data.finding_texts import findings
from rather.data.pairs import PairDataset
from rather.data.progress import bar
from rather.data.statistics import NEAR_PAIRS, Example, Look, Truncation, numbers

VERSION = 1  # raise it whenever the same pairs would give other numbers


def look(
    train: PairDataset,
    evals: Mapping[str, PairDataset],
    report: Mapping[str, Any],
    cache: Cache,
    console: Console,
) -> dict[str, Any]:
    """The part `look` of a data report."""
    sets = {"train": train, **{f"eval {name}".strip(): pairs for name, pairs in evals.items()}}
    told = {
        "train": report["train"],
        **{f"eval {name}".strip(): entry for name, entry in report["evals"].items()},
    }
    found = _remembered(sets, cache, console)
    complete = replace(
        found,
        examples=list(_placed(found.examples, sets, told)),
        truncation={
            name: _truncation(entry, report) for name, entry in told.items() if "dropped" in entry
        },
        inference=_named_inference(report["train"]),
    )
    return asdict(replace(complete, findings=findings(complete)))


def _remembered(sets: Mapping[str, PairDataset], cache: Cache, console: Console) -> Look:
    named = [f"{name}:{pairs.fingerprint}" for name, pairs in sets.items()]
    address = text_sha("\n".join([f"look {VERSION} {NEAR_PAIRS}", *named]))
    with suppress(ValidationError):
        return TypeAdapter(Look).validate_json(cache.look(address) or "")
    with bar(console, "looking at the pairs", sum(map(len, sets.values()))) as advance:
        found = numbers(sets, lambda done: advance(done, f"{done:,} prompts"))
    with suppress(OSError):  # then the next start counts again
        cache.keep_look(address, asdict(found))
    return found


def _named_inference(told: Mapping[str, Any]) -> dict[str, Any]:
    inference = told["inference"]
    files = [entry["path"] for entry in told["files"]]
    named = [
        {**one, "place": f"{files[one['source']]}:{one['number']}"} for one in inference["examples"]
    ]
    return {**inference, "examples": named}


def _truncation(told: Mapping[str, Any], report: Mapping[str, Any]) -> Truncation:
    def count(group: str, *kinds: str) -> int:
        return sum(told[group][kind]["count"] for kind in kinds if kind in told[group])

    return Truncation(
        report["sequence_length"],
        told["overlong"],
        told["pairs"],
        count("dropped", "too_long", "prompt_too_long"),
        count("changed", "truncated_prompt"),
        count("changed", "truncated_response"),
    )


def _placed(
    examples: list[Example], sets: Mapping[str, PairDataset], told: Mapping[str, Mapping[str, Any]]
) -> Iterator[Example]:
    columns = {
        name: (sets[name].column("source"), sets[name].column("number"))
        for name in _named(examples)
    }

    def place(name: str, row: int) -> str:
        files = (
            told[name].get("files") or told["train"]["files"]
        )  # what is held out of train lies in its files
        sources, lines = columns[name]
        return f"{files[sources[row]]['path']}:{lines[row]}"

    for one in examples:
        yield replace(one, place=place(one.set, one.row), like=place(one.like_set, one.like_row))


def _named(examples: list[Example]) -> set[str]:
    return {name for one in examples for name in (one.set, one.like_set)}
