"""Every argument of TRL's configs and trainers means what it means there, or is refused."""

from __future__ import annotations

import importlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from transformers import HfArgumentParser, TrainerCallback

import rather.trl
from rather.errors import ConfigError
from rather.trl.configs import NEEDS, REFUSED, default_of
from rather.trl.trainers import dpo_loss
from tests.golden.trl_run import make_rows
from tests.trl.cases import PATHS, TRAINERS, Case, config_of, make_trainer, rows_of
from tests.trl.make_table import OURS, PAGE, describe_argument, with_table

ARGUMENTS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("expected_1_16.json").read_text(encoding="utf-8")
)["arguments"]
OF_TRANSFORMERS = {argument.name for argument in fields(transformers.TrainingArguments)}
CELLS = [(trainer, name) for trainer in TRAINERS for name in ARGUMENTS[trainer]]
# Values for arguments whose default says nothing about their type.
VALUES: dict[str, Any] = {
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2},
    "include_for_metrics": ["loss"],
    "label_names": ["labels"],
    "liger_kernel_config": {"rope": True},
    "include_num_input_tokens_seen": "all",
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
}
# Arguments of DPO's loss: another value, and what it needs to have an effect.
OF_THE_LOSS: dict[str, tuple[Any, dict[str, Any]]] = {
    "loss_type": (["hinge"], {}),
    "loss_weights": ([1.0, 0.5], {"loss_type": ["sigmoid", "sft"]}),
    "beta": (0.3, {}),
    "label_smoothing": (0.2, {"loss_type": ["robust"]}),
    "f_divergence_type": ("js_divergence", {}),
    "f_alpha_divergence_coef": (0.7, {"f_divergence_type": "alpha_divergence"}),
    "discopop_tau": (0.1, {"loss_type": ["discopop"]}),
    "ld_alpha": (0.5, {}),
    "use_weighting": (True, {}),
}


def class_of(trainer: str) -> Any:
    return getattr(rather.trl, f"{trainer}Config")


def another(name: str, default: Any) -> Any:
    """Return a value that is not the default."""
    if name in VALUES:
        return VALUES[name]
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else 3


@pytest.mark.parametrize("trainer", TRAINERS)
def test_configs_have_trls_arguments_and_defaults(trainer: str) -> None:
    ours = {argument.name: default_of(argument) for argument in fields(class_of(trainer))}
    assert set(ours) == set(ARGUMENTS[trainer])
    for name, default in ARGUMENTS[trainer].items():
        assert ours[name] == default or str(ours[name]) == default, name


@pytest.mark.parametrize(("trainer", "name"), [c for c in CELLS if c[1] in REFUSED])
def test_a_refused_argument_is_named(trainer: str, name: str, tmp_path: Path) -> None:
    value = another(name, ARGUMENTS[trainer][name])
    with pytest.raises(ConfigError, match=f"{name}: "):
        class_of(trainer)(output_dir=str(tmp_path), **{name: value})


def test_every_argument_is_in_the_table() -> None:
    for trainer, name in CELLS:
        status, text = describe_argument(name)
        assert (name in OURS) + (name in REFUSED) + (name in OF_TRANSFORMERS) >= 1, name
        assert status in ("exact", "refused"), (trainer, name)
        assert text
    known = {name for _, name in CELLS}
    assert set(OURS) <= known
    assert set(REFUSED) <= known


@pytest.mark.parametrize("name", OF_THE_LOSS)
def test_an_argument_of_the_loss_changes_the_objective(name: str, tmp_path: Path) -> None:
    value, others = OF_THE_LOSS[name]
    before = dpo_loss(config_of("DPO", tmp_path, **others)).description()
    after = dpo_loss(config_of("DPO", tmp_path, **{**others, name: value})).description()
    assert after != before


@pytest.mark.parametrize(("trainer", "name"), [c for c in CELLS if c[1] in NEEDS])
def test_an_argument_without_effect_is_refused(trainer: str, name: str, tmp_path: Path) -> None:
    value = another(name, ARGUMENTS[trainer][name])
    with pytest.raises(ConfigError, match=f"{name}: is read only with {NEEDS[name][0]}"):
        class_of(trainer)(output_dir=str(tmp_path), **{name: value})


def test_label_smoothing_that_trl_ignores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"label_smoothing: TRL 1\.16 ignores it for sigmoid"):
        dpo_loss(config_of("DPO", tmp_path, label_smoothing=0.1))


def test_real_trl_has_the_stored_arguments() -> None:
    trl = pytest.importorskip("trl", reason="the `bench` extra is not installed")
    assert trl.__version__.startswith("1.16.")
    for trainer in TRAINERS:
        path = ".".join(["trl", *filter(None, [PATHS.get(trainer)])])
        theirs = getattr(importlib.import_module(path), f"{trainer}Config")
        assert [argument.name for argument in fields(theirs)] == list(ARGUMENTS[trainer])


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert "| `deepspeed` | refused |" in page
    assert with_table(page) == page, "python -m tests.trl.make_table"


def test_paths_of_trl() -> None:
    from rather.trl.experimental import bco, cpo, kto, orpo

    assert kto.KTOTrainer is rather.trl.KTOTrainer
    assert orpo.ORPOConfig is rather.trl.ORPOConfig
    assert cpo.CPOTrainer is rather.trl.CPOTrainer
    with pytest.raises(ConfigError, match="pref_loss: bco"):
        _ = bco.BCOConfig


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_parser_of_trls_scripts_takes_it(trainer: str, tmp_path: Path) -> None:
    """TrlParser is an HfArgumentParser."""
    parser = HfArgumentParser(class_of(trainer))
    line = [
        f"--output_dir={tmp_path}", "--use_cpu", "--bf16=False", "--learning_rate=1e-4",
        "--max_length=77", '--model_init_kwargs={"revision": "main"}',
    ]  # fmt: skip
    (args,) = parser.parse_args_into_dataclasses(line)
    assert (args.learning_rate, args.max_length) == (1e-4, 77)
    assert args.model_init_kwargs == {"revision": "main"}


# --- what a trainer refuses ---


class OwnLoss(rather.trl.DPOTrainer):
    def compute_loss(self, *args: Any, **named: Any) -> Any:
        return torch.zeros(())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"compute_metrics": len}, "compute_metrics: logits are never kept"),
        ({"data_collator": len}, "data_collator: rows are packed"),
        ({"tokenizer": 1}, "tokenizer: not an argument in TRL 1.16"),
    ],
)
def test_arguments_of_a_trainer(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rather.trl.DPOTrainer("no model is loaded", **given)


def test_an_overridden_loss_is_refused_with_the_way_to_write_one() -> None:
    with pytest.raises(
        ConfigError, match=r"OwnLoss.compute_loss: .*@rather.losses.losses.loss\(\)"
    ):
        OwnLoss("no model is loaded")


def test_rows_that_trl_reads_in_two_ways_are_refused(model: str, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    rows = Dataset.from_list([{"prompt": "w1", "completion": " w2", "messages": turns}])
    args = config_of("SFT", tmp_path)
    with pytest.raises(ConfigError, match="rows have messages and a prompt"):
        rather.trl.SFTTrainer(model, args, train_dataset=rows)


def test_what_is_set_after_the_config_was_made_is_refused_too(tmp_path: Path) -> None:
    args = config_of("SFT", tmp_path)
    args.packing = True
    with pytest.raises(ConfigError, match="packing: a step counts answers"):
        rather.trl.SFTTrainer("no model is loaded", args)


def sft_labels(model: str, folder: Path, row: dict[str, Any], **settings: Any) -> list[int]:
    """Return the labels that SFT's first row gets."""
    args = config_of("SFT", folder, **settings)
    trainer = rather.trl.SFTTrainer(model, args, train_dataset=Dataset.from_list([row, row]))
    return trainer.train_dataset[0]["labels"]


TOKENS = [1, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("masks", "settings", "labels"),
    [
        ({"completion_mask": [0, 0, 1, 1, 1]}, {"completion_only_loss": True}, [8, 9, 10]),
        ({"completion_mask": [0, 0, 1, 1, 1]}, {}, TOKENS),
        ({"assistant_masks": [0, 0, 0, 1, 1]}, {}, [9, 10]),
        ({"labels": [-100, -100, -100, -100, 10]}, {}, [10]),
    ],
)
def test_tokens_keep_their_masks(
    masks: dict[str, list[int]],
    settings: dict[str, Any],
    labels: list[int],
    model: str,
    tmp_path: Path,
) -> None:
    """Labels are those that TRL 1.16 builds from the same columns."""
    found = sft_labels(model, tmp_path, {"input_ids": TOKENS, **masks}, **settings)
    assert found == [-100] * (5 - len(labels)) + labels


def test_conversations_with_speakers_become_messages(model: str, tmp_path: Path) -> None:
    speakers = [{"from": "user", "value": "w1"}, {"from": "assistant", "value": "w2"}]
    turns = [{"role": turn["from"], "content": turn["value"]} for turn in speakers]
    assert sft_labels(model, tmp_path, {"conversations": speakers}) == sft_labels(
        model, tmp_path, {"messages": turns}
    )


@pytest.mark.parametrize("row", [{"prompt": "w1", "completion": " w2"}, {"input_ids": TOKENS}])
def test_a_formatting_function_that_trl_does_not_use_is_refused(
    row: dict[str, Any], model: str, tmp_path: Path
) -> None:
    args = config_of("SFT", tmp_path)
    rows = Dataset.from_list([row])
    with pytest.raises(ConfigError, match="formatting_func: makes plain text"):
        rather.trl.SFTTrainer(model, args, train_dataset=rows, formatting_func=str)


ON_HEAD = LoraConfig(target_modules=["q_proj", "lm_head"])
VIRTUAL = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
DROPOUT = {"lora_dropout": 0.1}


@pytest.mark.parametrize(
    ("case", "more", "text"),
    [
        (Case("DPO"), {"peft_config": ON_HEAD}, "peft_config: .*an adapter on the head"),
        (Case("DPO"), {"peft_config": VIRTUAL}, "peft_config: .*virtual tokens"),
        (Case("DPO", settings={"pad_token": "no such"}), {}, "pad_token: 'no such' is not in"),
        (Case("SFT", columns="completion", lora=DROPOUT), {}, "lora_dropout: random dropout is"),
        (Case("Reward", lora=DROPOUT), {}, "lora_dropout: random dropout is"),
    ],
)
def test_a_case_that_cannot_be_trained_is_refused(
    case: Case, more: dict[str, Any], text: str, model: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        make_trainer("rather.trl", case, model, tmp_path, **more)


def test_a_frozen_model_is_refused(model: str, tmp_path: Path) -> None:
    """TRL 1.16 runs all steps and changes nothing."""
    frozen = transformers.AutoModelForCausalLM.from_pretrained(model).requires_grad_(False)
    args = config_of("DPO", tmp_path)
    with pytest.raises(ConfigError, match="model: every weight is frozen"):
        rather.trl.DPOTrainer(frozen, args=args, train_dataset=rows_of(Case("DPO")))


def test_older_names_of_columns_of_tokens(model: str, tmp_path: Path) -> None:
    args = config_of("Reward", tmp_path)
    row = {"chosen_input_ids": [1, 7, 8], "rejected_input_ids": [1, 9]}
    trainer = rather.trl.RewardTrainer(model, args, train_dataset=Dataset.from_list([row, row]))
    assert trainer.train_dataset[0]["chosen_ids"] == [1, 7, 8]


def test_a_reward_model_has_one_label(model: str, tmp_path: Path) -> None:
    two = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
    args = config_of("Reward", tmp_path)
    with pytest.raises(ConfigError, match="num_labels=2 is not a reward model"):
        rather.trl.RewardTrainer(two, args, train_dataset=rows_of(Case("Reward")))


@pytest.mark.parametrize("changed", [False, True])
def test_the_reference_is_what_the_name_of_the_model_loads(
    changed: bool, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL 1.16 loads it again: changes of a model in memory are not in its reference."""
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = policy.lm_head.weight.detach().clone()
    if changed:
        with torch.no_grad():
            policy.lm_head.weight.mul_(1.5)
    args = config_of("DPO", tmp_path)
    trainer = rather.trl.DPOTrainer(policy, args=args, train_dataset=rows_of(Case("DPO")))
    assert torch.equal(trainer.ref_model.lm_head.weight, before)
    assert ("the model was changed after it was loaded" in caplog.text) == changed


def test_unknown_arguments_of_a_config() -> None:
    with pytest.raises(ConfigError, match=r"max_prompt_length: not an argument in TRL 1\.16"):
        rather.trl.DPOConfig(output_dir="x", max_prompt_length=3)


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "deepspeed_config"),
        ("ACCELERATE_USE_FSDP", "true", "fsdp_config"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "dynamo_config"),
    ],
)
def test_files_of_accelerate(
    variable: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=text):
        rather.trl.DPOConfig(output_dir=str(tmp_path))


# --- callbacks, saving, evaluation ---


class Recorder(TrainerCallback):
    """Records where it is called, and stops the run after two steps."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name != "on_step_end":
            object.__getattribute__(self, "calls").append(name)
        return object.__getattribute__(self, name)

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.calls.append("on_step_end")
        assert named["model"] is not None
        control.should_training_stop = state.global_step == 2
        control.should_evaluate = control.should_save = state.global_step == 1


def test_callbacks_saving_and_a_dict_of_datasets(model: str, tmp_path: Path) -> None:
    recorder = Recorder()
    rows = Dataset.from_list(make_rows("chat"))
    case = Case("DPO", settings={"max_steps": 50, "save_strategy": "steps", "save_steps": 99})
    sets = {"one": rows.select(range(3)), "two": rows.select(range(3, 8))}
    trainer = make_trainer(
        "rather.trl", case, model, tmp_path, callbacks=[recorder], eval_dataset=sets
    )
    result = trainer.train()
    assert result.global_step == trainer.state.global_step == 2
    assert result.metrics["train_loss"] > 0
    first = ["on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin"]
    assert recorder.calls[:4] == first
    for name in ("on_log", "on_evaluate", "on_save", "on_train_end", "on_optimizer_step"):
        assert name in recorder.calls
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()
    assert {"eval_one_loss", "eval_rewards/margins"} <= set(trainer.state.log_history[1])
    assert trainer.evaluate(rows)["eval_loss"] > 0
    trainer.save_model(str(tmp_path / "saved"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.tensor([[1, 7, 8, 9]])
    assert torch.equal(again(ids).logits, trainer.model.eval()(ids).logits)  # its own forward
    assert trainer.model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > 4
