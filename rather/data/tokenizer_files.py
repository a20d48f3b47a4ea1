"""Check a tokenizer's files before a library opens them.

The `tokenizers` library trusts its file: it allocates memory by the largest id, builds a tree of
all added tokens, and panics or aborts where a Python library would raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rather.errors import DataError
from rather.files import read_json

MOST_IDS = 1_000_000  # ids may have gaps; the largest vocabularies have 262,144 tokens
GAPS = 4  # more ids are allowed if the file has a quarter as many tokens
MOST_ADDED = 4_000_000  # characters of all added tokens: they take a hundred bytes each
MOST_AROUND = 1_000  # tokens that a post-processor adds to a text; usual are one or two


def check_tokenizer_files(folder: Path) -> None:
    """Raise DataError if a tokenizer could exhaust the memory, or end the process."""
    for name, check in (
        ("tokenizer.json", _check_tokenizer),
        ("vocab.json", _check_vocabulary),
        ("added_tokens.json", _check_vocabulary),
    ):
        path = folder / name
        if not path.is_file():
            continue
        try:
            check(read_json(path))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, ValueError | OSError):
                reason = str(error)
            raise DataError(f"{path}: the tokenizer cannot be used ({reason}).") from error


def _check_vocabulary(tokens: dict[str, int]) -> None:
    _check_ids(tokens.values(), len(tokens))


def _check_tokenizer(content: dict[str, Any]) -> None:
    added = content.get("added_tokens") or []
    characters = sum(len(token["content"]) for token in added)
    if characters > MOST_ADDED:
        raise ValueError(
            f"its added_tokens have {characters:,} characters; at most {MOST_ADDED:,} are read"
        )
    vocabulary = content["model"].get("vocab") or {}
    ids = [token["id"] for token in added]
    if isinstance(vocabulary, dict):  # a list has no gaps
        ids += vocabulary.values()
    _check_ids(ids, len(vocabulary) + len(added))
    for processor in _template_processors(content.get("post_processor")):
        _check_post_processor(processor)


def _check_ids(ids: Iterable[int], tokens: int) -> None:
    largest = max(ids, default=0)
    if largest >= max(MOST_IDS, GAPS * tokens):
        raise ValueError(f"a token has the id {largest:,}, but there are only {tokens:,} tokens")


def _template_processors(part: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(part, dict):
        return
    if part.get("type") == "Sequence":
        for inner in part["processors"]:
            yield from _template_processors(inner)
    elif part.get("type") == "TemplateProcessing":
        yield part


def _check_post_processor(part: dict[str, Any]) -> None:
    special = part.get("special_tokens") or {}
    for side in ("single", "pair"):
        names = [piece["SpecialToken"]["id"] for piece in part[side] if "SpecialToken" in piece]
        if missing := [name for name in names if name not in special]:
            raise ValueError(
                f"its post_processor uses {missing[0]!r}, which is not among its special_tokens"
            )
        pieces = len(part[side]) + sum(len(special[name]["ids"]) for name in names)
        if pieces > MOST_AROUND:
            raise ValueError(
                f"its post_processor adds {pieces:,} tokens to a text; at most {MOST_AROUND:,} are "
                "allowed"
            )
