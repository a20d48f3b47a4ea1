"""Every problem of a file is in one error, with its place and the way out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from rather.config.compat import DEGREES
from rather.config.inherit import value_at
from rather.config.load import config_from_dict, load, load_config
from rather.config.run_config import DPOConfig
from rather.config.show import explain
from rather.config.strategies import layout
from rather.errors import ConfigError
from tests.config.conftest import smallest

BASE = {"pretrain": "org/model", "actor_train": {"data_args": {"file_name": "pairs.json"}}}


def test_three_mistakes_are_one_message(write) -> None:
    path = write("""
        pretrain: org/model
        bata: 0.2
        label_smoothing: 0.7
        actor_train:
          training_args:
            learning_rate: fast
          data_args:
            file_name: pairs.json
    """)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.exit_code == 2
    assert caught.value.problems == [
        "bata (dpo.yaml:2): unknown key; did you mean 'beta'?",
        "label_smoothing (dpo.yaml:3): 0.7 is not a number >= 0 and < 0.5 or null: "
        "at 0.5 the labels say nothing, above it they are reversed",
        "actor_train.training_args.learning_rate (dpo.yaml:6): 'fast' is not a number >= 0",
    ]
    assert [p.name for p in path.parent.iterdir()] == ["dpo.yaml"]


TYPOS = [
    ("exp_nmae", "exp_name"),
    ("sead", "seed"),
    ("ouput_dir", "output_dir"),
    ("loging_dir", "logging_dir"),
    ("max_step", "max_steps"),
    ("save_step", "save_steps"),
    ("eval_stpes", "eval_steps"),
    ("loging_steps", "logging_steps"),
    ("resume_from_checkpont", "resume_from_checkpoint"),
    ("sequence_lenght", "sequence_length"),
    ("pretrian", "pretrain"),
    ("betta", "beta"),
    ("label_smothing", "label_smoothing"),
    ("pref_los", "pref_loss"),
    ("chosen_keys", "chosen_key"),
    ("rejectd_key", "rejected_key"),
    ("track_wiht", "track_with"),
    ("max_gard_norm", "max_grad_norm"),
    ("num_node", "num_nodes"),
    ("num_gpu_per_node", "num_gpus_per_node"),
    ("system_env", "system_envs"),
    ("actor_trian", "actor_train"),
    ("refrence", "reference"),
    ("validaton", "validation"),
    ("learning_rate", "actor_train.training_args.learning_rate"),
    ("file_name", "actor_train.data_args.file_name"),
    ("dtype", "actor_train.model_args.dtype"),
    ("max_length", "sequence_length"),
    ("lr", "actor_train.training_args.learning_rate"),
    ("actor_train.trainig_args", "training_args"),
    ("actor_train.training_args.per_device_train_batch_siez", "per_device_train_batch_size"),
    ("actor_train.training_args.warmup", "warmup_steps"),
    ("actor_train.data_args.filename", "file_name"),
    ("actor_train.model_args.model_name_or_paht", "model_name_or_path"),
    ("actor_train.strategy_args.strategy_nam", "strategy_name"),
    ("actor_train.device_maping", "device_mapping"),
    ("reference.training_args", "actor_train.training_args"),
    ("reference.inferbatch_size", "infer_batch_size"),
    ("validation.data_args.weights", "actor_train.data_args.weights"),
    ("validation.data_args.splitt", "split"),
    ("checkpoint_config.outputdir", "output_dir"),
    ("tracker_kwargs.logdir", "log_dir"),
]


@pytest.mark.parametrize(("typo", "meant"), TYPOS)
def test_unknown_key_says_what_was_meant(judged, typo: str, meant: str) -> None:
    assert judged(f"{typo}=1") == [f"{typo}: unknown key; did you mean '{meant}'?"]


def test_a_key_that_belongs_to_the_top_level_says_so(judged) -> None:
    (line,) = judged("actor_train.training_args.save_steps=2")
    assert line.endswith("unknown key; did you mean 'save_steps' at the top level?")


def test_a_removed_key_says_so_and_what_to_use(judged) -> None:
    (line,) = judged("trace=true")
    assert line.startswith("trace: was removed; metrics.jsonl and the report")
    (line,) = judged("determinism=canonical")
    assert line.startswith("determinism: was removed")
    assert "deterministic: true" in line
    (line,) = judged("parity=trl-1.x")
    assert line.startswith("parity: was removed; `from rather.trl import DPOConfig, DPOTrainer`")
    with pytest.raises(ConfigError, match="determinism: was removed"):
        DPOConfig(determinism="canonical")


def test_a_removed_key_without_a_value_is_read() -> None:
    """Configs in run folders of earlier versions have every key."""
    unset = {"determinism": None, "trace": False, "parity": None}
    assert config_from_dict({**BASE, **unset}).pretrain == "org/model"


def test_unknown_key_like_no_other_lists_the_keys_there(problems) -> None:
    (line,) = problems("validation.zzz=1")
    assert line == "validation.zzz (command line): unknown key; known: data_args"


def test_a_misspelt_required_key_is_one_problem(problems) -> None:
    text = "pretrian: org/model\nactor_train: {data_args: {filename: pairs.json}}\n"
    assert problems(text=text) == [
        "pretrian (dpo.yaml:1): unknown key; did you mean 'pretrain'?",
        "actor_train.data_args.filename (dpo.yaml:2): unknown key; did you mean 'file_name'?",
    ]


OUT_OF_RANGE = [
    ("beta=0", "0 is not a number > 0 or null: at 0 the preference has no effect"),
    ("beta=.nan", "nan is not a number > 0"),
    ("beta=true", "True is not a number > 0"),
    ("label_smoothing=0.5", "0.5 is not a number >= 0 and < 0.5"),
    ("actor_train.training_args.learning_rate=-1.0e-6", "-1e-06 is not a number >= 0"),
    ("actor_train.training_args.adam_beta2=1", "1 is not a number >= 0 and < 1"),
    ("actor_train.training_args.adam_epsilon=0", "0 is not a number > 0"),
    ("actor_train.training_args.per_device_train_batch_size=0", "0 is not a whole number >= 1"),
    ("actor_train.training_args.per_device_train_batch_size=2.5", "2.5 is not a whole number >= 1"),
    ("actor_train.training_args.gradient_accumulation_steps=[2]", "[2] is not a whole number >= 1"),
    ("actor_train.training_args.warmup_ratio=1", "1 is not a number >= 0 and < 1"),
    ("actor_train.training_args.num_train_epochs=0", "0 is not a number > 0"),
    ("actor_train.training_args.lr_scheduler_type=cosin", "did you mean 'cosine'?"),
    ("actor_train.training_args.lr_scheduler_kwargs.min_lr=-1", "-1 is not an entry of"),
    (
        "actor_train.training_args.lr_scheduler_kwargs.num_cycle=1",
        "unknown parameter of the schedule 'linear'",
    ),
    ("actor_train.model_args.dtype=bf61", "did you mean 'bf16'?"),
    ("actor_train.model_args.model_type=trl", "'trl' is not causal_lm or null"),
    ("actor_train.data_args.score=lst", "did you mean 'last'?"),
    (
        "actor_train.data_args.overlong=truncate",
        "is not drop | truncate_prompt | truncate_response | error",
    ),
    ("actor_train.data_args.file_name=[1]", "[1] is not text or a list of texts or null"),
    ("actor_train.data_args.weights=[0]", "[0] is not a list of numbers"),
    (
        "actor_train.strategy_args.gpu_memory_utilization=1.5",
        "1.5 is not a number > 0 and <= 1 or null",
    ),
    ("actor_train.worker_cls=my worker", "dotted import path"),
    ("actor_train.worker_cls=5", "dotted import path"),
    ("actor_train.training_args=5", "5 is not a group of keys (learning_rate"),
    (
        "validation.data_args.split=1.5",
        "a fraction between 0 and 1 (0.05) or a whole number of pairs >= 1",
    ),
    ("validation.data_args.split=0", "a fraction between 0 and 1"),
    ("sequence_length=1", "1 is not a whole number >= 2: prompt and response need a token each"),
    ("max_steps=0", "0 is not a whole number >= 1 or null"),
    ("save_steps=0", "it must be a whole number of steps >= 1 or a fraction of the run"),
    ("max_ckpt_to_keep=-1", "-1 is not a whole number >= 0"),
    ("max_bad_fraction=2", "2 is not a number >= 0 and <= 1"),
    ("exp_name=a/b", "1 to 128 of the characters"),
    ("exp_name=..", "1 to 128 of the characters"),
    (f"exp_name={'x' * 129}", "1 to 128 of the characters"),
    ("output_dir=/", "name a folder of its own"),
    ("output_dir=..", "name a folder of its own"),
    ("logging_dir=''", "name a folder of its own"),
    ("ipo=maybe", "'maybe' is not true or false"),
    ("metric_for_best_model=loss", "names of evaluation metrics begin with 'eval/'"),
    ("resume_from_checkpoint=3", "3 is not true or false or text"),
    ("track_with=wandbb", "did you mean 'wandb'?"),
    (
        "track_with=[wandb, comet]",
        "is not tensorboard | wandb | trackio | mlflow | swanlab or a list of",
    ),
    ("tracker_kwargs.mode=local", "'local' is not online | offline"),
    ("ranked_pairs=best_vs_res", "did you mean 'best_vs_rest'?"),
    ("checkpoint_config.type=oss", "'oss' is not file_system"),
    ("seed=-1", "-1 is not a whole number >= 0"),
    ("seed=null", "null is not a whole number"),
    ("system_envs={A: 1}", "write it in quotes"),
    ("pretrain=[a]", "['a'] is not text or null"),
]


@pytest.mark.parametrize(("override", "said"), OUT_OF_RANGE)
def test_wrong_value_says_what_is_allowed(judged, override: str, said: str) -> None:
    (line,) = judged(override)
    assert said in line
    assert line.startswith(override.partition("=")[0])


COMBINATIONS = [
    (["ipo=true", "pref_loss=simpo"], "ipo", "pref_loss says simpo"),
    (
        ["max_grad_norm=1", "actor_train.training_args.max_grad_norm=2"],
        "actor_train.training_args.max_grad_norm",
        "differs",
    ),
    (
        ["precision=lean", "actor_train.model_args.dtype=fp16"],
        "precision",
        "lean cannot be combined with actor_train.model_args.dtype=fp16",
    ),
    (["save_best=true"], "save_best", "validation.data_args.split"),
    (
        ["early_stopping_patience=2"],
        "early_stopping_patience",
        "needs validation.data_args.file_name or validation.data_args.split",
    ),
    (
        ["eval_steps=10"],
        "eval_steps",
        "needs validation.data_args.file_name or validation.data_args.split",
    ),
    (
        ["metric_for_best_model=eval/rewards/margins"],
        "metric_for_best_model",
        "needs save_best or early_stopping_patience",
    ),
    (
        ["validation.data_args.file_name=e.json", "validation.data_args.split=5"],
        "validation.data_args.split",
        "keep one",
    ),
    (
        ["actor_train.data_args.weights=[1,2]"],
        "actor_train.data_args.weights",
        "2 weights for 1 files",
    ),
    (
        ["train_batch_size=10", "actor_train.training_args.per_device_train_batch_size=4"],
        "train_batch_size",
        "10 pairs is not dp 1 x per_device_train_batch_size 4",
    ),
    (
        [
            "train_batch_size=10",
            "actor_train.training_args.per_device_train_batch_size=4",
            "actor_train.training_args.gradient_accumulation_steps=2",
        ],
        "train_batch_size",
        "10 pairs is not dp 1 x per_device_train_batch_size 4 x gradient_accumulation_steps 2",
    ),
    (
        ["train_batch_size=9", "actor_train.device_mapping=0-3"],
        "train_batch_size",
        "9 pairs is not dp 4",
    ),
    (
        ["num_gpus_per_node=4", "actor_train.device_mapping=0-7"],
        "actor_train.device_mapping",
        "names device 7",
    ),
    (
        ["actor_train.strategy_args.tp_size=3"],
        "actor_train.strategy_args.tp_size",
        "does not divide the 1 devices",
    ),
    (
        ["actor_train.strategy_args.strategy_name=megatron"],
        "actor_train.strategy_args.strategy_name",
        "did you mean 'megatron_",
    ),
    (
        ["actor_train.strategy_args.strategy_name=hf_infer"],
        "actor_train.strategy_args.strategy_name",
        "is not a strategy of this role",
    ),
    (
        ["actor_train.strategy_args.strategy_config.tensor_model_paralel_size=1"],
        "actor_train.strategy_args.strategy_config.tensor_model_paralel_size",
        "did you mean 'tensor_model_parallel_size'?",
    ),
    (
        [
            "actor_train.strategy_args.tp_size=1",
            "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2",
        ],
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size",
        "2 means actor_train.strategy_args.tp_size: 2, and actor_train.strategy_args.tp_size says 1",
    ),
    (
        ["actor_train.strategy_args.strategy_config.expert_model_parallel_size=2"],
        "actor_train.strategy_args.strategy_config.expert_model_parallel_size",
        "expert parallel 2 does not divide the 1 data-parallel ranks",
    ),
    (
        ["actor_train.strategy_args.strategy_config.recompute_granularity=some"],
        "actor_train.strategy_args.strategy_config.recompute_granularity",
        "'some' is not allowed: Input should be 'full', 'selective' or 'half'",
    ),
    (
        ["reference.offload=on", "sync_ref_model=true"],
        "reference.offload",
        "on cannot be combined with sync_ref_model",
    ),
    (
        ["reference.offload=on", "actor_train.device_mapping=0-1", "reference.device_mapping=0-1"],
        "reference.offload",
        "set strategy_name: gemini_auto",
    ),
    (
        ["actor_train.strategy_args.strategy_config.offload_activations=true", "compile=on"],
        "actor_train.strategy_args.strategy_config.offload_activations",
        "cannot be combined with compile=on",
    ),
    (
        [
            "actor_train.strategy_args.strategy_config.recompute_granularity=full",
            "actor_train.model_args.disable_gradient_checkpointing=true",
        ],
        "actor_train.model_args.disable_gradient_checkpointing",
        "keep one of them",
    ),
    (
        ["reference.model_args.disable_gradient_checkpointing=false"],
        "reference.model_args.disable_gradient_checkpointing",
        "no backward",
    ),
    (
        ["reference.model_args.tokenizer_name_or_path=other"],
        "reference.model_args.tokenizer_name_or_path",
        "same tokenizer",
    ),
    (
        [
            "actor_train.strategy_args.gpu_memory_utilization=0.6",
            "reference.strategy_args.gpu_memory_utilization=0.5",
        ],
        "reference.strategy_args.gpu_memory_utilization",
        "more than a whole GPU",
    ),
    (
        ["actor_train.system_envs.A=x", "reference.system_envs.A=y"],
        "reference.system_envs.A",
        "share one process",
    ),
    (["overwrite=true", "resume_from_checkpoint=some/path"], "overwrite", "starts from scratch"),
    (["track_with=null", "tracker_kwargs.log_dir=tb"], "tracker_kwargs.log_dir", "track_with"),
    (
        ["track_with=mlflow", "tracker_kwargs.log_dir=tb"],
        "tracker_kwargs.log_dir",
        "tensorboard, wandb, swanlab",
    ),
    (["tracker_kwargs.project=a"], "tracker_kwargs.project", "wandb, trackio, mlflow, swanlab"),
    (["tracker_kwargs.name=a"], "tracker_kwargs.name", "wandb, trackio, mlflow, swanlab"),
    (
        ["track_with=trackio", "tracker_kwargs.tags=[a]"],
        "tracker_kwargs.tags",
        "wandb, mlflow, swanlab",
    ),
    (
        ["track_with=trackio", "tracker_kwargs.notes=a"],
        "tracker_kwargs.notes",
        "wandb, mlflow, swanlab",
    ),
    (["track_with=mlflow", "tracker_kwargs.mode=offline"], "tracker_kwargs.mode", "wandb, swanlab"),
    (["track_with=wandb", "tracker_kwargs.uri=http://host"], "tracker_kwargs.uri", "mlflow"),
    (
        ["track_with=mlflow", "tracker_kwargs.uri='http://me:word@host'"],
        "tracker_kwargs.uri",
        "MLFLOW_TRACKING_URI",
    ),
    (["chosen_key=a", "rejected_key=a"], "rejected_key", "two columns"),
    (
        ["chosen_key=a", "actor_train.data_args.columns.chosen=b"],
        "actor_train.data_args.columns",
        "differs from chosen_key",
    ),
]


@pytest.mark.parametrize(("overrides", "key", "said"), COMBINATIONS)
def test_impossible_combination(judged, overrides: list[str], key: str, said: str) -> None:
    (line,) = judged(*overrides)
    assert line.startswith(f"{key}: ")
    assert said in line


def test_no_model_names_both_keys_and_no_data_its_own(problems) -> None:
    assert problems(text="seed: 1\n") == [
        "pretrain (dpo.yaml): no model is named; set pretrain or actor_train.model_args.model_name_or_path "
        "to a folder or hub name",
        "actor_train.data_args.file_name (dpo.yaml): no training pairs are named; "
        "set it to a file or files",
    ]
    assert "no training pairs" in problems("actor_train.data_args.file_name=")[0]


def test_bad_values_do_not_hide_bad_combinations(problems) -> None:
    lines = problems("beta=-1", "save_best=true", "ipo=true", "pref_loss=simpo", "exp_name=a b")
    assert sorted(line.partition(" ")[0] for line in lines) == [
        "beta",
        "exp_name",
        "ipo",
        "save_best",
    ]


def test_combinations_with_a_bad_value_are_not_reported(problems) -> None:
    (line,) = problems("validation.data_args.split=7.5", "save_best=true")
    assert line.startswith("validation.data_args.split")


def test_secret_values_are_not_in_messages(problems) -> None:
    (line,) = problems("system_envs={HF_TOKEN: 12345678}")
    assert line.startswith("system_envs.HF_TOKEN (command line): the value is not")
    assert "12345678" not in line


FILES = {
    "empty": ("", "the file must hold keys and values"),
    "comment": ("# nothing\n", "the file must hold keys and values"),
    "list": ("- a\n- b\n", "the file must hold keys and values"),
    "scalar": ("hello\n", "the file must hold keys and values"),
    "syntax": ("seed: 1\nbeta: [1\n", "dpo.yaml:3: "),
    "tab": (
        "actor_train:\n\tdata_args: 1\n",
        "dpo.yaml:2: found character '\\t' that cannot start any token; indent with spaces",
    ),
    "duplicate": (
        "seed: 1\nbeta: 0.1\nseed: 2\n",
        "dpo.yaml:3: found duplicate key seed",
    ),
    "nested duplicate": (
        "actor_train:\n  infer_batch_size: 1\n  infer_batch_size: 2\n",
        "dpo.yaml:3: found duplicate key infer_batch_size",
    ),
    "target": (
        "actor_train:\n  _target_: os.system\n",
        "actor_train._target_ (dpo.yaml:2): a config never names code",
    ),
    "target in a list": (
        "a:\n- b: 1\n  _target_: os.system\n",
        "a.[]._target_ (dpo.yaml:3): a config never",
    ),
    "tag": (
        "seed: !!python/object/apply:os.getcwd []\n",
        "dpo.yaml:1: could not determine a constructor for the tag 'tag:yaml.org,2002:python",
    ),
    "own tag": ("seed: !mine 3\n", "could not determine a constructor for the tag '!mine'"),
    "loop": ("a: &a\n  b: *a\n", "unfold to more than"),
    "bomb": (
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)),
        "unfold to more than 20,000 values",
    ),
    "deep": ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
    "no colon": ("seed 1\nbeta: 1\n", "; is a colon missing in the line above?"),
    "no colon later": (
        "seed: 1\nbeta 1\ngamma: 2\n",
        "; write `key: value`, here or in the line above",
    ),
    "indentation": ("a:\n    b: 1\n  c: 2\n", "; check the indentation of this line"),
    "number as a key": ("1: x\n", "1 (dpo.yaml:1): unknown key"),
}


@pytest.mark.parametrize("case", FILES)
def test_file_that_is_not_a_config(write, case: str) -> None:
    text, said = FILES[case]
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    assert said in str(caught.value)


def test_missing_file_folder_wrong_name_and_encoding(tmp_path: Path, write) -> None:
    write()
    cases = {
        tmp_path / "dpx.yaml": "near it: dpo.yaml, dpo.yml, big.yaml",
        tmp_path: "is a folder; name a file in it (big.yaml, dpo.yaml, latin.yaml)",
        write(name="pairs.jsonl"): "is data; name it in a YAML file as",
        write(name="dpo.yml"): "rename it to dpo.yaml",
    }
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("exp_name: caf\xe9\n".encode("latin-1"))
    cases[latin] = "can't decode byte 0xe9 in position 13"
    big = tmp_path / "big.yaml"
    big.write_text("# " + "x" * 1_000_001)
    cases[big] = "Is it a data file?"
    for path, said in cases.items():
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert said in str(caught.value)


def test_python_users_meet_the_same_checks() -> None:
    said = "ipo: true means pref_loss: ipo, and pref_loss says simpo; keep one of them"
    with pytest.raises(ConfigError, match=said):
        config_from_dict({**BASE, "ipo": True, "pref_loss": "simpo"})
    with pytest.raises(ConfigError, match=said):
        DPOConfig(**BASE, ipo=True, pref_loss="simpo")


def test_a_config_does_not_change() -> None:
    config = config_from_dict(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


def test_config_imports_without_torch() -> None:
    code = dedent("""
        import sys
        import rather.config.load, rather.config.show, rather.config.strategies
        sys.exit("torch" in sys.modules)
    """)
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
    )


@pytest.mark.parametrize(
    ("words", "key", "meant"),
    [
        ({"ipo": True}, "pref_loss", "ipo"),
        ({"ipo": True, "pref_loss": "sigmoid"}, "pref_loss", "ipo"),  # as older runs wrote it
        ({"loss_type": "simpo_loss"}, "pref_loss", "simpo"),
        ({"disable_reference_model": True, "pref_loss": "simpo"}, "use_ref_model", False),
        ({"apply_loss_mask": False}, "validation.data_args.score", "all"),
        ({"ref_tp": 1}, "reference.strategy_args.tp_size", 1),
    ],
)
def test_words_of_other_tools_set_the_key_that_they_mean(
    words: dict[str, Any], key: str, meant: Any
) -> None:
    for config in (config_from_dict({**BASE, **words}), DPOConfig(**BASE, **words)):
        assert value_at(config, key) == meant
        assert config.followed[key] == next(iter(words))


@pytest.mark.parametrize("name", DEGREES)
@pytest.mark.parametrize("is_megatrons", [True, False])
@pytest.mark.parametrize("role", ["actor_train", "reference"])
def test_degrees_in_strategy_config_are_those_of_strategy_args(
    name: str, is_megatrons: bool, role: str
) -> None:
    word = f"{role}.strategy_args.strategy_config.{DEGREES[name] if is_megatrons else name}"
    key = f"{role}.strategy_args.{name}"
    devices = ["actor_train.device_mapping=0-3", f"{word}=2"]
    config = config_from_dict(smallest(*devices))
    assert value_at(DPOConfig(**smallest(*devices)), key) == value_at(config, key) == 2
    assert config.followed[key] == word
    assert config.reference.strategy_args.model_dump()[name] == 2  # inherited, or its own
    assert f"also as  {word}" in explain(None, key).replace(", ", "\n  also as  ")
    assert explain(None, word) == explain(None, key)
    # Runs write every word down.
    again = config_from_dict(config.model_dump(mode="json"))
    assert layout(again.actor_train) == layout(config.actor_train)
    assert layout(again.reference) == layout(config.reference)
    with pytest.raises(ConfigError, match=re.escape(f"{word}: 2 means {key}: 2, and {key} says 4")):
        config_from_dict(smallest(*devices, f"{key}=4"))
    with pytest.raises(ConfigError, match=re.escape(f"{word}: ")):
        config_from_dict(smallest("actor_train.device_mapping=0-2", f"{word}=2"))
    with pytest.raises(ConfigError, match=re.escape(f"{word}: 'two' is not")):
        config_from_dict(smallest(f"{word}=two"))


def test_keys_of_other_tools_that_are_settings_of_their_own() -> None:
    """use_ref_model, val_batch_size and lora_config have a meaning that no other key has."""
    settings = {"use_ref_model": True, "val_batch_size": 4, "train_batch_size": 4}
    lora = {"model_args": {"lora_config": None}}
    for config in (
        config_from_dict({**BASE, **settings, "actor_train": {**BASE["actor_train"], **lora}}),
        DPOConfig(**{**BASE, **settings, "actor_train": {**BASE["actor_train"], **lora}}),
    ):
        assert config.use_ref_model
        assert config.val_batch_size == 4
    for key in ("use_ref_model", "val_batch_size", "actor_train.model_args.lora_config"):
        assert explain(None, key).startswith(f"{key}\n  meaning  ")
    with pytest.raises(ConfigError, match="val_batch_size: 0 is not a whole number >= 1"):
        config_from_dict({**BASE, **settings, "val_batch_size": 0})


@pytest.mark.parametrize("word", ["tp", "tensor_parallel_size", "tensor_model_parallel_size"])
def test_degrees_at_the_top_level_are_explained(word: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'actor_train\.strategy_args\.tp_size'"):
        config_from_dict({**BASE, word: 2})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"ipo": True, "loss_type": "simpo_loss"}, "ipo: true means pref_loss: ipo, and loss_type"),
        ({"loss_type": "simpo_loss", "pref_loss": "orpo"}, 'loss_type: "simpo_loss" means'),
        ({"disable_reference_model": True, "use_ref_model": True}, "disable_reference_model: true"),
        (
            {"apply_loss_mask": False, "actor_train": {"data_args": {"score": "last"}}},
            "apply_loss_mask: false means actor_train.data_args.score: all",
        ),
        (
            {"actor_train": {"model_args": {"additional_target": "norm"}}},
            "actor_train.model_args.additional_target: needs actor_train.model_args.lora_rank",
        ),
    ],
)
def test_problems_name_the_words_of_the_user(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        DPOConfig(pretrain="model", **words)
