"""`rather init`: a YAML for a file, a model and a device, which `rather train` runs as written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from rather.config.load import load_config
from rather.data.prepare import prepare
from rather.plan.memory import Device
from rather.tools import init
from tests.commands.conftest import json_of, rather, refusal, succeed, write
from tests.tiny import make_config

GIB = 1 << 30
SEVEN_B = {  # the shape of Qwen2.5-7B with a tiny vocabulary
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_config(tmp_path)
    return tmp_path


def values_of(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def test_rather_train_runs_the_file_as_written(place: Path) -> None:
    done = succeed("init", "pairs.jsonl", "--model", "base", "--out", "my run.yaml")
    text = (place / "my run.yaml").read_text()
    assert text.strip() in done.output
    assert "rather train 'my run.yaml'" in done.output, "as a shell reads it"
    assert max(map(len, text.splitlines())) <= 120
    config = load_config(place / "my run.yaml")
    assert config.exp_name == "my-run"
    assert len(prepare(config).train) == 38, "two pairs are held out, none is too long"
    written = values_of(place / "my run.yaml")
    assert written["train_batch_size"] == 4
    assert written["sequence_length"] == 128, "the positions of the model"
    assert "model_args" not in written["actor_train"], "all weights fit"
    succeed("train", "my run.yaml", "max_steps=1", "track_with=null", "report_html=false")
    assert (place / "output/my-run/model/config.json").exists()


ROWS = {
    "preference": {"prompt": "w1", "chosen": " w2", "rejected": " w3"},
    "unpaired": {"prompt": "w1", "completion": " w2", "label": True},
    "regression": {"prompt": "w1", "completion": " w2", "score": 0.5},
    "sft": {"prompt": "w1", "completion": " w2"},
}


@pytest.mark.parametrize("task", ROWS)
def test_the_columns_decide_the_task(tmp_path: Path, task: str) -> None:
    rows = write(tmp_path / "rows.jsonl", {"note": "no answer"}, ROWS[task])
    assert init.task_of(str(rows)) == task


CHOICES: list[tuple[int, Any, float]] = [  # GiB of the GPU
    (400, {}, 1e-6),
    (40, {"lora_rank": 16}, 1e-5),
    (12, {"lora_rank": 16, "quantization": "4bit"}, 1e-5),
]


def test_the_planner_chooses_what_fits_the_gpu(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised = prepare(make_config(place))  # once for all devices
    config = json_of(place / "base/config.json")
    config.pop("head_dim", None)
    (place / "base/config.json").write_text(json.dumps(config | SEVEN_B))
    (place / "base/model.safetensors").unlink()  # config.json is enough
    monkeypatch.setattr("rather.cluster.group.device_kind", lambda _: "cuda")
    monkeypatch.setattr("rather.data.prepare.prepare", lambda _: tokenised)

    def with_gpu(memory: int) -> Result:
        device = Device("cuda", memory * GIB)
        monkeypatch.setattr("rather.pipeline.run_summary.device_here", lambda *_: device)
        return rather("init", "pairs.jsonl", "--model", "base", "--out", f"{memory}.yaml")

    for memory, adapter, rate in CHOICES:
        done = with_gpu(memory)
        assert done.exit_code == 0, done.output
        actor = values_of(place / f"{memory}.yaml")["actor_train"]
        assert actor.get("model_args", {}) == adapter
        assert actor["training_args"]["learning_rate"] == pytest.approx(rate)
        assert ("rather[quantization]" in done.output) == ("quantization" in adapter)
    refused = with_gpu(2)
    assert refused.exit_code == 2
    assert "base: does not fit on" in refused.output
    assert not (place / "2.yaml").exists()


def test_lengths_follow_the_rows() -> None:
    import numpy as np

    short = np.full(99, 300)
    assert init._longest(np.append(short, 350), 4096) == 384, "all rows, for little more"
    assert init._longest(np.append(short, 9000), 32768) == 384, "one long row is dropped"
    assert init._longest(np.append(short, 350), 256) == 256, "positions of the model"
    assert list(init._lengths(4096)) == [4096, 2048, 1024, 512]


def test_nothing_is_overwritten_unless_asked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("init", "pairs.jsonl", "--out", "dpo.yaml")
    (place / "dpo.yaml").write_text("mine")
    assert "dpo.yaml: already exists" in refusal(2, *arguments, "--model", "base")
    monkeypatch.setattr(init, "_is_terminal", lambda: True)
    assert rather(*arguments, "--model", "base", input="n\n").exit_code == 2
    assert (place / "dpo.yaml").read_text() == "mine"
    succeed(*arguments, input="y\nbase\ny\n")
    assert values_of(place / "dpo.yaml")["task"] == "reward", "the third question"


@pytest.mark.defect("N4")
def test_unknown_words_are_reported_before_the_first_step(place: Path) -> None:
    cafe = {"prompt": "w1", "chosen": " w2 soup", "rejected": " coffee w3"}
    write(place / "cafe.jsonl", *[cafe | {"prompt": f"w1 w{i}"} for i in range(8)])
    done = succeed("init", "cafe.jsonl", "--model", "base", "--out", "cafe.yaml")
    trial = succeed("train", "cafe.yaml", "--dry-run")
    for output in (done.output, trial.output):
        text = " ".join(output.split())
        assert "serious: 33 % of the tokens in the answers of train stand for words" in text


@pytest.mark.parametrize("name", ["on, off: {x}.jsonl", "1e3", "null", "~", "/a/ö 1", "a.jsonl"])
def test_odd_names_stay_text(name: str) -> None:
    assert yaml.safe_load(init._flow({"file_name": name})) == {"file_name": name}
