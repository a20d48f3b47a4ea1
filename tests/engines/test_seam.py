"""The seam of an engine: it replaces loading, stepping and updates, and says what it cannot do."""

from __future__ import annotations

import json
import logging
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import yaml

from rather.checkpoint.checkpoint import open_checkpoint
from rather.config.found import found_values
from rather.config.load import config_from_dict
from rather.config.run_config import DPOConfig
from rather.errors import CheckpointError, ConfigError
from rather.pipeline.pipeline import DPOPipeline
from rather.train import engine as seam
from tests.commands.conftest import rather
from tests.engines import toy
from tests.tiny import make_config, metrics

pytestmark = pytest.mark.usefixtures("no_self_check")
TOY = f"{toy.__file__}:ToyEngine"
STEPS: dict[str, Any] = {
    "max_steps": 4,
    "save_steps": 2,
    "forgetting": "off",
    "actor_train__training_args__lr_scheduler_type": "constant",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


def run(folder: Path, name: str, **changes: Any) -> DPOConfig:
    config = make_config(folder, exp_name=name, **{**STEPS, **changes})
    assert DPOPipeline(config).run() == 0
    return config


def losses(config: DPOConfig) -> list[float]:
    return [line["loss"] for line in metrics(config) if "loss" in line]


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, DPOConfig]:
    """The same run on Rather's own engine and on the toy."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("check_family", "check_model"):
            patch.setattr(f"rather.parallel.load.{name}", lambda _: None)
        return {
            "torch": run(folder, "own"),
            "toy": run(folder, "toy", actor_train__engine=TOY),
        }


def test_an_engine_trains_the_same_run(trained: dict[str, DPOConfig]) -> None:
    assert losses(trained["toy"]) == pytest.approx(losses(trained["torch"]), rel=1e-5)
    assert len(losses(trained["toy"])) == 4


def test_checkpoint_and_card_name_the_engine(trained: dict[str, DPOConfig]) -> None:
    names = {"torch": "torch", "toy": "toy.py:ToyEngine"}
    for key, config in trained.items():
        card = (config.run_dir / "model" / "README.md").read_text()
        assert f"| engine | {names[key]} |" in card
        identity = open_checkpoint(config.run_dir / "checkpoint-4").state["identity"]["engine"]
        assert (identity if key == "torch" else identity[0]) == names[key]


def test_an_interrupted_run_resumes_to_the_same_numbers(
    folder: Path, trained: dict[str, DPOConfig]
) -> None:
    run(folder, "resumed", actor_train__engine=TOY, max_steps=2)
    again = run(folder, "resumed", actor_train__engine=TOY)
    assert losses(again) == losses(trained["toy"])


def test_a_checkpoint_of_another_engine_needs_leave(
    folder: Path, trained: dict[str, DPOConfig]
) -> None:
    run(folder, "moved", actor_train__engine=TOY, max_steps=2)
    with pytest.raises(
        CheckpointError, match=r"(?s)engine.*toy\.py:ToyEngine.*resume\.allow=\[eng"
    ):
        run(folder, "moved")
    moved = run(folder, "moved", resume__allow=["engine"])
    assert losses(moved) == pytest.approx(losses(trained["torch"]), rel=1e-5)


def test_the_log_names_the_engine_and_what_it_does_not_promise(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rather"):
        run(folder, "logged", actor_train__engine=TOY, max_steps=1)
    assert "toy.py:ToyEngine runs the training steps. It is experimental" in caplog.text


def test_an_installed_engine_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("toy", "tests.engines.toy:ToyEngine", seam.ENTRY_POINTS)
    monkeypatch.setattr(seam, "entry_points", lambda **_: EntryPoints([entry]))
    assert seam.find_engine("toy") is toy.ToyEngine
    with pytest.raises(ConfigError, match=r"actor_train\.engine: .*'toi'; did you mean 'toy'"):
        seam.find_engine("toi")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (f"{toy.__file__}:NotAnEngine", "is not a subclass of rather.train.engine.Engine"),
        (f"{toy.__file__}:Missing", "has no function or class of this name"),
        ("/nowhere/engine.py:Mine", "cannot be read"),
        ("deepspeed", "no installed package has an engine 'deepspeed'"),
    ],
)
def test_what_is_not_an_engine_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"actor_train\.engine:.*{sentence}"):
        seam.find_engine(name)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"actor_train__model_args__lora_rank": 2}, "lora_rank"),
        ({"precision": "lean"}, "precision=lean"),
        ({"compile": "on"}, "compile=on"),
        ({"actor_train__model_args__dtype": "fp16"}, "dtype=fp16"),
        ({"actor_train__training_args__log_num_zeros_in_grad": True}, "log_num_zeros_in_grad"),
    ],
)
def test_what_the_seam_does_not_carry_is_refused(
    folder: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"actor_train\.engine: cannot be combined with .*{key}"):
        make_config(folder, actor_train__engine=TOY, **changes)


def test_an_engine_refuses_runs_by_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rather.parallel.load.cpu_has_bf16", lambda: True)
    config = make_config(
        folder, exp_name="never", actor_train__engine=TOY, actor_train__model_args__dtype="bf16"
    )
    with pytest.raises(ConfigError, match=r"ToyEngine: rounding: dithered .*rounding: nearest"):
        DPOPipeline(config).run()


@pytest.mark.parametrize("name", ["my engine", "engine.py", "engine.py:my class", 7])
def test_a_name_of_an_engine_is_checked(folder: Path, name: object) -> None:
    with pytest.raises(ConfigError, match=r"actor_train\.engine.*FILE\.py:Class"):
        make_config(folder, actor_train__engine=name)


def test_a_file_is_named_by_its_absolute_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(toy.__file__).parent)
    assert make_config(folder, actor_train__engine="toy.py:ToyEngine").actor_train.engine == TOY


def test_a_run_folder_cannot_name_an_engine(trained: dict[str, DPOConfig]) -> None:
    file = trained["toy"].run_dir / "config.yaml"
    assert TOY in file.read_text()
    assert "engine" not in found_values(file)["actor_train"]


def test_migrate_does_not_copy_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["pretrain: base", "actor_train:", f"  engine: {TOY}", "  data_args:"]
    Path("roll.yaml").write_text("\n".join([*lines, "    file_name: pairs.jsonl", ""]))
    result = rather("migrate", "roll.yaml", "--from", "roll")
    assert "left out: actor_train.engine" in result.output
    values = yaml.safe_load(next(tmp_path.glob("dpo*.yaml")).read_text())
    assert "engine" not in values["actor_train"]


def test_plan_names_the_engine_and_does_not_run_it(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(9)\n")
    config = make_config(folder, actor_train__engine=f"{broken}:Mine")
    values = json.loads(config.model_dump_json(exclude_unset=True))
    assert config_from_dict(values).actor_train.engine == f"{broken}:Mine"
    from rather.config.strategies import layout

    text = layout(config.actor_train).describe()
    assert text.endswith("run by the engine broken.py:Mine (experimental)")
