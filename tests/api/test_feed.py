"""`fit`, `evaluate` and `training_step` with pairs that are few, bad, used up or oddly batched."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from rather import DPOConfig, DPOTrainer
from rather.api.collate import DataCollatorForPreferenceDataset, StatefulDistributedSampler
from rather.config.schema import TrainingArgs
from rather.errors import ConfigError, DataError
from tests.api import conftest, test_coati
from tests.api.test_trainer import trainer_of

TEXT = [{"prompt": f"w{i}", "chosen": " w1 w2", "rejected": " w3"} for i in range(5, 13)]
BAD = [
    {"prompt": "w1", "chosen": "", "rejected": "w2"},
    {"prompt": "w1", "chosen": "w2", "rejected": "w2"},
]
TOKENS = conftest.TOKENS[:8]


@pytest.fixture
def trainer(folder: Path, tokenizer: Any) -> Any:
    """Makes one; `args` and keys of the config may be changed."""

    def made(args: dict[str, Any] | None = None, **keys: Any) -> DPOTrainer:
        given = {"lr_scheduler_type": "constant", "per_device_train_batch_size": 1, **(args or {})}
        settings = {"train_config": DPOConfig(**keys), "args": TrainingArgs(**given)}
        model = AutoModelForCausalLM.from_pretrained(folder)
        return trainer_of(model, tokenizer=tokenizer, **settings)

    return made


def test_dropped_rows_are_logged(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rather.api.feed")
    own = trainer({"num_train_epochs": 2})
    assert len(own.fit(DataLoader([*TEXT[:3], *BAD], batch_size=5, collate_fn=list))) == 6
    own.training_step(own.policy.policy, iter([[*TEXT[:3], *BAD]]), 64)
    told = [message for message in caplog.messages if message.startswith("rows dropped: ")]
    assert len(told) == 3, "after each epoch, and after a step"
    assert all(
        "1 empty_response (chosen: nothing but white space), 1 identical_text" in each
        for each in told
    )
    caplog.clear()
    own.fit([*TEXT, {"prompt": "w1", "chosen": "w2 \ud800", "rejected": "w3"}])
    assert "1 bad_unicode (half of a surrogate pair" in caplog.text


LONG = {"sequence_length": 2, "actor_train": {"data_args": {"overlong": "error"}}}
TWICE = {"num_train_epochs": 2}


@pytest.mark.parametrize(
    ("args", "keys", "source", "named"),
    [
        # the default collate makes texts to lists
        ({}, {}, lambda: DataLoader(TEXT, batch_size=2), r"0 pairs .* epoch 1; .* 4 bad_type \("),
        ({}, {"sequence_length": 2}, lambda: iter(TEXT), r"0 pairs .* 8 prompt_too_long \("),
        ({}, {}, list, "0 pairs are left; rows dropped: none"),
        ({}, {"on_bad": "error"}, lambda: [*TEXT, *BAD], "empty_response .* on_bad is error"),
        ({}, LONG, lambda: TEXT, "too_long .* overlong is error"),
        ({}, LONG, lambda: TOKENS, "too_long .* overlong is error"),
        ({"num_train_epochs": 3}, {}, lambda: iter(TOKENS), "not in 3 epochs"),
        (TWICE, {"max_steps": 9}, lambda: iter(TOKENS), "0 pairs are left in epoch 2"),
    ],
)
def test_pairs_that_cannot_be_trained_on_are_refused(
    trainer: Any, args: Any, keys: Any, source: Any, named: str
) -> None:
    with pytest.raises(DataError, match=named):
        trainer(args, **keys).fit(source())


def test_the_number_of_steps_must_be_known(trainer: Any) -> None:
    loader = DataLoader(TOKENS, batch_size=4, collate_fn=list)  # of lists: its items are no pairs
    assert len(trainer().fit(loader)) == 8
    with pytest.raises(ConfigError, match="'linear' needs the number of steps"):
        trainer({"lr_scheduler_type": "linear"}).fit(loader)
    with pytest.raises(ConfigError, match=r"num_train_epochs: 0\.5 .* set max_steps"):
        trainer({"num_train_epochs": 0.5}).fit(iter(TOKENS))
    assert len(trainer(TWICE, max_steps=2).fit(iter(TOKENS))) == 2


def test_held_out_pairs_are_read_in_each_epoch(trainer: Any) -> None:
    with pytest.raises(DataError, match="an iterator gives its pairs once, not in 2 epochs"):
        trainer(TWICE).fit(TOKENS, iter(TOKENS[:4]))
    with pytest.raises(DataError, match="0 pairs are left; rows dropped: none"):
        trainer().evaluate([])


def test_an_iterator_lasts_one_epoch_in_coati(folder: Path, model: Any) -> None:
    once: Iterator[Any] = iter(list(test_coati.loader(folder, 4, 1)))
    with pytest.raises(DataError, match="0 pairs are left in epoch 2"):
        test_coati.trainer_of(folder, model).fit(once)


def test_each_epoch_has_the_order_of_its_sampler(trainer: Any, tokenizer: Any) -> None:
    seen: list[list[int]] = []

    class Watched(DataCollatorForPreferenceDataset):
        def __call__(self, instances: Any) -> Any:
            seen.append(instances[0]["chosen_input_ids"])
            return super().__call__(instances)

    collate = Watched(tokenizer)
    loader = DataLoader(TOKENS, sampler=StatefulDistributedSampler(TOKENS), collate_fn=collate)
    assert len(trainer({"num_train_epochs": 2, "lr_scheduler_type": "linear"}).fit(loader)) == 16
    assert seen[:8] != seen[8:]
    assert sorted(seen[:8]) == sorted(seen[8:])


def test_a_fraction_of_epochs_is_not_rounded_up_twice(trainer: Any) -> None:
    """25 * 0.28 is 7.000000000000001."""
    assert len(trainer({"num_train_epochs": 0.28}).fit([*TOKENS, *TOKENS, *TOKENS, TOKENS[0]])) == 7
