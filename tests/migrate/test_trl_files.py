"""Files of TRL, the alignment handbook and SimPO: losses, data, versions, devices."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

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
from tests.cells import read_table
from tests.migrate.convert import (
    BASIC,
    DATA,
    FILE,
    LR,
    of,
    problems,
    row_of,
    values_of,
)

HELD_OUT = "validation.data_args"
SHORT = {"model_name_or_path": "m", "dataset_name": "d.jsonl"}
DIVERGENCE = {"f_divergence_type": "alpha_divergence"}


@pytest.mark.parametrize(
    ("trainer", "settings", "expected"),
    read_table(
        """
        dpo | {} | {pref_loss: sigmoid, beta: 0.1, pairs: 8, model.lora_rank: null, sequence_length: 1024}
        # only dpo.py has it
        null | {loss_type: apo_zero} | {pref_loss: apo_zero}
        null | {loss_type: simpo} | {pref_loss: simpo}
        orpo | {beta: 0.3} | {pref_loss: orpo, beta: 0.3}
        cpo | {} | {pref_loss: cpo, cpo_alpha: 1.0, rpo_alpha: null}
        cpo | {loss_type: simpo, cpo_alpha: 0.5} | {pref_loss: simpo, rpo_alpha: 0.5, gamma: 0.5, cpo_alpha: null}
        kto | {desirable_weight: 2} | {task: unpaired, pref_loss: kto, desirable_weight: 2, training.learning_rate: 1.0e-6}
        kto | {loss_type: apo_zero_unpaired} | {task: unpaired, pref_loss: apo_zero_unpaired, beta: 0.1}
        sft | {assistant_only_loss: true} | {task: sft, data.score: assistant, training.learning_rate: 2.0e-5}
        reward | {center_rewards_coefficient: 0.01} | {task: reward, pref_loss: bradley_terry, center_rewards_coefficient: 0.01, training.learning_rate: 1.0e-4}
        # defaults of TRL that are written out
        dpo | {} | {training.num_train_epochs: 3.0, data.overlong: truncate_response, model.dtype: bf16}
        dpo | {} | {logging_steps: 10, save_steps: 500, max_ckpt_to_keep: 0, model.moe_aux_loss_coef: null}
        # transformers trains for max_steps, whatever the epochs
        dpo | {max_steps: 500, num_train_epochs: 1} | {max_steps: 500, training.num_train_epochs: 500}
        dpo | {max_steps: -1} | {max_steps: null, training.num_train_epochs: 3.0}
        dpo | {warmup_steps: 0.1} | {training.warmup_ratio: 0.1}
        dpo | {lr_scheduler_type: constant, warmup_steps: 20} | {training.warmup_steps: 0}
        dpo | {max_length: null} | {sequence_length: 32768}
        dpo | {bf16: false, gradient_checkpointing: false} | {model.dtype: fp32, model.disable_gradient_checkpointing: true}
        dpo | {loss_type: [sigmoid, bco_pair, sft], loss_weights: [0.8, 0.2, 1.0]} | {pref_loss: [sigmoid, bco_pair, sft], loss_weights: [0.8, 0.2, 1.0]}
        dpo | {label_smoothing: 0.1} | {label_smoothing: null}
        dpo | {label_smoothing: 0.1, loss_type: [robust]} | {label_smoothing: 0.1}
        # without use_peft
        dpo | {lora_r: 8} | {model.lora_rank: null}
        dpo | {use_peft: true, lora_dropout: 0.05, model_name_or_path: meta-llama/Llama-3.2-1B} | {model.lora_rank: 16, model.lora_target: [q_proj, v_proj]}
        dpo | {model_name_or_path: org/Mix-8x7B} | {model.moe_aux_loss_coef: 0.001}
        dpo | {model_name_or_path: org/Mix-8x7B, router_aux_loss_coef: 0.02} | {model.moe_aux_loss_coef: 0.02}
        # devices
        dpo | {num_processes: 4} | {pairs: 32, actor_train.strategy_args.strategy_name: null}
        dpo | {accelerate_config: zero2} | {pairs: 64, actor_train.strategy_args.strategy_name: zero2}
        dpo | {accelerate_config: zero3, num_processes: 2} | {pairs: 16, actor_train.strategy_args.strategy_name: zero3}
        # data
        dpo | {dataset_name: null, datasets: [{path: a.jsonl}, {path: b.jsonl}]} | {data.file_name: [a.jsonl, b.jsonl]}
        dpo | {dataset_name: org/d} | {data.file_name: "hf://datasets/org/d", held_out.file_name: null}
        dpo | {dataset_name: org/d, dataset_config: c, eval_strategy: epoch} | {data.file_name: "hf://datasets/org/d:c/train", held_out.file_name: "hf://datasets/org/d:c/test"}
        dpo | {dataset_name: ./here} | {data.file_name: here.jsonl}
    """,
        yaml.safe_load,
    ),
)
def test_what_is_trained(trainer: str | None, settings: Any, expected: dict[str, Any]) -> None:
    result = of({**SHORT, **settings}, trainer=trainer)
    assert problems(result) == {}
    assert values_of(result, expected) == expected


@pytest.mark.parametrize(
    ("trainer", "settings", "expected"),
    read_table(
        """
        # depends on the rows' columns
        sft | {} | {(scored turns): not determined}
        sft | {assistant_only_loss: true, packing: true} | {packing: not possible}
        sft | {assistant_only_loss: true, loss_type: dft} | {loss_type: not possible}
        kto | {loss_type: sigmoid} | {loss_type: not possible, (loss): not determined}
        orpo | {loss_type: ipo} | {loss_type: not possible}
        null | {} | {(loss): not determined, (learning rate): not determined}
        null | {rpo_alpha: 1.0, cpo_alpha: 1.0} | {(loss): not determined, (learning rate): not determined, cpo_alpha: not possible}
        dpo | {loss_type: nca_pair, f_divergence_type: js_divergence} | {f_divergence_type: not possible}
        dpo | {dtype: float16} | {dtype: not possible}
        dpo | {model_init_kwargs: {revision: x}} | {model_init_kwargs.revision: not possible}
        dpo | {accelerator_config: {split_batches: true}} | {accelerator_config.split_batches: not possible}
        dpo | {accelerate_config: mine} | {accelerate_config: not possible}
        dpo | {dataset_name: null, datasets: [{path: a.jsonl, fraction: 0.5}]} | {datasets: not possible, (data): not determined}
        dpo | {dataset_name: org/d, dataset_train_split: "train[:9]"} | {dataset_name: not possible, (data): not determined}
        orpo | {model_name_or_path: org/Mix-30B-A3B} | {(router loss): not determined}
        dpo | {use_peft: true, model_name_or_path: microsoft/phi-2} | {(layers): not determined}
    """,
        yaml.safe_load,
    ),
)
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
    expected = {f"{DATA}.overlong": "truncate_prompt", "f_alpha_divergence_coef": 0.0}
    assert values_of(old, expected) == expected
    smoothed = of({"label_smoothing": 0.1, "max_prompt_length": 128}, trainer="dpo")  # cDPO
    assert smoothed.config.label_smoothing == 0.1


# ---- keys that several trainers have


@pytest.mark.defect("U1")
@pytest.mark.parametrize(
    ("key", "value"),
    [(key, None) for key in ("precompute_ref_log_probs", "sync_ref_model", "truncation_mode",
     "max_completion_length", "generate_during_eval", "max_prompt_length", "is_encoder_decoder")]
    + [("loss_type", loss) for loss in ("sigmoid", "hinge", "ipo")],
)  # fmt: skip
def test_a_key_or_loss_of_several_trainers_determines_none(key: str, value: Any) -> None:
    assert problems(of({**BASIC, key: value})).get("(loss)") == MISSING


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
        ({"id": "org/a", "shards": 3}, "shards: save the rows"),
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
