"""Keys that other trainers have are answered with Rather's own key."""

from __future__ import annotations

import re

import pytest

from rather.config.inherit import TASK_OF_LOSS
from rather.config.keys import OTHER_NAMES, table
from rather.config.load import config_from_dict
from rather.config.run_config import DPOConfig
from rather.config.show import explain
from rather.errors import ConfigError
from rather.losses.losses import LOSSES
from tests.cells import read_table

NAMES = """
    batch_size | did you mean 'train_batch_size'?
    bf16 | set actor_train.model_args.dtype: bf16
    gpus | set actor_train.device_mapping: list(range(0,N)) for N GPUs
    wandb | set track_with: wandb
    load_in_4bit | set actor_train.model_args.quantization: 4bit
    optim | the optimizer is always AdamW
    warmup | did you mean 'actor_train.training_args.warmup_steps'?
    xyzzy | `rather config reference` lists all keys
"""


@pytest.mark.defect("U11")
@pytest.mark.parametrize(("name", "text"), read_table(NAMES))
def test_the_key_that_rather_has_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        config_from_dict({name: 1})


def test_every_other_name_leads_to_a_key_and_is_not_one() -> None:
    for name, meant in OTHER_NAMES.items():
        key, _, value = meant.partition(": ")
        assert key in table(), name
        assert name not in table()
        choices = table()[key].choices
        assert not value or not choices or value.split()[0] in choices, name


@pytest.mark.defect("U11")
@pytest.mark.parametrize("name", ["learning_rate", "lr"])
def test_a_key_is_explained_without_its_path(name: str) -> None:
    assert explain(None, name).startswith("actor_train.training_args.learning_rate\n")
    assert "reference.device_mapping" in explain(None, "device_mapping")
    with pytest.raises(ConfigError, match="did you mean"):
        explain(None, "lerning_rate")


@pytest.mark.defect("U15")
def test_the_reason_against_dropout_is_given() -> None:
    values = {"actor_train": {"model_args": {"lora_rank": 4, "lora_dropout": 0.05}}}
    with pytest.raises(ConfigError, match=r"lora_dropout: 0\.05 is not 0: both answers of a pair"):
        config_from_dict(values)


@pytest.mark.defect("U25")
@pytest.mark.parametrize(("loss", "task"), [("kto", "unpaired"), ("bradley_terry", "reward")])
def test_a_loss_of_one_task_sets_it(loss: str, task: str) -> None:
    assert DPOConfig(pref_loss=loss).task == task


def test_the_tasks_are_those_that_the_losses_have() -> None:
    single = {name: rule.task for name, rule in LOSSES.items() if rule.task != "preference"}
    assert {name: task for name, task in single.items() if name != "sft"} == TASK_OF_LOSS
