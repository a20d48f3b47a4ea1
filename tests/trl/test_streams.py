"""Streams, references that move, and a model that is pushed, as in TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainerCallback

import rather.trl
from rather.errors import ConfigError
from rather.trl.tokens import Packer, token_pair
from tests.hub import TOKEN, accepting_uploads
from tests.trl.cases import Case, config_of, make_trainer, rows_of


def trainer_of(kind: str, rows: Any, model: str, folder: Path, **settings: Any) -> Any:
    sizes = {"per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1}
    args = config_of(kind, folder, **{**sizes, **settings})
    return getattr(rather.trl, f"{kind}Trainer")(
        model, args=args, train_dataset=rows, eval_dataset=rows
    )


@pytest.mark.parametrize("kind", ["DPO", "SFT"])
def test_a_stream_trains_on_the_same_rows_in_their_order(
    kind: str, model: str, tmp_path: Path
) -> None:
    rows = rows_of(Case(kind, columns={"SFT": "messages"}.get(kind, "")))
    # In one batch: transformers counts the rows of a stream's last batch as those of a full one.
    settings = {"train_sampling_strategy": "sequential", "per_device_eval_batch_size": len(rows)}
    losses = []
    for data in (rows, rows.to_iterable_dataset()):
        trainer = trainer_of(kind, data, model, tmp_path, **settings)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        losses[-1].append(trainer.evaluate()["eval_loss"])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) > 2


def test_an_evaluation_before_training_has_trls_keys(model: str, tmp_path: Path) -> None:
    """TRL prepares the reference, and so transformers does not report how long that takes."""
    trainer = trainer_of("DPO", rows_of(Case("DPO")), model, tmp_path)
    assert "eval_model_preparation_time" not in trainer.evaluate()


def test_a_reference_that_a_callback_moves_is_refused(model: str, tmp_path: Path) -> None:
    """The log-probs of the reference are kept, so nobody else may move it."""

    class SyncRefModelCallback(TrainerCallback):
        pass

    trainer = make_trainer(
        "rather.trl", Case("DPO"), model, tmp_path, callbacks=[SyncRefModelCallback()]
    )
    with pytest.raises(ConfigError, match="set sync_ref_model"):
        trainer.train()


def test_padding_free_needs_no_limit_as_in_trl(model: str, tmp_path: Path) -> None:
    rows = rows_of(Case("SFT", columns="messages"))
    with pytest.raises(ConfigError, match="padding_free: not with max_length"):
        trainer_of("SFT", rows, model, tmp_path, padding_free=True)
    trainer_of("SFT", rows, model, tmp_path, padding_free=True, max_length=None)


def test_answers_that_are_equal_after_the_cut_count_twice() -> None:
    sequence = ([5, 6, 7], [0, 1, 1])
    rows = [{"prompt_ids": [], "row": 0}]
    packed = Packer(lambda row: [token_pair([sequence, sequence], 3)])(rows)
    assert int(packed["tokens"]) == 6


def test_a_trainer_pushes_its_model(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "library_name": "transformers", "tags": ["rather", "dpo"], "license": "unknown",
        "datasets": ["shop/pairs"],
    }  # fmt: skip
    assert "| max_steps | 1 |" in card
    assert "| last metric |" in card
    assert TOKEN not in card
    assert str(tmp_path) not in card
    with pytest.raises(ConfigError, match="blocking"):
        trainer.push_to_hub(blocking=False)
