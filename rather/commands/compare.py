"""`rather compare`: what differs between two runs in settings, metrics and weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import typer

from rather.board.runs import read_config
from rather.checkpoint.sharded_tensors import ShardedFiles
from rather.commands.terminal import print_table
from rather.model.files import weight_files
from rather.report.folder import Folder

# Where a run is, and how it was started, not what it does.
PLACE = ("exp_name", "output_dir", "logging_dir", "overwrite", "resume_from_checkpoint")
CLOCK = ("time/", "pairs_per_second", "tokens_per_second")  # never the same twice
JUDGED = ("loss", "accuracies", "margins")  # endings of metrics that have a best value
MOST_METRICS = 12  # differing metrics that are printed

Curve = Mapping[int, float]


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Return all differences as JSON types."""
    runs = [Folder(path) for path in (a, b)]
    environments = [run.starts[-1]["environment"] if run.starts else {} for run in runs]
    first, second = map(curves_of, runs)
    shared = [name for name in first if name in second and not name.startswith(CLOCK)]
    pairs = {name: (first[name], second[name]) for name in shared}
    only = [sorted(first.keys() - second.keys()), sorted(second.keys() - first.keys())]
    difference, weights = first_difference(pairs), compare_weights(a, b)
    same_steps = all(x.keys() == y.keys() for x, y in pairs.values())
    equal = difference is None and same_steps and not any(only)
    return {
        "runs": [str(a), str(b)],
        "steps": [run.step for run in runs],
        "config": differences(read_config(a), read_config(b)),
        "environment": differences(*environments),
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


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the keys with different values, except those that say where a run is."""
    keys = sorted({*a, *b}.difference(PLACE))
    return {key: [a.get(key), b.get(key)] for key in keys if a.get(key) != b.get(key)}


def _gap(a: float, b: float) -> float:
    """Return how far two values are apart; a NaN is infinitely far from everything but a NaN."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return math.inf if math.isnan(a - b) else abs(a - b)


def first_difference(curves: Mapping[str, tuple[Curve, Curve]]) -> dict[str, Any] | None:
    """Return the earliest common step at which a number is not the same to the last bit."""
    found = [
        (step, name, [a[step], b[step]])
        for name, (a, b) in curves.items()
        for step in a.keys() & b.keys()
        if _gap(a[step], b[step])
    ]
    return dict(zip(("step", "metric", "values"), min(found), strict=True)) if found else None


def distance(a: Curve, b: Curve) -> dict[str, Any]:
    """Return how far two curves are apart at their common steps."""
    gaps = {step: _gap(a[step], b[step]) for step in sorted(a.keys() & b.keys())}
    largest = max(gaps.values(), default=0.0)
    at = next((step for step, gap in gaps.items() if gap == largest), None)
    rms = math.sqrt(sum(gap * gap for gap in gaps.values()) / max(1, len(gaps)))
    return {"steps": len(gaps), "largest": largest, "at": at if largest else None, "rms": rms}


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
    names, gaps = sorted({*first, *second}), {}
    for name in names:
        alike = name in first and name in second and first.shape(name) == second.shape(name)
        if not alike:
            gaps[name] = math.inf
        elif not _equal_bits(first[name], second[name]):
            gaps[name] = float((first[name].double() - second[name].double()).abs().max())
    largest = max(gaps, key=lambda name: gaps[name], default=None)
    found = {"equal": not gaps, "tensors": len(names), "differing": len(gaps)}
    return {**found, "largest": gaps.get(str(largest)), "in": largest}


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A NaN is equal to itself, and -0.0 differs from 0.0."""
    first, second = (x.reshape(-1).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(first, second)


def print_comparison(found: Mapping[str, Any]) -> None:
    a, b = (Path(name).name for name in found["runs"])
    for title in ("config", "environment"):
        rows = [(key, *pair) for key, pair in found[title].items()]
        print_table((title, a, b), rows, f"{title}: {len(rows)} differences")
    curves = {name: curve for name, curve in found["curves"].items() if curve["largest"]}
    rows = []
    for name in sorted(curves, key=lambda name: -curves[name]["largest"])[:MOST_METRICS]:
        curve, final = curves[name], found["metrics"][name]["final"]
        apart = f"{curve['largest']:.3g} at step {curve['at']}, {curve['rms']:.3g} rms"
        rows.append((name, *(f"{value:.6g}" for value in final), apart))
    title = f"metrics: {len(curves)} of {len(found['curves'])} differ"
    print_table(("metric", f"{a}, final", f"{b}, final", "largest gap"), rows, title)
    first, weights = found["first_difference"], found["weights"]
    said = ["Steps: {} and {}.".format(*found["steps"]), "No metric differs at a common step."]
    if first:
        values = "{!r} and {!r}".format(*first["values"])
        said[1] = f"They differ from step {first['step']}: {first['metric']} is {values}."
    if weights is None:
        said.append("Weights were not compared: a run has no exported model.")
    else:
        differ = f"{weights['differing']} of {weights['tensors']} tensors of the models differ."
        said.append(differ)
    said.append("The runs are bit-identical." if found["equal"] else "The runs are not equal.")
    typer.echo("\n".join(said))
