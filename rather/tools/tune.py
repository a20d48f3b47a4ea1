"""`rather tune`: choose learning rate and beta within a time budget, as a careful person would.

First a learning-rate range test: some steps with rates a factor of 10 apart. Then successive
halving: all settings around the best rate train for some steps, the best third three times as many,
and so on. These runs only propose. The finalists train to the end, with the schedule and epochs of
the YAML that is written, and are compared with each other and with doing nothing.

A third of the held-out prompts, by their digests, guides the search and proposes the finalist whose
gain is surest. The others decide whether it is better than doing nothing (rather.losses.gain). If
it is, all of them choose among the finalists. If the YAML splits pairs off, more of them are held
out meanwhile. What was measured is in tune.json, so the same command continues, within what is left
of the budget.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from rather.commands.terminal import echo, print_table, settings
from rather.config.found import Trust
from rather.config.load import dump_yaml
from rather.config.run_config import DPOConfig
from rather.config.values import FORGETTING
from rather.data.pairs import PairDataset
from rather.data.prepare import prepare
from rather.errors import ConfigError, NonFiniteError
from rather.files import JsonObject, own, parse_json, read_bytes, replace_own, write_own
from rather.losses.gain import LEAST, LEAST_PROMPTS, Gain
from rather.losses.metrics import wilson
from rather.losses.objective import from_config
from rather.model.generate import Decoding, generate
from rather.outcome.forgetting import PHRASINGS, SHIPPED, read_rows
from rather.pipeline.forgetting import Limits, drifts
from rather.pipeline.steps import PreparedSteps
from rather.run_folder import control
from rather.run_folder.model_source import here, weights_of
from rather.tools.report.folder import MetricsReader
from rather.tools.report.pairs import read_ledgers
from rather.tools.sweep import SIGNALS, combinations, folder_of_runs, train_here
from rather.tracking.json_lines import strict_json

STATE = "tune.json"
LOWER = "has a lower held-out loss than no training,"
VERSION = 2  # of what it holds: since then a third of the held-out pairs chooses
NOTHING = "nothing"  # the candidate that is not trained
RATE, BETA, LOSS = "actor_train.training_args.learning_rate", "beta", "pref_loss"
RANGE = (0.01, 0.1, 1.0, 10.0, 100.0)  # of the rate in the YAML, in the range test
AROUND = (1 / 3, 1.0, 3.0)  # of the best of these, and of beta
GENTLER = 1 / 3  # of a rate
SHARE = 0.2  # of the budget, for the range test
FIRST = 4  # steps of each rate before the length of the range test is chosen
PER_ROUND = 3  # reduction factor of successive halving
MOST_FINALISTS = 20
FINER = (3.0, math.sqrt(3))  # steps of rate and beta around the best finalist
# Of rate and beta, as powers of such a step.
NEIGHBOURS = ((1, 0), (-1, 0), (0, 1), (0, -1), (-1, 1), (1, -1))
SAME = 1.05  # settings that differ by less are the same
MOST_GRADES = 8  # times that a rate is made gentler, or stronger
MOST_TRADES = 2  # times that a third of the rate is traded for three times beta
MOST_RESCUES = 2  # smaller rates if the usable finalists lost more right answers than allowed
DIRECT = (
    3.0  # times the cost of a short run: full runs that cost less follow the range test directly
)
MARGIN = 1.15  # of the time that a full run is expected to take
CHOOSING = 1 / 3  # of the held-out pairs; the others decide
# Of all pairs, if they are split off the training data: a fifth, of few pairs up to a third. More
# would leave too few to train on, and a lower learning rate would seem the best.
HELD_OUT, HELD_OUT_OF_FEW, FEW_HELD_OUT = 1 / 5, 1 / 3, 300
MOST_HELD_OUT = 1000
GIVEN_AWAY = 0.003  # of the loss, at most, for a gentler setting
FEW = 200  # deciding pairs
MEASURED = ("loss", "accuracy", "drift")  # of the choosing pairs, but drift
TEXTS = {"error", "problem"}
OF_SEARCH = [
    "actor_train.training_args.lr_scheduler_type=constant",
    "actor_train.training_args.warmup_steps=0", "actor_train.training_args.warmup_ratio=0",
    "forgetting=off",
]  # fmt: skip
ANSWER_TOKENS = 60


def seconds_of(text: str) -> float:
    """Return the seconds of 90s, 20m or 1.5h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not match or not float(match[1]):
        raise ConfigError(f"--budget {text}: write a time such as 90s, 20m or 1.5h.")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def read_state(file: Path) -> JsonObject:
    """Return what was measured before; refuse a damaged file, from which tuning would go astray."""
    if not os.path.lexists(file):
        return {"seconds": 0.0, "runs": {}, "rounds": {}}
    try:
        state: JsonObject = parse_json(read_bytes(file, opener=own))
        state["seconds"] = _number(state["seconds"])
        for run in state["runs"].values():
            run["values"] = {str(key): str(setting) for key, setting in run["values"].items()}
            run["steps"] = int(_number(run["steps"]))
            timed = ("step_seconds", "start_seconds") if run["steps"] else ()
            run |= {name: _number(run[name]) for name in timed}
            # JSON has no NaN: it is stored as text.
            run |= {name: float(run[name]) for name in MEASURED if name in run}
            run |= {name: str(run[name]) for name in TEXTS if name in run}
            if "forgetting_kept" in run:
                kept_answers(run)
        for name, setting in state["rounds"].items():
            number = _number(setting if name != "rate" else float(setting))
            if number <= 0:
                raise ValueError(f"{name} is {number}")
        return state
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}: is damaged ({type(error).__name__}: {error}). Remove {file.parent} to tune "
            "from scratch, or choose another exp_name."
        ) from error


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{str(value)[:80]!r} is not a number of 0 or more")
    return value


# --- held-out pairs ---


@dataclass(frozen=True)
class Rewards:
    """The reward margins of some held-out pairs: beta times the margins of the log-ratios."""

    margins: NDArray[np.float64]
    prompts: NDArray[np.uint64]  # a digest of each pair's prompt

    @staticmethod
    def of(
        run_dir: Path, beta: float, prompts: Mapping[int, int], *, first: bool = False
    ) -> Rewards:
        """Read those after the last step of a run, or before the first.

        `prompts` has the digest of each pair's prompt by the digest of the pair.
        """
        table = read_ledgers(run_dir)[1]
        steps, ids, margins = (table.column(name).to_numpy() for name in ("step", "id", "margin"))
        now = steps == (steps.min() if first else steps.max())
        of_pairs = np.array([prompts[pair] for pair in ids[now].tolist()], np.uint64)
        return Rewards(beta * margins[now], of_pairs)

    def divided(self) -> tuple[Rewards, Rewards]:
        """Return the pairs that choose and those that decide; whole prompts, by their digests."""
        _, place, sizes = np.unique(self.prompts, return_inverse=True, return_counts=True)
        chooses = (np.cumsum(sizes) - sizes < CHOOSING * len(place))[place]
        return self._only(chooses), self._only(~chooses)

    def _only(self, rows: NDArray[np.bool_]) -> Rewards:
        return Rewards(self.margins[rows], self.prompts[rows])

    @property
    def losses(self) -> NDArray[np.float64]:
        """-log of the probability that the rewards give to the preference, of each pair.

        It can be compared between betas and losses, and punishes rewards that are too sure.
        """
        return np.asarray(np.logaddexp(0, -self.margins))

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    @property
    def accuracy(self) -> float:
        return float((self.margins > 0).mean())

    def gain_over(self, other: Rewards) -> Gain:
        """Return by how much the loss is lower than another's on the same pairs."""
        return Gain.of(other.losses - self.losses, self.prompts)

    def text(self) -> str:
        low, high = wilson(self.accuracy, len(self.margins))
        return f"loss {self.loss:.4f}, accuracy {self.accuracy:.1%} ({low:.1%} to {high:.1%})"


def prompts_of(sets: Iterable[PairDataset]) -> dict[int, int]:
    """Return the digest of each pair's prompt by the digest of the pair.

    Where all pairs have the same prompt, each counts as one of its own.
    """
    prompts: dict[int, int] = {}
    for pairs in sets:
        of_pairs = pairs.column("prompt_hash").tolist()
        prompts |= zip(pairs.digests.tolist(), of_pairs, strict=True)
    is_one = len(set(prompts.values())) == 1
    return {pair: pair for pair in prompts} if is_one else prompts


# --- the search ---


@dataclass
class Tuning:
    """The settings that are tried, and what was measured: JSON values, stored after every run."""

    file: Path
    base: DPOConfig
    shared: Sequence[str]  # overrides of all runs
    folder: Path
    budget: float
    state: JsonObject = field(default_factory=dict)
    prompts: Mapping[int, int] = field(default_factory=dict)  # see Rewards.of
    reserved: float = 0.0  # seconds that the search leaves to the finalists

    @staticmethod
    def of(file: Path, overrides: Sequence[str], budget: float) -> Tuning:
        base = settings(file, overrides)
        if base.task != "preference":
            raise ConfigError("task: settings are compared on held-out pairs, not for "
                              f"{base.task}; compare those of other tasks with `rather "
                              "sweep`.")  # fmt: skip
        if not base.validation.data_args.given:
            raise ConfigError("validation.data_args: set file_name or split: settings are compared "
                              "on held-out pairs.")  # fmt: skip
        folder, place_overrides = folder_of_runs(base, "tune")
        shared = [
            *overrides, *place_overrides, "eval_steps=null", "save_steps=null", "report_html=false",
            "save_best=false", "early_stopping_patience=null", "track_with=null",
            "pair_ledger=true", "eval_prompts=null",
        ]  # fmt: skip
        tuning = Tuning(file, base, shared, folder, budget)
        tuning.state = read_state(folder / STATE)
        request = {"config": dump_yaml(base), "overrides": list(overrides), "version": VERSION}
        if tuning.state.setdefault("asked", request) != request:
            raise ConfigError(
                f"{folder} was tuned with other settings, or by an earlier version; choose another "
                "exp_name, or remove it."
            )
        return tuning

    @property
    def _texts(self) -> Path:
        """The file of forgetting, unless it is off."""
        if self.base.forgetting == "auto":
            return SHIPPED
        return self.base.actor_train.data_args.locate(self.base.forgetting)

    @property
    def runs(self) -> JsonObject:
        """What was measured of each run, by its name."""
        runs: JsonObject = self.state["runs"]
        return runs

    @property
    def searched(self) -> list[str]:
        return [name for name in self.runs if not name.startswith("final-")]

    @property
    def finalists(self) -> list[str]:
        """The runs that were trained to the end, or tried to."""
        return [name for name in self.runs if name.startswith("final-")]

    @property
    def usable(self) -> list[str]:
        """The finalists within all limits."""
        return [name for name in self.finalists if self.loss(name) < math.inf]

    @property
    def left(self) -> float:
        return self.budget - self.reserved - float(self.state["seconds"])

    def hold_out(self, pairs: int, steps: int) -> None:
        """Hold out so many pairs in all runs, which train for as many steps as the YAML."""
        epochs = self.base.actor_train.training_args.num_train_epochs
        overrides = [
            f"validation.data_args.split={pairs}", f"max_steps={steps}",
            f"actor_train.training_args.num_train_epochs={2 * epochs}",
        ]  # fmt: skip
        self.shared = [*self.shared, *overrides]
        self.base = settings(self.file, [*self.state["asked"]["overrides"], *overrides])

    def save(self) -> None:
        replace_own(self.folder / STATE, strict_json(self.state, indent=1) + "\n")

    def beta(self, values: JsonObject) -> float:
        """Return the factor between log-ratios and rewards of a setting."""
        config = settings(self.file, [*self.shared, *overrides_of(values)])
        return from_config(config).terms[0].beta or 1.0

    def train(self, name: str, values: JsonObject, steps: int, how: Sequence[str]) -> int:
        """Train one setting up to so many steps and measure it; return an exit code to end with."""
        run = self.runs.setdefault(name, {"values": dict(values), "steps": 0})
        if run["steps"] >= steps or "error" in run:
            return 0
        changes = overrides_of({**values, "exp_name": name})
        config = settings(self.file, [*self.shared, *how, *changes])
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
            chooses = self._chooses(name)
            run |= {"loss": chooses.loss, "accuracy": chooses.accuracy}
            run |= self._limits(columns)
            timed = zip(columns["pairs"].values, columns["pairs_per_second"].values, strict=True)
            step = median(pairs / speed for pairs, speed in timed)
            # What a start costs: loading, and the evaluation at the end.
            start = max(0.0, spent - step * (steps - run["steps"]))
            run |= {"steps": steps, "step_seconds": step, "start_seconds": start}
        self.save()
        return 0

    def _limits(self, columns: Any) -> JsonObject:
        """Return drift and forgetting of a run, and the `problem` if it exceeds a limit."""
        before = {name: column.values[0] for name, column in columns.items()}
        now = {name: column.values[-1] for name, column in columns.items()}
        base: JsonObject = drifts(before)
        moved = [drift - base[name] for name, drift in drifts(now).items()]
        limits_of_run: JsonObject = {"drift": max(moved, default=0.0)}
        if f"{FORGETTING}loss" in now:
            base["forgetting"] = {"loss": before[f"{FORGETTING}loss"]}
            limits_of_run["forgetting_loss_before"] = before[f"{FORGETTING}loss"]
        for name in ("loss", "kept", "chance"):
            if f"{FORGETTING}{name}" in now:
                limits_of_run[f"forgetting_{name}"] = now[f"{FORGETTING}{name}"]
        if f"{FORGETTING}kept" in now:
            questions = len(read_rows(self._texts)[0])
            asked = questions * len(PHRASINGS)
            limits_of_run |= {
                "forgetting_asked": asked,
                "forgetting_known": round(now[f"{FORGETTING}known"] * questions),
                "forgetting_right_before": round(now[f"{FORGETTING}right_before"] * asked),
                "forgetting_right": round(now[f"{FORGETTING}right"] * asked),
            }
        limits = Limits(self.base.drift_limit, self.base.forgetting_limit)
        if problem := limits.problem(now, base):
            limits_of_run["problem"] = problem
        return limits_of_run

    def loss(self, name: str) -> float:
        """Return the loss of the choosing pairs; infinite if it failed or exceeds a limit."""
        return math.inf if self.runs[name].keys() & TEXTS else self._any_loss(name)

    def _any_loss(self, name: str) -> float:
        """Return the loss of the choosing pairs, even if the run exceeds a limit."""
        loss = float(self.runs[name].get("loss", math.inf))
        return loss if math.isfinite(loss) else math.inf

    def ranked(self, names: Iterable[str]) -> list[str]:
        """Return the usable runs, best first; raise without any."""
        losses = {name: self.loss(name) for name in names}
        good = [name for name in sorted(losses, key=losses.__getitem__) if losses[name] < math.inf]
        if good:
            return good
        raise NonFiniteError(
            "No setting is usable: each one diverged, failed or exceeded a limit "
            f"({self._reasons(losses)}). Lower {RATE}, and look at {self.folder / STATE}."
        )

    def _reasons(self, names: Iterable[str]) -> str:
        """Return why none of these can be used."""
        runs = ((name, self.runs[name]) for name in names)
        unknown = "the held-out loss is not finite"
        return "; ".join(
            f"{name}: {run.get('error') or run.get('problem') or unknown}" for name, run in runs
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
                if code := self._search(f"range-{name}", {**values, **fixed}, steps):
                    return code
            return 0

        if code := probe(first):
            return code
        # Now the cost of a step is known: leave time to the finalists, use the share of the range
        # test.
        step, start = self._costs
        self._reserve(total_steps)
        room = (SHARE * self.left) / len(probes) - start
        longer = first + int(room / step)
        longer = longer if longer >= 2 * first else first  # a few steps are not worth a start
        if code := probe(rounds.setdefault("range", min(total_steps, longer))):
            return code
        tried = [name for name in self.runs if name.startswith("range-")]
        rounds.setdefault("rate", self.runs[self.ranked(tried)[0]]["values"][RATE])
        trial = start + step * rounds["range"]
        rounds.setdefault(
            "direct", 1 if not losses and self._full_run(total_steps) < DIRECT * trial else 2
        )
        code = 0 if self._is_direct else self._halve(float(rounds["rate"]), losses, total_steps)
        return code or self._train_finalists(total_steps)

    @property
    def _is_direct(self) -> bool:
        """Return whether full runs are so cheap that further short ones are not worth a start."""
        return bool(self.state["rounds"].get("direct") == 1)

    def _search(self, name: str, values: JsonObject, steps: int) -> int:
        return self.train(name, values, steps, [*OF_SEARCH, f"max_steps={steps}"])

    def _full_run(self, total_steps: int) -> float:
        """Return the seconds that a finalist is expected to take."""
        step, start = self._costs
        done = [self.runs[name] for name in self.finalists if self.runs[name]["steps"]]
        starts = [run["start_seconds"] for run in done[-1:]]  # they also measure forgetting
        return float(MARGIN * (max([start, *starts]) + step * total_steps))

    def _reserve(self, total_steps: int) -> None:
        """Leave time for two finalists, or three if half of it is left then; refuse otherwise."""
        full, seconds_left = self._full_run(total_steps), self.left
        if seconds_left < 2 * full and len(self.finalists) < 2:
            needed = float(self.state["seconds"]) + 2 * full
            raise ConfigError(
                f"--budget: {self.budget:.0f} seconds do not hold two full runs, which are "
                f"compared in the end. A run of {total_steps} steps takes about {full:.0f} seconds "
                f"here; set --budget {math.ceil(needed)}s or more (twice as much also searches), "
                "train for fewer steps, or use `rather sweep`. What was measured is kept."
            )
        self.reserved = 3 * full if seconds_left >= 6 * full else 2 * full

    def _halve(self, rate: float, losses: Sequence[str], total_steps: int) -> int:
        axes = {RATE: [f"{rate * factor:.3g}" for factor in AROUND]}
        if beta := self._beta:
            axes[BETA] = [f"{beta * factor:.3g}" for factor in AROUND]
        if losses:
            axes[LOSS] = list(losses)
        names = list(every := combinations(axes))
        rounds = self.state["rounds"]
        steps = rounds.get("steps") or self._first_steps(len(names), total_steps)
        rounds["steps"] = steps
        while True:
            for name in names:
                done = self.runs.get(name, {}).get("steps", 0)
                step, start = self._costs
                if done < steps and self.left < start + step * (steps - done):
                    return 0  # the finalists need the rest
                if code := self._search(name, every[name], steps):
                    return code
            if len(names) <= PER_ROUND or steps >= total_steps:
                return 0
            names = sorted(names, key=self.loss)[: math.ceil(len(names) / PER_ROUND)]
            steps = min(total_steps, PER_ROUND * steps)

    @property
    def _costs(self) -> tuple[float, float]:
        """The seconds of a step, and what a run takes besides; the first ones fill caches."""
        searched_runs = [self.runs[name] for name in self.searched]
        timed = [run for run in searched_runs if run["steps"]]
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

    # --- the finalists ---

    def _next_finalist(self) -> JsonObject | None:
        """Return the next setting to train to the end; None if no other is worth it.

        First the best of the search and a gentler rate, because few steps favour high rates; then
        on in the direction that was better. Then beta: a third of the rate with three times beta
        gives about the same rewards and moves the model less. A rate that lost right answers is
        not raised before gentler settings were tried.
        """
        top = self._best_of_search()
        tried = {str(self.runs[name]["values"]): name for name in self.finalists}
        rates = {}  # by how many times gentler than the top
        for grade in range(-MOST_GRADES, MOST_GRADES + 1):
            if name := tried.get(str(with_rate(top, GENTLER**grade))):
                rates[grade] = name
        if len(rates) < 2:
            return with_rate(top, GENTLER ** len(rates))
        best = min(rates, key=lambda grade: (self._any_loss(rates[grade]), -grade))
        if best == max(rates) < MOST_GRADES:
            return with_rate(top, GENTLER ** (best + 1))
        stronger = None
        if best == min(rates) > -MOST_GRADES and self.loss(rates[best]) < math.inf:
            stronger = with_rate(top, GENTLER ** (best - 1))
        if stronger and not self._lost_share(rates[best]):
            return stronger
        starts = {rates[best]: None}  # in this order
        usable = min(rates.values(), key=self.loss)
        if self.loss(usable) < math.inf:
            starts[usable] = None
        for start in starts:
            if values := self._trade_or_gentler(start, tried):
                return values
        return stronger

    def _neighbour(self) -> JsonObject | None:
        """Return a setting next to the best finalist; None if all were tried.

        The best is the one with the lowest loss of those that kept the right answers. What moves
        the model more than a finalist beyond a limit is left out.
        """
        usable = self.usable
        if not usable:
            return None
        best = min(usable, key=lambda name: (self._lost_share(name), self.loss(name)))
        values = self.runs[best]["values"]
        tried = {name: self._place(self.runs[name]["values"]) for name in self.finalists}
        for step in FINER:
            for of_rate, of_beta in NEIGHBOURS if self._beta else NEIGHBOURS[:2]:
                near = with_rate(values, step**of_rate)
                if of_beta:
                    near[BETA] = f"{self.beta(values) * step**of_beta:.3g}"
                if not any(self._rules_out(name, tried[name], near) for name in tried):
                    return near
        return None

    def _place(self, values: JsonObject) -> tuple[float, float]:
        return math.log(float(values[RATE])), math.log(self.beta(values))

    def _rules_out(self, name: str, place: tuple[float, float], values: JsonObject) -> bool:
        """Return whether a finalist is the same setting, or a gentler one that is not usable."""
        rate, beta = (a - b for a, b in zip(self._place(values), place, strict=True))
        same = math.log(SAME)
        is_stronger = rate > -same and beta < same
        return (abs(rate) < same and abs(beta) < same) or (
            is_stronger and self.loss(name) == math.inf
        )

    def _best_of_search(self) -> JsonObject:
        ranked = self.ranked(self.searched)
        top = max(ranked, key=lambda name: self.runs[name]["steps"])  # the first of the longest
        values: JsonObject = self.runs[top]["values"]
        # The few steps of the range test favour high rates even more.
        return with_rate(values, GENTLER) if self._is_direct else values

    def _trade_or_gentler(self, best: str, tried: Mapping[str, str]) -> JsonObject | None:
        """Return the next setting with a smaller rate and a larger beta than the best rate's.

        As long as every finalist exceeds a limit, ever smaller rates follow; two at most if the
        finalists as good as the best lost right answers.
        """
        values: JsonObject = self.runs[best]["values"]
        usable = self.usable
        trades = MOST_TRADES if self._beta else 0
        most = trades + MOST_RESCUES if usable else MOST_GRADES - 1
        for trade in range(1, most + 1):
            if trade <= trades:
                beta = self.beta(values) / GENTLER
                values = {**with_rate(values, GENTLER), BETA: f"{beta:.3g}"}
            elif self._has_keeper():
                return None
            else:
                values = with_rate(values, GENTLER)
            name = tried.get(str(values))
            if name is None:
                return values
            if name in usable and self._chooses(best).gain_over(self._chooses(name)).is_certain:
                return None
        return None

    def _has_keeper(self) -> bool:
        """Return whether a finalist as good as the best usable one kept the right answers."""
        keepers = [name for name in self.usable if not self._lost_share(name)]
        if not keepers:
            return False
        best = self._chooses(min(self.usable, key=self.loss))
        return any(not best.gain_over(self._chooses(name)).is_certain for name in keepers)

    def _rewards(self, name: str, *, first: bool = False) -> Rewards:
        beta = self.beta(self.runs[name]["values"])
        return Rewards.of(self.folder / name, beta, self.prompts, first=first)

    def _chooses(self, name: str) -> Rewards:
        return self._rewards(name).divided()[0]

    @property
    def _beta(self) -> float:
        """The beta of the YAML or of its loss; 0 for a loss that has none."""
        return self.base.loss_numbers.get("beta") or from_config(self.base).terms[0].beta or 0.0

    def _lost_share(self, name: str) -> float:
        """Return the share of the base's right answers that were lost; 0 within the limit."""
        kept_share = float(self.runs[name].get("forgetting_kept", 1.0))
        return 0.0 if kept_share >= 1 - self.base.forgetting_limit else 1 - kept_share

    def _warning(self, best: str) -> str:
        """Return what the last line adds if the best setting lost more answers than allowed."""
        if best == NOTHING or not self._lost_share(best):
            return ""
        text = f"; it {kept_answers(self.runs[best])}, and no finalist about as good "
        text += f"kept {1 - self.base.forgetting_limit:.0%}"
        untried = self._next_finalist()
        if untried and float(untried[RATE]) < float(self.runs[best]["values"][RATE]):
            text += "; a larger --budget tries gentler settings"
        return text

    def _harm(self, name: str) -> tuple[float, float]:
        return self._lost_share(name), float(self.runs[name]["drift"])

    def _train_finalists(self, total_steps: int) -> int:
        self.reserved = 0.0
        how = [f"forgetting={SHIPPED}"] if self.base.forgetting == "auto" else []
        for name in self.finalists:  # one of them may have been interrupted
            if code := self.train(name, self.runs[name]["values"], total_steps, how):
                return code
        while values := self._next_finalist() or self._neighbour():
            count = len(self.finalists)
            is_late = count >= 2 and self.left < self._full_run(total_steps)
            if is_late or (count >= MOST_FINALISTS and self.usable):
                break
            label = next(iter(combinations({key: [setting] for key, setting in values.items()})))
            if code := self.train(f"final-{label}", values, total_steps, how):
                return code
        return 0

    def result(self) -> JsonObject:
        """Return the finalists on the pairs that did not choose them, the best one, and why."""
        trained = [name for name in self.finalists if self.runs[name]["steps"]]
        if not trained:
            tried = self._reasons(self.finalists)
            raise NonFiniteError(f"No setting could be trained to the end ({tried}).")
        every = {name: self._rewards(name) for name in trained}
        untrained = self._rewards(trained[0], first=True)
        usable = {name: every[name] for name in self.usable}
        best, reason = NOTHING, "every finalist exceeded a limit; see the table"
        if usable:
            best, reason = self._decide(usable, untrained)
        deciding = {name: rewards.divided()[1] for name, rewards in every.items()}
        finals = {
            name: {"loss": rewards.loss, "accuracy": rewards.accuracy,
                   "pairs": len(rewards.margins), "text": rewards.text()}
            for name, rewards in {NOTHING: untrained.divided()[1], **deciding}.items()
        }  # fmt: skip
        return {
            "best": best, "reason": reason, "finalists": finals, "runs": self.runs,
            "seconds": self.state["seconds"], "budget": self.budget,
        }  # fmt: skip

    def _decide(self, usable: Mapping[str, Rewards], untrained: Rewards) -> tuple[str, str]:
        """Return the setting to write, or NOTHING, and why."""
        harm = {name: self._harm(name) for name in usable}
        proposed, gain, best = decide(usable, untrained, harm)
        if best == NOTHING:
            text = undecided(gain, len(untrained.margins))
            return best, f"{proposed} is not shown to be better: {text}"
        reason = f"{proposed} {LOWER} by {gain} on pairs that did not propose it"
        top = min(usable, key=lambda name: usable[name].loss)
        if best != top:
            virtue = "keeps more right answers" if harm[best][0] < harm[top][0] else "is gentler"
            lower = usable[best].loss - usable[top].loss
            reason += f"; {best} {virtue} than {top}, whose loss is lower by only {lower:.4f}"
        elif best != proposed:
            reason += f"; {best} has the lowest loss of all held-out pairs"
        return best, reason + self._warning(best)


def decide(
    finalists: Mapping[str, Rewards], untrained: Rewards, harm: Mapping[str, tuple[float, float]]
) -> tuple[str, Gain, str]:
    """Return the finalist that is proposed, its gain over no training, and the best or NOTHING.

    Only this gain decides whether anything is written: the best of many finalists would beat doing
    nothing by chance. Proposed is the one that is most standard errors better than doing nothing,
    which shows a gain with fewer pairs than the lowest loss: that may have a few pairs it is very
    wrong about. Then all pairs choose, among those that beat doing nothing as well.
    """
    parts = [rewards.divided() for rewards in finalists.values()]
    proposing, deciding = (
        {name: part[place].gain_over(untrained.divided()[place])
         for name, part in zip(finalists, parts, strict=True)}
        for place in (0, 1)
    )  # fmt: skip
    proposed = max(finalists, key=lambda name: proposing[name].ratio)
    if not deciding[proposed].is_certain:
        return proposed, deciding[proposed], NOTHING
    better = {name: finalists[name] for name, gain in deciding.items() if gain.is_certain}
    return proposed, deciding[proposed], choose(better, harm)


def undecided(gain: Gain, pairs: int) -> str:
    """Return why so many held-out pairs do not show a gain, and how many would."""
    text = f"it {LOWER} by only {gain}"
    if gain.mean <= 0:
        text = f"its loss is higher than without training, by {-gain.mean:.4f}"
    if math.isfinite(gain.enough):
        text += f"; about {math.ceil(gain.enough * pairs):,} held-out pairs would decide"
    return text


def choose(candidates: Mapping[str, Rewards], harm: Mapping[str, tuple[float, float]]) -> str:
    """Return the gentlest candidate that is about as good as the one with the lowest loss.

    Candidates that are worse beyond the 95 % interval are out, then those that lost more answers
    than others. Of the rest, the gentlest within one standard error of the lowest loss wins, and
    within GIVEN_AWAY: few pairs have a large error. `harm` is that of Tuning._harm.
    """
    gains = _gains(candidates, list(candidates))
    close = [name for name, gain in gains.items() if not gain.is_certain]
    fewest_lost = min(harm[name][0] for name in close)
    gains = _gains(candidates, [name for name in close if harm[name][0] == fewest_lost])
    close = [name for name, gain in gains.items() if gain.mean <= min(gain.error, GIVEN_AWAY)]
    return min(close, key=harm.__getitem__)


def _gains(candidates: Mapping[str, Rewards], names: Sequence[str]) -> dict[str, Gain]:
    """Return by how much the one with the lowest loss is better than each."""
    top = min((candidates[name] for name in names), key=lambda rewards: rewards.loss)
    return {name: top.gain_over(candidates[name]) for name in names}


def overrides_of(values: JsonObject) -> list[str]:
    return [f"{key}={setting}" for key, setting in values.items()]


def with_rate(values: JsonObject, factor: float) -> JsonObject:
    return {**values, RATE: f"{float(values[RATE]) * factor:.3g}"}


def held_out_of(total: int) -> int:
    """Return how many of so many pairs are held out while settings are compared."""
    at_least = min(round(HELD_OUT_OF_FEW * total), FEW_HELD_OUT)
    return min(max(round(HELD_OUT * total), at_least), MOST_HELD_OUT)


def tune(file: Path, overrides: Sequence[str], budget: float, losses: Sequence[str]) -> Tuning:
    """Try settings until the budget is used; exit with the code of a run that was asked to stop."""
    tuning = Tuning.of(file, overrides, budget)
    prepared = prepare(tuning.base)
    split = tuning.base.validation.data_args.split
    if split is not None:
        held_out, total = len(prepared.evals[""]), len(prepared.evals[""]) + len(prepared.train)
        needed = held_out_of(total)
        if held_out < needed:
            echo(f"tune: holds out {needed} of {total} pairs while it compares settings; the YAML "
                 f"keeps its split of {split}.", err=True)  # fmt: skip
            tuning.hold_out(needed, PreparedSteps.of(tuning.base, prepared).total_steps)
            prepared = prepare(tuning.base)
    tuning.prompts = prompts_of(prepared.evals.values())
    digests = np.array(list(tuning.prompts.values()), np.uint64)
    _, decides = Rewards(np.zeros(len(digests)), digests).divided()
    pairs, prompts = len(decides.margins), len(np.unique(decides.prompts))
    if pairs < LEAST or prompts < LEAST_PROMPTS:
        raise ConfigError(
            f"validation.data_args: {pairs} pairs of {prompts} prompts would decide; at least "
            f"{LEAST} pairs of {LEAST_PROMPTS} prompts are needed. Hold out more."
        )
    if pairs < FEW:
        text = (
            f"tune: {pairs} held-out pairs decide; with fewer than {FEW} only large gains are seen."
        )
        echo(text, err=True)
    total_steps = PreparedSteps.of(tuning.base, prepared).total_steps
    with control.lock(tuning.folder):
        if code := tuning.run(losses, total_steps):
            raise typer.Exit(code)
    return tuning


# --- the result ---


def write_best(tuning: Tuning, found: JsonObject, out: Path) -> None:
    """Write the YAML of the best setting, with the reasons above it."""
    best = found["runs"][found["best"]]
    lines = [f"Chosen by rather tune: {found['reason']}."]
    lines += [f"{key}: {setting}" for key, setting in best["values"].items()]
    for name, final in found["finalists"].items():
        lines.append(f"{name}: {final['text']}, {facts(found, name)}")
        if "problem" in found["runs"].get(name, {}):
            lines.append(f"  cannot win: {found['runs'][name]['problem']}")
    changes = [*tuning.state["asked"]["overrides"], *overrides_of(best["values"])]
    config = settings(tuning.file, changes)
    write_own(out, "".join(f"# {line}\n" for line in lines) + dump_yaml(config))


def facts(found: JsonObject, name: str) -> str:
    """Return drift and forgetting of a finalist."""
    run = found["runs"].get(name, {})
    texts = [f"drift {run.get('drift', 0.0):.3g}"]
    if "forgetting_loss" in run:
        rise = run["forgetting_loss"] - run["forgetting_loss_before"]
        texts.append(f"loss on neutral text {rise:+.3f}")
    elif run:
        texts.append("forgetting not measured")
    if "forgetting_kept" in run:
        texts.append(kept_answers(run))
    return ", ".join(texts)


def kept_answers(run: JsonObject) -> str:
    """Return `kept 19 of the 20 answers that the base knew (right: 90 of 150 before, 92 after)`."""
    names = ("kept", "known", "right_before", "right", "asked")
    kept_share, known, before, after, asked = (run[f"forgetting_{name}"] for name in names)
    return (
        f"kept {round(kept_share * known)} of the {known} answers that the base knew (right: "
        f"{before} of {asked} before, {after} after)"
    )


def print_result(found: JsonObject) -> None:
    searched = [name for name in found["runs"] if not name.startswith("final-")]
    rows = []
    for name in searched:
        run = found["runs"][name]
        numbers = [f"{run[key]:.4f}" if key in run else "" for key in MEASURED]
        rows.append((name, run["steps"], *numbers, run.get("error") or run.get("problem", "")))
    headings = ("setting", "steps", "loss", "accuracy", "drift", "")
    print_table(headings, rows, "Search, on the held-out pairs that propose")
    final_rows = []
    for name, final in found["finalists"].items():
        run = found["runs"].get(name, {})
        mark = "best" if name == found["best"] else run.get("problem", "")
        accuracy = f"{final['accuracy']:.4f}" if name != NOTHING else "-"
        final_rows.append((name, f"{final['loss']:.4f}", accuracy, facts(found, name), mark))
    for name, run in found["runs"].items():
        if name.startswith("final-") and "error" in run:
            final_rows.append((name, "", "", "", run["error"]))
    final_headings = ("trained to the end", "loss", "accuracy", "limits", "")
    pairs = found["finalists"][NOTHING]["pairs"]
    used = f"{found['seconds']:.0f} of {found['budget']:.0f} seconds used"
    print_table(
        final_headings,
        final_rows,
        f"Finalists, on the {pairs} held-out pairs that propose nothing. {used}.",
    )


def print_answers(tuning: Tuning, best: str) -> None:
    """Print a greedy answer to a held-out prompt, before and after training with the best."""
    evals = prepare(tuning.base).evals
    ids = next(iter(evals.values())).take(np.array([0]))[0].prompt.tolist()
    folders = {"before": tuning.base.actor_train.model_path}
    if best != NOTHING:
        folders["after"] = str(tuning.folder / best)
    trust = Trust(tuning.base.actor_train.model_args.trust_remote_code)
    for when, folder in folders.items():
        weights = weights_of(folder, trust)
        tokenizer = weights.tokenizer()
        model = weights.load(here()).causal_lm
        [answer] = generate(model, tokenizer, [ids], Decoding(ANSWER_TOKENS))
        if when == "before":
            echo(f"prompt: {tokenizer.decode(ids, skip_special_tokens=True)[-500:].strip()}")
        echo(f"{when}: {tokenizer.decode(answer.ids, skip_special_tokens=True).strip()}")
