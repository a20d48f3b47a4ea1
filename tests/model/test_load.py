"""A model folder becomes a policy in eval mode, or one sentence that says what is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config

from rather.config.schema import ModelArgs
from rather.errors import ConfigError
from rather.parallel.load import load_policy, same_weights, stored_dtype
from tests.tiny import make_model

WEIGHTS = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


def with_weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return work


def with_config(**changes: Any) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return work


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight is missing": (
        with_weights(lambda w: w.pop(QUERY)),
        rf"do not fill.*missing keys.*{QUERY}",
    ),
    "a weight has another shape": (
        with_weights(lambda w: w.update({QUERY: torch.zeros(5, 5)})),
        rf"do not fill.*mismatched keys.*{QUERY}",
    ),
    "a weight is NaN": (
        with_weights(lambda w: w["model.norm.weight"].fill_(torch.nan)),
        r"not finite numbers: model\.norm\.weight",
    ),
    "whole numbers": (
        with_weights(lambda w: w.update({QUERY: w[QUERY].long()})),
        rf"weights that are whole numbers: {QUERY}",
    ),
    "control characters": (
        with_weights(lambda w: w.update({"a\x1b[2Jb": w[QUERY].clone()})),
        r"the name of a tensor has control characters: 'a\\x1b\[2Jb'",
    ),
    "cut off": (cut, r"its weights cannot be opened.*incomplete"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"its config cannot be opened"),
    "a broken config": (
        lambda folder: (folder / "config.json").write_text("{"),
        r"config\.json: cannot be read",
    ),
    "an impossible config": (
        with_config(num_attention_heads=5),
        r"its config cannot be opened.*multiple",
    ),
    "an unknown family": (with_config(model_type="lama"), r"its config cannot be opened.*`lama`"),
    "no causal language model": (
        lambda folder: (folder / "config.json").write_text(
            json.dumps(T5Config(vocab_size=63, d_model=8, d_kv=4, d_ff=8).to_dict())
        ),
        r"its weights cannot be opened.*T5Config",
    ),
}


X = {"whole numbers": "X7", "control characters": "X26"}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(name, marks=[pytest.mark.defect(X[name])] if name in X else [])
        for name in DAMAGE
    ],
)
def test_an_unusable_folder_gives_a_one_line_error(base: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(base, folder)
    work, sentence = DAMAGE[damage]
    work(folder)
    with pytest.raises(ConfigError, match=f"(?s){folder}.*{sentence}") as caught:
        load_policy(str(folder), ModelArgs(), "cpu")
    assert "\n" not in str(caught.value)


def test_an_unknown_model_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_policy(str(tmp_path / "nowhere"), ModelArgs(), "cpu")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_runs_in_the_dtype_asked_for_and_remembers_that_of_its_source(
    base: Path, dtype: Any
) -> None:
    policy = load_policy(str(base), ModelArgs(dtype=dtype), "cpu")
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert {p.dtype for p in policy.parameters()} == {stored_dtype(ModelArgs(dtype=dtype), "cpu")}
    assert all(p.equal(p.to(wanted).to(p.dtype)) for p in policy.parameters())
    assert policy.causal_lm.config.dtype == torch.float32
    assert not any(module.training for module in policy.modules())


def test_the_same_folder_by_two_names(base: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(base)
    shutil.copytree(base, tmp_path / "copy")
    assert same_weights(str(base), str(tmp_path / "link"))
    assert same_weights("org/model", "org/model")
    assert not same_weights(str(base), str(tmp_path / "copy"))
    assert not same_weights("org/model", "org/other")


# OPT calls dropout in the layer itself, GPT-2 in its parts; both have a tenth by default.
