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
from tests.cells import read_table
from tests.config.conftest import assert_the_last_is_refused, smallest

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


TYPOS = """
    exp_nmae | exp_name
    sead | seed
    ouput_dir | output_dir
    loging_dir | logging_dir
    max_step | max_steps
    save_step | save_steps
    eval_stpes | eval_steps
    loging_steps | logging_steps
    resume_from_checkpont | resume_from_checkpoint
    sequence_lenght | sequence_length
    pretrian | pretrain
    betta | beta
    label_smothing | label_smoothing
    pref_los | pref_loss
    chosen_keys | chosen_key
    rejectd_key | rejected_key
    track_wiht | track_with
    max_gard_norm | max_grad_norm
    num_node | num_nodes
    num_gpu_per_node | num_gpus_per_node
    system_env | system_envs
    actor_trian | actor_train
    refrence | reference
    validaton | validation
    learning_rate | actor_train.training_args.learning_rate
    file_name | actor_train.data_args.file_name
    dtype | actor_train.model_args.dtype
    max_length | sequence_length
    lr | actor_train.training_args.learning_rate
    actor_train.trainig_args | training_args
    actor_train.training_args.per_device_train_batch_siez | per_device_train_batch_size
    actor_train.training_args.warmup | warmup_steps
    actor_train.data_args.filename | file_name
    actor_train.model_args.model_name_or_paht | model_name_or_path
    actor_train.strategy_args.strategy_nam | strategy_name
    actor_train.device_maping | device_mapping
    reference.training_args | actor_train.training_args
    reference.inferbatch_size | infer_batch_size
    validation.data_args.weights | actor_train.data_args.weights
    validation.data_args.splitt | split
    checkpoint_config.outputdir | output_dir
    tracker_kwargs.logdir | log_dir
"""


@pytest.mark.parametrize(("typo", "meant"), read_table(TYPOS))
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


OUT_OF_RANGE = """
    beta=0 | 0 is not a number > 0 or null: at 0 the preference has no effect
    beta=.nan | nan is not a number > 0
    beta=true | True is not a number > 0
    label_smoothing=0.5 | 0.5 is not a number >= 0 and < 0.5
    actor_train.training_args.learning_rate=-1.0e-6 | -1e-06 is not a number >= 0
    actor_train.training_args.adam_beta2=1 | 1 is not a number >= 0 and < 1
    actor_train.training_args.adam_epsilon=0 | 0 is not a number > 0
    actor_train.training_args.per_device_train_batch_size=0 | 0 is not a whole number >= 1
    actor_train.training_args.per_device_train_batch_size=2.5 | 2.5 is not a whole number >= 1
    actor_train.training_args.gradient_accumulation_steps=[2] | [2] is not a whole number >= 1
    actor_train.training_args.warmup_ratio=1 | 1 is not a number >= 0 and < 1
    actor_train.training_args.num_train_epochs=0 | 0 is not a number > 0
    actor_train.training_args.lr_scheduler_type=cosin | did you mean 'cosine'?
    actor_train.training_args.lr_scheduler_kwargs.min_lr=-1 | -1 is not an entry of
    actor_train.training_args.lr_scheduler_kwargs.num_cycle=1 | unknown parameter of the schedule 'linear'
    actor_train.model_args.dtype=bf61 | did you mean 'bf16'?
    actor_train.model_args.model_type=trl | 'trl' is not causal_lm or null
    actor_train.data_args.score=lst | did you mean 'last'?
    actor_train.data_args.overlong=truncate | did you mean 'truncate_prompt'?
    actor_train.data_args.file_name=[1] | [1] is not text or a list of texts or null
    actor_train.data_args.weights=[0] | [0] is not a list of numbers
    actor_train.strategy_args.gpu_memory_utilization=1.5 | 1.5 is not a number > 0 and <= 1 or null
    actor_train.worker_cls=my worker | write a dotted import path
    actor_train.worker_cls=5 | write a dotted import path
    actor_train.training_args=5 | 5 is not a group of keys (learning_rate
    validation.data_args.split=1.5 | a fraction between 0 and 1 (0.05) or a whole number of pairs >= 1
    validation.data_args.split=0 | a fraction between 0 and 1
    sequence_length=1 | 1 is not a whole number >= 2: prompt and response need a token each
    max_steps=0 | 0 is not a whole number >= 1 or null
    save_steps=0 | must be a whole number of steps >= 1 or a fraction of the run
    max_ckpt_to_keep=-1 | -1 is not a whole number >= 0
    max_bad_fraction=2 | 2 is not a number >= 0 and <= 1
    logging_dir='' | name a folder of its own
    ipo=maybe | 'maybe' is not true or false
    metric_for_best_model=loss | names of evaluation metrics begin with 'eval/'
    resume_from_checkpoint=3 | 3 is not true or false or text
    track_with=wandbb | did you mean 'wandb'?
    track_with=[wandb, comet] | swanlab or a list of tensorboard
    tracker_kwargs.mode=local | 'local' is not online
    ranked_pairs=best_vs_res | did you mean 'best_vs_rest'?
    checkpoint_config.type=oss | 'oss' is not file_system
    seed=-1 | -1 is not a whole number >= 0 and < 4,294,967,296
    seed=null | null is not a whole number >= 0
    system_envs.A=1 | write it in quotes
    pretrain=[a] | ['a'] is not text or null
"""


@pytest.mark.parametrize(("setting", "said"), read_table(OUT_OF_RANGE))
def test_wrong_value_says_what_is_allowed(judged, setting: str, said: str) -> None:
    assert_the_last_is_refused(judged(setting), [setting], said)


COMBINATIONS = """
    pref_loss=simpo + ipo=true | true means pref_loss: ipo, and pref_loss says simpo
    max_grad_norm=1 + actor_train.training_args.max_grad_norm=2 | 2.0 differs from max_grad_norm at the top level (1.0)
    actor_train.model_args.dtype=fp16 + precision=lean | lean cannot be combined with actor_train.model_args.dtype=fp16
    save_best=true | needs validation.data_args.file_name or validation.data_args.split
    early_stopping_patience=2 | needs validation.data_args.file_name or validation.data_args.split
    eval_steps=10 | needs validation.data_args.file_name or validation.data_args.split
    metric_for_best_model=eval/rewards/margins | needs save_best or early_stopping_patience
    validation.data_args.file_name=e.json + validation.data_args.split=5 | cannot be combined with validation.data_args.file_name; keep one
    actor_train.data_args.weights=[1,2] | 2 weights for 1 files
    actor_train.training_args.per_device_train_batch_size=4 + train_batch_size=10 | 10 pairs is not dp 1 x per_device_train_batch_size 4
    actor_train.training_args.per_device_train_batch_size=4 + actor_train.training_args.gradient_accumulation_steps=3 + train_batch_size=10 | 10 pairs is not dp 1 x per_device_train_batch_size 4 x gradient_accumulation_steps 3
    actor_train.device_mapping=0-3 + train_batch_size=9 | 9 pairs is not dp 4
    num_gpus_per_node=4 + actor_train.device_mapping=0-7 | names device 7
    actor_train.strategy_args.tp_size=3 | tp 3 x pp 1 x cp 1 = 3 does not divide the 1 devices
    actor_train.strategy_args.strategy_name=megatron | did you mean 'megatron_train'?
    actor_train.strategy_args.strategy_name=hf_infer | is not a strategy of this role; known: ddp
    actor_train.strategy_args.strategy_config.tensor_model_paralel_size=1 | unknown key; did you mean 'tensor_model_parallel_size'?
    actor_train.strategy_args.tp_size=1 + actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2 | 2 means actor_train.strategy_args.tp_size: 2, and actor_train.strategy_args.tp_size says 1
    actor_train.strategy_args.strategy_config.expert_model_parallel_size=2 | expert parallel 2 does not divide the 1 data-parallel ranks
    actor_train.strategy_args.strategy_config.recompute_granularity=some | 'some' is not allowed: Input should be 'full', 'selective' or 'half'
    sync_ref_model=true + reference.offload=on | on cannot be combined with sync_ref_model
    actor_train.device_mapping=0-1 + reference.device_mapping=0-1 + reference.offload=on | set strategy_name: gemini_auto
    compile=on + actor_train.strategy_args.strategy_config.offload_activations=true | cannot be combined with compile=on
    actor_train.strategy_args.strategy_config.recompute_granularity=full + actor_train.model_args.disable_gradient_checkpointing=true | keep one of them
    reference.model_args.disable_gradient_checkpointing=false | no backward pass
    reference.model_args.tokenizer_name_or_path=other | same tokenizer
    actor_train.strategy_args.gpu_memory_utilization=0.6 + reference.strategy_args.gpu_memory_utilization=0.5 | more than a whole GPU
    actor_train.system_envs.A=x + reference.system_envs.A=y | share one process
    resume_from_checkpoint=some/path + overwrite=true | starts from scratch
    track_with=null + tracker_kwargs.log_dir=tb | names none of tensorboard, wandb, swanlab,
    track_with=mlflow + tracker_kwargs.log_dir=tb | names none of tensorboard, wandb, swanlab,
    tracker_kwargs.project=a | names none of wandb, trackio, mlflow, swanlab,
    tracker_kwargs.name=a | names none of wandb, trackio, mlflow, swanlab,
    track_with=trackio + tracker_kwargs.tags=[a] | names none of wandb, mlflow, swanlab,
    track_with=trackio + tracker_kwargs.notes=a | names none of wandb, mlflow, swanlab,
    track_with=mlflow + tracker_kwargs.mode=offline | names none of wandb, swanlab,
    track_with=wandb + tracker_kwargs.uri=http://host | names none of mlflow,
    track_with=mlflow + tracker_kwargs.uri='http://me:word@host' | set MLFLOW_TRACKING_URI
    chosen_key=a + rejected_key=a | use two columns
    chosen_key=a + actor_train.data_args.columns={chosen: b} | chosen: b differs from chosen_key (a)
    loss_type=simpo_loss + ipo=true | true means pref_loss: ipo, and loss_type says simpo
    pref_loss=orpo + loss_type=simpo_loss | means pref_loss: simpo, and pref_loss says orpo
    use_ref_model=true + disable_reference_model=true | true means use_ref_model: False
    actor_train.model_args.additional_target=norm | needs actor_train.model_args.lora_rank or
    actor_train.strategy_args.strategy_config.moe_aux_loss_coeff=0.01 | choose actor_train.model_args.moe_aux_loss_coef
    actor_train.strategy_args.strategy_config.moe_expert_capacity_factor=1.5 | no token of an expert is dropped
    actor_train.strategy_args.strategy_config.moe_enable_routing_replay=true | every pass chooses experts itself
    actor_train.strategy_args.strategy_config.expert_tensor_parallel_size=2 | 2 is not allowed: Input should be 1
    actor_train.strategy_args.strategy_config.efsdp_size=3 | is dp 1 / ep 1
    actor_train.strategy_args.strategy_config.additional_configs.moe_z_loss_coeff=0.1 | is not supported
    actor_train.model_args.ulysses_size=2 | set strategy_args.cp_size instead
    actor_train.training_args.seed=3 | set seed at the top level instead
    pref_loss=[sigmoid, sft] + loss_weights=[1.0] | 1 weights for 2 losses in pref_loss
    ref_model_sync_steps=4 | needs sync_ref_model
    response_length=512 | set sequence_length
    actor_train.strategy_args.strategy_config.calculate_per_token_loss=true | counts pairs
"""


@pytest.mark.parametrize(("cell", "said"), read_table(COMBINATIONS))
def test_impossible_combination(judged, cell: str, said: str) -> None:
    settings = cell.split(" + ")
    assert_the_last_is_refused(judged(*settings), settings, said)


def test_each_place_that_scores_other_tokens_is_named(judged) -> None:
    lines = judged("actor_train.data_args.score=last", "apply_loss_mask=false")
    keys = [line.partition(":")[0] for line in lines]
    assert keys == ["apply_loss_mask", "validation.data_args.score"]


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
    keys = sorted(line.partition(" ")[0] for line in lines)
    assert keys == ["beta", "exp_name", "ipo", "save_best"]


def test_combinations_with_a_bad_value_are_not_reported(problems) -> None:
    (line,) = problems("validation.data_args.split=7.5", "save_best=true")
    assert line.startswith("validation.data_args.split")


def test_secret_values_are_not_in_messages(problems) -> None:
    (line,) = problems("system_envs={HF_TOKEN: 12345678}")
    assert line.startswith("system_envs.HF_TOKEN (command line): the value is not")
    assert "12345678" not in line


FILES = {  # text -> place and advice; tests/security has files that are hostile
    "": "dpo.yaml: ",
    "# nothing\n": "dpo.yaml: ",
    "- a\n- b\n": "dpo.yaml: ",
    "hello\n": "dpo.yaml: ",
    "seed: 1\nbeta: [1\n": "dpo.yaml:3: ",
    "actor_train:\n\tdata_args: 1\n": "dpo.yaml:2: .*indent with spaces",
    "seed: 1\nbeta: 0.1\nseed: 2\n": "dpo.yaml:3: .* seed",
    "actor_train:\n  infer_batch_size: 1\n  infer_batch_size: 2\n": "dpo.yaml:3: .* infer_batch_size",
    "seed 1\nbeta: 1\n": "colon missing in the line above",
    "seed: 1\nbeta 1\ngamma: 2\n": "`key: value`, here or in the line above",
    "a:\n    b: 1\n  c: 2\n": "dpo.yaml:3: .*indentation of this line",
    "1: x\n": r"1 \(dpo.yaml:1\): ",
}


@pytest.mark.parametrize("text", FILES)
def test_file_that_is_not_a_config(write, text: str) -> None:
    with pytest.raises(ConfigError, match=FILES[text]):
        load(write(text))


def test_missing_file_folder_wrong_name_and_encoding(tmp_path: Path, write) -> None:
    write()
    (tmp_path / "latin.yaml").write_bytes("exp_name: caf\xe9\n".encode("latin-1"))
    write("# " + "x" * 1_000_001, "big.yaml")
    for path, said in {
        tmp_path / "dpx.yaml": "near it: dpo.yaml, dpo.yml, big.yaml",
        tmp_path: r"\(big.yaml, dpo.yaml, latin.yaml\)",
        write(name="pairs.jsonl"): "is data; name it in a YAML file as",
        write(name="dpo.yml"): "rename it to dpo.yaml",
        tmp_path / "latin.yaml": "byte 0xe9 in position 13",
        tmp_path / "big.yaml": "Is it a data file",
    }.items():
        with pytest.raises(ConfigError, match=said):
            load(path)


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
    for settings in (
        [*devices, f"{key}=4"],
        ["actor_train.device_mapping=0-2", f"{word}=2"],
        [f"{word}=two"],
    ):
        with pytest.raises(ConfigError, match=re.escape(f"{word}: ")):
            config_from_dict(smallest(*settings))


def test_keys_of_other_tools_that_are_settings_of_their_own() -> None:
    """use_ref_model, val_batch_size and lora_config have a meaning that no other key has."""
    settings = {"use_ref_model": True, "val_batch_size": 4, "train_batch_size": 4}
    actor = {**BASE["actor_train"], "model_args": {"lora_config": None}}
    values = {**BASE, **settings, "actor_train": actor}
    for config in (config_from_dict(values), DPOConfig(**values)):
        assert config.use_ref_model
        assert config.val_batch_size == 4
    for key in ("use_ref_model", "val_batch_size", "actor_train.model_args.lora_config"):
        assert explain(None, key).startswith(f"{key}\n  meaning  ")
    with pytest.raises(ConfigError, match="val_batch_size: "):
        config_from_dict({**BASE, **settings, "val_batch_size": 0})


@pytest.mark.parametrize("word", ["tp", "tensor_parallel_size", "tensor_model_parallel_size"])
def test_degrees_at_the_top_level_are_explained(word: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'actor_train\.strategy_args\.tp_size'"):
        config_from_dict({**BASE, word: 2})
