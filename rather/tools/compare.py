"""`rather compare`: what differs between two runs in settings, metrics and weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rather.checkpoint.sharded_tensors import ShardedFiles
from rather.commands.terminal import echo, print_table
from rather.errors import ConfigError
from rather.files import JsonObject, refuse_outside
from rather.model.files import weight_files
from rather.tools.board.runs import FolderProblem, read_config
from rather.tools.report.folder import Folder
from rather.tracking.json_lines import FALLS

# Where a run is, and how it was started, not what it does.
PLACE = ("exp_name", "output_dir", "logging_dir", "overwrite", "resume_from_checkpoint")
CLOCK = ("time/", "pairs_per_second", "tokens_per_second")  # never the same twice
JUDGED = ("loss", "accuracies", "margins")  # endings of metrics that have a best value
MOST_METRICS = 12  # differing metrics that are printed

Curve = Mapping[int, float]


def compare(a: Path, b: Path) -> JsonObject:
    """Return all differences as JSON types."""
    runs = [Folder(path) for path in (a, b)]
    first, second = map(curves_of, runs)
    shared = [name for name in first if name in second and not name.startswith(CLOCK)]
    metrics = {name: compare_curves(name, first[name], second[name]) for name in shared}
    only = [sorted(first.keys() - second.keys()), sorted(second.keys() - first.keys())]
    weights = compare_weights(a, b)
    difference = None
    changes = [
        (compared["from"], name)
        for name, compared in metrics.items()
        if compared["from"] is not None
    ]
    if changes:
        step, name = min(changes)
        values = [first[name][step], second[name][step]]
        difference = {"step": step, "metric": name, "values": values}
    same_steps = all(first[name].keys() == second[name].keys() for name in shared)
    equal = difference is None and same_steps and not any(only)
    return {
        "runs": [str(a), str(b)],
        "steps": [run.step for run in runs],
        "config": differences(settings_of(a), settings_of(b)),
        "environment": differences(*map(environment_of, runs)),
        "metrics": metrics,
        "only_in_one": only,
        "first_difference": difference,
        "weights": weights,
        "equal": bool(equal and weights and weights["equal"]),
    }


def environment_of(run: Folder) -> JsonObject:
    """Return where a run was last started; a line that Rather did not write may hold anything."""
    environment = run.starts[-1].get("environment") if run.starts else None
    return environment if isinstance(environment, dict) else {}


def settings_of(run: Path) -> JsonObject:
    try:
        return read_config(run)
    except FolderProblem as problem:
        raise ConfigError(f"{run}: {problem}.") from problem


def curves_of(folder: Folder) -> dict[str, Curve]:
    """Return metric -> step -> value."""
    columns = folder.metrics.items()
    return {name: dict(zip(column.steps, column.values, strict=True)) for name, column in columns}


def differences(a: JsonObject, b: JsonObject) -> dict[str, list[Any]]:
    """Return the keys with different values, except those that say where a run is."""
    keys = sorted({*a, *b}.difference(PLACE))
    return {key: [a.get(key), b.get(key)] for key in keys if a.get(key) != b.get(key)}


def compare_curves(name: str, a: Curve, b: Curve) -> JsonObject:
    """Return final and best values, and the gaps at common steps; a NaN is far from any number."""
    gaps = {}
    for step in sorted(a.keys() & b.keys()):
        if a[step] != b[step] and not (math.isnan(a[step]) and math.isnan(b[step])):
            gap = abs(a[step] - b[step])
            gaps[step] = math.inf if math.isnan(gap) else gap
    largest = max(gaps.values(), default=0.0)
    comparison: JsonObject = {"final": [a[max(a)], b[max(b)]], "from": min(gaps, default=None)}
    comparison |= {"largest": largest, "at": next((s for s in gaps if gaps[s] == largest), None)}
    return comparison | ({"best": [best(name, a), best(name, b)]} if name.endswith(JUDGED) else {})


def best(name: str, curve: Curve) -> tuple[float, int]:
    """Return (value, step) of the lowest loss, or of the highest other metric, the earliest."""
    finite = [step for step in sorted(curve) if not math.isnan(curve[step])]
    sign = 1 if name.endswith(FALLS) else -1
    best_step = min(finite or sorted(curve), key=lambda step: sign * curve[step])
    return curve[best_step], best_step


def compare_weights(a: Path, b: Path) -> JsonObject | None:
    """Compare the exported models tensor by tensor; None if one of them does not exist yet."""
    for folder in (a, b):
        refuse_outside(folder, folder / "model")
    if not all((folder / "model" / "config.json").is_file() for folder in (a, b)):
        return None
    first, second = (ShardedFiles(weight_files(folder / "model")) for folder in (a, b))
    names, gaps = {*first, *second}, {}
    for name in names:
        if name not in first or name not in second or first.shape(name) != second.shape(name):
            gaps[name] = math.inf
            continue
        a_tensor, b_tensor = first[name], second[name]
        # By their bytes: a NaN is equal to itself, and -0.0 differs from 0.0.
        bits = (tensor.reshape(-1).view(torch.uint8) for tensor in (a_tensor, b_tensor))
        if a_tensor.dtype != b_tensor.dtype or not torch.equal(*bits):
            gaps[name] = float((a_tensor.double() - b_tensor.double()).abs().max())
    largest = max(gaps, key=lambda name: gaps[name], default="")
    counts = {"equal": not gaps, "tensors": len(names), "differing": len(gaps)}
    return {**counts, "largest": gaps.get(largest), "in": largest}


def print_comparison(found: JsonObject) -> None:
    a, b = (Path(name).name for name in found["runs"])
    for title in ("config", "environment"):
        rows = [(key, *pair) for key, pair in found[title].items()]
        print_table((title, a, b), rows, f"{title}: {len(rows)} differences")
    metrics = found["metrics"].items()
    rows = [
        (
            name,
            *(f"{number:.6g}" for number in compared["final"]),
            f"{compared['largest']:.3g}",
            compared["at"],
        )
        for name, compared in sorted(metrics, key=lambda item: -item[1]["largest"])
        if compared["largest"]
    ]
    title = f"metrics: {len(rows)} of {len(metrics)} differ"
    names = ("metric", f"{a}, final", f"{b}, final", "largest gap", "at step")
    print_table(names, rows[:MOST_METRICS], title)
    first, weights = found["first_difference"], found["weights"]
    echo("Steps: {} and {}.".format(*found["steps"]))
    if first:
        values = "{!r} and {!r}".format(*first["values"])
        echo(f"They differ from step {first['step']}: {first['metric']} is {values}.")
    if weights:
        echo("{differing} of {tensors} tensors of the models differ.".format(**weights))
    else:
        echo("Weights were not compared: a run has no exported model.")
    echo("The runs are bit-identical." if found["equal"] else "The runs are not equal.")
