"""The label doctor: reads the ledger of a run and says which pairs look wrong, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from rather.data.pairs import hex_id
from rather.errors import ConfigError
from rather.files import JsonObject
from rather.losses.metrics import wilson
from rather.run_folder.names import DATA_REPORT
from rather.tracking.json_lines import LEDGER, read_object
from rather.tracking.ledger import LEDGER_SCHEMA, read_batches

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
CALIBRATED = ("auc", "chance", "precision", "recall")
CALIBRATION = "pairs.json"  # in the run folder, from flips that `rather pairs --plant` made
MEANINGS = {
    "likely_flipped": "the label is probably wrong: the model contradicts it too surely to be in "
    "error",
    "disagrees": "the model prefers the rejected answer, as it also does on hard pairs with right "
    "labels",
    "never_learned": "the margin was never above 0",
    "unlearned": "the margin was above 0, and ended at 0 or below",
    "chosen_falls": "the chosen answer became less likely",
}
# Of the flip score, chosen on other seeds than the reported ones (bench/flipped_pairs.py).
FADING = 0.4  # what a visit counts of the one before it: models learn wrong labels by heart
UNDECIDED = 0.5  # the score of a pair without a margin; above it the model disagrees
SURE = 0.51  # a score from which on the model contradicts a label by more than a hair
FLOOR = 5.4  # evidence (LabelNoise) that 1 % of the runs with right labels reach by chance
MOST_ERRORS = 2 / 3  # of what contradicts a sure model may be its own errors
MOST_NAMES = 3  # of sources with the same conclusion
UNKNOWN = "the sources of the pairs are not known here"
OR_PLANT = "or calibrate with `rather pairs RUN --plant 0.2`"
PRECISION = 0.8  # of the pairs that are called likely flipped: that many labels are wrong
MEAN_CHANCE = 0.82  # of the same pairs, which is an estimate, and so a little above PRECISION
FEWEST = 0.25  # of the wrong labels must be named, or the tails of a few pairs decide who is


def read_ledger(run_dir: Path) -> Any:
    """Return the training rows of a run's ledger as an Arrow table, up to the last whole step."""
    return read_ledgers(run_dir)[0]


def read_ledgers(run_dir: Path) -> tuple[Any, Any]:
    """Return the rows of the training pairs and those of the held-out pairs.

    Ledgers of earlier versions have no held-out rows.
    """
    file = run_dir / LEDGER
    try:
        table = pa.Table.from_batches(read_batches(file), LEDGER_SCHEMA)
        is_held_out = table.column("gradient_weight").is_null()
        return table.filter(pa.compute.invert(is_held_out)), table.filter(is_held_out)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: cannot be read ({error}). Runs with task: preference write it unless "
            "pair_ledger is false."
        ) from error


@dataclass(frozen=True)
class PairHistory:
    """What the ledger knows of each pair, one entry per pair in the order of their digests."""

    ids: NDArray[np.uint64]
    visits: NDArray[np.int64]
    first: Floats  # margin before the pair was trained on
    last: Floats
    mean: Floats
    flip_score: Floats
    highest: Floats  # margin before the last visit
    chosen_moved: Floats  # log-ratio of the chosen answer at the last visit minus the first
    gradient_weight: Floats  # mean
    longer: Floats  # scored tokens of chosen minus rejected

    @staticmethod
    def of(ledger: Any) -> PairHistory:
        column = {name: ledger.column(name).to_numpy() for name in ledger.column_names}
        ids, pair_of, visits = np.unique(column["id"], return_inverse=True, return_counts=True)
        if not len(ids):
            raise ConfigError("The ledger is empty: no step is finished yet.")
        # A stable sort keeps the visits of a pair in the order of the steps.
        order = np.argsort(pair_of, kind="stable")
        start = np.cumsum(visits) - visits
        last = start + visits - 1
        margin, chosen = column["margin"][order], column["chosen"][order]
        before = margin.copy()
        before[last[visits > 1]] = -np.inf
        longer = (column["chosen_tokens"] - column["rejected_tokens"])[order][start]
        return PairHistory(
            ids,
            visits,
            margin[start],
            margin[last],
            np.add.reduceat(margin, start) / visits,
            _doubt(margin, start, visits),
            np.maximum.reduceat(before, start),
            chosen[last] - chosen[start],
            np.add.reduceat(column["gradient_weight"][order].astype(float), start) / visits,
            longer.astype(float),
        )

    @property
    def findings(self) -> dict[str, Flags]:
        """Return which pairs were never learned, or unlearned, or have a falling chosen answer."""
        again = self.visits > 1
        return {
            "never_learned": again & (self.highest <= 0) & (self.last <= 0),
            "unlearned": again & (self.highest > 0) & (self.last <= 0),
            "chosen_falls": again & (self.chosen_moved < 0),
        }

    @property
    def explained_by_length(self) -> float:
        """Return R^2 of the last margin on the difference of lengths; 0 if either is constant."""
        if np.ptp(self.last) == 0 or np.ptp(self.longer) == 0:
            return 0.0
        return float(np.corrcoef(self.last, self.longer)[0, 1] ** 2)


def _doubt(margin: Floats, start: NDArray[np.int64], visits: NDArray[np.int64]) -> Floats:
    """Return how little training believes the labels, from 0 to 1; 0.5 is undecided.

    The mean over visits of sigmoid(-margin), in units of the spread of first-seen margins, so that
    it does not depend on beta or the loss, and one extreme margin cannot outweigh the others.
    """
    unit = float(margin[start].std()) or 1.0
    visit = np.arange(len(margin)) - np.repeat(start, visits)
    weight = FADING**visit
    disbelief = weight / (1 + np.exp(np.clip(margin / unit, -50, 50)))
    return np.add.reduceat(disbelief, start) / np.add.reduceat(weight, start)


def auc(score: Floats, positive: Flags) -> float:
    """Return the chance that a positive has a higher score than a negative; ties count half."""
    negatives = np.sort(score[~positive])
    if not len(negatives) or len(negatives) == len(score):
        raise ValueError("both positives and negatives are needed")
    below, up_to = (np.searchsorted(negatives, score[positive], side) for side in ("left", "right"))
    return float((below + up_to).mean() / (2 * len(negatives)))


# --- which labels are wrong, and which pairs are only hard ---

GROUPS = 100  # of pairs with a similar score, for the fit
SHARES = np.linspace(0, 0.4, 81)  # candidates
SLOPES = np.geomspace(0.05, 200, 40)


@dataclass(frozen=True)
class LabelNoise:
    """How often labels contradict the model, and how that depends on how sure it is.

    A model errs less the surer it is. Wrong labels contradict it however sure it is. So the chance
    that label and model agree is (1 - share) * right + share * (1 - right), where right is
    sigmoid(slope * sureness). Share and slope are those with the greatest likelihood.
    """

    share: float  # of labels that are wrong
    slope: float
    likelihood: Floats  # the log of that of each of SHARES (rows) and SLOPES

    @staticmethod
    def fit(sureness: Floats) -> LabelNoise:
        """Fit pairs; above 0 the model agrees with the label, and the surer the further from it."""
        sureness = sureness[np.argsort(np.abs(sureness), kind="stable")]
        groups = np.array_split(sureness, min(GROUPS, len(sureness)))
        size = np.array([np.abs(group).mean() for group in groups])
        agreeing = np.array([(group > 0).sum() for group in groups])
        contradicting = np.array([(group < 0).sum() for group in groups])
        right = _sigmoid(SLOPES[:, None] * size)  # [slopes, groups]
        share = SHARES[:, None, None]
        agrees = (1 - share) * right + share * (1 - right)
        likelihood = (agreeing * np.log(agrees) + contradicting * np.log1p(-agrees)).sum(axis=2)
        return LabelNoise.best(likelihood)

    @staticmethod
    def of_margins(margin: Floats) -> LabelNoise:
        """Fit margins in units of their root mean square, which no flipped label changes."""
        return LabelNoise.fit(margin / _root_mean_square(margin))

    @staticmethod
    def best(likelihood: Floats) -> LabelNoise:
        share, slope = np.unravel_index(likelihood.argmax(), likelihood.shape)
        return LabelNoise(float(SHARES[share]), float(SLOPES[slope]), likelihood)

    def with_slope_of(self, held_out: LabelNoise) -> LabelNoise:
        """Return the fit with one slope for both: the held-out pairs show how the model errs."""
        return LabelNoise.best(self.likelihood + held_out.likelihood.max(axis=0))

    @property
    def evidence(self) -> float:
        """Return twice the log of the likelihood ratio to "no label is wrong"."""
        return float(2 * (self.likelihood.max() - self.likelihood[0].max()))

    def evidence_beyond(self, held_out: LabelNoise) -> float:
        """Return the same for the ratio to "MOST_ERRORS of this share are errors of the model"."""
        explained = -np.inf
        for share, of_slopes in zip(SHARES, self.likelihood, strict=True):
            errors = held_out.likelihood[MOST_ERRORS * share - 1e-9 <= SHARES].max(axis=0)
            explained = max(explained, float((of_slopes + errors).max()))
        return 2 * (float(self.with_slope_of(held_out).likelihood.max()) - explained)

    def chance(self, sureness: Floats, slope: Floats) -> Floats:
        """Return the chance that each label is wrong."""
        right = _sigmoid(slope * sureness)
        wrong_label = self.share * (1 - right)
        return np.asarray(wrong_label / (wrong_label + (1 - self.share) * right))


def _root_mean_square(x: Floats) -> float:
    return float(np.sqrt(np.mean(x**2))) or 1.0


def _middle(x: Floats) -> float:
    return float(np.median(np.abs(x))) or 1.0


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -30, 30))))


# --- calibration ---


def calibrate(doctor: Doctor, planted: NDArray[np.uint64]) -> dict[str, float]:
    """Return how well planted flips are found, and from which chance on a pair is worth flagging.

    From that chance on, at least PRECISION of the pairs are planted flips; 1 if that is never so.
    This is a lower bound for wrong labels: the others may be wrong as well.
    """
    flipped, chance = np.isin(doctor.history.ids, planted), doctor.chance
    order = np.argsort(-chance, kind="stable")
    right = np.cumsum(flipped[order])
    precision = right / np.arange(1, len(order) + 1)
    is_last_of_ties = np.append(np.diff(chance[order]) < 0, True)  # a cut takes all of them
    good = np.flatnonzero((precision >= PRECISION) & is_last_of_ties)
    area = auc(doctor.history.flip_score, flipped)
    calibration = {"auc": area, "chance": 1.0, "precision": 0.0, "recall": 0.0}
    if len(good):
        last = int(good[-1])
        calibration["chance"] = float(chance[order[last]])
        calibration["precision"] = float(precision[last])
        calibration["recall"] = float(right[last] / flipped.sum())
    return calibration


@dataclass(frozen=True)
class HeldOut:
    """The margins of held-out pairs at the last evaluation."""

    margins: Floats

    @staticmethod
    def of(ledger: Any) -> HeldOut | None:
        step, margin = (ledger.column(name).to_numpy() for name in ("step", "margin"))
        if not len(step) or step.max() == 0:  # before the first step all margins are 0
            return None
        return HeldOut(margin[step == step.max()])

    @property
    def accuracy(self) -> float:
        return float((self.margins > 0).mean())

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.accuracy, len(self.margins))

    @cached_property
    def noise(self) -> LabelNoise:
        """How labels and model disagree."""
        return LabelNoise.of_margins(self.margins)

    def errors(self, sureness: Floats) -> Floats:
        """Return which share of labels the model contradicts more surely than each of these.

        In units of the median size, which no flipped label and no tail changes. One error more is
        assumed, because few are seen.
        """
        ranked = np.sort(self.margins / _middle(self.margins))
        beyond = np.searchsorted(ranked, sureness, side="right")
        return np.asarray((beyond + 1) / (len(ranked) + 1))

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.accuracy:.1%} (95 %: {low:.1%} to {high:.1%})"


def shortened(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more sources" if more > 0 else "")


def is_of_one_source(run_dir: Path) -> bool:
    """Return whether all pairs of a run, the held-out ones too, are of one file."""
    report = read_object(run_dir / DATA_REPORT)
    files = report.get("train", {}).get("files", [])
    evals = report.get("evals", {}).values()
    return len(files) == 1 and all("held_out_of" in entry for entry in evals)


@dataclass(frozen=True)
class Doctor:
    """The findings of a run, with its calibration if flips were planted."""

    history: PairHistory
    calibration: dict[str, float]
    held_out: HeldOut | None = None
    # Pairs of several sources: each label is judged only by what is known of its own source.
    sources: Mapping[str, Doctor] = field(default_factory=dict)

    @staticmethod
    def of(run_dir: Path, source_of: Mapping[int, str] | None = None) -> Doctor:
        """Read a run; `source_of` has the source of each pair by its digest, where it is known."""
        training, held_out = read_ledgers(run_dir)
        calibration = read_object(run_dir / CALIBRATION)  # may be a stranger's
        if all(isinstance(calibration.get(name), float) for name in CALIBRATED):
            return Doctor(PairHistory.of(training), calibration, HeldOut.of(held_out))
        if source_of is None and is_of_one_source(run_dir):
            source_of = {}
        return Doctor.by_source(training, held_out, source_of)

    @staticmethod
    def by_source(training: Any, held_out: Any, source_of: Mapping[int, str] | None) -> Doctor:
        """Judge the pairs of each source; pairs without one are of one source of their own."""
        every = Doctor(PairHistory.of(training), {}, HeldOut.of(held_out))
        if source_of is None:
            return replace(every, sources={UNKNOWN: replace(every, held_out=None)})
        judged, known = (
            np.array([source_of.get(digest, "") for digest in table.column("id").to_pylist()])
            for table in (training, held_out)
        )
        sources = {}
        for name in np.unique(judged).tolist():
            history = PairHistory.of(training.filter(judged == name))
            errors = HeldOut.of(held_out.filter(pa.array(known == name, pa.bool_())))
            sources[name] = Doctor(history, {}, errors)
        is_one = len(sources) == 1 and (known == judged[0]).all()
        return every if is_one else replace(every, sources=sources)

    @cached_property
    def errors(self) -> LabelNoise | None:
        """Return how held-out labels contradict the model; None if that is unknown."""
        return self.held_out.noise if self.held_out else None

    @cached_property
    def first_seen(self) -> LabelNoise:
        """Return how labels contradict the model when it sees them for the first time.

        Later it knows some of the wrong labels by heart, and their share would seem smaller.
        """
        return LabelNoise.of_margins(self.history.first)

    @cached_property
    def noise(self) -> LabelNoise:
        return self.first_seen.with_slope_of(self.errors) if self.errors else self.first_seen

    @cached_property
    def chance(self) -> Floats:
        """Return the chance that the label of each pair is wrong, from all visits of the pair."""
        # All visits of a pair say no more than if the errors of the model were independent: as much
        # as this many visits of equal weight.
        weight = FADING ** np.arange(self.history.visits.max())
        independent = np.cumsum(weight) ** 2 / np.cumsum(weight**2)
        first = self.history.first
        slope = self.noise.slope * first.std() / _root_mean_square(first)  # the unit of the score
        most = slope * independent[self.history.visits - 1]
        slopes = np.minimum(LabelNoise.fit(self._sureness).slope, most)
        return self.noise.chance(self._sureness, slopes)

    @cached_property
    def _sureness(self) -> Floats:
        """The scores as margins, in units of the spread of first-seen margins."""
        score = np.clip(self.history.flip_score, 1e-12, 1 - 1e-12)
        return np.asarray(np.log1p(-score) - np.log(score))

    @cached_property
    def why_none(self) -> str:
        """Return why no pair is called likely flipped; empty if pairs may be."""
        noise, errors, held_out = self.noise, self.errors, self.held_out
        if held_out and held_out.interval[0] <= 0.5:
            return (
                "on held-out pairs the model is not better than chance, so it cannot judge labels"
            )
        if not self.calibration and self.history.visits.max() < 2:
            return f"each pair was seen once. Train for two epochs, {OR_PLANT}"
        if not self.calibration and not errors:
            return (
                "how often the model errs on pairs of this source is unknown. Hold pairs out with "
                "validation.data_args.split, or give held-out and training rows the same text as "
                f"`source`, {OR_PLANT}"
            )
        if noise.evidence < FLOOR:
            return "the model disagrees no more often than a model of its quality errs"
        if errors and self.first_seen.evidence_beyond(errors) < FLOOR:
            return (
                f"the model contradicts {noise.share:.1%} of the labels however sure it is, and "
                f"{errors.share:.1%} of the held-out labels, too many or of too few to tell its "
                "own errors from wrong labels"
            )
        wrong, named = noise.share * len(self.chance), self.chance[self._mostly_wrong].sum()
        if not self.calibration and named < FEWEST * wrong:
            return (
                f"of about {wrong:.0f} wrong labels the model is sure enough to name {named:.0f}, "
                "too few to rely on"
            )
        return ""

    @property
    def conclusion(self) -> str:
        """Return what is known about the labels of the run, in one sentence or two."""
        if self.sources:
            names: dict[str, list[str]] = {}
            for name, doctor in self.sources.items():
                names.setdefault(doctor.conclusion, []).append(name)
            return "\n".join(f"{shortened(same)}: {text}" for text, same in names.items())
        if self.why_none:
            return f"No pair is called likely flipped: {self.why_none}."
        held_out_errors = ""
        if self.errors:
            held_out_errors = f", but only {self.errors.share:.1%} of the held-out labels"
        return (
            f"The model contradicts about {self.noise.share:.1%} of the labels however sure it is"
            f"{held_out_errors}. Where it is less sure and disagrees, it may be wrong itself."
        )

    @cached_property
    def findings(self) -> dict[str, Flags]:
        """Return name -> which pairs."""
        history = self.history
        disagrees = history.flip_score > UNDECIDED
        likely = np.zeros_like(disagrees)
        if self.sources:
            for doctor in self.sources.values():
                likely |= np.isin(history.ids, doctor.ids_of("likely_flipped"))
        elif self.calibration and not self.why_none:
            likely = disagrees & (self.chance >= self.calibration["chance"])
        elif not self.why_none:
            likely = self._mostly_wrong & (history.visits > 1)
        return {"likely_flipped": likely, "disagrees": disagrees & ~likely, **history.findings}

    @cached_property
    def _mostly_wrong(self) -> Flags:
        """Return the pairs with the highest scores, as many as have this mean chance.

        So the set as a whole has at most a fifth of right labels. A limit for each single pair
        would leave out many that are wrong. The chance assumes that errors fade as fast among the
        surest pairs as among the others; as many right labels are expected among the accused as the
        model contradicts so surely in held-out pairs, if these are more.
        """
        history, score = self.history, self.history.flip_score
        order = np.argsort(-score, kind="stable")
        count = np.arange(1, len(order) + 1)
        expected = np.cumsum(self.chance[order]) / count
        if self.held_out:
            sureness = (
                self._sureness[order] * history.first.std() / _root_mean_square(history.first)
            )
            right = (1 - self.noise.share) * len(order) * self.held_out.errors(sureness)
            expected = np.minimum(expected, 1 - right / count)
        enough = np.flatnonzero((expected >= MEAN_CHANCE) & (score[order] >= SURE))
        flags = np.zeros(len(order), dtype=bool)
        if len(enough):
            flags[order[: enough[-1] + 1]] = True
        return flags

    @cached_property
    def _chances(self) -> dict[int, float]:
        """Return the chance of each pair; without evidence it is unknown."""
        if self.sources:
            return {k: v for doctor in self.sources.values() for k, v in doctor._chances.items()}
        if self.why_none:
            return {}
        return dict(zip(self.history.ids.tolist(), self.chance.tolist(), strict=True))

    def rows(self) -> list[JsonObject]:
        """Return one object per pair, the most suspicious first."""
        history = self.history
        ids, chances = history.ids.tolist(), self._chances
        numbers = ("flip_score", "first", "last", "mean", "chosen_moved", "gradient_weight")
        return [
            {
                "id": hex_id(ids[i]),
                **{name: round(float(getattr(history, name)[i]), 6) for name in numbers},
                **({"chance": round(chances[ids[i]], 6)} if ids[i] in chances else {}),
                "visits": int(history.visits[i]),
                "longer": int(history.longer[i]),
                "findings": [name for name, flags in self.findings.items() if flags[i]],
            }
            for i in np.argsort(-history.flip_score, kind="stable").tolist()
        ]

    def ids_of(self, finding: str) -> list[int]:
        """Return the digests of the pairs of a finding, the most suspicious first."""
        order = np.argsort(-self.history.flip_score, kind="stable")
        return [int(digest) for digest in self.history.ids[order][self.findings[finding][order]]]

    def summary(self) -> JsonObject:
        counts = {name: int(flags.sum()) for name, flags in self.findings.items()}
        visits = int(self.history.visits.max())
        counted = {"pairs": len(self.history.ids), "epochs": visits, **counts}
        return counted | {"explained_by_length": round(self.history.explained_by_length, 4)}
