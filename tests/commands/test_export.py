"""`rather export`: what is written opens, is the same model, in the precision and sizes asked for, or is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.checkpoint import checkpoint
from rather.commands.export import parse_size
from rather.config.run_config import DPOConfig
from rather.errors import ConfigError
from rather.optim.rounding import Rounding
from tests.commands.conftest import refusal, succeed
from tests.tiny import make_model


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 50)[None]).logits
    return found


def test_a_run_in_half_precision_and_small_files(run: DPOConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = succeed("export", run.run_dir, out, "--dtype", "bf16", "--shard-size", "20KB")
    assert "(allowed: 0.5)" in done.output
    before, after = weights(run.run_dir / "model"), weights(out)
    assert before.keys() == after.keys()
    rounding = Rounding("dithered")
    assert all(after[name].equal(rounding.rounded(name, value)) for name, value in before.items())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    assert max(file.stat().st_size for file in files) < 22_000
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained(out)) == 63
    card = (out / "README.md").read_text()
    assert "trained by Rather (task: preference)" in card
    assert "Exported from" in card
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_checkpoint_has_its_own_weights(run: DPOConfig, tmp_path: Path) -> None:
    succeed("export", run.run_dir / "checkpoint-2", tmp_path / "out")
    saved = checkpoint.open_checkpoint(run.run_dir / "checkpoint-2").tensors("model")
    written = weights(tmp_path / "out")
    assert {f"causal_lm.{name}" for name in written} == set(saved)
    assert all(torch.equal(saved[f"causal_lm.{name}"], tensor) for name, tensor in written.items())
    assert any(
        not torch.equal(tensor, written[name])
        for name, tensor in weights(run.run_dir / "model").items()
    )


@pytest.mark.parametrize("source", ["", "adapter", "checkpoint-3"])
def test_an_adapter_alone_and_merged(
    lora: DPOConfig, folder: Path, tmp_path: Path, source: str
) -> None:
    """From the run, its adapter or its checkpoint: PEFT opens the adapter, and merged it is the run's model."""
    expected = logits(AutoModelForCausalLM.from_pretrained(lora.run_dir / "model"))
    succeed("export", lora.run_dir / source, tmp_path / "alone", "--adapter")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    assert torch.allclose(
        logits(PeftModel.from_pretrained(base, tmp_path / "alone").eval()), expected, atol=1e-4
    )
    succeed("export", lora.run_dir / source, tmp_path / "whole", "--dtype", "fp32")
    assert torch.allclose(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")), expected, atol=1e-4
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "whole"]


def test_what_does_not_open_is_not_there(
    run: DPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rather.model import export

    rounded = export._rounded
    monkeypatch.setattr(export, "_rounded", lambda *args: 2 * rounded(*args))
    assert "not written: log-probs before and after differ by" in refusal(
        2, "export", run.run_dir, tmp_path / "out"
    )
    assert not list(tmp_path.iterdir())


def test_sizes() -> None:
    assert (parse_size("5GB"), parse_size("0.5 mb"), parse_size("300KB")) == (
        5 * 10**9,
        500_000,
        300_000,
    )
    with pytest.raises(ConfigError):
        parse_size("0GB")


@pytest.mark.defect("X20")
def test_weights_that_float16_makes_zero_are_counted_or_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    file = model / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name][0] = 1e-12
    save_file(weights, file, metadata={"format": "pt"})
    done = succeed("export", model, tmp_path / "some", "--dtype", "fp16")
    assert f"{weights[name].shape[1]} of " in done.output
    assert "weights became 0 in float16" in done.output
    weights[name] *= 1e-12
    save_file(weights, file, metadata={"format": "pt"})
    assert f"weights of {name} are too small for float16 and would become 0" in refusal(
        2, "export", model, tmp_path / "all", "--dtype", "fp16"
    )
    assert not (tmp_path / "all").exists()
