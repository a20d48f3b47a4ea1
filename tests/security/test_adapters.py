"""An adapter is untrusted like a model; one that the config does not name is never loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rather.config.schema import ModelArgs
from rather.errors import ConfigError
from rather.parallel.load import load_policy
from tests.commands.conftest import exits
from tests.security.conftest import Bait, Config, change

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


@pytest.fixture
def adapter(lora: Path, tmp_path: Path) -> Path:
    """A copy, to be spoilt."""
    return Path(shutil.copytree(lora, tmp_path / "adapter"))


def commands(good: Path, named: Path) -> list[tuple[Any, ...]]:
    """What takes a model or an adapter."""
    return [
        ("chat", named, "--prompt", "w1"),
        ("score", named, good / "pairs.jsonl"),
        ("export", named, "written"),
    ]


def out_of_its_folder(file: Path) -> None:
    elsewhere = file.parent.parent / f"private-{file.name}"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def test_an_honest_adapter_and_the_links_of_a_hub_are_followed(
    good: Path, adapter: Path, tmp_path: Path
) -> None:
    args = ModelArgs(adapter_name_or_path=str(adapter))
    assert (
        load_policy(str(good / "base"), args, "cpu").state_dict().keys()
        - load_policy(str(good / "base"), ModelArgs(), "cpu").state_dict().keys()
    )
    blobs, snapshot = (
        tmp_path / "models--a--b" / "blobs",
        tmp_path / "models--a--b" / "snapshots" / "0a1b",
    )
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        (adapter / name).rename(blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert load_policy(str(good / "base"), ModelArgs(adapter_name_or_path=str(snapshot)), "cpu")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_linked_adapter_cannot_lead_out(
    config: Config, good: Path, adapter: Path, name: str
) -> None:
    out_of_its_folder(adapter / name)
    file = config(actor_train__model_args__adapter_name_or_path=str(adapter))
    merge = ("merge", adapter, "--out", "written")
    for command in (("train", file), merge, *commands(good, adapter)):
        assert f"{name}: is a link to" in exits(2, *command)
    assert not Path("written").exists()


def test_an_adapter_of_a_huge_rank(config: Config, good: Path, adapter: Path) -> None:
    change(adapter / CONFIG, r=1_000_000)
    file = config(actor_train__model_args__adapter_name_or_path=str(adapter))
    for command in (("train", file), *commands(good, adapter)):
        assert "r: 1000000 is too large for the weights next to it" in exits(2, *command)


def test_a_pattern_of_layers_is_not_matched(
    config: Config, adapter: Path, good: Path, tmp_path: Path
) -> None:
    """PEFT would match the names of all modules; the file of the adapter has those that count."""
    for place, pattern in enumerate((".*[qv]_proj", "(.*a*)*" * 9 + "b", "(" * 5000)):
        change(adapter / CONFIG, target_modules=pattern)
        out = tmp_path / f"merged-{place}"
        exits(0, "merge", adapter, "--base", good / "base", "--out", out)
    exits(0, "train", config(actor_train__model_args__adapter_name_or_path=str(adapter)))
    saved = json.loads((tmp_path / "out" / "run" / "adapter" / CONFIG).read_text())
    layers = json.loads((good / "base" / "config.json").read_text())["num_hidden_layers"]
    assert sorted(saved["target_modules"]) == [
        f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(layers) for name in "qv"
    ]


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "there"])
def test_an_adapter_next_to_a_model_is_not_loaded(
    config: Config, good: Path, model: Path, lora: Path, adapter: Path, linked: bool
) -> None:
    for name in (CONFIG, WEIGHTS):
        shutil.copy(lora / name, model / name)
        if linked:
            out_of_its_folder(model / name)
    stray = "holds an adapter (adapter_config.json)"
    out = "outside of its folder"
    assert (out if linked else "adapter_name_or_path") in exits(2, "train", config())
    stray = out if linked else stray
    assert stray in exits(2, "merge", adapter, "--base", model, "--out", "written")
    for command in commands(good, model):
        assert "contains a model and an adapter; move adapter_* into a separate folder" in exits(
            2, *command
        )
    assert not Path("written").exists()


def test_a_model_that_is_an_adapter_is_refused(lora: Path) -> None:
    """Else its base would be loaded, wherever its config says that it lies."""
    with pytest.raises(ConfigError, match=r"holds an adapter .*adapter_name_or_path"):
        load_policy(str(lora), ModelArgs(), "cpu")


def test_a_pickled_adapter(
    config: Config, good: Path, adapter: Path, model: Path, marker: Path, pickled: bytes
) -> None:
    torch.save({"base_model.model.x.lora_A.weight": Bait(marker)}, adapter / PICKLED)
    (adapter / WEIGHTS).unlink()
    file = config(actor_train__model_args__adapter_name_or_path=str(adapter))
    merge = ("merge", adapter, "--out", "written")
    for command in (("train", file), merge, *commands(good, adapter)):
        assert "is not a PEFT adapter; use a folder with adapter_config.json and" in exits(
            2, *command
        )
    (adapter / WEIGHTS).write_bytes(pickled)
    assert "adapter_model.safetensors: is not a readable safetensors file" in exits(
        2, "train", file
    )
    for name in (CONFIG, PICKLED):
        shutil.copy(adapter / name, model / name)
    assert "holds an adapter" in exits(2, "train", config())


@pytest.mark.parametrize(
    ("key", "value"),
    [("r", 1e9), ("r", 0), ("lora_alpha", "x"), ("lora_alpha", float("nan")), ("revision", [1]),
     ("base_model_name_or_path", ["x"]), ("modules_to_save", ["x"] * 10_001), ("target_modules", [1])],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused(adapter: Path, key: str, value: Any) -> None:
    change(adapter / CONFIG, **{key: value})
    message = exits(2, "merge", adapter, "--out", "written")
    assert f"{key}: {str(value)[:9]}" in message


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_an_invalid_adapter_config_is_refused(good: Path, adapter: Path, text: str) -> None:
    (adapter / CONFIG).write_text(text)
    with pytest.raises(ConfigError, match=r"adapter_config\.json: cannot be read"):
        load_policy(str(good / "base"), ModelArgs(adapter_name_or_path=str(adapter)), "cpu")
