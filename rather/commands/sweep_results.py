"""What the runs of a sweep came to: their metrics, and which one is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from rather.commands.compare import JUDGED, best, curves_of
from rather.commands.score import wilson
from rather.commands.sweep_runs import Sweep, SweepRun
from rather.commands.terminal import make_table
from rather.config.schema import LOSS_MODIFIERS, LOSS_NUMBERS, DPOConfig
from rather.errors import ConfigError
from rather.losses.metrics import OF_A_LOSS, PER_PAIR
from rather.report.folder import METRICS, Folder

ACCURACY = "rewards/accuracies"
# Keys that change the unit of the loss, so that losses cannot be compared between their values.
RESCALING = ("pref_loss", "loss_weights", *LOSS_NUMBERS, *LOSS_MODIFIERS)


class RunResult(NamedTuple):
    """The metrics of a run so far."""

    run: SweepRun
    steps: int
    curves: Mapping[str, Mapping[int, float]]
    times: Mapping[str, Any]

    @staticmethod
    def read(run: SweepRun) -> RunResult:
        if not (run.config.run_dir / METRICS).is_file():
            return RunResult(run, 0, {}, {})
        folder = Folder.of(run.config.run_dir)
        return RunResult(run, folder.step, curves_of(folder), folder.times)

    @property
    def forwards(self) -> int | None:
        """Micro-batches that the reference computed."""
        return (self.times.get("reference") or {}).get("forwards")

    def last(self, metric: str | None) -> float | None:
        curve = self.curves.get(metric or "")
        return curve[max(curve)] if curve else None

    def interval(self, metric: str | None) -> tuple[float, float] | None:
        """Return the 95 % interval of an accuracy, from the number of held-out pairs."""
        value = self.last(metric)
        if not metric or value is None or not metric.endswith(ACCURACY):
            return None
        pairs = self.last(f"{metric.removesuffix(ACCURACY)}pairs")
        return wilson(value, pairs) if pairs else None

    def as_json(self, metric: str | None) -> dict[str, Any]:
        curve = self.curves.get(metric or "")
        return {
            "name": self.run.name,
            "folder": str(self.run.config.run_dir),
            **self.run.as_json(),
            "steps": self.steps,
            "value": self.last(metric),
            "interval": self.interval(metric),
            "best": best(str(metric), curve) if curve else None,
            "reference_forwards": self.forwards,
            "seconds": self.times.get("seconds"),
            "final": {name: self.last(name) for name in self.curves},
        }


class Results(NamedTuple):
    """All runs, and the held-out metric that decides which is the best."""

    sweep: Sweep
    metric: str | None
    runs: list[RunResult]

    @property
    def ranking(self) -> list[tuple[float, RunResult]]:
        """Return finished runs with the last value of the metric, the best first."""
        finished = [result for result in self.runs if result.run.state == "finished"]
        values = [(result.last(self.metric), result) for result in finished]
        known = [(value, r) for value, r in values if value is not None and not math.isnan(value)]
        sign = 1 if str(self.metric).endswith("loss") else -1
        return sorted(known, key=lambda found: sign * found[0])

    def as_json(self) -> dict[str, Any]:
        top = self.ranking[0][1].run.name if self.ranking else None
        runs = [result.as_json(self.metric) for result in self.runs]
        reference = self.sweep.reference
        return {"metric": self.metric, "best": top, "reference": reference, "runs": runs}

    def verdict(self) -> str:
        """Say which run is the best, and what speaks against trusting it."""
        metric = self.metric
        if metric is None:
            return "No best run: no pairs are held out (validation.data_args)."
        if not self.ranking:
            return f"No best run: none has finished with a {metric}."
        (value, top), *others = self.ranking
        text = f"Best by {metric}: {top.run.name} ({value:.4g}), in {top.run.config.run_dir}"
        low, high = top.interval(metric) or (math.inf, -math.inf)
        if near := [result.run.name for value, result in others if low <= value <= high]:
            text += "\nNot significantly worse with so few held-out pairs "
            text += f"(95 %: {low:.3g} to {high:.3g}): {', '.join(near)}"
        keys = [key for key in self.sweep.axes if key in RESCALING]
        if metric.endswith("loss") and keys:
            text += f"\n{metric} has another scale for every {', '.join(keys)}; compare accuracies."
        return text

    def print(self, console: Console) -> None:
        """Print a table that fits into eighty columns, and the verdict."""
        wanted = dict.fromkeys((self.metric, "eval/rewards/margins", "eval/loss"))
        shown = [name for name in wanted if name and any(name in run.curves for run in self.runs)]
        shown = shown or ["rewards/accuracies", "loss"]
        names = [name.rpartition("/")[2] for name in shown]
        table = make_table(
            f"Sweep {self.sweep.folder}", "run", "state", "steps", *names, "reference", "seconds",
            box=None, pad_edge=False, caption="reference: micro-batches that it computed",
        )  # fmt: skip
        for result in self.runs:
            run, seconds = result.run, result.times.get("seconds")
            numbers = [result.steps, *map(result.last, shown), result.forwards, seconds]
            cells = ["-" if number is None else f"{number:.4g}" for number in numbers]
            style = {"finished": "", "waiting": "yellow"}.get(run.state, "red")
            table.add_row(Text(run.name), run.state, *cells, style=style)
        errors = [f"{each.run.name}: {each.run.error}\n" for each in self.runs if each.run.error]
        console.print(table, Text("".join(errors), style="red"), sep="\n", soft_wrap=True)
        console.print(Text(self.verdict()), soft_wrap=True)


def choose_metric(base: DPOConfig, wanted: str | None) -> str | None:
    """Return the metric that decides: as asked, else the accuracy on the first held-out set."""
    data = base.validation.data_args
    if not data.given:
        if wanted:
            raise ConfigError(
                f"--by {wanted}: no pairs are held out; set validation.data_args.file_name or split"
            )
        return None
    sets = [""] if data.split is not None else list(data.sets)
    prefixes = [f"eval/{name}/" if name else "eval/" for name in sets]
    if wanted is None:
        return prefixes[0] + ACCURACY
    known = sorted(name for name in (*PER_PAIR, *OF_A_LOSS) if name.endswith(JUDGED))
    if wanted not in {prefix + name for prefix in prefixes for name in known}:
        raise ConfigError(
            f"--by {wanted}: not a metric with a best value; choose one of {', '.join(known)}, "
            f"each after {' or '.join(prefixes)}"
        )
    return wanted
