"""A TRL file becomes the training of its own trainer, or that is not determined; never another."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rather.tools.migrate.engine import TRAINER
from rather.tools.migrate.peers import trl
from rather.tools.migrate.peers.trl_versions import BETWEEN, OLD, SHARED, table
from rather.tools.migrate.rules import UNSET
from tests.commands.conftest import refusal, succeed
from tests.migrate.convert import BASIC, of, problems

VERSIONS: list[str] = list(table()["versions"])
TRAINED = {  # what Rather calls the training of each trainer
    "dpo": ("preference", "sigmoid"),
    "cpo": ("preference", "cpo"),
    "orpo": ("preference", "orpo"),
    "kto": ("unpaired", "kto"),
    "bco": ("unpaired", "bco"),
    "sft": ("sft", "sft"),
    "reward": ("reward", "bradley_terry"),
}
RATES = {"reward": 1e-4, "sft": 2e-5, "bco": 5e-7}  # of TRL 1.x; of others 1e-6


@cache
def keys_of(trainer: str) -> dict[str, set[str]]:
    """Return the settings of a trainer by version."""
    keys: dict[str, set[str]] = {}
    for span, names in table()["keys"][trainer].items():
        first, last = map(VERSIONS.index, span.split())
        for version in VERSIONS[first : last + 1]:
            keys.setdefault(version, set()).update(names.split())
    return keys


def default_in(trainer: str, key: str, version: str) -> Any:
    for first, last, default in table()["defaults"].get(trainer, {}).get(key, ()):
        if VERSIONS.index(first) <= VERSIONS.index(version) <= VERSIONS.index(last):
            return default
    return None


def file_of(trainer: str, version: str) -> dict[str, Any]:
    """Return a file that sets every key of a config to its default."""
    own = {key: default_in(trainer, key, version) for key in sorted(keys_of(trainer)[version])}
    return {"model_name_or_path": "m", "dataset_name": "d.jsonl", **own}


CELLS = [(name, version) for name in table()["keys"] if name != SHARED for version in keys_of(name)]


@pytest.mark.defect("U1")
def test_no_file_of_a_trainer_is_taken_for_another() -> None:
    wrong = []
    for trainer, version in CELLS:
        values = file_of(trainer, version)
        for given in (values, *({key: value} for key, value in values.items())):
            found = trl.trainer(given)
            if found is not UNSET and found != trainer:
                wrong.append((trainer, version, list(given), found))
    assert wrong == []


def test_some_files_determine_their_trainer() -> None:
    found = {cell: trl.trainer(file_of(*cell)) for cell in CELLS}
    for trainer, first in (("dpo", "0.9"), ("kto", "0.8"), ("cpo", "0.9"), ("reward", "0.13")):
        for version in VERSIONS[VERSIONS.index(first) :]:
            assert found[trainer, version] == trainer, version
    for trainer in ("orpo", "bco"):
        assert {name for (own, _), name in found.items() if own == trainer} == {UNSET}


@pytest.mark.defect("U1")
@pytest.mark.parametrize(
    ("trainer", "version"),
    [cell for cell in CELLS if cell[0] in TRAINED and cell[1] in ("0.9", "0.28", "head")],
)
def test_the_loss_of_a_file_is_right_or_not_determined(trainer: str, version: str) -> None:
    values = {**file_of(trainer, version), "learning_rate": 1e-6}
    result, determined = of(values), trl.trainer(values) is not UNSET
    assert ("(loss)" not in problems(result)) == determined
    if determined:
        assert (result.config.task, *result.config.loss_names) == TRAINED[trainer]


@pytest.mark.parametrize("trainer", TRAINED)
def test_the_user_names_the_trainer(trainer: str) -> None:
    result = of(
        {**BASIC, "assistant_only_loss": True} if trainer == "sft" else BASIC, trainer=trainer
    )
    assert problems(result) == {}
    assert (result.config.task, *result.config.loss_names) == TRAINED[trainer]


@pytest.mark.defect("U1")
def test_the_command_takes_a_trainer(tmp_path: Path) -> None:
    file, out = tmp_path / "x.yaml", tmp_path / "out.yaml"
    file.write_text(yaml.safe_dump({**BASIC, "max_length": 512, "max_prompt_length": 128}))
    command = ["migrate", file, "--from", "trl", "--out", out]
    assert "not determined: (loss); a file does not name its trainer" in refusal(2, *command)
    succeed(*command, "--trainer", "orpo")
    assert yaml.safe_load(out.read_text())["pref_loss"] == "orpo"


# ---- versions

NAMELESS = {"model_name_or_path": "m", "dataset_name": "d.jsonl"}
DECISIVE = {"learning_rate": 1e-6, "bf16": True, "max_length": 99, "max_prompt_length": 9}


@pytest.mark.parametrize("trainer", TRAINED)
def test_the_defaults_are_those_of_the_newest_version(trainer: str) -> None:
    given: dict[str, Any] = {TRAINER: trainer}
    for key, default in trl.PEER.defaults_for(given):
        given.setdefault(key, default)
    for key in ("learning_rate", "max_length", "logging_steps", "beta", "truncation_mode"):
        listed = default_in(trainer, key, "head")
        assert listed is None or given[key] == listed, key
    assert given["learning_rate"] == RATES.get(trainer, 1e-6)


@pytest.mark.parametrize(
    ("trainer", "settings", "era", "unset"),
    [
        ("dpo", {"rpo_alpha": 1.0}, OLD, "learning rate, precision, bf16, max_length, max_prompt_length"),
        ("dpo", {"max_prompt_length": 9, "bf16": False, "sync_ref_model": True}, OLD,
         "learning rate, max_length, ref_model_mixup_alpha"),
        ("sft", {"max_seq_length": 9, "fp16": True, "assistant_only_loss": True}, OLD, "learning rate"),
        ("simpo", {**DECISIVE, "learning_rate": None}, OLD, "learning rate"),
        # kto.py had the setting up to 1.1, and cut prompts up to 0.26
        ("kto", {"learning_rate": 1e-6, "bf16": True, "generate_during_eval": False}, BETWEEN,
         "max_length, max_prompt_length, truncation_mode"),
    ],
)  # fmt: skip
def test_an_older_file_has_to_set_what_has_another_default_now(
    trainer: str, settings: dict[str, Any], era: str, unset: str
) -> None:
    assert trl.era({TRAINER: trainer, **settings}) == era
    result = of({**NAMELESS, **settings}, trainer=trainer)
    assert set(problems(result)) == {f"({name})" for name in unset.split(", ")}
    others = {"learning_rate": 1e-6, "ref_model_mixup_alpha": 0.6, "truncation_mode": "keep_end"}
    missing = {key: value for key, value in ({**DECISIVE, **others}).items() if key in unset}
    complete = {**NAMELESS, **settings, **missing, "learning_rate": 1e-6}
    assert problems(of(complete, trainer=trainer)) == {}
