"""An adapter on another base than it was trained on: refused, unless the user allows it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rather.pipeline.pipeline import DPOPipeline
from tests.commands.conftest import exits, succeed
from tests.tiny import make_config

ANY = "--any-base"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a LoRA adapter with its own base, which tests may copy as a whole."""
    folder = tmp_path_factory.mktemp("based")
    lora = {"actor_train__model_args__lora_rank": 2}
    assert DPOPipeline(make_config(folder, max_steps=2, save_steps=1, **lora)).run() == 0
    return folder


@pytest.fixture
def replaced(trained: Path) -> Any:
    """The base has other weights of the same shapes during a test."""
    file = trained / "base" / "model.safetensors"
    whole = file.read_bytes()
    weights = load_file(file)
    name = sorted(weights)[-1]
    weights[name] = weights[name].clone()
    weights[name].view(-1)[7] += 1
    save_file(weights, file, {"format": "pt"})
    yield trained
    file.write_bytes(whole)


def commands(folder: Path, out: Path) -> dict[str, list[object]]:
    run = folder / "output" / "run"
    return {
        "chat": ["chat", run / "adapter", "--prompt", "w1", "--max-new-tokens", "2"],
        "checkpoint": ["chat", run / "checkpoint-1", "--prompt", "w1", "--max-new-tokens", "2"],
        "score": ["score", run / "adapter", folder / "pairs.jsonl"],
        "export": ["export", run / "checkpoint-2", out],
        "adapter": ["export", run, out, "--adapter"],
        "merge": ["merge", run / "adapter", "--out", out],
    }


NAMES = [*commands(Path(), Path())]


@pytest.mark.defect("X5")
@pytest.mark.parametrize("name", NAMES)
def test_a_replaced_base_is_refused(replaced: Path, tmp_path: Path, name: str) -> None:
    (line,) = exits(2, *commands(replaced, tmp_path / "out")[name]).strip().splitlines()
    assert "was trained on other weights than" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["checkpoint", "adapter", "merge"])
def test_it_can_be_allowed(replaced: Path, tmp_path: Path, name: str) -> None:
    succeed(*commands(replaced, tmp_path / "out")[name], ANY)
    if name == "adapter":  # it still says what it was trained on
        exits(2, "merge", tmp_path / "out", "--out", tmp_path / "merged")


@pytest.mark.defect("X5")
def test_another_base_of_the_same_shape(trained: Path, tmp_path: Path) -> None:
    other = shutil.copytree(trained / "base", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    changed = {key: weight * 1.01 for key, weight in weights.items()}
    save_file(changed, other / "model.safetensors", {"format": "pt"})
    words = ["merge", trained / "output" / "run" / "adapter", "--base", other, "--out"]
    exits(2, *words, tmp_path / "out")
    succeed(*words, tmp_path / "out", ANY)
    same = shutil.copytree(trained / "base", tmp_path / "same")
    words[3] = same
    succeed(*words, tmp_path / "copy")


def test_an_adapter_of_another_tool_works_as_before(replaced: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(replaced / "output" / "run" / "adapter", tmp_path / "adapter")
    assert json.loads((adapter / "rather.json").read_text()).keys() == {"base_weights"}
    (adapter / "rather.json").unlink()
    succeed("merge", adapter, "--out", tmp_path / "out")


def test_a_resumed_run_compares_as_well(replaced: Path) -> None:
    words = ["exp_name=run", "max_steps=3"]
    file = replaced / "output" / "run" / "config.yaml"
    assert "model weights" in exits(4, "train", file, *words)


@pytest.mark.defect("X5")
def test_a_run_that_starts_from_it_compares_as_well(replaced: Path, tmp_path: Path) -> None:
    adapter = replaced / "output" / "run" / "adapter"
    words = ["exp_name=next", f"output_dir={tmp_path}", "actor_train.model_args.lora_rank=null"]
    words += [f"actor_train.model_args.adapter_name_or_path={adapter}"]
    printed = exits(2, "train", replaced / "output" / "run" / "config.yaml", *words)
    assert f"actor_train.model_args.adapter_name_or_path: {adapter} was trained on" in printed
    assert "--any-base" in printed


def test_what_the_digest_covers(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not depend on the division into files; of a large model it reads a few blocks."""
    from rather.model import files

    whole = load_file(trained / "base" / "model.safetensors")
    names = sorted(whole)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: whole[name] for name in part}, tmp_path / file, {"format": "x"})
    index = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for limit in (1 << 30, 0):
        monkeypatch.setattr(files, "MOST_HASHED", limit)
        digest = files.weights_digest(trained / "base")
        assert digest is not None
        assert files.weights_digest(tmp_path) == digest
        for name in names:  # each tensor counts: its last number is in the last block
            part = tmp_path / index[name]
            with safe_open(part, "pt") as opened:
                before = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            after = {**before, name: before[name].clone()}
            after[name].view(-1)[-1] += 1
            save_file(after, part, {"format": "x"})
            assert files.weights_digest(tmp_path) != digest, (limit, name)
            save_file(before, part, {"format": "x"})
    assert torch.equal(load_file(tmp_path / "a.safetensors")[names[0]], whole[names[0]])
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 100)
    assert files.weights_digest(tmp_path) is None
