"""Values of a config that must not be written: secrets by key or by look, whatever was read from
the environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rather.config.inherit import value_at
from rather.config.redaction import looks_secret, redact
from rather.config.schema import DPOConfig
from rather.config.values import MASK

COMMIT = "revision"  # a git commit looks like an old W&B key


def secret_values(values: Any, secret: bool = False) -> Iterator[str]:
    """Every text under a key that is named like a secret."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from secret_values(value, looks_secret(str(name)))
    elif isinstance(values, list):
        for value in values:
            yield from secret_values(value, secret)
    elif secret and isinstance(values, str):
        yield values


def public_values(config: DPOConfig) -> dict[str, Any]:
    """All effective values that may be shown: a key that follows a hidden one is hidden with it."""
    values = config.model_dump()
    shown: dict[str, Any] = masked(values, config.unresolved)
    for path, source in config.followed.items():
        if value_at(values, path) == value_at(values, source):
            parent, _, name = path.rpartition(".")
            (value_at(shown, parent) if parent else shown)[name] = value_at(shown, source)
    return shown


def masked(values: Any, raw: Any) -> Any:
    """Resolved `values` without secrets; what came from the environment is shown as written in
    `raw`."""
    return _masked(values, raw, raw)


def _masked(value: Any, text: Any, root: Any, name: str = "") -> Any:
    if isinstance(text, str) and reads_environment(text, root):
        return text
    if isinstance(value, dict):
        texts: Any = text if isinstance(text, dict) else {}
        return {key: _masked(item, texts.get(key), root, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        texts = text if isinstance(text, list) and len(text) == len(value) else [None] * len(value)
        return [_masked(item, part, root, name) for item, part in zip(value, texts, strict=True)]
    if looks_secret(name) and value is not None:
        return MASK
    return redact(value) if isinstance(value, str) and name != COMMIT else value


def reads_environment(text: str, root: Any, seen: frozenset[str] = frozenset()) -> bool:
    """Whether an unresolved text takes anything from the environment, itself or through the keys
    it names."""
    if "oc.env" in text:
        return True
    if re.search(
        r"\$\{\s*\.", text
    ):  # relative names are not followed: rather too careful than leaking
        return True
    named = set(re.findall(r"\$\{\s*([\w.]+)\s*\}", text)) - seen
    return any(
        reads_environment(part, root, seen | named)
        for path in named
        for part in _texts(_at(root, path))
    )


def _at(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []
