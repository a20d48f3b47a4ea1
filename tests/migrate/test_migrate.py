"""Configs of every tool become a YAML that trains the same, and no key is lost on the way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rather.config.inherit import value_at
from rather.config.keys import table
from rather.config.load import composed_values, load
from rather.config.run_config import DPOConfig
from rather.errors import ConfigError
from rather.tools.migrate import NAMES, removed
from rather.tools.migrate.engine import full, guess, migrate
from rather.tools.migrate.peers import PEERS
from rather.tools.migrate.rules import (
    CHANGED,
    CONVERTED,
    IMPOSSIBLE,
    LEFT_OUT,
    MISSING,
    NEEDLESS,
    UNKNOWN,
    WRITTEN,
    Lines,
    pairs,
)
from rather.tools.migrate.source import read_file
from rather.tracking.json_lines import flatten
from tests.cells import read_table
from tests.commands.conftest import rather as command
from tests.migrate.convert import (
    BASIC,
    DATA,
    DTYPE,
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

TESTS = Path(__file__).parents[1]
SOURCES = TESTS / "migrate" / "sources"


def rather(*words: Any) -> tuple[int, str]:
    done = command("migrate", *words)
    return done.exit_code, done.output


# ---- the published examples


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trl", {"pretrain": "Qwen/Qwen2-0.5B-Instruct", LR: 5e-7, "save_steps": 500, f"{DATA}.overlong": "truncate_response",
                 RANK: 32, "eval_steps": 50, "label_smoothing": None, "train_batch_size": None, "pairs": 16}),
        ("llama-factory", {"beta": 0.1, "global_template": "qwen3", "sequence_length": 2048, "output_dir": "saves/qwen3-4b/lora",
                           f"{TRAINING}.warmup_ratio": 0.1, f"{MODEL}.lora_target": "all-linear", "pairs": 8}),
        ("axolotl", {"pref_loss": "sigmoid", f"{TRAINING}.per_device_train_batch_size": 2, "sequence_length": 4096,
                     "validation.data_args.split": 0.05, DTYPE: "bf16", "pairs": 8}),
    ],
)  # fmt: skip
def test_examples_become_files_that_load(name: str, expected: Any, tmp_path: Path) -> None:
    path = SOURCES / f"{name}.yaml"
    source = read_file(path)
    peer = guess(path, source, PEERS)
    assert peer.name == name
    result = migrate(path, source, peer)
    assert values_of(result, expected) == expected
    file = tmp_path / "dpo.yaml"
    file.write_text(result.yaml(), encoding="utf-8")
    config = load(file)
    for path, value in flatten(result.values, whole=[f"{TRAINING}.lr_scheduler_kwargs"]).items():
        if path in table() and "device_mapping" not in path:
            assert value_at(config, path) == value, path
    keys = {row.key for row in result.rows}
    assert flatten(source, whole=peer.whole.split()).keys() <= keys
    assert UNKNOWN not in {row.status for row in result.rows}


def test_roll_files() -> None:
    files = {name: TESTS / "config" / "roll" / name / "dpo_config.yaml"
             for name in ("dense", "older", "experts")}  # fmt: skip
    results = {
        name: migrate(path, composed_values(path), PEERS["roll"]) for name, path in files.items()
    }
    assert {row.status for row in results["dense"].rows} == {CONVERTED, NEEDLESS}
    assert results["older"].config.global_batch() == 64
    assert "both roles read the same" in row_of(results["older"], "reference.data_args").note
    experts = "actor_train.strategy_args.strategy_config.expert_model_parallel_size"
    assert row_of(results["experts"], experts).status == CONVERTED


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("trl", {**BASIC, "use_peft": True, "deepspeed": {"zero_optimization": {"stage": 2}}}),
        ("axolotl", {"rl": "dpo", "base_model": "m", "trl": {"sync_ref_model": True, "ref_model_sync_steps": 9}}),
    ],
)  # fmt: skip
def test_parts_of_dotted_keys_are_not_marks(name: str, values: Any) -> None:
    assert guess(Path("x.yaml"), values, PEERS).name == name


# ---- the command


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "dpo.yaml"
    arguments = (SOURCES / "trl.yaml", "--trainer", "dpo", "--out", out)
    code, shown = rather(*arguments)
    assert code == 0, shown
    assert "A step has 16 pairs on each device; the file does not say how many" in shown
    assert yaml.safe_load(out.read_text())["pretrain"] == "Qwen/Qwen2-0.5B-Instruct"
    code, again = rather(*arguments)
    assert (code, "--force" in again) == (2, True)
    code, everything = rather(*arguments, "--force", "--verbose")
    assert code == 0
    hidden = [line for line in everything.splitlines() if line not in shown]
    assert f"{len(hidden)} more keys without a difference: see --verbose." in shown
    statuses = (CONVERTED, NEEDLESS, WRITTEN)
    assert all(line.startswith(tuple(f"{status}: " for status in statuses)) for line in hidden)


def test_incomplete_files_have_another_name_and_exit_code_2(tmp_path: Path) -> None:
    source, out = tmp_path / "trl.yaml", tmp_path / "dpo.yaml"
    long = "a_key_with_a_very_long_name_" * 4
    source.write_text(yaml.safe_dump({**BASIC, "learning_rate": 1e-4, long: 1}))
    command = (source, "--from", "trl", "--trainer", "dpo", "--out", out)
    code, shown = rather(*command)
    assert code == 2
    assert shown.startswith(f"not known: {long} = 1; ")
    assert not out.exists()
    file = tmp_path / "dpo.incomplete.yaml"
    assert long in file.read_text().splitlines()[2]
    assert load(file).actor_train.training_args.learning_rate == 1e-4
    code, shown = rather(*command, "--json", "--force")
    facts = json.loads(shown)
    assert (code, facts["complete"], facts["keys"][0]["key"]) == (2, False, long)
    assert facts["file"].endswith("dpo.incomplete.yaml")


SWIFT = {"rlhf_type": "dpo", "model": "m", "dataset": "d.jsonl", "tuner_type": "lora"}
NEMO = {"dpo": {"reference_policy_kl_penalty": 0.05}, "policy": {"train_global_batch_size": 8}}
OPENRLHF = {"pretrain": "m", "micro_train_batch_size": 1, "zero_stage": 2}
CHAT = {"pretrain": "m", "plugin": "3d", "accumulation_steps": 2, "lr": 1e-5, "batch_size": 8}
LINES = "command lines and shell scripts are not converted; pass the YAML or JSON file"


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        ([], None, "Pass the YAML or JSON file"),
        (["nowhere.yaml"], None, "cannot be read"),
        (["x.yaml", "--from", "tlr"], "beta: 1", "unknown; choose one of trl"),
        (["x.yaml"], "beta: 0.1", "cannot tell which tool this file is for; add --from"),
        (["x.yaml"], "rl: dpo\nstage: dpo", "add --from llama-factory|axolotl"),
        (["x.yaml"], "compute_environment: LOCAL\ndistributed_type: NO", "configures accelerate"),
        (["x.yaml", "--from", "trl", "--trainer", "grpo"], "beta: 1", "of trl Rather converts dpo, "),
        (["x.yaml", "--from", "axolotl", "--trainer", "dpo"], "beta: 1", "what a file itself says"),
        pytest.param(["--line", "colossalai run --nproc_per_node 4 train_dpo.py --sp 2"], None, LINES,
                     marks=pytest.mark.defect("M4")),
        pytest.param(["x.sh"], "torchrun run_train.py $options", LINES, marks=pytest.mark.defect("M5")),
        pytest.param(["x.sh"], "python prepare_preference_dataset.py --a b", LINES,
                     marks=pytest.mark.defect("M6")),
        pytest.param(["--line", "deepspeed --include localhost:0,1 --module openrlhf.cli.train_dpo"],
                     None, LINES, marks=pytest.mark.defect("N15")),
        pytest.param(["--line", "bash train_dpo.sh --pref_beta 0.05"], None, LINES,
                     marks=pytest.mark.defect("N17")),
        (["x.py"], "DPOTrainer()", "change the import to `from rather.trl import ...`"),
        (["x.ipynb"], "{}", "change the import to `from rather.trl import ...`"),
        (["x.txt"], "trl dpo", LINES),
        (["x"], "trl dpo", LINES),
        *[(["x.yaml", "--from", tool], "a: 1", f"--from {tool}: a file of this tool is not converted")
          for tool in removed.MARKS],
        (["x.json"], json.dumps(SWIFT), "a file of swift is not converted; write a YAML with `rather init`"),
        (["x.yaml"], json.dumps(NEMO), "a file of nemo-rl is not converted"),
        (["x.yaml"], json.dumps(OPENRLHF), "a file of openrlhf is not converted"),
        (["x.yaml"], json.dumps(CHAT), "a file of colossalchat is not converted"),
        (["x.yaml"], b"beta: 0.1\nname: caf\xe9\n", "x.yaml: cannot be read"),
        (["x.yaml"], "a: &x [*x]", "x.yaml: cannot be read"),
    ],
)  # fmt: skip
def test_what_the_command_refuses(
    words: list[str], content: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(words[0]).write_bytes(content if isinstance(content, bytes) else content.encode())
    code, shown = rather(*words)
    assert (code, said in shown) == (2, True), shown
    assert not [*tmp_path.glob("dpo*.yaml")]


def test_every_removed_tool_has_a_column_in_the_table_of_keys() -> None:
    page = (TESTS.parent / removed.PAGE).read_text(encoding="utf-8").lower()
    [head] = [line for line in page.splitlines() if line.startswith("| rather | openrlhf")]
    assert all(tool in head for tool in removed.MARKS)


@pytest.mark.defect("N16")
def test_values_that_a_script_fills_in_are_not_known(tmp_path: Path) -> None:
    file = tmp_path / "trl.yaml"
    text = yaml.safe_dump({"model_name_or_path": "m", "dataset_name": "d.jsonl", "bf16": True})
    file.write_text(
        f"{text}learning_rate: !!float $rate\nsave_steps: !!int ${{STEPS}}\noutput_dir: $OUT/run\n"
    )
    result = migrate(file, read_file(file), PEERS["trl"], trainer="dpo")
    unknown = {"learning_rate": IMPOSSIBLE, "save_steps": IMPOSSIBLE}
    assert problems(result) == {**unknown, "(learning rate)": MISSING}
    for key in (*unknown, "output_dir"):
        assert "only known when a script has filled it in" in row_of(result, key).note
    assert row_of(result, "output_dir").status == LEFT_OUT


# ---- all tools


@pytest.mark.parametrize("name", [name for name in NAMES if name != "roll"])
def test_the_tables_name_keys_that_exist(name: str) -> None:
    """The tables are texts: a typing error must not wait for a user."""
    peer = PEERS[name]
    defaults = [line.split(" if ")[0] for line in peer.defaults.splitlines()]
    keys = {*pairs(" ".join(defaults)), *peer.derived, *peer.marks.split()}
    unknown = [key for key in keys if key not in peer.rules and "loss_type=" not in key]
    assert not unknown
    lines = [line for rule in peer.rules.values() if isinstance(rule, Lines) for line in rule]
    targets = [re.split("[:;]", line.meaning)[0].split() for line in lines if line.sign in "=>"]
    paths = {full(path.partition("=")[0]) for group in targets for path in group}
    free = ".strategy_config."  # any name
    assert not [path for path in paths if path not in table() and free not in path]


@pytest.mark.defect("U12")
@pytest.mark.parametrize("name", ["llama-factory", "axolotl"])
def test_no_setting_of_a_tool_is_called_unknown(name: str) -> None:
    peer = PEERS[name]
    other = "a value that is not the default"
    values = {key: other for key in peer.settings if peer.rules.get(key) is None}
    assert values
    result = of({**values, "gradient_accumulation_stepz": 1}, name)
    rows = [row for row in result.rows if row.key in values]
    assert {(row.status, row.note) for row in rows} == {(IMPOSSIBLE, "Rather has no rule for it")}
    typo = row_of(result, "gradient_accumulation_stepz").note
    assert typo.startswith(f"{name} {peer.version} has no such setting; did you mean")


def test_no_secret_is_written() -> None:
    result = of({"hub_token": "hf_canary", "hub_model_id": "me/model"})
    assert "canary" not in result.yaml() + "".join(row.line for row in result.rows)
    assert {row_of(result, key).status for key in ("hub_token", "hub_model_id")} == {LEFT_OUT}
    envs = {"HF_TOKEN": "hf_canary", "NCCL_DEBUG": "INFO"}
    roll = of({"pretrain": "m", "system_envs": envs}, "roll")
    assert roll.config.system_envs == {"NCCL_DEBUG": "INFO"}
    assert "canary" not in roll.yaml()


FACTORY: dict[str, Any] = {
    "model_name_or_path": "m", "stage": "dpo", "do_train": True, "bf16": True, "dataset": "mine",
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
}  # fmt: skip
AXOLOTL: dict[str, Any] = {
    "base_model": "m", "rl": "dpo", "learning_rate": 1e-5, "micro_batch_size": 2,
    "datasets": [{"path": "d.jsonl", "type": "chat_template.default"}], "warmup_steps": 5,
}  # fmt: skip
BASES = {"llama-factory": FACTORY, "axolotl": AXOLOTL}


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    """Return a folder with a dataset_info.json, as LLaMA-Factory is started in."""
    pairs = {"ranking": True, "formatting": "sharegpt", "columns": {"messages": "conversations"}}
    registry = {
        "mine": {"file_name": "mine.json", **pairs},
        "hub": {"hf_hub_url": "org/pairs", "ms_hub_url": "other/pairs", "split": "dev", **pairs},
        "modelscope": {"ms_hub_url": "other/pairs", **pairs},
        "drawn": {"file_name": "mine.json", "num_samples": 5, **pairs},
        "answers": {"file_name": "answers.json"},
        "tagged": {"file_name": "a.json", "ranking": True, "tags": {"user_tag": "client"}},
        "images": {"file_name": "a.json", "ranking": True, "columns": {"images": "i"}},
        "renamed": {"file_name": "a.json", "ranking": True, "columns": {
            "prompt": "question", "chosen": "good", "rejected": "rejected"}},
    }  # fmt: skip
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(registry))
    return tmp_path


@pytest.mark.parametrize(
    ("peer", "settings", "expected"),
    read_table(
        """
        llama-factory | {stage: kto, dataset: answers, kto_rejected_weight: 0.5} | {task: unpaired, pref_loss: kto, undesirable_weight: 0.5, beta: 0.1}
        llama-factory | {stage: rm} | {task: reward, pref_loss: bradley_terry}
        llama-factory | {stage: sft, dataset: answers} | {task: sft, data.score: assistant}
        llama-factory | {stage: sft, dataset: answers, mask_history: true} | {task: sft, data.score: last}
        llama-factory | {dataset: renamed} | {data.columns: {instruction: question, chosen: good}, model.lora_alpha: 16.0}
        llama-factory | {ray_num_workers: 4} | {pairs: 32} ## U6
        llama-factory | {max_samples: 1000} | {data.file_name: mine.json, data.max_samples: 1000} ## U7
        llama-factory | {dataset: "mine,hub"} | {data.file_name: [mine.json, "hf://datasets/org/pairs:dev"]} ## U7
        llama-factory | {dataset: org/x, dataset_dir: ONLINE} | {data.file_name: "hf://datasets/org/x"} ## U7
        # the default of a setting without a rule
        llama-factory | {train_from_scratch: false} | {data.file_name: mine.json, data.max_samples: null} ## U7
        # the reference is the base model
        llama-factory | {adapter_name_or_path: a, lora_rank: 8, lora_target: all} | {model.adapter_name_or_path: a, model.lora_rank: null, reference.model_args.adapter_name_or_path: null} ## U8
        axolotl | {rl: kto, rl_beta: 0.5, kto_desirable_weight: 0.2, warmup_steps: 0} | {task: unpaired, pref_loss: kto, desirable_weight: 0.2, beta: 0.5}
        axolotl | {num_epochs: null, warmup_ratio: null, sequence_len: null} | {training.num_train_epochs: 1.0, training.warmup_steps: 5, sequence_length: 512}
        axolotl | {use_ray: true, ray_num_workers: 4} | {pairs: 8} ## U6
        axolotl | {use_ray: false, ray_num_workers: 4} | {pairs: 2}
        axolotl | {rl: null, datasets: [{path: d.jsonl, type: chat_template}]} | {task: sft, data.score: assistant} ## U12
        axolotl | {eval_table_max_new_tokens: null} | {beta: 0.1}
        axolotl | {warmup_steps: 7, warmup_ratio: 0.1} | {training.warmup_steps: 7, training.warmup_ratio: 0.0} ## U20
        axolotl | {warmup_steps: 0, warmup_ratio: 0.1} | {training.warmup_steps: 0, training.warmup_ratio: 0.0}
        axolotl | {warmup_steps: 10, lr_scheduler: constant} | {training.warmup_steps: 0, training.lr_scheduler_type: constant}
        axolotl | {warmup_steps: null, lr_scheduler: constant} | {training.warmup_steps: 0, training.warmup_ratio: 0.0}
        axolotl | {warmup_steps: null, warmup_ratio: 0.1, max_steps: 99, save_steps: 9} | {training.warmup_steps: 0, training.warmup_ratio: 0.1} ## U20
        axolotl | {saves_per_epoch: 2, evals_per_epoch: 4, num_epochs: 2, val_set_size: 0.1} | {save_steps: 0.25, eval_steps: 0.125} ## U20
        axolotl | {saves_per_epoch: 1, num_epochs: 1} | {save_steps: null, eval_steps: null} ## U20
        # after each epoch, by default
        axolotl | {num_epochs: 4} | {save_steps: 0.25} ## U20
        axolotl | {save_strategy: epoch, num_epochs: 2} | {save_steps: 0.5} ## U20
        axolotl | {save_strategy: "no"} | {save_steps: null} ## U20
        axolotl | {save_steps: 0.2} | {save_steps: 0.2} ## U20
        axolotl | {save_steps: 50} | {save_steps: 50, eval_steps: null} ## U20
    """,
        yaml.safe_load,
    ),
)
def test_what_is_trained(peer: str, settings: Any, expected: Any, factory: Path) -> None:
    result = of({**BASES[peer], **settings}, peer, folder=factory)
    assert problems(result) == {}
    assert values_of(result, expected) == expected


@pytest.mark.parametrize(
    ("peer", "settings", "expected"),
    read_table(
        """
        llama-factory | {stage: sft} | [dataset, (data)] ## U7
        llama-factory | {dataset: modelscope} | [dataset, (data)] ## U7
        llama-factory | {dataset: drawn} | [dataset, (data)] ## U7
        llama-factory | {dataset: answers} | [dataset, (data)] ## U7
        llama-factory | {dataset: tagged} | [dataset, (data)] ## U7
        llama-factory | {dataset: images} | [dataset, (data)] ## U7
        llama-factory | {dataset: elsewhere} | [dataset, (data)] ## U7
        llama-factory | {model_name_or_path: org/Llama-3-8B-GPTQ} | [(model)] ## U7
        llama-factory | {model_name_or_path: org/Llama-3-8B-awq} | [(model)] ## U7
        llama-factory | {model_name_or_path: org/Llama-3-8B-AQLM-2Bit-1x16-hf} | [(model)] ## U7
        llama-factory | {do_train: false, do_predict: true} | [do_predict] ## U7
        llama-factory | {train_from_scratch: true} | [train_from_scratch] ## U7
        llama-factory | {dataset_dir: "REMOTE:llamafactory/demo_data"} | [dataset_dir, dataset, (data)] ## U6
        llama-factory | {dataset_dir: {mine: {}}} | [dataset_dir, dataset, (data)] ## U6
        llama-factory | {adapter_name_or_path: a, create_new_adapter: true} | [adapter_name_or_path, create_new_adapter, (adapter)] ## U8
        llama-factory | {adapter_name_or_path: "a,b"} | [adapter_name_or_path, (adapter)] ## U8
        # two names of one setting
        axolotl | {rl_beta: 0.2, orpo_alpha: 0.3} | [orpo_alpha]
        axolotl | {rl: null, datasets: [{path: d.jsonl, type: chat_template}], sample_packing: true} | [sample_packing]
        axolotl | {datasets: [{path: d.jsonl, type: zephyr.nectar}]} | [datasets, (data)]
        axolotl | {datasets: [{path: d.jsonl, type: mine.transform}]} | [datasets, (data)]
        axolotl | {datasets: [{path: d.jsonl, shards: 4}]} | [datasets, (data)]
        axolotl | {datasets: [{path: d.jsonl, type: {prompt_format: "Q: {prompt}"}}]} | [datasets, (data)]
        axolotl | {datasets: [{path: d.jsonl, roles: {user: [client]}}]} | [datasets, (data)]
        axolotl | {datasets: [{path: d.jsonl, message_property_mappings: {content: body}}]} | [datasets, (data)]
        axolotl | {chat_template: llama3, special_tokens: {eos_token: </s>}} | [special_tokens.eos_token]
        axolotl | {special_tokens: {bos_token: <b>}} | [special_tokens.bos_token]
        axolotl | {warmup_steps: null, save_steps: 9} | [(warm-up)] ## U20
        axolotl | {warmup_steps: null, save_steps: 9, max_steps: 1000} | [(warm-up)] ## U20
        axolotl | {save_strategy: epoch, num_epochs: 1.5} | [save_strategy] ## U20
        axolotl | {save_strategy: epoch, max_steps: 10} | [save_strategy] ## U20
    """,
        yaml.safe_load,
    ),
)
def test_what_is_not_possible(peer: str, settings: Any, expected: list[str], factory: Path) -> None:
    """A key in brackets is not determined: no key of the file says it."""
    result = of({**BASES[peer], **settings}, peer, folder=factory)
    unstated = {key for key in expected if key.startswith("(") and key != "(model)"}
    statuses = {key: MISSING if key in unstated else IMPOSSIBLE for key in expected}
    assert problems(result) == statuses


@pytest.mark.parametrize(
    ("values", "peer", "named"),
    [
        ({**AXOLOTL, "rl": "gdpo"}, "axolotl", "rl: gdpo"),
        ({**AXOLOTL, "rl": "grpo"}, "axolotl", "rl: grpo"),
        ({**FACTORY, "stage": "ppo"}, "llama-factory", "stage: ppo"),
        ({**BASIC, "model_name_or_path": "OpenGVLab/InternVL3-8B"}, "trl", "families of docs/vision"),
    ],
)  # fmt: skip
def test_other_algorithms_are_refused_by_name(values: Any, peer: str, named: str) -> None:
    with pytest.raises(ConfigError) as why:
        of(values, peer)
    assert named in str(why.value)
    assert ("see `rather rounds`" in str(why.value)) == (peer != "trl")


@pytest.mark.parametrize(
    ("values", "peer", "expected"),
    [
        ({**FACTORY, "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", "image_max_pixels": 262144},
         "llama-factory", {f"{DATA}.image_max_pixels": 262144, f"{MODEL}.freeze": None}),
        ({**BASIC, "model_name_or_path": "Qwen/Qwen3-VL-2B-Instruct"}, "trl", {f"{MODEL}.freeze": []}),
        ({**AXOLOTL, "base_model": "Qwen/Qwen3-VL-2B-Instruct"}, "axolotl", {f"{MODEL}.freeze": []}),
        ({**AXOLOTL, "base_model": "Qwen/Qwen3-VL-2B-Instruct", "adapter": "lora"}, "axolotl",
         {f"{MODEL}.freeze": None}),
    ],
)  # fmt: skip
def test_examples_with_images_say_what_may_differ(values: Any, peer: str, expected: Any) -> None:
    result = of(values, peer)
    assert values_of(result, expected) == expected
    row = row_of(result, "(images)")
    assert row.status == MISSING  # exit code 2: whether the tokens are equal is not known
    assert "sizes and tokens of images may differ" in row.note


def test_deepspeed_by_its_file_or_its_name(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    strategy = of({"deepspeed": str(file)}).config.actor_train.strategy_args
    assert strategy.strategy_config == {"config_file": str(file)}
    elsewhere = of({"stage": "dpo", "deepspeed": "examples/ds_z3_config.json"}, "llama-factory")
    assert value_at(elsewhere.config, STRATEGY) == "zero3"
    assert row_of(elsewhere, "deepspeed").status == CHANGED
    assert row_of(of({"deepspeed": "ds.json"}), "deepspeed").status == IMPOSSIBLE


@pytest.mark.defect("U12")
def test_the_number_of_devices_that_is_not_said(factory: Path) -> None:
    unknown = of(FACTORY, "llama-factory", folder=factory)
    assert "8 pairs on each device; the file does not say" in unknown.step
    assert "--devices" in unknown.step
    known = of(FACTORY, "llama-factory", devices=4, folder=factory)
    assert known.step == "A step has 32 pairs on 4 devices."


@pytest.mark.defect("U26")
@pytest.mark.parametrize("sharded", [{"deepspeed": "zero3.json"}, {"fsdp": "full_shard auto_wrap"}])
@pytest.mark.parametrize(("peer", "pairs"), [("llama-factory", 32), ("trl", 32)])
def test_sharded_weights_need_the_number_of_devices(
    sharded: dict[str, str], peer: str, pairs: int, factory: Path
) -> None:
    values, trainer = (FACTORY, None) if peer == "llama-factory" else (BASIC, "dpo")
    result = of({**values, **sharded}, peer, trainer, folder=factory)
    assert problems(result) == {"(devices)": MISSING}
    assert "the weights are divided among devices" in result.yaml()
    assert "pass --devices" in result.yaml()
    known = of({**values, **sharded}, peer, trainer, devices=4, folder=factory)
    assert (problems(known), known.config.global_batch()) == ({}, pairs)


ROLES = {"path": "d.jsonl", "type": "chat_template.default", "field_messages": "talk",
         "message_property_mappings": {"role": "from", "content": "value"},
         "roles": {"user": ["human"], "assistant": ["gpt"]}}  # fmt: skip
OWN = {"path": "d.jsonl", "type": {"field_prompt": "q", "prompt_format": "{prompt}", "field_chosen": "good"}}  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "template", "expected"),
    [
        (ROLES, "qwen_25", {f"{DATA}.columns": {"messages": "talk"}, "global_template": "qwen2_5"}),
        ({"path": "d.jsonl", "type": "chatml.intel"}, "llama3", {"global_template": "chatml"}),
        (OWN, "tokenizer_default", {f"{DATA}.columns": {"prompt": "q", "chosen": "good"}}),
    ],
)
def test_types_of_axolotl_name_columns_and_template(
    entry: Any, template: Any, expected: Any
) -> None:
    tokens = {"pad_token": "<p>"}
    values = {**AXOLOTL, "datasets": [entry], "chat_template": template, "special_tokens": tokens}
    result = of({**values, "adapter": "lora", "lora_r": 4, "load_in_8bit": True}, "axolotl")
    assert problems(result) == {}
    assert values_of(result, expected) == expected
    assert row_of(result, "load_in_8bit").status == CHANGED
    assert result.config.actor_train.model_args.quantization is None


# ---- a fraction of the run, which migrate writes


@pytest.mark.defect("U20")
@pytest.mark.parametrize(
    ("value", "total", "steps"), [(0.1, 30, 3), (0.1, 3, 1), (1 / 3, 9, 3), (0.3, 10, 3), (7, 3, 7)]
)
def test_a_fraction_of_the_run(value: float, total: int, steps: int) -> None:
    held_out = {"data_args": {"split": 5}}
    config = DPOConfig.model_validate(
        {"save_steps": value, "eval_steps": value, "validation": held_out}
    )
    assert config.interval("save_steps", total) == steps
    assert config.interval("eval_steps", total) == steps


@pytest.mark.defect("U20")
def test_a_fraction_needs_a_length() -> None:
    assert DPOConfig(save_steps=None).interval("save_steps", None) is None
    with pytest.raises(ConfigError, match=r"save_steps: 0\.5 is a fraction of the run"):
        DPOConfig(save_steps=0.5).interval("save_steps", None)
    with pytest.raises(ConfigError, match="a fraction of the run between 0 and 1"):
        DPOConfig(save_steps=1.5)
