"""Every setting of the Python API has an effect, or is refused; so are pairs a loss cannot use."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from rather import DPOConfig, DPOTrainer
from rather.api.collate import DataCollatorForPreferenceDataset, pairs_of
from rather.api.feed import Feed
from rather.api.torch_optimizer import TorchOptimizer
from rather.config.schema import TrainingArgs
from rather.errors import ConfigError, DataError, NonFiniteError
from tests.api import conftest
from tests.tiny import tiny_policy

TOKENS = conftest.TOKENS[:8]
EXTRAS = {"weight": 3.0, "margin": 1.5, "soft_label": 0.9}


def trainer_of(args: Any = None, *, dtype: torch.dtype = torch.float32, **keys: Any) -> DPOTrainer:
    model, config = tiny_policy(dtype=dtype).causal_lm, DPOConfig(**keys)
    reference = None if keys.get("pref_loss") in ("cpo", "sft") else copy.deepcopy(model)
    return DPOTrainer(model, config, reference, args)


def steps_of(size: int, **changes: Any) -> TrainingArgs:
    return TrainingArgs(**{"learning_rate": 1e-3, "per_device_train_batch_size": size, **changes})


# --- what a pair carries beside its tokens ---


def told(pair: Any) -> dict[str, float]:
    return {name: getattr(pair, name) for name in EXTRAS}


def test_rows_and_batches_of_tokens_keep_what_a_file_keeps() -> None:
    class Padding:
        pad_token_id = 0

    feed = Feed((), DPOConfig(), 2)
    [pair] = feed.pairs({**TOKENS[0], **EXTRAS, "id": 7})
    assert (told(pair), pair.id) == (EXTRAS, "7")
    batch = DataCollatorForPreferenceDataset(Padding())(
        [{**TOKENS[0], **EXTRAS}, {**TOKENS[1], "weight": 2}]
    )
    first, second = feed.pairs(batch)
    assert told(first) == EXTRAS
    assert second.weight == 2
    assert math.isnan(second.margin)
    mapped = DPOConfig(actor_train={"data_args": {"columns": {"weight": "importance"}}})
    assert (
        Feed((), mapped, 2).pairs({**TOKENS[0], "weight": 5.0, "importance": 0.5})[0].weight == 0.5
    )
    with pytest.raises(DataError, match="weight must be a number from 0 to inf"):
        feed.pairs({**TOKENS[0], "weight": -1})
    with pytest.raises(DataError, match="margin: a batch of 2 pairs needs a list of 2 values"):
        pairs_of({**batch, "margin": [1.0]})


def test_a_row_with_labels() -> None:
    sides = {"chosen": [1, 2, 3], "rejected": [1, 2, 4]}
    row = {f"{side}_input_ids": ids for side, ids in sides.items()}
    row |= {f"{side}_labels": [-100, -100, ids[-1]] for side, ids in sides.items()}
    [pair] = Feed((), DPOConfig(), 2).pairs(row)
    assert (pair.chosen_scored, pair.rejected_scored) == (((2, 3),), ((2, 3),))


# --- what a loss cannot use ---


NO_LABEL = "reads the column soft_label: 2 of 2"


@pytest.mark.parametrize(
    ("keys", "pairs", "named"),
    [
        ({"pref_loss": "odpo"}, [{**TOKENS[0], "margin": 1.0}, *TOKENS[1:]], "margin: 7 of 8"),
        ({"soft_labels": True, "max_steps": 3}, TOKENS, f"{NO_LABEL} training pairs"),
        ({"pref_loss": "aot"}, [{**row, "weight": 2.0} for row in TOKENS], "'aot' sorts the pairs"),
    ],
)
def test_pairs_that_a_loss_cannot_use_are_refused(keys: Any, pairs: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        trainer_of(steps_of(2), **keys).fit(iter(pairs) if "max_steps" in keys else pairs)


def test_held_out_pairs_that_a_loss_cannot_use_are_refused() -> None:
    with pytest.raises(DataError, match=f"{NO_LABEL} evaluation pairs"):
        trainer_of(steps_of(2), soft_labels=True).evaluate(TOKENS)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"on_nonfinite": "stop"}, "on_nonfinite: stop"),
        ({"max_nonfinite_steps": 2}, r"2 such steps in a row \(max_nonfinite_steps\)"),
        ({"max_steps": 3}, "3 such steps in a row"),
    ],
)
def test_nonfinite_steps_end_a_training(keys: dict[str, Any], said: str) -> None:
    trainer = trainer_of(steps_of(1), **keys)
    with torch.no_grad():
        trainer.policy.policy.causal_lm.model.norm.weight.fill_(math.nan)
    with pytest.raises(NonFiniteError, match=said):
        trainer.fit(TOKENS)


# --- settings ---


@pytest.mark.parametrize(
    ("args", "keys", "named"),
    [
        (None, {"sync_ref_model": True, "ref_model_sync_steps": 1}, "train_config: sync_ref_model"),
        (None, {"precision": "lean"}, "train_config: precision=lean"),
        (None, {"spike": {}}, "train_config: spike"),
        (None, {"on_nonfinite": "rollback"}, "train_config: on_nonfinite=rollback"),
        ({"gradient_checkpointing": True}, {}, "args: gradient_checkpointing"),
        ({"dataloader_num_workers": 4}, {}, "args: dataloader_num_workers"),
        ({"per_device_eval_batch_size": 64}, {}, "args: per_device_eval_batch_size"),
        ({"bf16": True, "use_cpu": True}, {}, "args: bf16"),
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor"),
        ({"max_steps": 3}, {}, "max_steps and seed belong in train_config"),
        ({"lr_scheduler_type": "polynomial"}, {}, "^lr_scheduler_type"),
        ({"max_grad_norm": 0.3}, {"max_grad_norm": 0.01}, r"max_grad_norm: 0\.3 differs"),
        (steps_of(2, lr_scheduler_kwargs={"num_cycle": 3}), {}, r"lr_scheduler_kwargs\.num_cycle"),
        (steps_of(2, gradient_accumulation_steps=2), {"train_batch_size": 7}, "train_batch_size: 7"),
        (steps_of(2), {"actor_train": {"training_args": {"learning_rate": 1}}}, "learning_rate"),
    ],
)  # fmt: skip
def test_settings_that_would_have_no_effect_are_refused(
    args: Any, keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """A dict of arguments is one of transformers' TrainingArguments."""
    if isinstance(args, dict):
        args = TrainingArguments(output_dir=str(tmp_path), **args)
    with pytest.raises(ConfigError, match=named):
        trainer_of(args, **keys)


def test_clipping_follows_the_arguments(tmp_path: Path) -> None:
    silent = TrainingArguments(output_dir=str(tmp_path))
    assert trainer_of(silent, max_grad_norm=0.01).config.max_grad_norm == 0.01
    said = TrainingArguments(output_dir=str(tmp_path), max_grad_norm=0.3)
    assert trainer_of(said).config.max_grad_norm == 0.3


def test_the_seed_of_the_order_is_that_of_args() -> None:
    first, again, other = (
        [step["logps/chosen"] for step in trainer_of(steps_of(2, data_seed=seed)).fit(TOKENS)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_rows_of_tokens_past_sequence_length(caplog: pytest.LogCaptureFixture) -> None:
    longest = max(
        len(row[f"{side}_input_ids"]) for row in TOKENS for side in ("chosen", "rejected")
    )
    history = trainer_of(steps_of(1), sequence_length=longest - 1).fit(TOKENS)
    assert len(history) < len(TOKENS)
    assert f"too_long ({longest} tokens; sequence_length is {longest - 1})" in caplog.text
    cut = {"data_args": {"overlong": "truncate_prompt"}}
    with pytest.raises(DataError, match="rows of tokens are not cut"):
        trainer_of(sequence_length=longest - 1, actor_train=cut).evaluate(TOKENS)


def test_dpo_loss_needs_sums_without_lengths() -> None:
    sums = torch.tensor([-10.0, -20.0])
    with pytest.raises(ConfigError, match="dpo_loss: length_normalization needs lengths"):
        trainer_of(length_normalization=True).dpo_loss(sums, sums, sums, sums)


# --- a training after another, and evaluations ---


def test_a_second_fit_has_its_own_schedule() -> None:
    trainer = trainer_of(steps_of(2))
    first, second = ([step["lr"] for step in trainer.fit(TOKENS)] for _ in range(2))
    assert first == second
    assert first[0] == 1e-3


@pytest.mark.parametrize(
    "keys", [{"pref_loss": "aot"}, {"pref_loss": "cpo"}, {"rpo_alpha": 1.0}], ids=str
)
def test_an_evaluation_does_not_depend_on_its_batches(keys: dict[str, Any]) -> None:
    found = []
    for size in (1, 8):
        trainer = trainer_of(steps_of(size), **keys)
        for parameter in trainer.reference.policy.parameters() if trainer.reference else ():
            parameter.mul_(1.2)  # so that pairs differ
        found.append(trainer.evaluate(TOKENS))
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_an_adapter_of_float32_in_a_model_of_float16_has_a_loss_scale() -> None:
    trainer = trainer_of(dtype=torch.float16)
    for parameter in trainer.policy.policy.parameters():
        parameter.requires_grad_(parameter.ndim == 1)
        if parameter.ndim == 1:
            parameter.data = parameter.data.float()
    trainer._make_optimizer(1)
    assert trainer.policy.optimizer is not None
    assert trainer.policy.optimizer.loss_scale is not None


def test_an_optimizer_of_the_user_is_asked_for_weights_that_it_does_not_hold() -> None:
    """Norms under tensor parallel name the weights that all ranks hold whole."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    held = torch.optim.SGD(model[0].parameters(), lr=0.1)
    own = TorchOptimizer(model.named_parameters(), held, max_grad_norm=1.0, compute=torch.float32)
    assert own.named_gradients(["0.bias", "1.bias"]).keys() == {"0.bias"}
    assert own.gradient("1.bias") is None
    assert float(own.grad_norm()) == pytest.approx(6**0.5)  # of the weights that it holds


@pytest.mark.defect("U14")
@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"learning_rate": 1e-5}, "did you mean 'actor_train.training_args.learning_rate'"),
        ({"beta": -1}, "beta: -1 is not a number > 0"),
        ({"save_best": True}, "save_best: needs"),
        ({"actor_train": {"training_args": {"lr": 1}}}, "actor_train.training_args.lr: unknown"),
    ],
)
def test_a_wrong_config_is_a_config_error(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DPOConfig(**keys)
