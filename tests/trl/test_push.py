"""`trainer.push_to_hub()` uploads model and card as `rather push` does."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rather.errors import ConfigError
from tests.golden.trl_run import make_model
from tests.hub import TOKEN, accepting_uploads
from tests.trl.cases import Case, make_trainer


def test_a_trainer_pushes_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(make_model(tmp_path / "base"))
    settings = {"max_steps": 1, "hub_model_id": "shop/kind", "hub_private_repo": True}
    case = Case("DPO", settings={**settings, "hub_token": TOKEN})
    trainer = make_trainer("rather.trl", case, model, tmp_path / "out")
    trainer.train()
    with accepting_uploads(tmp_path, monkeypatch) as hub:
        monkeypatch.delenv("HF_TOKEN")
        address = trainer.push_to_hub(dataset_name="shop/pairs")
        assert address == f"{hub.address}/shop/kind"
        assert hub.private == {"shop/kind": True}
        assert hub.tokens == {TOKEN}
        files = hub.commits[hub.revisions["shop/kind", "main"]]
    assert (tmp_path / "out/training_args.bin").exists()
    assert files.keys() >= {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    assert not any(name.endswith(".bin") or "checkpoint" in name for name in files)
    card = files["README.md"].decode()
    top = yaml.safe_load(card.split("---\n")[1])
    assert top == {
        "library_name": "transformers",
        "tags": ["rather", "dpo"],
        "license": "unknown",
        "datasets": ["shop/pairs"],
    }
    assert "| max_steps | 1 |" in card
    assert "| last metric |" in card
    assert TOKEN not in card
    assert str(tmp_path) not in card
    with pytest.raises(ConfigError, match="blocking"):
        trainer.push_to_hub(blocking=False)
