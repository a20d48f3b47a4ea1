"""A TRL file becomes the training of its own trainer, or that is not determined; never another."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rather.cli import app
from rather.tools.migrate.peers import trl, trl_versions
from rather.tools.migrate.rules import MISSING, UNSET
from tests.migrate.convert import BASIC, of, problems

CELLS = [
    (trainer, version)
    for trainer in sorted(set(trl_versions.table()["keys"]) - {trl_versions.SHARED})
    for version in trl_versions.versions()
    if trl_versions.keys_of(trainer, version)
]
TRAINED = {  # what Rather calls the training of each trainer
    "dpo": ("preference", "sigmoid"),
    "cpo": ("preference", "cpo"),
    "orpo": ("preference", "orpo"),
    "kto": ("unpaired", "kto"),
    "bco": ("unpaired", "bco"),
    "sft": ("sft", "sft"),
    "reward": ("reward", "bradley_terry"),
}


def file_of(trainer: str, version: str) -> dict[str, Any]:
    """Return a file that sets every key of a config to its default."""
    keys = trl_versions.keys_of(trainer, version)
    own = {key: trl_versions.default_in(trainer, key, version) for key in sorted(keys)}
    return {"model_name_or_path": "m", "dataset_name": "d.jsonl", **own}


def test_the_table_has_every_minor_version_with_its_commit() -> None:
    order = trl_versions.versions()
    assert (order[0], order[-1]) == ("0.8", "head")
    minors = [tuple(map(int, version.split("."))) for version in order[:-1]]
    for before, after in pairwise(minors):
        assert after in ((before[0], before[1] + 1), (before[0] + 1, 0))
    assert all(len(text.split()[1]) == 40 for text in trl_versions.table()["versions"].values())


@pytest.mark.defect("U1")
def test_no_file_of_a_trainer_is_taken_for_another() -> None:
    wrong = []
    for trainer, version in CELLS:
        values = file_of(trainer, version)
        alone = [{key: value} for key, value in values.items()]
        for given in (values, *alone):
            found = trl.trainer(given)
            if found is not UNSET and found != trainer:
                wrong.append((trainer, version, list(given), found))
    assert wrong == []


def test_some_files_determine_their_trainer() -> None:
    found = {
        (trainer, version): trl.trainer(file_of(trainer, version)) for trainer, version in CELLS
    }
    for trainer, first in (("dpo", "0.9"), ("kto", "0.8"), ("cpo", "0.9"), ("reward", "0.13")):
        order = trl_versions.versions()
        for version in order[order.index(first) :]:
            assert found[trainer, version] == trainer, version
    for trainer in ("orpo", "bco"):
        assert {name for (own, _), name in found.items() if own == trainer} == {UNSET}


@pytest.mark.defect("U1")
@pytest.mark.parametrize("trainer", TRAINED)
@pytest.mark.parametrize("version", ["0.9", "0.28", "head"])
def test_the_loss_of_a_file_is_right_or_not_determined(trainer: str, version: str) -> None:
    keys = trl_versions.keys_of(trainer, version)
    values = {key: value for key, value in file_of(trainer, version).items() if key in keys}
    result = of({**values, "learning_rate": 1e-6})
    if "(loss)" in problems(result):
        return
    assert (result.config.task, result.config.loss_names) == (
        TRAINED[trainer][0],
        [TRAINED[trainer][1]],
    )


@pytest.mark.parametrize(("loss", "trained"), [("apo_zero", "apo_zero"), ("simpo", "simpo")])
def test_a_loss_of_one_trainer_determines_it(loss: str, trained: str) -> None:
    result = of({**BASIC, "loss_type": loss})
    assert problems(result) == {}
    assert result.config.loss_names == [trained]


def test_keys_of_two_trainers_determine_none() -> None:
    found = problems(of({**BASIC, "rpo_alpha": 1.0, "cpo_alpha": 1.0}))
    assert found["(loss)"] == MISSING


@pytest.mark.parametrize("trainer", TRAINED)
def test_the_user_names_the_trainer(trainer: str) -> None:
    result = of(
        {**BASIC, "assistant_only_loss": True} if trainer == "sft" else BASIC, trainer=trainer
    )
    assert problems(result) == {}
    assert (result.config.task, result.config.loss_names) == (
        TRAINED[trainer][0],
        [TRAINED[trainer][1]],
    )


@pytest.mark.defect("U1")
def test_the_command_takes_a_trainer(tmp_path: Path) -> None:
    file, out = tmp_path / "x.yaml", tmp_path / "out.yaml"
    file.write_text(yaml.safe_dump({**BASIC, "max_length": 512, "max_prompt_length": 128}))
    command = ["migrate", str(file), "--from", "trl", "--out", str(out)]
    unnamed = CliRunner().invoke(app, command)
    assert unnamed.exit_code == 2
    assert "not determined: (loss); a file does not name its trainer" in unnamed.output
    named = CliRunner().invoke(app, [*command, "--trainer", "orpo"])
    assert named.exit_code == 0, named.output
    assert yaml.safe_load(out.read_text())["pref_loss"] == "orpo"


# ---- versions


def test_defaults_that_differ_between_the_versions_of_a_file_are_not_determined() -> None:
    old = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "rpo_alpha": 1.0}
    (row,) = (row for row in of(old).rows if row.key == "(defaults)")
    assert row.status == MISSING
    assert row.value == ["learning_rate", "bf16", "max_length", "max_prompt_length"]
    assert "0.9 and 0.28" in row.note
    given = {**old, "learning_rate": 1e-6, "bf16": True, "max_length": 99, "max_prompt_length": 9}
    assert problems(of(given)) == {}


def test_a_file_of_the_newest_version_has_its_defaults() -> None:
    result = of({"model_name_or_path": "m", "dataset_name": "d.jsonl"}, trainer="dpo")
    assert problems(result) == {}
    assert result.config.sequence_length == 1024
