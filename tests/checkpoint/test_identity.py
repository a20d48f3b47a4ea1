"""A checkpoint of another run is refused field by field, unless `resume.allow` names what may differ."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from rather.checkpoint.checkpoint import Checkpoint, open_checkpoint
from rather.config.keys import table
from rather.config.schema import Guard
from rather.errors import CheckpointError, ConfigError
from rather.pipeline.checks import GUARDS, refuse_other_run
from rather.pipeline.pipeline import DPOPipeline
from tests.checkpoint.runs import config_of, copy_of_whole
from tests.checkpoint.saving import save_checkpoint
from tests.tiny import make_config, make_model

CHANGES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "loss": ({"beta": 0.5}, [r"loss\.sigmoid\.beta: 0\.1 then, 0\.5 now"], "pref_loss, beta"),
    "seed": ({"seed": 7}, [r"seed: \[42, 42\] then, \[7, 7\] now"], "data_seed"),
    "data": ({"sequence_length": 32}, [r"data\.pairs: \w{12} then, \w{12} now"], "sequence_length"),
    "batch": ({"train_batch_size": 16}, ["global batch: 8 then, 16 now"], "train_batch_size"),
    "reference": (
        {"sync_ref_model": True, "ref_model_sync_steps": 2},
        [r"synced reference: nothing then, \[0\.6, 2\] now"],
        "sync_ref_model",
    ),
}


def test_every_guard_can_be_allowed() -> None:
    assert set(get_args(Guard)) == set(GUARDS)


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_is_refused_with_the_keys_that_bring_it_back(folder: Path, name: str) -> None:
    change, lines, keys = CHANGES[name]
    with pytest.raises(CheckpointError, match="belongs to another run") as refused:
        DPOPipeline(config_of(folder, "whole", max_steps=8, **change)).run()
    for line in lines:
        assert any(re.search(line, told) for told in str(refused.value).splitlines()), refused.value
    assert keys in str(refused.value)
    assert f"resume.allow=[{name}]" in str(refused.value)


def test_the_keys_that_are_advised_exist() -> None:
    for _, keys in GUARDS.values():
        for key in re.findall(r"\w+(?:\.\w+)+", keys):
            assert key in table(), key


@pytest.mark.parametrize("name", ["loss", "seed", "batch", "data", "reference"])
def test_allowed_differences_resume_and_are_logged(
    folder: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    goes_on(folder, caplog, [name], CHANGES[name][0])


def goes_on(
    folder: Path, caplog: pytest.LogCaptureFixture, allowed: list[str], change: dict[str, Any]
) -> None:
    name = "-".join(["allowed", *allowed, *change])[:80]
    change = {**change, "actor_train__training_args__num_train_epochs": 5.0}
    config = copy_of_whole(folder, name, max_steps=7, resume__allow=allowed, **change)
    with caplog.at_level(logging.WARNING):
        assert DPOPipeline(config).run() == 0
    assert all(f"resume.allow: {each} has changed" in caplog.text for each in allowed)
    assert open_checkpoint(config.run_dir / "checkpoint-7").step == 7


@pytest.mark.parametrize(("role", "guard"), [("actor_train", "model"), ("reference", "reference")])
def test_another_model_of_the_same_shape(
    folder: Path, caplog: pytest.LogCaptureFixture, role: str, guard: str
) -> None:
    other = make_model(folder / f"other-{guard}", seed=3)
    paths = {"actor_train": folder / "base", "reference": folder / "base", role: other}
    change = {f"{each}__model_args__model_name_or_path": str(path) for each, path in paths.items()}
    with pytest.raises(CheckpointError, match=rf"{guard}: .*base.* then, .*other-{guard}.* now"):
        DPOPipeline(config_of(folder, "whole", max_steps=8, **change)).run()
    goes_on(folder, caplog, [guard], change)


def test_another_tokenizer_makes_other_pairs(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Path(shutil.copytree(folder / "base", folder / "other-tokenizer"))
    file = other / "tokenizer.json"
    words = json.loads(file.read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["w0"], vocabulary["w1"] = vocabulary["w1"], vocabulary["w0"]
    file.write_text(json.dumps(words))
    change = {"actor_train__model_args__tokenizer_name_or_path": str(other)}
    with pytest.raises(CheckpointError, match=r"data\.pairs: \w{12} then") as refused:
        DPOPipeline(
            config_of(folder, "whole", max_steps=8, resume__allow=["tokenizer"], **change)
        ).run()
    assert "tokenizer: " not in str(refused.value)
    goes_on(folder, caplog, ["tokenizer", "data"], change)


def test_an_unknown_guard_is_an_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume\.allow: .* is not a list of data \| tokenizer"):
        config_of(folder, "whole", resume__allow=["datta"])


def test_tokenizer_template_and_model_config_are_guarded(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_steps=1)
    assert DPOPipeline(config).run() == 0
    identity = open_checkpoint(config.run_dir / "checkpoint-1").state["identity"]
    file = tmp_path / "base" / "tokenizer_config.json"
    template = "{{ messages[0]['content'] + messages[-1]['content'] }}"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 1e-3}))
    with pytest.raises(CheckpointError) as refused:
        DPOPipeline(make_config(tmp_path, max_steps=2)).run()
    for field in ("tokenizer", "model config", "reference config"):
        assert f"{field}: {str(identity[field])[:12]} then, " in str(refused.value)


def test_a_changed_template_is_named(tmp_path: Path) -> None:
    found = _checkpoint(tmp_path, {"chat template": {"name": "chatml", "sha256": "0" * 64}})
    with pytest.raises(CheckpointError, match=r"chat template\.name: chatml then, native now"):
        refuse_other_run(found, {"chat template": {"name": "native", "sha256": "0" * 64}}, [])


def test_changed_losses_are_named(tmp_path: Path) -> None:
    found = _checkpoint(
        tmp_path, {"loss": {"losses": [["ipo", 1.0, {"beta": 0.1}]], "rpo_alpha": None}}
    )
    now = {"loss": {"losses": [["sigmoid", 1.0, {"beta": 0.1}]], "rpo_alpha": 0.5}}
    with pytest.raises(CheckpointError) as refused:
        refuse_other_run(found, now, ["seed"])
    for line in ("loss.ipo.beta: 0.1 then, nothing now", "loss.sigmoid.beta: nothing then, 0.1 now",
                 "loss.rpo_alpha: nothing then, 0.5 now"):  # fmt: skip
        assert line in str(refused.value)


def test_what_an_old_checkpoint_does_not_know_is_taken_as_unchanged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        refuse_other_run(
            _checkpoint(tmp_path, {"seed": [1, 1]}), {"seed": [1, 1], "tokenizer": "0" * 64}, []
        )
    assert caplog.text.count("tokenizer: unknown then or now, taken as unchanged") == 1


def _checkpoint(folder: Path, identity: dict[str, Any]) -> Checkpoint:
    state = {
        "identity": identity,
        "progress": {},
        "schedule": {},
        "trainer": {},
        "metrics_bytes": 0,
    }
    return open_checkpoint(save_checkpoint(folder, 1, {}, state))
