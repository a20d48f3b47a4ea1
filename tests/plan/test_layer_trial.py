"""Layers that are not those of a plain decoder: what a trial without memory counts is what they keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rather.config.schema import ActorConfig, ModelArgs
from rather.data.pack import pack
from rather.model.check import random_pairs
from rather.model.layer_trial import LayerTrial, is_plain, try_layers
from rather.model.policy import PolicyModel
from rather.model.sizes import few_layers, sizes_of
from rather.plan.forecast import _tried_layers
from tests.cells import cells
from tests.model.test_hybrids import hybrid
from tests.plan.test_arithmetic import saved_bytes

LENGTHS = [(90, 130, 110), (40, 150, 170)]


def saved_of(folder: Path, layers: int) -> float:
    """What autograd keeps of each token; the hidden state behind the layers is no part of it."""
    policy = PolicyModel(few_layers(str(folder), ModelArgs(), layers, "cpu", torch.float32))
    batch = pack(random_pairs(128, LENGTHS), 1024)[0]
    return saved_bytes(policy, lambda: policy.hidden(batch)) / len(batch.ids_N)


FAST = ["lfm2", "gpt_oss", "gemma4_text-experts"]


@pytest.mark.parametrize(
    "name", cells(FAST, ["gemma4_text", "qwen3_5_text", "nemotron_h", "falcon_h1"])
)
def test_a_trial_counts_what_layers_keep(name: str, tmp_path: Path) -> None:
    hybrid(name).config.save_pretrained(tmp_path)
    sizes = sizes_of(str(tmp_path), ModelArgs())
    assert not is_plain(sizes)
    trial = try_layers(str(tmp_path), ModelArgs(), "cpu", 4, random_pairs(128, LENGTHS))
    few = 1 if name == "falcon_h1" else 0  # its layers are alike, and it cannot have none
    measured = saved_of(tmp_path, sizes.layers) - saved_of(tmp_path, few)
    assert trial.kept * (sizes.layers - few) == pytest.approx(measured, rel=0.02)
    on_gpu = try_layers(str(tmp_path), ModelArgs(), "cuda", 2, random_pairs(128, LENGTHS))
    assert on_gpu.kept < trial.kept


def tried(monkeypatch: pytest.MonkeyPatch, trial: Any, *steps: Any) -> LayerTrial | None:
    """What a forecast takes of these steps, for layers that are not plain."""
    monkeypatch.setattr("rather.plan.forecast.is_plain", lambda _sizes: False)
    monkeypatch.setattr("rather.plan.forecast.try_layers", trial)
    actor = ActorConfig.model_validate({"model_args": {"model_name_or_path": "some/model"}})
    sizes: Any = None
    return _tried_layers(actor, sizes, "cpu", steps)


def test_the_step_whose_tokens_keep_most_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are bytes in place of pairs."""
    most = tried(monkeypatch, lambda *given: LayerTrial(given[-1], 0), 2.0, 5.0, 3.0)
    assert most == LayerTrial(5.0, 0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "olmo2"])
def test_plain_decoders_need_no_trial(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=2, vocab_size=128)
    config.architectures = []
    config.save_pretrained(tmp_path)
    assert is_plain(sizes_of(str(tmp_path), ModelArgs()))


def test_a_trial_that_fails_leaves_the_forecast_of_a_plain_decoder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_args: Any) -> None:
        raise RuntimeError("no fake kernel\nand more")

    assert tried(monkeypatch, fails, []) is None
    assert "cannot be tried without memory (no fake kernel);" in caplog.text
