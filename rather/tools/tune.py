"""`rather tune`: choose learning rate and beta within a time budget.

First a learning-rate range test: some steps with rates a factor of 10 apart. Then successive
halving: all settings around the best rate train for some steps, the best third three times as many,
and so on. Every setting is one run folder that each round resumes, and all share the caches. What was
measured is in tune.json, so the same command continues, within what is left of the budget.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import typer

from rather.commands.terminal import echo, print_table, settings
from rather.config.load import dump_yaml
from rather.config.run_config import DPOConfig
from rather.data.prepare import prepare
from rather.errors import ConfigError, NonFiniteError
from rather.files import JsonObject, own, parse_json, read_bytes, replace_own, write_own
from rather.losses.objective import from_config
from rather.pipeline.steps import PreparedSteps
from rather.run_folder import control
from rather.tools.report.folder import MetricsReader
from rather.tools.sweep import SIGNALS, combinations, folder_of_runs, train_here
from rather.tracking.json_lines import strict_json

STATE = "tune.json"
RATE, BETA, LOSS = "actor_train.training_args.learning_rate", "beta", "pref_loss"
RANGE = (0.01, 0.1, 1.0, 10.0, 100.0)  # of the rate in the YAML, in the range test
AROUND = (1 / 3, 1.0, 3.0)  # of the best of these, and of beta
SHARE = 0.2  # of the budget, for the range test
FIRST = 4  # steps of each rate before the length of the range test is chosen
PER_ROUND = 3  # each round trains so many times longer, and keeps one setting of so many
MEASURED = ("calibrated_loss", "rewards/accuracies", "drift", "rewards/accuracies_low",
            "rewards/accuracies_high", "rewards/accuracies_length_controlled")  # fmt: skip


def seconds_of(text: str) -> float:
    """Return the seconds of 90s, 20m or 1.5h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found or not float(found[1]):
        raise ConfigError(f"--budget {text}: write a time such as 90s, 20m or 1.5h.")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def read_state(file: Path) -> JsonObject:
    """Return what was measured before; refuse a damaged file, from which tuning would go astray."""
    if not os.path.lexists(file):
        return {"seconds": 0.0, "runs": {}, "rounds": {}}
    try:
        state: JsonObject = parse_json(read_bytes(file, opener=own))
        state["seconds"] = _number(state["seconds"])
        for run in state["runs"].values():
            run["values"] = {str(key): str(value) for key, value in run["values"].items()}
            run["steps"] = int(_number(run["steps"]))
            timed = ("step_seconds", "start_seconds") if run["steps"] else ()
            run |= {name: _number(run[name]) for name in timed}
            # JSON has no NaN: it is stored as text.
            run |= {name: float(run[name]) for name in MEASURED if name in run}
            if "error" in run:
                run["error"] = str(run["error"])
        for name, value in state["rounds"].items():
            number = _number(value if name != "rate" else float(value))
            if number <= 0:
                raise ValueError(f"{name} is {number}")
        return state
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}: is damaged ({type(error).__name__}: {error}). Remove {file.parent} to tune from "
            "scratch, or choose another exp_name."
        ) from error


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{str(value)[:80]!r} is not a number of 0 or more")
    return value


@dataclass
class Tuning:
    """The settings that are tried, and what was measured: JSON values, stored after every run."""

    file: Path
    base: DPOConfig
    shared: Sequence[str]  # overrides of all runs
    folder: Path
    budget: float
    state: JsonObject = field(default_factory=dict)

    @staticmethod
    def of(file: Path, overrides: Sequence[str], budget: float) -> Tuning:
        base = settings(file, overrides)
        if base.task != "preference":
            raise ConfigError(f"task: settings are compared on held-out pairs, not for {base.task}; "
                              "compare those of other tasks with `rather sweep`.")  # fmt: skip
        if not base.validation.data_args.given:
            raise ConfigError("validation.data_args: set file_name or split: settings are compared "
                              "on held-out pairs.")  # fmt: skip
        folder, places = folder_of_runs(base, "tune")
        shared = [
            *overrides, *places,
            "actor_train.training_args.lr_scheduler_type=constant",
            "actor_train.training_args.warmup_steps=0", "actor_train.training_args.warmup_ratio=0",
            "eval_steps=null", "save_steps=null", "report_html=false", "save_best=false",
            "early_stopping_patience=null", "track_with=null",
        ]  # fmt: skip
        found = Tuning(file, base, shared, folder, budget)
        found.state = read_state(folder / STATE)
        asked = {"config": dump_yaml(base), "overrides": list(overrides)}
        if found.state.setdefault("asked", asked) != asked:
            raise ConfigError(
                f"{folder} was tuned with other settings; choose another exp_name, or remove it."
            )
        return found

    @property
    def runs(self) -> JsonObject:
        """What was measured of each run, by its name."""
        runs: JsonObject = self.state["runs"]
        return runs

    @property
    def left(self) -> float:
        return self.budget - float(self.state["seconds"])

    def save(self) -> None:
        replace_own(self.folder / STATE, strict_json(self.state, indent=1) + "\n")

    def train(self, name: str, values: JsonObject, steps: int) -> int:
        """Train one setting up to so many steps and measure it; return an exit code to end with."""
        run = self.runs.setdefault(name, {"values": dict(values), "steps": 0})
        if run["steps"] >= steps or "error" in run:
            return 0
        own = [*(f"{key}={value}" for key, value in values.items()), f"exp_name={name}"]
        config = settings(self.file, [*self.shared, *own, f"max_steps={steps}"])
        typer.secho(f"tune: {name} to step {steps}", bold=True, err=True)
        began = time.monotonic()
        code, error = train_here(config)
        spent = time.monotonic() - began
        self.state["seconds"] += spent
        if code in SIGNALS:
            self.save()
            return code
        if code:
            run["error"] = error
        else:
            columns = MetricsReader(config.run_dir / "metrics.jsonl").update()
            prefix = next(name for name in columns if name.endswith(MEASURED[0]))
            prefix = prefix.removesuffix(MEASURED[0])
            for metric in MEASURED:
                if prefix + metric in columns:
                    run[metric] = columns[prefix + metric].values[-1]
            timed = zip(columns["pairs"].values, columns["pairs_per_second"].values, strict=True)
            step = median(pairs / speed for pairs, speed in timed)
            # What a start costs: loading, and the evaluation at the end.
            start = max(0.0, spent - step * (steps - run["steps"]))
            run |= {"steps": steps, "step_seconds": step, "start_seconds": start}
        self.save()
        return 0

    def loss(self, name: str) -> float:
        """Return a held-out loss that is comparable between betas; infinite if the run failed."""
        run = self.runs[name]
        value = run.get("calibrated_loss", math.inf)
        return float(value) if math.isfinite(value) and "error" not in run else math.inf

    def ranked(self, names: Iterable[str]) -> list[str]:
        """Return the runs that were measured and did not diverge, best first; raise without any."""
        losses = {name: self.loss(name) for name in names}
        good = [name for name in sorted(losses, key=losses.__getitem__) if losses[name] < math.inf]
        if good:
            return good
        why = {name: self.runs[name].get("error", "the held-out loss is not finite")
               for name in losses}  # fmt: skip
        tried = "; ".join(f"{name}: {error}" for name, error in why.items())
        raise NonFiniteError(
            f"No setting is usable: each one diverged or failed ({tried}). Lower {RATE}, and look at "
            f"{self.folder / STATE}."
        )

    def run(self, losses: Sequence[str], total_steps: int) -> int:
        """Do what is left within the budget; return an exit code, 0 unless asked to stop."""
        fixed = {LOSS: losses[0]} if losses else {}
        rate = self.base.actor_train.training_args.learning_rate
        probes = combinations({RATE: [f"{rate * factor:.3g}" for factor in RANGE]})
        rounds = self.state["rounds"]
        first = min(total_steps, FIRST)

        def probe(steps: int) -> int:
            for name, values in probes.items():
                if code := self.train(f"range-{name}", {**values, **fixed}, steps):
                    return code
            return 0

        if code := probe(first):
            return code
        # Now the cost of a step is known: use the share of the range test.
        step, start = self._costs
        room = (self.left - (1 - SHARE) * self.budget) / len(probes) - start
        longer = first + int(room / step)
        longer = longer if longer >= 2 * first else first  # a few steps are not worth a start
        if code := probe(rounds.setdefault("range", min(total_steps, longer))):
            return code
        tried = [name for name in self.runs if name.startswith("range-")]
        rounds.setdefault("rate", self.runs[self.ranked(tried)[0]]["values"][RATE])
        return self._halve(float(rounds["rate"]), losses, total_steps)

    def _halve(self, rate: float, losses: Sequence[str], total_steps: int) -> int:
        axes = {RATE: [f"{rate * factor:.3g}" for factor in AROUND]}
        if beta := self.base.loss_numbers.get("beta") or from_config(self.base).terms[0].beta:
            axes[BETA] = [f"{beta * factor:.3g}" for factor in AROUND]
        if losses:
            axes[LOSS] = list(losses)
        names = list(every := combinations(axes))
        if "steps" not in self.state["rounds"]:
            self.state["rounds"]["steps"] = self._first_steps(len(names), total_steps)
        steps = self.state["rounds"]["steps"]
        while True:
            for name in names:
                done = self.runs.get(name, {}).get("steps", 0)
                step, start = self._costs
                if self.left < start + step * max(0, steps - done):
                    echo("tune: the budget is used up; the best so far counts.", err=True)
                    return 0
                if code := self.train(name, every[name], steps):
                    return code
            if len(names) <= PER_ROUND or steps >= total_steps:  # the best of these is chosen
                return 0
            names = sorted(names, key=self.loss)[: math.ceil(len(names) / PER_ROUND)]
            steps = min(total_steps, PER_ROUND * steps)

    @property
    def _costs(self) -> tuple[float, float]:
        """The seconds of a step, and what a run takes besides; the first ones fill caches."""
        timed = [run for run in self.runs.values() if run["steps"]]
        if not timed:
            raise ConfigError(f"No setting could be trained; see {self.folder / STATE}.")
        step = min(run["step_seconds"] for run in timed)
        return float(step), float(min(run["start_seconds"] for run in timed))

    def _first_steps(self, settings: int, total_steps: int) -> int:
        """Return the steps of the first round, so that all rounds fit into the budget."""
        counts = [settings]  # of each round
        while counts[-1] > PER_ROUND:
            counts.append(math.ceil(counts[-1] / PER_ROUND))
        # A round continues the runs of the previous one.
        steps = sum(n * (PER_ROUND**i - PER_ROUND**i // PER_ROUND) for i, n in enumerate(counts))
        step, start = self._costs
        room = 0.9 * self.left - start * sum(counts)
        return max(1, min(total_steps, int(room / (step * steps))))

    def result(self) -> JsonObject:
        """Return the frontier of held-out loss and drift, the best setting, and why."""
        order = self.ranked(self.runs)
        most = max(self.runs[name]["steps"] for name in order)
        best = next(name for name in order if self.runs[name]["steps"] == most)
        frontier, least = [], math.inf
        for name in order:
            drift = self.runs[name].get("drift", 0.0)
            if drift < least:
                least = drift
                frontier.append(name)
        return {
            "best": best, "frontier": frontier, "runs": self.runs,
            "seconds": self.state["seconds"], "budget": self.budget,
        }  # fmt: skip


def tune(file: Path, overrides: Sequence[str], budget: float, losses: Sequence[str]) -> Tuning:
    """Try settings until the budget is used; exit with the code of a run that was asked to stop."""
    tuning = Tuning.of(file, overrides, budget)
    total = PreparedSteps.of(tuning.base, prepare(tuning.base)).total_steps
    with control.lock(tuning.folder):
        if code := tuning.run(losses, total):
            raise typer.Exit(code)
    return tuning


def write_best(tuning: Tuning, found: JsonObject, out: Path) -> None:
    """Write the YAML of the best setting, with the reasons above it."""
    best = found["runs"][found["best"]]
    lines = ["Chosen by rather tune. The schedule of the learning rate is that of the base config;",
             "settings were compared with a constant one."]  # fmt: skip
    lines += [f"{key}: {value}" for key, value in best["values"].items()]
    lines.append(f"held-out after {best['steps']} steps: " + _numbers(best))
    order = sorted(found["runs"], key=tuning.loss)
    others = [name for name in order if name != found["best"]]
    lines += [f"next: {name}: {_numbers(found['runs'][name])}" for name in others[:3]]
    changes = [f"{key}={value}" for key, value in best["values"].items()]
    config = settings(tuning.file, [*tuning.state["asked"]["overrides"], *changes])
    write_own(out, "".join(f"# {line}\n" for line in lines) + dump_yaml(config))


def _numbers(run: JsonObject) -> str:
    if not {*MEASURED[:2], *MEASURED[3:5]} <= run.keys():
        return str(run.get("error", "not measured"))
    loss, accuracy, _, low, high = (run.get(name) for name in MEASURED[:5])
    text = f"loss {loss:.4f}, accuracy {accuracy:.1%} ({low:.1%} to {high:.1%})"
    return text + (f", drift {run['drift']:.4g} per token" if "drift" in run else "")


def print_result(found: JsonObject) -> None:
    rows = []
    for name, run in found["runs"].items():
        numbers = [f"{run[key]:.4f}" if key in run else "" for key in MEASURED[:3]]
        marks = ["best"] * (name == found["best"]) + ["frontier"] * (name in found["frontier"])
        rows.append((name, run["steps"], *numbers, ", ".join(marks), run.get("error", "")[:60]))
    headings = ("setting", "steps", "held-out loss", "accuracy", "drift", "", "error")
    used = f"{found['seconds']:.0f} of {found['budget']:.0f} seconds used"
    print_table(headings, rows, f"{used}. The frontier: no other has a lower loss and less drift.")
