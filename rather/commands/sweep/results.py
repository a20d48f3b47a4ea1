"""What the runs of a sweep came to: a row for each, the best one by a held-out metric, a page with their curves."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rather.commands.compare import JUDGED, Run, best
from rather.commands.score import wilson
from rather.commands.sweep.runs import DONE, PAGE, Outcome, Point, Sweep
from rather.config.schema import LOSS_MODIFIERS, LOSS_NUMBERS, DPOConfig
from rather.errors import ConfigError
from rather.losses.metrics import OF_A_LOSS, PER_PAIR
from rather.report import chart, escape, lines, page, plotly_bundle, table
from rather.report.folder import METRICS, Folder

ACCURACY = "rewards/accuracies"
RESCALING = (
    "pref_loss",
    "loss_weights",
    *LOSS_NUMBERS,
    *LOSS_MODIFIERS,
)  # keys under which losses have other units


@dataclass(frozen=True)
class Result:
    """One run as it stands. `value` is its last one of the metric that the sweep is judged by."""

    point: Point
    outcome: Outcome
    steps: int
    curves: Mapping[str, Mapping[int, float]]
    forwards: int | None  # micro-batches that the reference computed
    seconds: float | None
    metric: str | None

    @staticmethod
    def of(point: Point, outcome: Outcome, metric: str | None) -> Result:
        folder = point.config.run_dir
        if not (folder / METRICS).is_file():
            return Result(point, outcome, 0, {}, None, None, metric)
        told = Folder.of(folder)
        forwards = (told.times.get("reference") or {}).get("forwards")
        return Result(
            point, outcome, told.step, Run(told).curves, forwards, told.times.get("seconds"), metric
        )

    def last(self, name: str | None) -> float | None:
        curve = self.curves.get(name or "")
        return curve[max(curve)] if curve else None

    @property
    def value(self) -> float | None:
        return self.last(self.metric)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of an accuracy, by the number of held-out pairs."""
        if self.metric is None or self.value is None or not self.metric.endswith(ACCURACY):
            return None
        pairs = self.last(f"{self.metric.removesuffix(ACCURACY)}pairs")
        return wilson(self.value, pairs) if pairs else None

    def told(self) -> dict[str, Any]:
        """As JSON takes it."""
        top = (
            best(self.metric, self.curves[self.metric])
            if self.metric in self.curves and self.metric
            else None
        )
        return {
            "name": self.point.name,
            "folder": str(self.point.config.run_dir),
            "values": dict(self.point.values),
            **self.outcome._asdict(),
            "steps": self.steps,
            "value": self.value,
            "interval": self.interval,
            "best": top,
            "reference_forwards": self.forwards,
            "seconds": self.seconds,
            "final": {name: self.last(name) for name in self.curves},
        }


def metric_of(base: DPOConfig, wanted: str | None) -> str | None:
    """What runs are judged by: as asked, else the accuracy on the first held-out set; None where there is none."""
    data = base.validation.data_args
    if not data.given:
        if wanted:
            raise ConfigError(
                f"--by {wanted}: no pairs are held out; set validation.data_args.file_name or split"
            )
        return None
    prefixes = [
        f"eval/{name}/" if name else "eval/"
        for name in ([""] if data.split is not None else data.sets)
    ]
    if wanted is None:
        return prefixes[0] + ACCURACY
    known = [name for name in (*PER_PAIR, *OF_A_LOSS) if name.endswith(JUDGED)]
    if wanted not in {prefix + name for prefix in prefixes for name in known}:
        raise ConfigError(f"--by {wanted}: there is no such metric with a best value; there are "
                          f"{', '.join(sorted(known))}, each after {' or '.join(prefixes)}")  # fmt: skip
    return wanted


def results_of(sweep: Sweep, metric: str | None) -> list[Result]:
    return [Result.of(point, sweep.outcome(point), metric) for point in sweep.points]


def winner(results: Sequence[Result]) -> Result | None:
    """The finished run with the best last value; of equal ones the first."""
    judged = [
        r
        for r in results
        if r.outcome.state == DONE and r.value is not None and not math.isnan(r.value)
    ]
    if not judged or judged[0].metric is None:
        return None
    sign = 1 if judged[0].metric.endswith("loss") else -1
    return min(judged, key=lambda result: sign * (result.value or 0.0))


def verdict(sweep: Sweep, results: Sequence[Result], metric: str | None) -> list[str]:
    """The best run in words, and what stands against trusting it."""
    if metric is None:
        return ["no pairs are held out (validation.data_args), so no run can be called the best"]
    top = winner(results)
    if top is None or top.value is None:
        return [f"no run has finished with a {metric}"]
    said = [f"best by {metric}: {top.point.name} ({top.value:.4g}), in {top.point.config.run_dir}"]
    others = [
        r for r in results if r is not top and r.outcome.state == DONE and r.value is not None
    ]
    low, high = top.interval or (math.inf, -math.inf)
    near = [r.point.name for r in others if r.value is not None and low <= r.value <= high]
    if near:
        said.append(
            f"within the noise of so few held-out pairs (95 %: {low:.3g} to {high:.3g}) lie: {', '.join(near)}"
        )
    if metric.endswith("loss") and (keys := [key for key in sweep.grid.axes if key in RESCALING]):
        said.append(
            f"mind that {metric} has another scale for every {', '.join(keys)}; judge by accuracies instead"
        )
    return said


def write_page(
    sweep: Sweep, results: Sequence[Result], metric: str | None, said: Sequence[str]
) -> Path:
    """One self-contained file: the table, the metric over the steps of every run, and against the values."""
    body = [f"<p>{escape(sentence)}.</p>" for sentence in said]
    headings = [
        "run",
        *sweep.grid.axes,
        "state",
        "steps",
        metric or "loss",
        "reference forwards",
        "seconds",
    ]
    rows = [
        [r.point.name, *r.point.values.values(), r.outcome.state, r.steps, *(
            "-" if x is None else x for x in (r.last(metric or "loss"), r.forwards, r.seconds)
        )]
        for r in results
    ]  # fmt: skip
    body.append('<h2 id="runs">Runs</h2>' + table("All runs", headings, rows))
    for name in dict.fromkeys(filter(None, (metric, "eval/rewards/margins", "loss"))):
        series = {r.point.name: _line(r.curves[name]) for r in results if name in r.curves}
        if series:
            told = f"{name} over the steps of {len(series)} runs"
            body.append(chart(lines(series, y=name), name, told))
    for key in sweep.grid.axes if metric else ():
        at = [(r.point.values[key], r.value) for r in results if r.value is not None]
        figure = lines(
            {str(metric): ([x for x, _ in at], [y for _, y in at])}, x=key, y=str(metric)
        )
        figure["data"][0]["mode"] = "markers"
        figure["layout"]["xaxis"]["type"] = "category"
        body.append(
            chart(figure, f"{metric} by {key}", f"the last {metric} of each run against its {key}")
        )
    file = sweep.folder / PAGE
    text = page(f"Sweep of {sweep.base.exp_name}", "\n".join(body), scripts=[plotly_bundle()])
    temporary = file.with_name(f".{file.name}-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)
    return file


def _line(curve: Mapping[int, float]) -> tuple[list[int], list[float | None]]:
    steps = sorted(curve)
    return steps, [curve[step] for step in steps]
