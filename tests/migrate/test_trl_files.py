"""Files of TRL, the alignment handbook and SimPO: losses, data, versions, devices."""

from __future__ import annotations

from typing import Any

import pytest

from rather.tools.migrate.rules import (
    CHANGED,
    CONVERTED,
    IMPOSSIBLE,
    MISSING,
    NEEDLESS,
    OPEN,
    UNKNOWN,
    WRITTEN,
)
from tests.migrate.convert import (
    BASIC,
    DATA,
    DTYPE,
    FILE,
    LR,
    MODEL,
    RANK,
    STRATEGY,
    TRAINING,
    of,
    problems,
    row_of,
    values_of,
)

HELD_OUT = "validation.data_args"
SHORT = {"model_name_or_path": "m", "dataset_name": "d.jsonl"}
MIXTURE_OF_EXPERTS = {**SHORT, "model_name_or_path": "org/Mix-8x7B"}
EPOCHS, ROUTER = f"{TRAINING}.num_train_epochs", f"{MODEL}.moe_aux_loss_coef"
LLAMA = {"use_peft": True, "lora_dropout": 0.05, "model_name_or_path": "meta-llama/Llama-3.2-1B"}
DIVERGENCE = {"f_divergence_type": "alpha_divergence"}
HUB = {"dataset_name": "org/d"}


@pytest.mark.parametrize(
    ("trainer", "settings", "expected"),
    [
        ("dpo", {}, {"pref_loss": "sigmoid", "beta": 0.1, "pairs": 8, RANK: None}),
        ("orpo", {"beta": 0.3}, {"pref_loss": "orpo", "beta": 0.3}),
        ("cpo", {}, {"pref_loss": "cpo", "cpo_alpha": 1.0, "rpo_alpha": None}),
        ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.5},
         {"pref_loss": "simpo", "rpo_alpha": 0.5, "gamma": 0.5, "cpo_alpha": None}),
        ("kto", {"desirable_weight": 2}, {"task": "unpaired", "pref_loss": "kto", "desirable_weight": 2, LR: 1e-6}),
        ("kto", {"loss_type": "apo_zero_unpaired"},
         {"task": "unpaired", "pref_loss": "apo_zero_unpaired", "beta": 0.1}),
        ("sft", {"assistant_only_loss": True}, {"task": "sft", f"{DATA}.score": "assistant", LR: 2e-5}),
        ("reward", {"center_rewards_coefficient": 0.01},
         {"task": "reward", "pref_loss": "bradley_terry", "center_rewards_coefficient": 0.01, LR: 1e-4}),
        # defaults of TRL that are written out
        ("dpo", {"beta": 0.1}, {EPOCHS: 3.0, f"{DATA}.overlong": "truncate_response", DTYPE: "bf16",
                                "logging_steps": 10, "save_steps": 500, "max_ckpt_to_keep": 0}),
        # transformers trains for max_steps, whatever the epochs
        ("dpo", {"max_steps": 500, "num_train_epochs": 1}, {"max_steps": 500, EPOCHS: 500}),
        ("dpo", {"max_steps": -1}, {"max_steps": None, EPOCHS: 3.0}),
        ("dpo", {"warmup_steps": 0.1}, {f"{TRAINING}.warmup_ratio": 0.1}),
        ("dpo", {"lr_scheduler_type": "constant", "warmup_steps": 20}, {f"{TRAINING}.warmup_steps": 0}),
        ("dpo", {"max_length": None}, {"sequence_length": 32768}),
        ("dpo", {"bf16": False, "gradient_checkpointing": False},
         {DTYPE: "fp32", f"{MODEL}.disable_gradient_checkpointing": True}),
        ("dpo", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
         {"pref_loss": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
        ("dpo", {"label_smoothing": 0.1}, {"label_smoothing": None}),
        ("dpo", {"label_smoothing": 0.1, "loss_type": ["robust"]}, {"label_smoothing": 0.1}),
        ("dpo", {"lora_r": 8}, {RANK: None}),  # without use_peft
        ("dpo", LLAMA, {RANK: 16, f"{MODEL}.lora_target": ["q_proj", "v_proj"]}),
        ("dpo", MIXTURE_OF_EXPERTS, {ROUTER: 0.001}),
        ("dpo", {**MIXTURE_OF_EXPERTS, "router_aux_loss_coef": 0.02}, {ROUTER: 0.02}),
        ("dpo", {}, {ROUTER: None}),
        # devices
        ("dpo", {"num_processes": 4}, {"pairs": 32, STRATEGY: None}),
        ("dpo", {"accelerate_config": "zero2"}, {"pairs": 64, STRATEGY: "zero2"}),
        ("dpo", {"accelerate_config": "zero3", "num_processes": 2}, {"pairs": 16, STRATEGY: "zero3"}),
        # data
        ("dpo", {"dataset_name": None, "datasets": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]},
         {FILE: ["a.jsonl", "b.jsonl"]}),
        ("dpo", HUB, {FILE: "hf://datasets/org/d", f"{HELD_OUT}.file_name": None}),
        ("dpo", {**HUB, "dataset_config": "c", "eval_strategy": "epoch"},
         {FILE: "hf://datasets/org/d:c/train", f"{HELD_OUT}.file_name": "hf://datasets/org/d:c/test"}),
        ("dpo", {"dataset_name": "./here"}, {FILE: "here.jsonl"}),
    ],
)  # fmt: skip
def test_what_is_trained(trainer: str, settings: Any, expected: dict[str, Any]) -> None:
    result = of({**SHORT, **settings}, trainer=trainer)
    assert problems(result) == {}
    assert values_of(result, expected) == expected


@pytest.mark.parametrize(
    ("trainer", "settings", "expected"),
    [
        ("sft", {}, {"(scored turns)": MISSING}),  # depends on the rows' columns
        ("sft", {"assistant_only_loss": True, "packing": True}, {"packing": IMPOSSIBLE}),
        ("sft", {"assistant_only_loss": True, "loss_type": "dft"}, {"loss_type": IMPOSSIBLE}),
        ("kto", {"loss_type": "sigmoid"}, {"loss_type": IMPOSSIBLE, "(loss)": MISSING}),
        ("orpo", {"loss_type": "ipo"}, {"loss_type": IMPOSSIBLE}),
        (None, {}, {"(loss)": MISSING, "(learning rate)": MISSING}),
        ("dpo", {"loss_type": "nca_pair", "f_divergence_type": "js_divergence"}, {"f_divergence_type": IMPOSSIBLE}),
        ("dpo", {"dtype": "float16"}, {"dtype": IMPOSSIBLE}),
        ("dpo", {"model_init_kwargs": {"revision": "x"}}, {"model_init_kwargs": IMPOSSIBLE}),
        ("dpo", {"accelerator_config": {"split_batches": True}}, {"accelerator_config": IMPOSSIBLE}),
        ("dpo", {"accelerate_config": "mine"}, {"accelerate_config": IMPOSSIBLE}),
        ("dpo", {"dataset_name": None, "datasets": [{"path": "a.jsonl", "fraction": 0.5}]},
         {"datasets": IMPOSSIBLE, "(data)": MISSING}),
        ("dpo", {**HUB, "dataset_train_split": "train[:9]"}, {"dataset_name": IMPOSSIBLE, "(data)": MISSING}),
        ("orpo", {"model_name_or_path": "org/Mix-30B-A3B"}, {"(router loss)": MISSING}),
        ("dpo", {"use_peft": True, "model_name_or_path": "microsoft/phi-2"}, {"(layers of the adapter)": MISSING}),
    ],
)  # fmt: skip
def test_what_is_not_certain_is_reported(trainer: str | None, settings: Any, expected: Any) -> None:
    assert problems(of({**SHORT, **settings}, trainer=trainer)) == expected


def test_statuses() -> None:
    values = {
        "beta": 0.2,
        "max_length": 512,
        "padding_free": True,
        "optim": "adafactor",
        "betta": 1,
    }
    result = of({**values, "label_smoothing": 0.1}, trainer="dpo")
    expected = {"beta": CONVERTED, "max_length": CONVERTED, "label_smoothing": CHANGED, "optim": IMPOSSIBLE,
                "betta": UNKNOWN, "padding_free": NEEDLESS, "num_train_epochs": WRITTEN, "(model)": MISSING}  # fmt: skip
    assert {key: row_of(result, key).status for key in expected} == expected
    assert "# not known: betta = 1" in result.yaml()
    assert LR not in result.values  # Rather's default is 1e-6, too


def test_a_file_from_before_0_29_has_its_defaults() -> None:
    old = of({"base_model_attribute_name": None, **DIVERGENCE})
    expected = {
        f"{DATA}.overlong": "truncate_prompt",
        f"{DATA}.max_prompt_length": 512,
        "f_alpha_divergence_coef": 0.0,
    }
    assert values_of(old, expected) == expected
    smoothed = of({"label_smoothing": 0.1, "max_prompt_length": 128}, trainer="dpo")  # cDPO
    assert smoothed.config.label_smoothing == 0.1


# ---- keys that several trainers have


@pytest.mark.defect("U1")
@pytest.mark.parametrize(
    "key",
    ["precompute_ref_log_probs", "sync_ref_model", "truncation_mode", "max_completion_length",
     "generate_during_eval", "max_prompt_length", "is_encoder_decoder"],
)  # fmt: skip
def test_a_key_of_several_trainers_determines_none(key: str) -> None:
    assert problems(of({**BASIC, key: None})).get("(loss)") == MISSING


@pytest.mark.defect("U1")
@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo"])
def test_a_loss_of_several_trainers_determines_none(loss: str) -> None:
    assert problems(of({**BASIC, "loss_type": loss})).get("(loss)") == MISSING


# ---- the alignment handbook and SimPO

HANDBOOK = {
    "model_name_or_path": "org/model",
    "dataset_mixture": {
        "datasets": [
            {"id": "org/pairs", "config": "default", "split": "train_prefs", "weight": 1.0,
             "columns": ["chosen", "rejected"]},
            {"id": "org/more", "config": "small", "columns": ["chosen", "rejected"]},
        ],
        "test_split_size": 200,
        "seed": 0,
    },
    "bf16": True, "learning_rate": 5e-7, "max_length": 1024, "max_prompt_length": 512,
}  # fmt: skip
FILES = ["hf://datasets/org/pairs:train_prefs", "hf://datasets/org/more:small/train"]


@pytest.mark.defect("U26")
@pytest.mark.parametrize("trainer", ["dpo", "orpo"])
def test_a_mixture_of_the_handbook(trainer: str) -> None:
    result = of(HANDBOOK, trainer=trainer)
    assert problems(result) == {}
    expected = {FILE: FILES, f"{HELD_OUT}.split": 200}
    assert values_of(result, expected) == expected
    assert row_of(result, "dataset_mixture").status == CHANGED


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"id": "org/a", "weight": 0.5}, "weight 0.5 is a random part of the rows"),
        ({"id": "org/a", "columns": ["chosen", "chat_template_kwargs"]}, "chat_template_kwargs"),
        ({"id": "org/a", "shards": 3}, "shards: not a setting"),
    ],
)
def test_what_a_mixture_cannot_be(entry: dict[str, Any], said: str) -> None:
    result = of({**HANDBOOK, "dataset_mixture": {"datasets": [entry]}}, trainer="dpo")
    row = row_of(result, "dataset_mixture")
    assert (row.status, said in row.note) == (IMPOSSIBLE, True)


def test_messages_of_a_mixture_are_scored_whole() -> None:
    chats = {"datasets": [{"id": "org/chats", "columns": ["messages"]}]}
    result = of({**BASIC, "dataset_mixture": chats, "dataset_name": None}, trainer="sft")
    assert problems(result) == {}
    assert result.config.actor_train.data_args.score == "all"


MIXER = {
    "model_name_or_path": "org/model", "dataset_mixer": {"org/pairs": 1.0},
    "dataset_splits": ["train_prefs", "test_prefs"], "auto_insert_empty_system_msg": False,
    "bf16": True, "learning_rate": 3e-7, "max_length": 1024, "max_prompt_length": 512,
    "evaluation_strategy": "steps", "eval_steps": 400,
}  # fmt: skip


@pytest.mark.defect("U26")
def test_the_older_mixer_of_the_handbook() -> None:
    result = of(MIXER, trainer="dpo")
    assert problems(result) == {}
    held_out = "hf://datasets/org/pairs:test_prefs"
    expected = {FILE: FILES[0], f"{HELD_OUT}.file_name": held_out, "eval_steps": 400}
    assert values_of(result, expected) == expected
    half = of({**MIXER, "dataset_mixer": {"org/pairs": 0.5}}, trainer="dpo")
    assert problems(half)["dataset_mixer"] == IMPOSSIBLE


@pytest.mark.defect("U1")
def test_a_simpo_file_is_simpo() -> None:
    result = of({**MIXER, "beta": 2.0, "gamma_beta_ratio": 0.8})
    assert problems(result) == {}
    expected = {"pref_loss": "simpo", "beta": 2.0, "gamma_beta_ratio": 0.8}
    assert values_of(result, expected) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, {"auto_insert_empty_system_msg": MISSING}),
        ("{% if system %}{% endif %}", {"auto_insert_empty_system_msg": MISSING}),
        ("{{ messages }}", {}),
    ],
)
def test_an_inserted_system_message_is_reported(template: str | None, expected: Any) -> None:
    """The scripts that read dataset_mixer insert an empty one if the template has such messages."""
    values = {key: value for key, value in MIXER.items() if "system" not in key}
    assert problems(of({**values, "chat_template": template}, trainer="dpo")) == expected


def test_a_template_in_the_file_is_to_be_saved() -> None:
    result = of({**BASIC, "chat_template": "{{ messages }}"}, trainer="dpo")
    status = row_of(result, "chat_template").status
    assert (status, result.config.global_template) == (OPEN, "chat_template.jinja")
