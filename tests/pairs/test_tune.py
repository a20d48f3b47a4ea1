"""`rather tune` chooses a setting, stays in its budget, and continues where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rather.cli import app
from rather.config.load import load
from rather.errors import ConfigError, NonFiniteError
from rather.tools import tune
from tests.tiny import make_config


def invoke(file: Path, *arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["tune", str(file), "--json", *arguments])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_a_setting_is_chosen_and_the_command_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "RANGE", (1e-3, 1.0))
    monkeypatch.setattr(tune, "AROUND", (1e-4, 1.0))
    monkeypatch.setattr(tune.Tuning, "_first_steps", lambda *_: 2)  # else it depends on the time
    file, out = tmp_path / "dpo.yaml", tmp_path / "best.yaml"
    config = make_config(tmp_path, beta=0.1)
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    options = ("--budget", "600s", "--out", str(out))
    found = invoke(file, *options)
    runs = found["runs"]
    assert isinstance(runs, dict)
    # Rates that change nothing lose: their held-out loss stays at ln 2.
    best = runs[str(found["best"])]
    assert best["steps"] == 5  # 2, and then what is left of the epoch
    assert best["values"][tune.RATE] == "0.001"
    assert runs["range-learning_rate-1e-06"]["calibrated_loss"] > best["calibrated_loss"]
    halved = [run["steps"] for name, run in runs.items() if not name.startswith("range-")]
    assert len(halved) == 4
    assert sorted(halved) == [2, 2, 5, 5]
    assert found["frontier"]
    written = load(out)
    assert written.actor_train.training_args.learning_rate == 0.001
    assert written.beta == float(best["values"].get("beta", 0.1))  # or of the range test
    assert written.actor_train.training_args.lr_scheduler_type != "constant"
    assert out.read_text().startswith("# Chosen by rather tune")
    again = invoke(file, *options)
    assert again == found  # nothing was left to do, and no second was spent
    result = CliRunner().invoke(app, ["tune", str(file), "beta=0.5", *options])
    assert result.exit_code == 2
    assert "was tuned with other settings" in result.output


def test_a_small_budget_trains_few_steps(tmp_path: Path) -> None:
    base = make_config(tmp_path)
    tuning = tune.Tuning(tmp_path / "x.yaml", base, [], tmp_path, 100.0)
    tuning.state = {"seconds": 20.0, "rounds": {}}
    tuning.state["runs"] = {"range-a": {"steps": 4, "step_seconds": 0.5, "start_seconds": 1.0}}
    # 9 settings, then 3 for twice as many further steps; the best of them is chosen.
    assert tuning._first_steps(9, 1000) == int((0.9 * 80 - 12 * 1.0) / (15 * 0.5))
    assert tuning._first_steps(9, 2) == 2
    tuning.state["seconds"] = 99.0
    assert tuning._first_steps(9, 1000) == 1


@pytest.mark.parametrize("text", ["20", "m", "0m", "1d", "-5m"])
def test_a_budget_needs_a_unit(text: str) -> None:
    with pytest.raises(ConfigError, match="--budget"):
        tune.seconds_of(text)
    assert tune.seconds_of("1.5h") == 5400


GOOD = {"values": {tune.RATE: "1e-6"}, "steps": 4, "step_seconds": 0.1, "start_seconds": 1.0}
STATE = {"seconds": 3.0, "runs": {"a": GOOD}, "rounds": {"range": 4, "rate": "1e-6"}, "asked": {}}
DAMAGED = {
    "not JSON": "{",
    "another type": "[]",
    "no runs": json.dumps({"seconds": 1.0, "rounds": {}}),
    "text as seconds": json.dumps({**STATE, "seconds": "many"}),
    "runs as a list": json.dumps({**STATE, "runs": []}),
    "a run without values": json.dumps({**STATE, "runs": {"a": {"steps": 4}}}),
    "negative steps": json.dumps({**STATE, "runs": {"a": {**GOOD, "steps": -1}}}),
    "no times": json.dumps({**STATE, "runs": {"a": {"values": {}, "steps": 4}}}),
    "a rate of 0": json.dumps({**STATE, "rounds": {"rate": "0"}}),
    "a loss that is a text": json.dumps({**STATE, "runs": {"a": {**GOOD, "calibrated_loss": "x"}}}),
}


@pytest.mark.defect("X13")
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_state_is_refused(tmp_path: Path, case: str) -> None:
    file = tmp_path / tune.STATE
    file.write_text(DAMAGED[case])
    with pytest.raises(ConfigError, match=r"tune\.json: is damaged .* to tune from scratch"):
        tune.read_state(file)


def tuning(folder: Path, *losses: object) -> tune.Tuning:
    """What was measured, as it is read from the file: JSON has no NaN."""
    runs = {f"run-{i}": {**GOOD, "calibrated_loss": loss} for i, loss in enumerate(losses)}
    (folder / tune.STATE).write_text(json.dumps({**STATE, "runs": runs}))
    config = make_config(folder)
    state = tune.read_state(folder / tune.STATE)
    return tune.Tuning(folder / "dpo.yaml", config, [], folder, 60.0, state)


@pytest.mark.defect("X13")
def test_if_every_rate_diverges_none_is_called_best(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="No setting is usable: each one diverged or failed"):
        tuning(tmp_path, "nan", "inf").result()
    found = tuning(tmp_path, "nan", 0.5, 0.4).result()
    assert found["best"] == "run-2"
