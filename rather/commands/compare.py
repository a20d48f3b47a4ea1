"""`rather compare`: two run folders: what differs in their settings, numbers and weights, and from which step on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rather.errors import ConfigError
from rather.report.folder import Folder

PLACE = ("exp_name", "output_dir", "logging_dir", "overwrite")  # where a run lies, not what it does
CLOCK = ("time/", "pairs_per_second", "tokens_per_second")  # never the same twice
JUDGED = ("loss", "accuracies", "margins")  # endings of metrics that have a best value

Curve = Mapping[int, float]


@dataclass(frozen=True)
class Run:
    """What a run folder tells about itself."""

    told: Folder

    @staticmethod
    def opened(path: Path) -> Run:
        if not (path / "config.yaml").is_file():
            raise ConfigError(
                f"{path}: is no run folder: it has no config.yaml; name one, <output_dir>/<exp_name>"
            )
        return Run(Folder.of(path))

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every key with its value; where the run lies is left out."""
        values = yaml.safe_load((self.told.path / "config.yaml").read_text(encoding="utf-8"))
        return {key: value for key, value in leaves(values) if key not in PLACE}

    @property
    def environment(self) -> dict[str, Any]:
        """That of its last start."""
        found: dict[str, Any] = self.told.starts[-1]["environment"] if self.told.starts else {}
        return found

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Metric -> step -> value."""
        columns = self.told.metrics.items()
        return {
            name: dict(zip(column.steps, column.values, strict=True)) for name, column in columns
        }


def compare(a: Path, b: Path) -> dict[str, Any]:
    """All differences, as JSON takes them."""
    runs = Run.opened(a), Run.opened(b)
    ours, theirs = (run.curves for run in runs)
    shared = [name for name in ours if name in theirs and not name.startswith(CLOCK)]
    only = [sorted(mine.keys() - other.keys()) for mine, other in ((ours, theirs), (theirs, ours))]
    first = first_difference({name: (ours[name], theirs[name]) for name in shared})
    weights = compare_weights(a, b)
    same = (
        first is None
        and not any(only)
        and all(ours[name].keys() == theirs[name].keys() for name in shared)
    )
    return {
        "runs": [str(a), str(b)],
        "steps": [run.told.step for run in runs],
        "config": differences(runs[0].config, runs[1].config),
        "environment": differences(runs[0].environment, runs[1].environment),
        "metrics": {name: _ends(name, ours[name], theirs[name]) for name in shared},
        "only_in_one": only,
        "curves": {name: distance(ours[name], theirs[name]) for name in shared},
        "first_difference": first,
        "weights": weights,
        "equal": bool(same and weights and weights["equal"]),
    }


def leaves(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Single values by their path."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, values


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [a.get(key), b.get(key)] for key in sorted({*a, *b}) if a.get(key) != b.get(key)}


def first_difference(curves: Mapping[str, tuple[Curve, Curve]]) -> dict[str, Any] | None:
    """The earliest step that both have at which any number is not the same to the last bit."""
    found = [
        (step, name)
        for name, (a, b) in curves.items()
        for step in a.keys() & b.keys()
        if not _same(a[step], b[step])
    ]
    if not found:
        return None
    step, name = min(found)
    return {"step": step, "metric": name, "values": [curves[name][0][step], curves[name][1][step]]}


def distance(a: Curve, b: Curve) -> dict[str, Any]:
    """How far two curves are apart at the steps that both have; a value that is no number is as far as can be."""
    steps = sorted(a.keys() & b.keys())
    gaps = {step: 0.0 if _same(a[step], b[step]) else abs(a[step] - b[step]) for step in steps}
    gaps = {step: math.inf if math.isnan(gap) else gap for step, gap in gaps.items()}
    if not gaps:
        return {"steps": 0, "largest": None, "at": None, "rms": None}
    at = max(gaps, key=lambda step: gaps[step])
    rms = math.sqrt(sum(gap * gap for gap in gaps.values()) / len(gaps))
    return {"steps": len(steps), "largest": gaps[at], "at": at if gaps[at] else None, "rms": rms}


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _ends(name: str, a: Curve, b: Curve) -> dict[str, Any]:
    told: dict[str, Any] = {"final": [curve[max(curve)] for curve in (a, b)]}
    if name.endswith(JUDGED):
        told["best"] = [list(best(name, curve)) for curve in (a, b)]
    return told


def best(name: str, curve: Curve) -> tuple[float, int]:
    """(value, step): the lowest of a loss, the highest of anything else; the earliest of equal ones."""
    known = {step: value for step, value in curve.items() if not math.isnan(value)} or dict(curve)
    sign = 1 if name.endswith("loss") else -1
    step = min(sorted(known), key=lambda each: sign * known[each])
    return known[step], step


# --- weights ---


def compare_weights(a: Path, b: Path) -> dict[str, Any] | None:
    """The exported models tensor by tensor, however they are cut into files; None where one has none yet."""
    from rather.checkpoint.sharded_tensors import ShardedFiles
    from rather.model.files import weight_files

    if not all((folder / "model" / "config.json").is_file() for folder in (a, b)):
        return None
    first, second = (ShardedFiles(weight_files(folder / "model")) for folder in (a, b))
    names = sorted({*first, *second})
    differing = [name for name in names if not _equal(first, second, name)]
    told: dict[str, Any] = {
        "equal": not differing,
        "tensors": len(names),
        "differing": len(differing),
    }
    if differing:
        both = [name for name in differing if name in first and name in second]
        sizes = {
            name: _gap(first, second, name)
            for name in both
            if first.shape(name) == second.shape(name)
        }
        told["largest"] = max(sizes.values(), default=None)
        told["in"] = max(sizes, key=lambda name: sizes[name], default=None)
    return told


def _equal(a: Any, b: Any, name: str) -> bool:
    """To the bit: a NaN is equal to itself, and -0.0 is not 0.0."""
    import torch

    if name not in a or name not in b or a.shape(name) != b.shape(name):
        return False
    first, second = a[name], b[name]
    return first.dtype == second.dtype and torch.equal(
        *(x.reshape(-1).view(torch.uint8) for x in (first, second))
    )


def _gap(a: Any, b: Any, name: str) -> float:
    return float((a[name].double() - b[name].double()).abs().max())
