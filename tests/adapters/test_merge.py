"""`rather merge`: the merged model is the base with its adapter, or nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.commands.export import merge
from rather.model import adapters
from rather.model.adapters import saved_config
from tests.commands.conftest import refusal, succeed
from tests.tiny import make_model


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(3, 50)[None]).logits
    return found


def difference_in(result: str) -> float:
    return float(result.partition("differ by ")[2].partition(" ")[0])


def copied(adapter: Path, folder: Path) -> Path:
    return shutil.copytree(adapter, folder / "adapter")


def test_by_the_command(shared: Path, tuned: Path, tmp_path: Path) -> None:
    """The adapter knows its base; here its folder has no tokenizer, so that of the base comes along."""
    done = succeed("merge", tuned, "--out", tmp_path / "merged")
    assert "log-probs before and after differ by" in done.output
    assert "(allowed: 0.0001)" in done.output
    source = AutoModelForCausalLM.from_pretrained(shared / "base")
    expected = logits(PeftModel.from_pretrained(source, tuned).eval())
    assert torch.allclose(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected, atol=1e-5
    )
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == 63
    assert "already exists" in refusal(2, "merge", tuned, "--out", tmp_path / "merged")


def test_half_precision_is_allowed_its_rounding(tuned: Path, tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", dtype=torch.bfloat16)
    found = merge(str(tuned), tmp_path / "merged", str(base))
    assert "(allowed: 0.5)" in found
    assert 0 < difference_in(found) < 0.1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 1}, "belongs to another model: the base has no model.layers.1"),
        ({"intermediate_size": 64}, "do not fill the model: model.layers.0.mlp.down_proj.lora_A"),
    ],
)
def test_a_foreign_base_is_refused(
    tuned: Path, tmp_path: Path, changes: dict[str, int], sentence: str
) -> None:
    base = make_model(tmp_path / "base", **changes)
    assert sentence in refusal(2, "merge", tuned, "--out", tmp_path / "merged", "--base", base)
    assert not (tmp_path / "merged").exists()


def test_a_merge_that_changes_the_model_is_not_written(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong_scale(folder: Path) -> Any:
        config = saved_config(folder)
        config.lora_alpha = 0
        return config

    def wrong(*args: Any) -> Any:
        with monkeypatch.context() as context:
            context.setattr(adapters, "saved_config", wrong_scale)
            return really(*args)

    really = adapters.merge
    monkeypatch.setattr(adapters, "merge", wrong)
    said = refusal(2, "merge", tuned, "--out", tmp_path / "merged")
    assert "not written: log-probs before and after differ" in said
    assert not list(tmp_path.iterdir())


def test_a_missing_base_is_reported(tuned: Path, tmp_path: Path) -> None:
    adapter = copied(tuned, tmp_path)
    file = adapter / "adapter_config.json"
    values = json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "gone")}
    file.write_text(json.dumps(values))
    assert "is not here; pass it with --base" in refusal(
        2, "merge", adapter, "--out", tmp_path / "merged"
    )


def test_a_base_quantised_in_training_is_reported(
    tuned: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without bitsandbytes the adapter is compared on the base as it is, and the log says so."""
    monkeypatch.setattr("rather.commands.export.takes_4_bits", lambda: False)
    adapter = copied(tuned, tmp_path)
    (adapter / "rather.json").write_text('{"quantization": "4bit"}')
    found = merge(str(adapter), tmp_path / "merged")
    assert "allowed" in found
    assert "bitsandbytes is missing" in caplog.text


def test_nonfinite_weights_are_refused(tuned: Path, tmp_path: Path) -> None:
    adapter = copied(tuned, tmp_path)
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    weights[min(weights)].fill_(float("nan"))
    save_file(weights, file)
    assert "not finite numbers" in refusal(2, "merge", adapter, "--out", tmp_path / "merged")
