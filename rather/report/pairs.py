"""The label doctor: reads the ledger of a run and says which pairs look wrong, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from rather.data.pairs import hex_id
from rather.errors import ConfigError
from rather.files import JsonObject, own
from rather.tracking.json_lines import LEDGER, read_object
from rather.tracking.run import LEDGER_SCHEMA

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
CALIBRATED = ("auc", "cut", "precision", "recall")
CALIBRATION = "pairs.json"  # in the run folder, from flips that `rather pairs --plant` made
MEANINGS = {
    "likely_flipped": "training did not believe the label: the flip score is too high",
    "never_learned": "the margin was never above 0",
    "unlearned": "the margin was above 0, and ended at 0 or below",
    "chosen_falls": "the chosen answer became less likely",
}
# Of the flip score, chosen on other seeds than the reported ones (bench/flipped_pairs.py).
FADING = 0.4  # what a visit counts of the one before it: models learn wrong labels by heart
CUT = 0.5  # above it the model disagrees with the label


def read_ledger(run_dir: Path) -> Any:
    """Return the training rows of a run's ledger as an Arrow table, up to the last whole step."""
    return read_ledgers(run_dir)[0]


def read_ledgers(run_dir: Path) -> tuple[Any, Any]:
    """Return the rows of the training pairs and those of the held-out pairs.

    Ledgers of earlier versions have no held-out rows.
    """
    file = run_dir / LEDGER
    try:
        os.close(own(file, os.O_RDONLY))  # raises if it is a link or a pipe
        reader = pa.ipc.open_stream(pa.memory_map(str(file)))
        if reader.schema != LEDGER_SCHEMA:
            raise pa.ArrowInvalid("it has other columns than a ledger")
        table = pa.Table.from_batches(_whole_batches(reader), reader.schema)
        table.validate(full=True)
        is_held_out = table.column("gradient_weight").is_null()
        return table.filter(pa.compute.invert(is_held_out)), table.filter(is_held_out)
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(
            f"{file}: cannot be read ({error}). Runs with task: preference write it unless pair_ledger is false."
        ) from error


def _whole_batches(reader: Any) -> Iterator[Any]:
    """Yield the steps of a stream; a run that writes, or was killed, may leave half of one."""
    with suppress(StopIteration, OSError, pa.ArrowInvalid):
        while True:
            yield reader.read_next_batch()


@dataclass(frozen=True)
class PairHistory:
    """What the ledger knows of each pair, one entry per pair in the order of their digests."""

    ids: NDArray[np.uint64]
    visits: NDArray[np.int64]
    first: Floats  # margin before the pair was trained on
    last: Floats
    mean: Floats
    flip_score: Floats
    lowest: Floats  # margin after the first visit
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
        after, before = margin.copy(), margin.copy()
        after[start[visits > 1]] = np.inf
        before[last[visits > 1]] = -np.inf
        longer = (column["chosen_tokens"] - column["rejected_tokens"])[order][start]
        return PairHistory(
            ids,
            visits,
            margin[start],
            margin[last],
            np.add.reduceat(margin, start) / visits,
            _doubt(margin, start, visits),
            np.minimum.reduceat(after, start),
            np.maximum.reduceat(before, start),
            chosen[last] - chosen[start],
            np.add.reduceat(column["gradient_weight"][order].astype(float), start) / visits,
            longer.astype(float),
        )

    @property
    def findings(self) -> dict[str, Flags]:
        """Return which pairs were never learned, were unlearned, or have a falling chosen answer."""
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

    def rows(self, findings: dict[str, Flags]) -> list[JsonObject]:
        """Return one object per pair, the most suspicious first."""
        numbers = ("flip_score", "first", "last", "mean", "chosen_moved", "gradient_weight")
        return [
            {
                "id": hex_id(int(self.ids[i])),
                **{name: round(float(getattr(self, name)[i]), 6) for name in numbers},
                "visits": int(self.visits[i]),
                "longer": int(self.longer[i]),
                "findings": [name for name, flags in findings.items() if flags[i]],
            }
            for i in np.argsort(-self.flip_score, kind="stable").tolist()
        ]


def _doubt(margin: Floats, start: NDArray[np.int64], visits: NDArray[np.int64]) -> Floats:
    """Return how little training believes the labels, from 0 to 1; 0.5 is undecided.

    The mean over visits of sigmoid(-margin), in units of the spread of first-seen margins, so that it does not
    depend on beta or the loss, and one extreme margin cannot outweigh the others.
    """
    unit = float(margin[start].std()) or 1.0
    visit = np.arange(len(margin)) - np.repeat(start, visits)
    weight = FADING**visit
    disbelief = weight / (1 + np.exp(np.clip(margin / unit, -50, 50)))
    return np.add.reduceat(disbelief, start) / np.add.reduceat(weight, start)


def auc(score: Floats, positive: Flags) -> float:
    """Return the chance that a positive has a higher score than a negative; ties count half."""
    others = np.sort(score[~positive])
    if not len(others) or len(others) == len(score):
        raise ValueError("both positives and negatives are needed")
    below, up_to = (np.searchsorted(others, score[positive], side) for side in ("left", "right"))
    return float((below + up_to).mean() / (2 * len(others)))


# --- calibration ---


def calibrate(history: PairHistory, planted: NDArray[np.uint64]) -> dict[str, float]:
    """Return how well the score finds planted flips, and the lowest score worth flagging.

    From that score on, at least half of the pairs are planted flips. This is a lower bound for wrong
    labels: the others may be wrong as well.
    """
    flipped, score = np.isin(history.ids, planted), history.flip_score
    order = np.argsort(-score, kind="stable")
    right = np.cumsum(flipped[order])
    good = np.flatnonzero(2 * right >= np.arange(1, len(order) + 1))
    last = int(good[-1]) if len(good) else 0
    return {
        "auc": auc(score, flipped),
        "cut": float(score[order[last]]),
        "precision": float(right[last] / (last + 1)),
        "recall": float(right[last] / max(1, flipped.sum())),
    }


@dataclass(frozen=True)
class Doctor:
    """The findings of a run, with its calibration if flips were planted."""

    history: PairHistory
    calibration: dict[str, float]

    @staticmethod
    def of(run_dir: Path) -> Doctor:
        history = PairHistory.of(read_ledger(run_dir))
        known = read_object(run_dir / CALIBRATION)  # may be a stranger's
        is_whole = all(isinstance(known.get(name), float) for name in CALIBRATED)
        return Doctor(history, known if is_whole else {})

    @cached_property
    def findings(self) -> dict[str, Flags]:
        """Return name -> which pairs. Without a calibration, any disagreement is suspicious."""
        flagged = self.history.flip_score > CUT
        if self.calibration:
            flagged = self.history.flip_score >= self.calibration["cut"]
        return {"likely_flipped": flagged, **self.history.findings}

    def ids_of(self, finding: str) -> list[int]:
        """Return the digests of the pairs of a finding, the most suspicious first."""
        order = np.argsort(-self.history.flip_score, kind="stable")
        return [int(each) for each in self.history.ids[order][self.findings[finding][order]]]

    def summary(self) -> JsonObject:
        counts = {name: int(flags.sum()) for name, flags in self.findings.items()}
        found = {"pairs": len(self.history.ids), "epochs": int(self.history.visits.max()), **counts}
        return found | {"explained_by_length": round(self.history.explained_by_length, 4)}
