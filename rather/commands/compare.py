"""`rather compare`: what differs between two runs in settings, metrics and weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from rather.checkpoint.sharded_tensors import ShardedFiles
from rather.errors import ConfigError
from rather.model.files import weight_files
from rather.report.folder import Folder

PLACE = ("exp_name", "output_dir", "logging_dir", "overwrite")  # where a run is, not what it does
CLOCK = ("time/", "pairs_per_second", "tokens_per_second")  # never the same twice
JUDGED = ("loss", "accuracies", "margins")  # endings of metrics that have a best value

Curve = Mapping[int, float]


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Return all differences as JSON types."""
    for path in (a, b):
        if not (path / "config.yaml").is_file():
            raise ConfigError(
                f"{path}: not a run folder, config.yaml is missing; pass <output_dir>/<exp_name>."
            )
    folders = [Folder.of(path) for path in (a, b)]
    first, second = (curves_of(folder) for folder in folders)
    shared = [name for name in first if name in second and not name.startswith(CLOCK)]
    pairs = {name: (first[name], second[name]) for name in shared}
    only = [sorted(first.keys() - second.keys()), sorted(second.keys() - first.keys())]
    difference, weights = first_difference(pairs), compare_weights(a, b)
    same_steps = all(x.keys() == y.keys() for x, y in pairs.values())
    equal = difference is None and same_steps and not any(only)
    return {
        "runs": [str(a), str(b)],
        "steps": [folder.step for folder in folders],
        "config": differences(*map(_settings, (a, b))),
        "environment": differences(
            *(folder.starts[-1]["environment"] if folder.starts else {} for folder in folders)
        ),
        "metrics": {name: _ends(name, pair) for name, pair in pairs.items()},
        "only_in_one": only,
        "curves": {name: distance(*pair) for name, pair in pairs.items()},
        "first_difference": difference,
        "weights": weights,
        "equal": bool(equal and weights and weights["equal"]),
    }


def curves_of(folder: Folder) -> dict[str, Curve]:
    """Return metric -> step -> value."""
    columns = folder.metrics.items()
    return {name: dict(zip(column.steps, column.values, strict=True)) for name, column in columns}


def _settings(run: Path) -> dict[str, Any]:
    values = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    return {key: value for key, value in leaves(values) if key not in PLACE}


def leaves(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the single values of nested mappings with their dotted paths."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, values


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [a.get(key), b.get(key)] for key in sorted({*a, *b}) if a.get(key) != b.get(key)}


def first_difference(curves: Mapping[str, tuple[Curve, Curve]]) -> dict[str, Any] | None:
    """Return the earliest common step at which a number is not the same to the last bit."""
    found = [
        (step, name, [a[step], b[step]])
        for name, (a, b) in curves.items()
        for step in a.keys() & b.keys()
        if not _same(a[step], b[step])
    ]
    return dict(zip(("step", "metric", "values"), min(found), strict=True)) if found else None


def distance(a: Curve, b: Curve) -> dict[str, Any]:
    """Return how far two curves are apart at their common steps; a NaN counts as infinitely far."""
    gaps = {
        step: 0.0 if _same(a[step], b[step]) else abs(a[step] - b[step])
        for step in sorted(a.keys() & b.keys())
    }
    gaps = {step: math.inf if math.isnan(gap) else gap for step, gap in gaps.items()}
    if not gaps:
        return {"steps": 0, "largest": None, "at": None, "rms": None}
    at = max(gaps, key=lambda step: gaps[step])
    rms = math.sqrt(sum(gap * gap for gap in gaps.values()) / len(gaps))
    return {"steps": len(gaps), "largest": gaps[at], "at": at if gaps[at] else None, "rms": rms}


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _ends(name: str, pair: tuple[Curve, Curve]) -> dict[str, Any]:
    ends: dict[str, Any] = {"final": [curve[max(curve)] for curve in pair]}
    if name.endswith(JUDGED):
        ends["best"] = [list(best(name, curve)) for curve in pair]
    return ends


def best(name: str, curve: Curve) -> tuple[float, int]:
    """Return (value, step): the lowest loss, or the highest other metric; the earliest of equals."""
    known = {step: value for step, value in curve.items() if not math.isnan(value)} or dict(curve)
    sign = 1 if name.endswith("loss") else -1
    step = min(sorted(known), key=lambda each: sign * known[each])
    return known[step], step


def compare_weights(a: Path, b: Path) -> dict[str, Any] | None:
    """Compare the exported models tensor by tensor; None if one of them does not exist yet."""
    if not all((folder / "model" / "config.json").is_file() for folder in (a, b)):
        return None
    first, second = (ShardedFiles(weight_files(folder / "model")) for folder in (a, b))
    names = {*first, *second}
    alike = [n for n in names if n in first and n in second and first.shape(n) == second.shape(n)]
    equal = [name for name in alike if _equal_bits(first[name], second[name])]
    result: dict[str, Any] = {
        "equal": len(equal) == len(names),
        "tensors": len(names),
        "differing": len(names) - len(equal),
    }
    gaps = {
        name: float((first[name].double() - second[name].double()).abs().max())
        for name in sorted({*alike} - {*equal})
    }
    if not result["equal"]:
        result["largest"] = max(gaps.values(), default=None)
        result["in"] = max(gaps, key=lambda name: gaps[name], default=None)
    return result


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A NaN is equal to itself, and -0.0 differs from 0.0."""
    first, second = (x.reshape(-1).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(first, second)
