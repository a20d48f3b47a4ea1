"""Streams, references that move, and what log_history says about both, as in TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import rather.trl
from rather.errors import ConfigError
from rather.trl.tokens import Packer, token_pair
from tests.golden.trl_run import make_model
from tests.trl.cases import Case, make_trainer, rows_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model")))


def trainer_of(kind: str, rows: Any, model: str, folder: Path, **settings: Any) -> Any:
    defaults = {"use_cpu": True, "bf16": False, "report_to": "none", "logging_steps": 1}
    args = getattr(rather.trl, f"{kind}Config")(
        str(folder), per_device_train_batch_size=2, max_steps=3, **{**defaults, **settings}
    )
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
