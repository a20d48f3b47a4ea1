"""`rather pairs`: which training pairs look wrong, and corrections to train again with."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from rather.commands.terminal import (
    AsJson,
    OutFile,
    RunFolder,
    TrustPaths,
    command,
    count,
    echo,
    print_table,
)
from rather.errors import ConfigError
from rather.files import JsonObject
from rather.tracking.json_lines import strict_json

if TYPE_CHECKING:
    from rather.config.found import Trust
    from rather.data.pairs import PairDataset
    from rather.tools.report.pair_texts import PairTexts
    from rather.tools.report.pairs import Doctor

Action = Literal["drop", "weight", "flip"]
CORRECTIONS: dict[str, JsonObject] = {
    "drop": {"weight": 0},
    "weight": {"weight": 0.5},
    "flip": {"flip": True},
}


@command
def pairs_command(
    run: RunFolder,
    as_json: AsJson = False,
    write: OutFile = None,
    action: Action = "drop",
    plant: Annotated[
        float | None,
        typer.Option(
            help="Train a copy of the run with this share of labels flipped, to calibrate the "
            "score; its folder is <exp_name>-planted.",
            min=0.01,
            max=0.5,
        ),
    ] = None,
    shown: Annotated[int, typer.Option(min=0)] = 10,
    trust_paths: TrustPaths = False,
) -> int:
    """Say which training pairs look wrong: flipped labels, never learned, unlearned, contradicting.

    Reads the ledger that training wrote. --json prints one object per pair and line.

    action: What the corrections do with a pair; weight: count half.
    write: Write corrections of the likely flipped pairs for data_args.corrections.
    shown: Pairs that are printed with their texts, the most suspicious first.
    """
    from rather.config.found import Trust
    from rather.run_folder.names import refuse_other_folder
    from rather.tools.report.pairs import Doctor

    refuse_other_folder(run)
    trust = Trust(paths=trust_paths)
    texts = _pair_texts(run, trust)
    pairs = texts.pairs if texts else None
    if plant is not None:
        with redirect_stdout(sys.stderr):  # what the run prints
            code = _calibrate(run, pairs, plant, trust)
        if code:
            return code
    doctor = Doctor.of(run, texts.source_of if texts else None)
    rows, summary = doctor.rows(), doctor.summary()
    if pairs:
        summary["contradicting"] = _add_places(rows, pairs)
    flipped = [row["id"] for row in rows if "likely_flipped" in row["findings"]]
    if write and flipped:
        lines = (strict_json({"id": pair_id, **CORRECTIONS[action]}) + "\n" for pair_id in flipped)
        write.write_text("".join(lines), encoding="utf-8")
    if as_json:
        for row in rows:
            echo(strict_json(row))
        return 0
    _print_summary(run, doctor, summary)
    if shown:
        _print_suspects(rows[:shown], texts)
    if write and flipped:
        echo(f"{count(len(flipped), 'correction')} in {write}. Train again with them:")
        echo(f"  actor_train.data_args.corrections={write}")
    elif write:
        echo(f"{write} was not written: no pair is likely flipped, so there is nothing to correct.")
    return 0


def _print_summary(run: Path, doctor: Doctor, summary: JsonObject) -> None:
    """Print what was found in all pairs, and how sure that is."""
    from rather.tools.report.pairs import MEANINGS

    contradicting = "the same two answers are also preferred the other way"
    meanings = {**MEANINGS, "contradicting": contradicting}
    counts = [(name, summary[name], text) for name, text in meanings.items() if name in summary]
    times = "once" if summary["epochs"] == 1 else f"up to {summary['epochs']} times"
    title = f"{run}: {count(summary['pairs'], 'pair')}, seen {times}"
    print_table(("finding", "pairs", "meaning"), counts, title)
    echo(doctor.conclusion)
    echo(f"Held-out accuracy of the model: {doctor.held_out or 'not measured'}.")
    echo(f"Length alone explains {summary['explained_by_length']:.0%} of the margins (R^2).")
    if calibration := doctor.calibration:
        echo(
            f"Planted flips: AUC {calibration['auc']:.2f}; likely_flipped finds "
            f"{calibration['recall']:.0%} of them, and at least {calibration['precision']:.0%} of "
            "its pairs were flipped."
        )


def _print_suspects(rows: list[JsonObject], texts: PairTexts | None) -> None:
    """Print the numbers of some pairs, each with its texts, which a reader judges by."""
    console = Console()
    width = console.width if console.is_terminal else None
    echo("\nThe pairs with the highest flip score:")
    for row in rows:
        name = row.get("row_id") or (f"#{row['place']}" if "place" in row else "")
        chance = f", chance of a wrong label {row['chance']:.0%}" if "chance" in row else ""
        margins = f"margin {row['first']:.2f}"
        if row["visits"] > 1:
            margins += f" at first, {row['last']:.2f} at visit {row['visits']}"
        echo(f"\n{row['id']} {name}")
        echo(f"  flip score {row['flip_score']:.3f}{chance}, {margins}")
        echo(f"  {', '.join(row['findings']) or 'no finding'}")
        if texts and "place" in row:
            for side, text in texts.shortened(row["place"]).items():
                line = f"  {side:<9} {text}"
                echo(line if width is None else line[:width])


def _pair_texts(run: Path, trust: Trust) -> PairTexts | None:
    """Return the training pairs of a run; None if its data is not on this machine."""
    from rather.errors import RatherError
    from rather.tools.report.pair_texts import PairTexts

    try:
        return PairTexts.of(run, trust)
    except (OSError, RatherError) as error:
        echo(f"rather: the texts of the pairs are not available ({error})", err=True)
        return None


def _add_places(rows: list[JsonObject], data: PairDataset) -> int:
    """Add the id of each row in the file, and the number of the pair in the board.

    Count the pairs that another one contradicts.
    """
    digests = data.column("pair_hash").tolist()
    row_ids = data.column("id").tolist()
    swapped = set(data.column("swapped_hash").tolist())
    index_of = {f"{digest:016x}": i for i, digest in reversed(list(enumerate(digests)))}
    for row in rows:
        if (index := index_of.get(row["id"])) is not None:
            row["place"] = index
            if row_ids[index]:
                row["row_id"] = row_ids[index]
            if digests[index] in swapped:
                row["findings"].append("contradicting")
    return sum("contradicting" in row["findings"] for row in rows)


def _calibrate(run: Path, data: PairDataset | None, share: float, trust: Trust) -> int:
    """Train a copy with planted flips, and store what it says about the score; the exit code."""
    import numpy as np

    from rather.commands.train import train_run
    from rather.config.load import load_found
    from rather.config.paths import check_paths
    from rather.config.schema import as_list
    from rather.data.pairs import hex_id
    from rather.files import replace_own, write_own
    from rather.run_folder.control import StopRequest
    from rather.tools.report.pairs import CALIBRATION, Doctor, calibrate

    if data is None:
        raise ConfigError(f"--plant: the training pairs of {run} are needed.")
    config = load_found(run / "config.yaml", trust)  # data: it came with the folder
    digests = np.unique(data.column("pair_hash"))
    draw = np.random.default_rng(config.seed)
    planted = draw.permutation(digests)[: max(1, round(share * len(digests)))]
    name = f"{run.absolute().name}-planted"
    file = run.absolute().with_name(f"{name}.jsonl")
    lines = [strict_json({"id": hex_id(int(digest)), "flip": True}) + "\n" for digest in planted]
    write_own(file, "".join(lines))
    actor, data_args = config.actor_train, config.actor_train.data_args
    corrections = [*as_list(data_args.corrections), str(file)]
    data_args = data_args.model_copy(update={"corrections": corrections})
    actor = actor.model_copy(update={"data_args": data_args})
    changes = {"exp_name": name, "report_html": False, "actor_train": actor}
    copy = config.model_copy(update=changes)
    check_paths(copy)
    with StopRequest() as stop:
        if code := train_run(copy, stop):
            return code
    calibration = calibrate(Doctor.of(copy.run_dir), planted)
    replace_own(run / CALIBRATION, strict_json({**calibration, "share": share}) + "\n")
    return 0
