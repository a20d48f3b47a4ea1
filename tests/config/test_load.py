"""Values: from the file, the command line, the environment, other keys; and written out again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from rather.config import load as loading
from rather.config.keys import table
from rather.config.load import config_from_dict, dump_yaml, load, load_config
from rather.config.redaction import looks_secret
from rather.config.values import MASK
from rather.errors import ConfigError, DataError
from rather.recipes import find_recipe
from tests.cells import read_table

from .conftest import SMALLEST, assert_the_last_is_refused, smallest


def test_the_smallest_file_is_enough(write) -> None:
    config = load_config(write(name="my-run.yaml"), check_paths=False)
    assert config.exp_name == "my-run"
    assert config.actor_train.model_path == config.reference.model_path == "org/model"
    assert config.actor_train.tokenizer_path == "org/model"
    assert config.run_dir == Path("output/my-run")
    assert config.log_dir == config.tracker_dir == Path("output/logs/my-run")
    assert config.checkpoint_copy_dir == config.run_dir
    assert config.loss_names == ["sigmoid"]
    assert config.loss_numbers == {}
    assert config.global_batch(dp=2) == 16
    assert config.data_seed == 42
    assert config.trackers == []
    assert config.data_cache_dir(config.actor_train.data_args) == Path("output/.cache/data")


def test_overrides_need_no_plus_and_win(write) -> None:
    config = load(
        write(),
        [
            "beta=0.05",
            "actor_train.training_args.learning_rate=1e-7",
            "+seed=7",
            "exp_name=2024",
            "track_with=[tensorboard]",
            "system_envs.OMP_NUM_THREADS='1'",
            "actor_train.device_mapping=0,2,4-6",
            "reference.device_mapping=list(range(0,3))",
            "output_dir=/tmp/my runs (new)",
            "validation={data_args: {split: 0.1}}",
            "hydra.run.dir=.",
        ],
    )
    assert config.beta == 0.05
    assert config.actor_train.training_args.learning_rate == 1e-7
    assert config.seed == 7
    assert config.exp_name == "2024"
    assert config.trackers == ["tensorboard"]
    assert config.system_envs == {"OMP_NUM_THREADS": "1"}
    assert config.actor_train.device_mapping == [0, 2, 4, 5, 6]
    assert config.reference.device_mapping == [0, 1, 2]
    assert config.run_dir == Path("/tmp/my runs (new)/2024")
    assert config.validation.data_args.split == 0.1
    assert config.sources["beta"] == config.sources["validation.data_args.split"] == "command line"
    assert config.sources["pretrain"] == "dpo.yaml:1"
    assert config.sources["label_smoothing"] == "default"
    assert config.sources["validation.data_args.score"] == "default"
    assert config.sources["reference.model_args.model_name_or_path"] == "follows pretrain"


def test_an_override_can_remove_a_key(write) -> None:
    assert load_config(write(SMALLEST + "beta: 0.3\n"), ["~beta"], check_paths=False).beta is None


@pytest.mark.parametrize("argument", ["beta", "=3", "--beta", "beta 0.1"])
def test_an_override_is_key_and_value(problems, argument: str) -> None:
    assert problems(argument, "=") == [
        f"{text} (command line): an override is written key=value, such as beta=0.05"
        for text in (argument, "=")
    ]


def test_hydra_never_advises_a_plus(problems) -> None:
    assert sorted(problems("bata=1", "actor_train.training_arg.learning_rate=1")) == [
        "actor_train.training_arg (command line): unknown key; did you mean 'training_args'?",
        "bata (command line): unknown key; did you mean 'beta'?",
    ]


def test_target_is_refused_on_the_command_line(problems) -> None:
    for override in ("system_envs._target_=os.system", "system_envs={_target_: os.system}"):
        assert problems(override) == [
            "system_envs._target_ (command line): a config never names code to run; remove it"
        ]


def test_interpolation(write, monkeypatch) -> None:
    monkeypatch.setenv("RATHER_BETA", "0.25")
    text = SMALLEST + "beta: ${oc.env:RATHER_BETA}\nchosen_key: ${exp_name}-${seed}\nseed: 3\n"
    config = load_config(write(text), check_paths=False)
    assert config.beta == 0.25
    assert config.chosen_key == "dpo-3"


def test_each_failed_interpolation_is_reported_with_the_other_problems(problems) -> None:
    text = (
        SMALLEST
        + "beta: ${oc.env:RATHER_NOT_SET}\nchosen_key: ${nothing}\nseed: x\nipo: true\npref_loss: simpo\n"
    )
    lines = problems(text=text)
    assert [line.partition(" ")[0] for line in lines] == ["beta", "chosen_key", "seed", "ipo"]
    assert "RATHER_NOT_SET" in lines[0]
    assert "nothing" in lines[1]


def test_an_override_that_is_half_an_interpolation(problems) -> None:
    (line,) = problems("system_envs.A=${b")
    assert line.startswith("system_envs.A (command line): ")


def test_interpolation_in_a_list(problems) -> None:
    (line,) = problems("actor_train.data_args.file_name=['${oc.env:RATHER_NOT_SET}/a.json']")
    assert line.startswith("actor_train.data_args.file_name (command line): ")


def test_a_loop_of_interpolations_is_an_error(problems) -> None:
    lines = problems(text=SMALLEST + "chosen_key: ${rejected_key}\nrejected_key: ${chosen_key}\n")
    assert [line.partition(" ")[0] for line in lines] == ["chosen_key", "rejected_key"]


def test_defaults_list_and_groups(write, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("beta: 0.3\nseed: 5\n")
    (tmp_path / "size").mkdir()
    (tmp_path / "size/small.yaml").write_text("# @package _global_\nsequence_length: 64\n")
    (tmp_path / "size/large.yaml").write_text("# @package _global_\nsequence_length: 4096\n")
    path = write(
        "defaults: [base, size: small, _self_]\nseed: 6\nhydra: {run: {dir: .}, output_subdir: null}\n"
        + SMALLEST
    )
    config = load(path)
    assert (config.beta, config.seed, config.sequence_length) == (0.3, 6, 64)
    assert config.sources["beta"] == "dpo.yaml:1, defaults list"
    assert config.sources["seed"] == "dpo.yaml:2"
    assert load(path, ["size=large"]).sequence_length == 4096
    with pytest.raises(ConfigError, match=r"dpo\.yaml: .*huge"):
        load(path, ["size=huge"])


def test_a_file_that_uses_nothing_of_hydra_is_read_as_hydra_composes_it(
    write, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write("{<<: {seed: 3}, exp_name: '${oc.env:USER_OF_THIS,x}-${seed}', beta: 0.3}")
    files, overrides = [written, find_recipe("rpo"), find_recipe("kto")], ["seed=5", "lr=null"]
    plain = [load_values(file, overrides) for file in files]
    monkeypatch.setattr(loading, "HYDRAS_OWN", re.compile(""))  # all is Hydra's
    assert [load_values(file, overrides) for file in files] == plain
    monkeypatch.undo()
    year = load(write(SMALLEST + "exp_name: run-${now:%Y}\n")).exp_name  # a resolver of Hydra
    assert re.fullmatch(r"run-\d{4}", year)


def load_values(file: Path, overrides: list[str]) -> tuple[dict[str, object], dict[str, str]]:
    sources: dict[str, str] = {}
    composed = loading._compose(file, overrides, sources)
    return OmegaConf.to_container(composed, resolve=True), sources


def test_a_file_elsewhere_with_an_odd_name(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "my configs, 100%"
    folder.mkdir()
    (folder / "a-b.c.yaml").write_text(SMALLEST)
    monkeypatch.chdir(tmp_path)
    assert load(Path("my configs, 100%") / "a-b.c.yaml").exp_name == "a-b.c"


def test_numbers_without_loss() -> None:
    config = config_from_dict(
        smallest("beta='1e-1'", "max_steps=1.0e+3", "seed='7'", "label_smoothing=0", "ipo='False'")
    )
    found = config.beta, config.max_steps, config.seed, config.label_smoothing, config.ipo
    assert found == (0.1, 1000, 7, 0.0, False)
    assert type(config.max_steps) is int


def test_resuming_is_a_switch_or_a_path() -> None:
    for text, value in {"auto": "auto", "'False'": False, "true": True, "runs/a": "runs/a"}.items():
        assert (
            config_from_dict(smallest(f"resume_from_checkpoint={text}")).resume_from_checkpoint
            == value
        )


def test_yaml_merge_and_anchors_keep_lines(problems) -> None:
    text = """
        actor_train:
          model_args: &model
            dtype: fp32
          data_args: {file_name: a}
        reference:
          model_args:
            <<: *model
            dtpye: bf16
        pretrain: x
    """
    (line,) = problems(text=text)
    assert line.startswith("reference.model_args.dtpye (dpo.yaml:8): ")


def test_null_group_is_an_empty_group() -> None:
    config = config_from_dict(
        smallest(
            "reference=", "checkpoint_config=null", "actor_train.strategy_args.strategy_config=null"
        )
    )
    assert config.reference.model_path == "org/model"
    assert config.actor_train.strategy_args.strategy_config == {}


# --- following ---


def test_reference_follows_actor_train() -> None:
    config = config_from_dict(
        smallest(
            "actor_train.model_args={model_name_or_path: org/tuned, revision: abc, dtype: fp32}",
            "actor_train.model_args.trust_remote_code=true",
            "actor_train.strategy_args={strategy_name: zero2, tp_size: 2}",
            "actor_train.device_mapping=0-3",
            "actor_train.infer_batch_size=4",
            "actor_train.max_tokens_per_microbatch_in_infer=2048",
        )
    )
    reference = config.reference
    assert reference.model_path == "org/tuned"
    assert (reference.model_args.revision, reference.model_args.dtype) == ("abc", "fp32")
    assert reference.model_args.trust_remote_code
    assert (reference.strategy_args.strategy_name, reference.strategy_args.tp_size) == ("zero2", 2)
    assert reference.device_mapping == [0, 1, 2, 3]
    assert (reference.infer_batch_size, reference.max_tokens_per_microbatch_in_infer) == (4, 2048)
    assert config.followed["reference.model_args.dtype"] == "actor_train.model_args.dtype"


def test_reference_says_otherwise() -> None:
    config = config_from_dict(
        smallest(
            "actor_train.model_args={revision: abc, dtype: fp32}",
            "actor_train.strategy_args={strategy_name: zero2, tp_size: 2}",
            "actor_train.device_mapping=0-3",
            "reference.model_args={model_name_or_path: org/other, dtype: bf16}",
            "reference.strategy_args={strategy_name: hf_infer}",
            "reference.device_mapping=[4]",
            "reference.infer_batch_size=1",
        )
    )
    reference = config.reference
    assert (reference.model_path, reference.model_args.revision) == ("org/other", None)
    assert reference.model_args.dtype == "bf16"
    assert (reference.strategy_args.strategy_name, reference.strategy_args.tp_size) == (
        "hf_infer",
        None,
    )
    assert (reference.device_mapping, reference.infer_batch_size) == ([4], 1)


def test_validation_follows_the_training_data() -> None:
    config = config_from_dict(
        smallest(
            "global_template=chatml",
            "actor_train.data_args.columns={prompt: question}",
            "actor_train.data_args.overlong=error",
            "validation.data_args={file_name: {easy: a.json, hard: [b.json, c.json]}, overlong: drop}",
        )
    )
    data = config.validation.data_args
    assert data.template == config.actor_train.data_args.template == "chatml"
    assert data.columns == {"prompt": "question"}
    assert data.overlong == "drop"
    assert data.sets == {"easy": [Path("a.json")], "hard": [Path("b.json"), Path("c.json")]}
    assert config.followed["validation.data_args.template"] == "global_template"


def test_clipping_may_be_written_in_either_place() -> None:
    of_role = "actor_train.training_args.max_grad_norm=2.5"
    for settings in ([of_role], [of_role, "max_grad_norm=2.5"]):
        assert config_from_dict(smallest(*settings)).max_grad_norm == 2.5


def test_train_batch_size_gives_what_is_left_out() -> None:
    per_device = "actor_train.training_args.per_device_train_batch_size"
    steps = "actor_train.training_args.gradient_accumulation_steps"
    for settings, sizes in (
        ([], (16, 1)),
        ([f"{steps}=4"], (4, 4)),
        ([f"{per_device}=2"], (2, 8)),
        ([f"{per_device}=2", f"{steps}=8"], (2, 8)),
    ):
        whole = ["train_batch_size=32", "actor_train.device_mapping=0-1"]
        config = config_from_dict(smallest(*whole, *settings))
        training = config.actor_train.training_args
        found = training.per_device_train_batch_size, training.gradient_accumulation_steps
        assert found == sizes
        assert config.global_batch(2) == 32


def test_roles_environments() -> None:
    config = config_from_dict(
        smallest("system_envs={A: '1', B: '1'}", "actor_train.system_envs={B: '2'}")
    )
    assert config.envs(config.actor_train) == {"A": "1", "B": "2"}
    assert config.envs(config.reference) == {"A": "1", "B": "1"}


def test_worker_class_is_a_class_or_a_path() -> None:
    values = smallest("reference.worker_cls=my_package.workers.Mine")
    values["actor_train"]["worker_cls"] = Path
    config = config_from_dict(values)
    assert config.actor_train.worker_cls is Path
    assert config.reference.worker_cls == "my_package.workers.Mine"
    assert yaml.safe_load(dump_yaml(config))["actor_train"]["worker_cls"].endswith(".Path")


# --- device_mapping ---

DEVICES = {
    "[0, 1]": [0, 1],
    "'[0, 1]'": [0, 1],
    "3": [3],
    "'3'": [3],
    "0-7": list(range(8)),
    "0,2,4-6": [0, 2, 4, 5, 6],
    "list(range(0,8))": list(range(8)),
    "list(range(0, 8, 2))": [0, 2, 4, 6],
    "list(range(4))": [0, 1, 2, 3],
    "range(1,3)": [1, 2],
    "null": None,
}


@pytest.mark.parametrize("text", DEVICES)
def test_device_mapping(text: str) -> None:
    assert (
        config_from_dict(smallest(f"actor_train.device_mapping={text}")).actor_train.device_mapping
        == DEVICES[text]
    )


BAD_DEVICES = """
    [0, 0]
    '0-3,2'
    [-1]
    'list(range(-1,2))'
    []
    'list(range(3,1))'
    '7-0'
    'list(range(0,9,0))'
    'list(range(0,999999999999))'
    '0-99999999999'
    "__import__('os').getpid()"
    'list(range(0,8)'
    'range(0,8))'
    [0.5]
    true
    '0,,1'
    {a: 1}
"""


@pytest.mark.parametrize("text", read_table(BAD_DEVICES))
def test_device_mapping_refused(judged, text: str) -> None:
    setting = f"actor_train.device_mapping={text}"
    assert_the_last_is_refused(judged(setting), [setting], "cannot be used: ")


# --- writing it out ---


def test_what_is_written_loads_again(write, tmp_path: Path) -> None:
    overrides = [
        "beta=0.07",
        "train_batch_size=4",
        "actor_train.device_mapping=0-1",
        "actor_train.training_args.max_grad_norm=0.5",
        "system_envs.NUMBER='1e-6'",
        "actor_train.data_args.separator='\n- '",
        "validation.data_args.split=3",
        "actor_train.training_args.learning_rate=3.3e-7",
        "exp_name=on",
        "actor_train.model_args.dtype=fp32",
    ]
    config = load_config(write(), overrides, check_paths=False)
    again = tmp_path / "config.yaml"
    again.write_text(dump_yaml(config))
    assert load_config(again, check_paths=False).model_dump() == config.model_dump()


def test_no_secret_is_written(write, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RATHER_CANARY", "canary-in-env")
    text = SMALLEST.replace("org/model", "${oc.env:RATHER_CANARY}") + (
        "system_envs:\n  HF_TOKEN: canary-plain\n  OTHER: ${oc.env:RATHER_CANARY}-x\n"
        "  THIRD: ${system_envs.OTHER}\n  FOURTH: ${.OTHER}\n  OPEN: ${exp_name}\n"
        "  TOKENIZERS_PARALLELISM: 'false'\n"
    )
    config = load_config(write(text), check_paths=False)
    assert config.reference.model_path == "canary-in-env"
    written = dump_yaml(config)
    assert "canary" not in written
    values = yaml.safe_load(written)
    assert (
        values["pretrain"]
        == values["reference"]["model_args"]["model_name_or_path"]
        == "${oc.env:RATHER_CANARY}"
    )
    assert values["system_envs"] == {
        "HF_TOKEN": MASK,
        "OTHER": "${oc.env:RATHER_CANARY}-x",
        "THIRD": "${system_envs.OTHER}",
        "FOURTH": "${.OTHER}",
        "OPEN": "dpo",
        "TOKENIZERS_PARALLELISM": "false",
    }
    again = tmp_path / "config.yaml"
    again.write_text(written)
    with pytest.raises(ConfigError, match=r"\*\*\* was masked when this file was written"):
        load(again)


def test_what_looks_like_a_secret() -> None:
    secret = """HF_TOKEN WANDB_API_KEY api_key dbPassword AWS_SECRET_ACCESS_KEY MYTOKEN
        credentials""".split()  # noqa: SIM905
    plain = """chosen_key rejected_key pad_token num_tokens tokenizer_name_or_path exp_name
        special_tokens max_tokens_per_microbatch_in_train TOKENIZERS_PARALLELISM""".split()  # noqa: SIM905
    plain += [key.name for key in table().values()]  # else config.yaml of a run could not be read
    assert [name for name in secret + plain if looks_secret(name)] == secret


# --- paths ---


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    return path


def test_missing_paths_are_named_together(write, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("")
    model_folder(tmp_path / "models/tiny")
    overrides = [
        f"pretrain={tmp_path}/models/tiney",
        "actor_train.model_args.tokenizer_name_or_path=./no/tokenizer",
        f"actor_train.data_args.file_name=[{tmp_path}/pairs.json,{tmp_path}/models]",
        "validation.data_args.file_name={a: https://host/e.json, b: b.json}",
        "global_template=templates/mine.jinja",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(write(), overrides)
    lines = caught.value.problems
    assert [line.partition(" (command line): ")[0] for line in lines] == [
        "pretrain",
        "actor_train.model_args.tokenizer_name_or_path",
        "global_template",
        *["actor_train.data_args.file_name"] * 2,
        *["validation.data_args.file_name"] * 2,
    ]
    assert f"{tmp_path}/models/tiney does not exist; near it: tiny" in lines[0]
    assert f"{tmp_path}/pairs.json does not exist; near it: pairs.jsonl" in lines[3]
    assert "*.arrow or state.json" in lines[4]


def test_a_token_folder_is_a_file_name_and_unreadable_paths_are_reported(
    write, tmp_path: Path
) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "state.json").write_text("{}")
    load_config(write(), [f"actor_train.data_args.file_name={tmp_path}/tokens"])
    for name, said in (("pairs.xlsx", r"pairs\.xlsx as CSV"), ("x" * 300, "File name too long")):
        with pytest.raises(DataError, match=said):
            load_config(write(), [f"actor_train.data_args.file_name={name}"])


def test_only_data_missing_is_a_data_error(write) -> None:
    with pytest.raises(DataError) as caught:
        load_config(write())
    assert caught.value.exit_code == 3
    assert str(caught.value).startswith(
        "actor_train.data_args.file_name (dpo.yaml:4): the data file /"
    )


def test_folders_that_hold_no_model_or_tokenizer(write, tmp_path: Path) -> None:
    (tmp_path / "pairs.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    data = f"actor_train.data_args.file_name={tmp_path}/pairs.json"
    model_folder(tmp_path / "run" / "model")
    (model_folder(tmp_path / "bare") / "tokenizer.json").unlink()
    for name, said in {
        f"{tmp_path}/empty": r"/empty is not a model folder: it has no config\.json",
        f"{tmp_path}/run": r"/run is not a model folder: .*; \S+/run/model has",
        f"{tmp_path}/bare": "/bare is not a tokenizer folder",
        "my model": "my model does not exist",
    }.items():
        with pytest.raises(ConfigError, match=said):
            load_config(write(), [data, f"pretrain={name}"])
    for name in (str(model_folder(tmp_path / "good")), "gpt2"):
        assert load_config(write(), [data, f"pretrain={name}"]).actor_train.model_path == name


def test_dataset_dir_comes_first(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    data = config_from_dict(
        smallest("actor_train.data_args={file_name: [a.json, data/b.json], dataset_dir: data}")
    )
    args = data.actor_train.data_args
    assert args.files == [Path("data/a.json"), Path("data/b.json")]
    (tmp_path / "data/data").mkdir()
    (tmp_path / "data/data/b.json").write_text("[]")
    assert args.files[1] == Path("data/data/b.json")


@pytest.mark.parametrize("name", ["1e-6", "1_000", "nan", "0x1F", "null", "2024-01-01"])
def test_a_text_that_looks_like_something_else_stays_a_text(name: str, tmp_path: Path) -> None:
    file = tmp_path / "dpo.yaml"
    file.write_text(dump_yaml(config_from_dict(smallest() | {"exp_name": name})))
    assert load_config(file, check_paths=False).exp_name == name
