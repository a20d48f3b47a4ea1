"""Migrate converts, says what is missing, or refuses; it never trains something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rather.cli import app
from rather.config.inherit import value_at
from rather.config.load import load
from rather.errors import ConfigError
from rather.tools.migrate.engine import Migrated, guess, migrate
from rather.tools.migrate.peers import PEERS
from rather.tools.migrate.rules import CHANGED, IMPOSSIBLE, LEFT_OUT, MISSING, NEEDLESS, UNKNOWN
from rather.tools.migrate.shell import commands
from rather.tools.migrate.source import read_file, read_line

LR, RANK = "actor_train.training_args.learning_rate", "actor_train.model_args.lora_rank"
DTYPE = "actor_train.model_args.dtype"
TRL = "python examples/scripts/{} --model_name_or_path m --dataset_name d.jsonl"


def of(source: str | Path, peer: str | None = None) -> Migrated:
    settings = read_line(source) if isinstance(source, str) else read_file(source)
    return migrate(settings, PEERS[peer] if peer else guess(settings, PEERS))


def problems(result: Migrated) -> dict[str, str]:
    """Return what is not converted; most lines of these tests name no data, which is one of them."""
    bad = (MISSING, IMPOSSIBLE, UNKNOWN)
    rows = [row for row in result.rows if row.key != "(data)"]
    return {row.key: row.status for row in rows if row.status in bad}


def saved(result: Migrated, folder: Path) -> dict[str, Any]:
    """Return the values that Rather's own loader reads from the written YAML."""
    file = folder / "written.yaml"
    file.write_text(result.yaml(), encoding="utf-8")
    config = load(file)
    paths = ("pref_loss", "beta", "cpo_alpha", "rpo_alpha", "gamma", LR, RANK, DTYPE)
    return {path: value_at(config, path) for path in paths} | {"pairs": config.global_batch()}


# ---- the program decides the algorithm


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (TRL.format("dpo.py"), {"pref_loss": "sigmoid", "beta": 0.1, "pairs": 8, RANK: None}),
        (TRL.format("orpo.py") + " --beta 0.3", {"pref_loss": "orpo", "beta": 0.3}),
        (TRL.format("cpo.py"), {"pref_loss": "cpo", "cpo_alpha": 1.0, "rpo_alpha": None}),
        (TRL.format("cpo.py") + " --loss_type simpo --cpo_alpha 0.5",
         {"pref_loss": "simpo", "rpo_alpha": 0.5, "gamma": 0.5, "cpo_alpha": None}),
        ("colossalai run --nproc_per_node 2 train_orpo.py --pretrain m --dataset a --lam 0.5 --batch_size 1",
         {"pref_loss": "orpo", "beta": 0.5, "pairs": 16, LR: 5e-6, DTYPE: "fp16"}),
        ("colossalai run --nproc_per_node 2 train_dpo.py --pretrain m --dataset a --batch_size 1",
         {"pref_loss": "sigmoid", "beta": 0.1, "pairs": 2}),
    ],
)  # fmt: skip
def test_the_program_decides_the_loss(line: str, expected: dict[str, Any], tmp_path: Path) -> None:
    result = of(line)
    assert problems(result) == {}
    found = saved(result, tmp_path)
    assert {path: found[path] for path in expected} == expected


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (TRL.format("online_dpo.py"), "online_dpo"),
        (TRL.format("dpo_vlm.py"), "families of docs/vision.md"),
        ("deepspeed --module openrlhf.cli.train_kto --pretrain m", "train_kto"),
        ("swift rlhf --rlhf_type dpo --model OpenGVLab/InternVL3-8B", "families of docs/vision.md"),
        ({"base_model": "m", "rl": "gdpo", "sequence_len": 10}, "rl: gdpo"),
        ({"base_model": "m", "rl": "grpo", "sequence_len": 10}, "rl: grpo"),
        ({"model_name_or_path": "m", "stage": "ppo", "cutoff_len": 10}, "stage: ppo"),
        (TRL.format("sft_vlm.py"), "sft_vlm"),
        ({"grpo": {"seed": 1}, "policy": {"model_name": "m"}}, "grpo"),
    ],
)  # fmt: skip
def test_other_algorithms_are_refused_by_name(source: Any, named: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    if isinstance(source, dict):
        file.write_text(yaml.safe_dump(source))
    with pytest.raises(ConfigError) as why:
        of(source if isinstance(source, str) else file)
    assert named in str(why.value)
    is_online = any(name in named for name in ("online", "grpo", "gdpo", "ppo"))
    assert ("see `rather rounds`" in str(why.value)) == is_online


FREEZE = "actor_train.model_args.freeze"
PIXELS = "actor_train.data_args.image_max_pixels"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", "stage": "dpo", "do_train": True,
          "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "pref_beta": 0.1,
          "image_max_pixels": 262144, "video_max_pixels": 16384, "template": "qwen2_vl",
          "dataset": "d.json", "cutoff_len": 2048, "bf16": True}, {PIXELS: 262144}),
        ("swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-VL-7B-Instruct --dataset d.jsonl "
         "--max_pixels 1003520", {PIXELS: 1003520}),
        ("python examples/scripts/dpo_vlm.py --model_name_or_path Qwen/Qwen3-VL-2B-Instruct "
         "--dataset_name d.jsonl", {FREEZE: []}),
        ("python examples/scripts/dpo_vlm.py --model_name_or_path Qwen/Qwen3.5-0.8B "
         "--dataset_name rlaif-v.jsonl", {FREEZE: []}),
    ],
)  # fmt: skip
def test_examples_with_images_are_mapped_and_say_what_may_differ(
    source: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "x.yaml"
    if isinstance(source, dict):
        file.write_text(yaml.safe_dump(source))
    result = of(source if isinstance(source, str) else file)
    (tmp_path / "written.yaml").write_text(result.yaml(), encoding="utf-8")
    config = load(tmp_path / "written.yaml")
    assert {path: value_at(config, path) for path in expected} == expected
    [row] = [row for row in result.rows if row.key == "(images)"]
    assert row.status == MISSING  # exit code 2: whether the tokens are equal is not known
    assert "sizes and tokens of images may differ" in row.note


LF = {"model_name_or_path": "m", "dataset": "d", "bf16": True}
SCORE = "actor_train.data_args.score"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TRL.format("kto.py") + " --desirable_weight 2",
         {"task": "unpaired", "pref_loss": "kto", "desirable_weight": 2, LR: 1e-6}),
        ("trl kto --model_name_or_path m --loss_type apo_zero_unpaired",
         {"task": "unpaired", "pref_loss": "apo_zero_unpaired", "beta": 0.1}),
        ("trl sft --model_name_or_path m --assistant_only_loss", {"task": "sft", SCORE: "assistant", LR: 2e-5}),
        ("swift rlhf --rlhf_type kto --model m --torch_dtype bfloat16",
         {"task": "unpaired", "pref_loss": "kto", LR: 1e-4}),
        ("swift sft --model m --torch_dtype bfloat16", {"task": "sft", SCORE: "assistant", RANK: 8}),
        ("megatron sft --model m --torch_dtype bfloat16 --train_iters 5",
         {"task": "sft", RANK: None, "train_batch_size": 16}),
        ("colossalai run --nproc_per_node 1 train_kto.py --pretrain m --dataset a --undesirable_weight 0.5",
         {"task": "unpaired", "pref_loss": "kto", "undesirable_weight": 0.5}),
        ("python -m openrlhf.cli.train_sft --model.model_name_or_path m --data.apply_chat_template "
         "--data.input_key q --data.multiturn",
         {"task": "sft", SCORE: "assistant", LR: 5e-6, "actor_train.data_args.columns": {"messages": "q"}}),
        ({**LF, "stage": "kto", "kto_rejected_weight": 0.5},
         {"task": "unpaired", "pref_loss": "kto", "undesirable_weight": 0.5, "beta": 0.1}),
        ("trl reward --model_name_or_path m --center_rewards_coefficient 0.01",
         {"task": "reward", "pref_loss": "bradley_terry", "center_rewards_coefficient": 0.01, LR: 1e-4}),
        ("swift rlhf --rlhf_type rm --model m --torch_dtype bfloat16", {"task": "reward", RANK: 8}),
        ("python -m openrlhf.cli.train_rm --model.model_name_or_path m --data.apply_chat_template",
         {"task": "reward", LR: 9e-6, "train_batch_size": 128}),
        ({**LF, "stage": "rm"}, {"task": "reward", "pref_loss": "bradley_terry"}),
        ({**LF, "stage": "sft"}, {"task": "sft", SCORE: "assistant"}),
        ({**LF, "stage": "sft", "mask_history": True}, {"task": "sft", SCORE: "last"}),
        ({"base_model": "m", "rl": "kto", "learning_rate": 1e-5, "rl_beta": 0.5, "kto_desirable_weight": 0.2,
          "warmup_steps": 0},
         {"task": "unpaired", "pref_loss": "kto", "desirable_weight": 0.2, "beta": 0.5}),
    ],
)  # fmt: skip
def test_single_answers_and_imitation(
    source: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "x.yaml"
    if isinstance(source, dict):
        file.write_text(yaml.safe_dump(source))
        entry = {"file_name": "d.json", "ranking": source.get("stage") == "rm"}
        (tmp_path / "dataset_info.json").write_text(json.dumps({"d": entry}))
    result = of(source if isinstance(source, str) else file)
    assert problems(result) == {}
    assert {path: value_at(result.config, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trl sft --model_name_or_path m", {"(scored turns)": MISSING}),  # depends on the rows' columns
        ("trl sft --model_name_or_path m --assistant_only_loss --packing", {"packing": IMPOSSIBLE}),
        ("trl sft --model_name_or_path m --assistant_only_loss --loss_type dft", {"loss_type": IMPOSSIBLE}),
        ("trl kto --model_name_or_path m --loss_type sigmoid",
         {"(loss)": MISSING, "loss_type": IMPOSSIBLE}),
        ("python -m openrlhf.cli.train_sft --model.model_name_or_path m", {"input_template": IMPOSSIBLE}),
        ("colossalai run --nproc_per_node 1 train_kto.py --pretrain m --auto_weight", {"auto_weight": IMPOSSIBLE}),
    ],
)  # fmt: skip
def test_what_single_answers_do_not_determine(line: str, expected: dict[str, str]) -> None:
    assert problems(of(line)) == expected


def test_a_trl_file_without_its_program_does_not_determine_the_loss(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("model_name_or_path: m\nbeta: 0.1\nuse_peft: false\n")
    assert problems(of(file)) == {"(loss)": MISSING, "(learning rate)": MISSING}
    assert problems(of(f"trl dpo --config {file}")) == {}


# ---- defaults are facts of the tool


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--tuner_type full", {RANK: None, LR: 1e-5, "beta": 0.1, "pairs": 16}),
        ("--train_type full", {RANK: None, LR: 1e-5}),
        ("", {RANK: 8, LR: 1e-4, "pref_loss": "sigmoid"}),
        ("--rlhf_type simpo", {"pref_loss": "simpo", "beta": 2.0, "gamma": 1.0, "rpo_alpha": 1.0}),
        ("--rlhf_type cpo", {"pref_loss": "cpo", "beta": 0.1, "cpo_alpha": 1.0, "rpo_alpha": None}),
        ("--rlhf_type orpo", {"pref_loss": "orpo", "beta": 0.1, "cpo_alpha": None}),
    ],
)
def test_defaults_of_swift(flags: str, expected: dict[str, Any], tmp_path: Path) -> None:
    line = "NPROC_PER_NODE=2 swift rlhf --model m --dataset d.jsonl --torch_dtype bfloat16 "
    found = saved(of(line + flags), tmp_path)
    assert {path: found[path] for path in expected} == expected


def test_megatron_swift(tmp_path: Path) -> None:
    line = (
        "NPROC_PER_NODE=8 megatron rlhf --rlhf_type dpo --model m --dataset d.jsonl --lr 2e-5 --min_lr 2e-6 "
        "--global_batch_size 32 --micro_batch_size 4 --tensor_model_parallel_size 4 --finetune true"
    )
    result = of(line)
    assert problems(result) == {"(precision)": MISSING}  # it is that of the model
    found = saved(result, tmp_path)
    assert (found[RANK], found[LR], found["pairs"]) == (None, 2e-5, 32)
    strategy = result.config.actor_train.strategy_args
    assert (strategy.strategy_name, strategy.strategy_config) == ("megatron_train", {"tp_size": 4})


SCRIPT = """\
set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \\
   --ckpt.output_dir ./out/run \\
   --train.batch_size 256 \\
   --model.model_name_or_path org/m \\
   --adam.lr 5e-7 \\
   --data.dataset d.jsonl
EOF
    # --model.ipo_enable
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""


def test_dotted_keys_of_openrlhf_in_a_here_document(tmp_path: Path) -> None:
    file = tmp_path / "train_dpo.sh"
    file.write_text(SCRIPT)
    result = of(file)
    assert problems(result) == {}
    found = saved(result, tmp_path)
    assert (found[LR], found["pairs"], found[DTYPE], found["pref_loss"]) == (5e-7, 256, "bf16", "sigmoid")  # fmt: skip
    assert result.config.actor_train.strategy_args.strategy_name == "zero2"
    result = of(
        "python -m openrlhf.cli.train_dpo --pretrain m --beta 0.2 --adam.learning_rate 1e-6"
    )
    assert problems(result) == {"(precision)": MISSING, "adam.learning_rate": UNKNOWN}


PARENT = """\
dpo: {max_num_steps: 9, reference_policy_kl_penalty: 0.05, preference_average_log_probs: false,
      sft_average_log_probs: "${.preference_average_log_probs}"}
policy:
  model_name: org/parent
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 64
  precision: bfloat16
  max_total_sequence_length: 512
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2}
  megatron_cfg: {enabled: false, optimizer: {lr: 1.0}}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6}}
data: {train: {dataset_name: PreferenceDataset, data_path: d.jsonl}}
logger: {wandb_enabled: true, tensorboard_enabled: true}
cluster: {gpus_per_node: 4, num_nodes: 1}
"""


def test_recipes_of_nemo_rl_inherit(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "dpo.yaml").write_text(PARENT)
    child = tmp_path / "configs" / "child.yaml"
    child.write_text(
        "defaults: ../dpo.yaml\npolicy: {model_name: org/child, train_global_batch_size: 8}\n"
    )
    result = of(child)
    assert problems(result) == {}
    found = saved(result, tmp_path)
    assert (found[LR], found["beta"], found["pairs"], found[DTYPE]) == (5e-6, 0.05, 8, "bf16")
    config = result.config
    assert config.actor_train.model_args.tokenizer_name_or_path == config.pretrain == "org/child"
    assert config.actor_train.strategy_args.strategy_config == {"tp_size": 2}
    assert config.track_with == ["tensorboard", "wandb"] or config.track_with == [
        "wandb",
        "tensorboard",
    ]
    line = f"uv run examples/run_dpo.py --config {child} policy.optimizer.kwargs.lr=1e-6 policy.megatron_cfg.anything=1"
    assert problems(of(line)) == {
        "policy.megatron_cfg.anything": UNKNOWN
    }  # of a backend that is off, too
    line = f"uv run examples/run_dpo.py --config {child} policy.dtensor_cfg.lora_cfg.enbled=true"
    assert problems(of(line)) == {"policy.dtensor_cfg.lora_cfg.enbled": UNKNOWN}
    child.write_text("defaults: ../nowhere.yaml\npolicy: {model_name: m}\n")
    with pytest.raises(ConfigError, match=r"nowhere.yaml: this parent"):
        of(child, "nemo-rl")
    child.write_text("grpo: {num_prompts_per_step: 8}\n")
    with pytest.raises(ConfigError, match="grpo is not training on preference pairs"):
        of(child, "nemo-rl")


def test_references_that_cannot_be_filled_in_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    text = PARENT.replace("model_name: org/parent", "model_name: '${oc.env:HOME}'")
    file.write_text(text.replace("lr: 5.0e-6", "lr: '${mul:2,3}'"))
    found = problems(of(file))
    assert found["policy.model_name"] == found["policy.optimizer.kwargs.lr"] == IMPOSSIBLE
    assert found["(model)"] == found["(learning rate)"] == MISSING


# ---- shell scripts


def test_a_script_with_functions_arrays_and_arithmetic(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "#!/bin/bash\nfree_gpus() {\n  local IDS=$(nvidia-smi --query-gpu=memory.used --format=csv | head -n $1)\n}\n"
        "free_gpus 2\nGPUS=2  # how many\nMODEL=\"org/m\"\nNAME=\"${MODEL}-run-$(date +%F)\"\n"
        "declare -a data=(\n  a.jsonl  # first\n  'b c.jsonl'\n)\n"
        "python prepare.py --lr 3\nNPROC_PER_NODE=$GPUS swift rlhf --rlhf_type dpo --model $MODEL \\\n"
        "  --dataset \"${data[@]}\" --torch_dtype bfloat16 --output_dir \"out/$NAME\" \\\n"
        "  --gradient_accumulation_steps $(expr 16 / $GPUS) --max_length $((512 * 2)) 2>&1 | tee log.txt\n"
    )  # fmt: skip
    result = of(file)
    assert problems(result) == {}
    config = result.config
    assert (config.pretrain, config.sequence_length, config.global_batch()) == ("org/m", 1024, 16)
    assert config.exp_name == "m-run-date"


def test_a_value_that_only_a_run_knows_is_not_guessed() -> None:
    text = "if [ $X ]; then LR=1e-3; else LR=1e-5; fi\nswift rlhf --model $M --learning_rate $LR --output_dir $OUT\n"
    result = of(text)
    found = problems(result)
    assert found["learning_rate"] == found["model"] == IMPOSSIBLE
    assert found["(learning rate)"] == found["(model)"] == MISSING
    assert {row.status for row in result.rows if row.key == "output_dir"} == {LEFT_OUT}


def test_several_training_commands_are_refused() -> None:
    with pytest.raises(ConfigError, match="several commands"):
        read_line("trl sft --beta 1\ntrl dpo --beta 1\n")


def test_a_script_that_doubles_a_variable_ends_soon() -> None:
    text = "a=xxxxxxxxxx\n" + 'a="$a$a"\n' * 60
    with pytest.raises(ValueError, match="too long"):
        commands(text)


# ---- every key is in one of four classes


def test_four_classes_of_keys() -> None:
    line = "swift rlhf --model m --torch_dtype bfloat16 --lorra_rank 4 --enable_dft_loss true --ddp_timeout 9"
    result = of(line + " --hub_token hf_canary --trust_remote_code true")
    assert problems(result) == {
        "lorra_rank": UNKNOWN,
        "enable_dft_loss": IMPOSSIBLE,
        "trust_remote_code": UNKNOWN,
    }
    rows = {row.key: row for row in result.rows}
    assert "did you mean lora_rank?" in rows["lorra_rank"].note
    assert rows["ddp_timeout"].status == NEEDLESS
    assert rows["ddp_timeout"].note
    assert "canary" not in result.yaml()


def test_every_rule_without_effect_has_a_reason() -> None:
    assert all(peer.version for peer in PEERS.values())


def test_incomplete_files_have_another_name_and_exit_code_2(tmp_path: Path) -> None:
    source, out = tmp_path / "trl.yaml", tmp_path / "dpo.yaml"
    long = "a_key_with_a_very_long_name_" * 4
    source.write_text(
        f"model_name_or_path: m\nloss_type: sigmoid\nlearning_rate: 1.0e-4\n{long}: 1\n"
        "dataset_name: pairs.jsonl\n"
    )
    command = ["migrate", str(source), "--from", "trl", "--trainer", "dpo", "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert done.output.startswith(f"not known: {long} = 1; ")
    assert not out.exists()
    file = tmp_path / "dpo.incomplete.yaml"
    assert long in file.read_text().splitlines()[2]
    assert load(file).actor_train.training_args.learning_rate == 1e-4
    done = CliRunner().invoke(app, [*command, "--json", "--force"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["complete"], told["keys"][0]["key"]) == (2, False, long)
    assert told["file"].endswith("dpo.incomplete.yaml")


# ---- what only the published examples have


@pytest.mark.parametrize(
    ("flags", "pairs", "strategy"),
    [("--num_processes 4", 32, None), ("--accelerate_config zero2", 64, "zero2"),
     ("--accelerate_config zero3 --num_processes 2", 16, "zero3")],
)  # fmt: skip
def test_processes_of_trls_launcher(flags: str, pairs: int, strategy: str | None) -> None:
    line = f"trl dpo --model_name_or_path m --dataset_name d.jsonl {flags}"
    result = of(line)
    assert problems(result) == {}
    assert result.config.global_batch() == pairs
    assert result.config.actor_train.strategy_args.strategy_name == strategy
    assert problems(of(line + " --accelerate_config mine")) == {"accelerate_config": IMPOSSIBLE}


def test_a_mixture_of_trl_is_a_list_of_files(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("model_name_or_path: m\ndatasets:\n- {path: a.jsonl}\n- {path: b.jsonl}\n")
    result = of(f"trl dpo --config {file}")
    assert problems(result) == {}
    assert result.config.actor_train.data_args.file_name == ["a.jsonl", "b.jsonl"]
    file.write_text("model_name_or_path: m\ndatasets: [{path: a.jsonl, fraction: 0.5}]\n")
    assert problems(of(f"trl dpo --config {file}")) == {"datasets": IMPOSSIBLE}


def test_nemo_rl_without_a_config_uses_the_one_next_to_the_program(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "dpo.yaml").write_text(PARENT)
    (tmp_path / "run_dpo.py").touch()
    line = "uv run python run_dpo.py policy.model_name=org/other dpo.sft_loss_weight=0.1"
    result = migrate(read_line(line, folder=tmp_path), PEERS["nemo-rl"])
    assert result.config.pretrain == "org/other"  # and so is what refers to it
    assert result.config.actor_train.model_args.tokenizer_name_or_path == "org/other"
    assert problems(result) == {"dpo.sft_loss_weight": IMPOSSIBLE}  # a sum there, a mean here
    line += " dpo.preference_average_log_probs=true"
    result = migrate(read_line(line, folder=tmp_path), PEERS["nemo-rl"])
    assert (problems(result), result.config.pref_ftx) == ({}, 0.1)


def test_swift_takes_the_precision_of_a_model_that_is_here(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text('{"torch_dtype": "float32"}')
    line = f'swift rlhf --model {model} --dataset d.jsonl --columns \'{{"talk": "messages"}}\''
    result = of(line)
    assert problems(result) == {}
    assert result.config.actor_train.model_args.dtype == "fp16"
    assert result.config.actor_train.data_args.columns == {"messages": "talk"}
    assert problems(of(line + " --packing true")) == {"packing": IMPOSSIBLE}  # packs, not pairs
    assert problems(of(line + " --packing false")) == {}


AXOLOTL = {"base_model": "m", "rl": "dpo", "learning_rate": 1e-5, "adapter": "lora", "lora_r": 4,
           "warmup_steps": 5}  # fmt: skip


def axolotl(tmp_path: Path, entry: dict[str, Any], **more: Any) -> Migrated:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({**AXOLOTL, "datasets": [entry], **more}))
    return of(file, "axolotl")


def test_types_of_axolotl_name_columns_and_template(tmp_path: Path) -> None:
    entry = {"path": "d.jsonl", "type": "chat_template.default", "field_messages": "talk",
             "message_property_mappings": {"role": "from", "content": "value"},
             "roles": {"user": ["human"], "assistant": ["gpt"]}}  # fmt: skip
    result = axolotl(tmp_path, entry, chat_template="qwen_25")
    assert problems(result) == {}
    data = result.config.actor_train.data_args
    assert (data.columns, result.config.global_template) == ({"messages": "talk"}, "qwen2_5")
    result = axolotl(tmp_path, {"path": "d.jsonl", "type": "chatml.intel"}, chat_template="llama3")
    assert (problems(result), result.config.global_template) == ({}, "chatml")  # the type wins
    own = {"field_prompt": "q", "prompt_format": "{prompt}", "field_chosen": "good"}
    result = axolotl(tmp_path, {"path": "d.jsonl", "type": own})
    assert result.config.actor_train.data_args.columns == {"prompt": "q", "chosen": "good"}


@pytest.mark.parametrize(
    "entry",
    [{"type": "zephyr.nectar"}, {"type": "mine.transform"}, {"type": {"prompt_format": "Q: {prompt}"}},
     {"shards": 4}, {"message_property_mappings": {"content": "body"}}, {"roles": {"user": ["client"]}}],
)  # fmt: skip
def test_rows_of_axolotl_that_are_not_read(entry: dict[str, Any], tmp_path: Path) -> None:
    result = axolotl(tmp_path, {"path": "d.jsonl", **entry})
    assert problems(result) == {"datasets": IMPOSSIBLE}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [({"pad_token": "<p>", "eos_token": "<|eot_id|>"}, {}), ({"eos_token": "</s>"}, {"special_tokens": IMPOSSIBLE}),
     ({"bos_token": "<b>"}, {"special_tokens": IMPOSSIBLE})],
)  # fmt: skip
def test_tokens_and_8_bit_weights_of_axolotl(
    tokens: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    more = {"special_tokens": tokens, "chat_template": "llama3", "load_in_8bit": True}
    result = axolotl(tmp_path, {"path": "d.jsonl"}, **more)
    assert problems(result) == expected
    assert {row.status for row in result.rows if row.key == "load_in_8bit"} == {CHANGED}
    assert result.config.actor_train.model_args.quantization is None


def test_a_script_knows_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "examples" / "mine").mkdir(parents=True)
    (tmp_path / "examples" / "mine" / "c.yaml").write_text("pretrain: org/m\nbeta: 0.2\n")
    script = tmp_path / "examples" / "mine" / "run.sh"
    script.write_text(
        "P=$(basename $(dirname $0))\n"
        "python examples/start_dpo_pipeline.py --config_path $P --config_name c\n"
    )
    assert of(script, "roll").config.beta == 0.2


# ---- attacks on the published examples: none of these may be converted into something else


SWIFT = "swift rlhf --model m --dataset d.jsonl --torch_dtype bfloat16"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (SWIFT + " --lr 1e-5 --learning_rate 2e-5", {"learning_rate": IMPOSSIBLE}),
        (SWIFT + " -learning_rate 1e-5", {"-learning_rate": UNKNOWN, "1e-5": UNKNOWN}),
        (SWIFT + " --per_device_train_batch_size $SIZE",
         {"(batch)": MISSING, "per_device_train_batch_size": IMPOSSIBLE}),
        (SWIFT + " --model_tokn abc", {"model_tokn": UNKNOWN}),  # a secret, but a typing error first
        ("NPROC_PER_NODE=$GPUS " + SWIFT, {"(devices)": MISSING}),
        ("NPROC_PER_NODE=4 NNODES=$NODES " + SWIFT, {"(devices)": MISSING}),
        ("torchrun --nproc_per_node gpu " + TRL.format("dpo.py"), {"(devices)": MISSING}),
        ("deepspeed --include localhost:0,1 " + TRL.format("dpo.py"), {"(devices)": MISSING}),
        (TRL.format("orpo.py") + " --loss_type ipo", {"loss_type": IMPOSSIBLE}),
        (TRL.format("dpo.py") + " --dtype float16", {"dtype": IMPOSSIBLE}),
        (TRL.format("dpo.py") + " --model_init_kwargs '{revision: x}'", {"model_init_kwargs": IMPOSSIBLE}),
        (TRL.format("dpo.py") + " --accelerator_config '{split_batches: true}'",
         {"accelerator_config": IMPOSSIBLE}),
        (TRL.format("orpo.py").replace(" m ", " org/Mix-30B-A3B "), {"(router loss)": MISSING}),
        ("python -m openrlhf.cli.train_dpo --model.model_name_or_path m --model.ipo_enable",
         {"model.ipo_enable": IMPOSSIBLE}),
    ],
)  # fmt: skip
def test_what_is_not_certain_is_reported(line: str, expected: dict[str, str]) -> None:
    assert problems(of(line)) == expected


def test_transformers_goes_on_for_max_steps_whatever_the_epochs() -> None:
    config = of(TRL.format("dpo.py") + " --max_steps 500 --num_train_epochs 1").config
    assert config.max_steps == config.actor_train.training_args.num_train_epochs == 500
    nothing = of(TRL.format("dpo.py") + " --max_steps -1").config
    assert (nothing.max_steps, nothing.actor_train.training_args.num_train_epochs) == (None, 3.0)


@pytest.mark.parametrize(
    ("model", "flags", "expected"),
    [("org/Mix-8x7B", "", 0.001), ("org/Mix-8x7B", "--router_aux_loss_coef 0.02", 0.02), ("org/Plain-7B", "", None)],
)  # fmt: skip
def test_the_router_loss_of_mixtures(model: str, flags: str, expected: float | None) -> None:
    result = of(f"trl dpo --model_name_or_path {model} --dataset_name d.jsonl {flags}")
    assert problems(result) == {}
    assert result.config.actor_train.model_args.moe_aux_loss_coef == expected


def test_an_empty_key_of_a_yaml_is_the_default_unless_it_has_a_meaning(tmp_path: Path) -> None:
    entry = {"path": "d.jsonl"}
    result = axolotl(tmp_path, entry, num_epochs=None, warmup_ratio=None, sequence_len=None)
    training = result.config.actor_train.training_args
    assert (training.num_train_epochs, training.warmup_steps) == (1.0, 5)
    assert result.config.sequence_length == 512
    no_limit = of("trl dpo --model_name_or_path m --dataset_name d.jsonl --max_length None")
    assert no_limit.config.sequence_length == 32768
    result = axolotl(tmp_path, entry, rl_beta=0.2, orpo_alpha=0.3)
    assert problems(result) == {"rl_beta": IMPOSSIBLE}  # two names of one setting


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("A=(--lr 1e-5)\nA+=(--beta 0.3)\n{} ${{A[@]}}", {LR: 1e-5, "beta": 0.3}),
        ("A=0.\nA+=3\n{} --beta $A", {"beta": 0.3}),
        ("B=\n{} --beta ${{B:-0.3}}", {"beta": 0.3}),
        ("B=0.2\n{} --beta ${{B:-0.3}}", {"beta": 0.2}),
        ("num_processes=9\nNPROC_PER_NODE=2 {}", {"pairs": 16}),  # a variable is not a launcher's
        ("B=0.25\n{} --beta ${{B:0:3}}", "beta"),
        ("B=0.25\n{} --beta ${{B:+0.1}}", "beta"),
        ("B=(1 2)\nB[0]=3\n{} --beta $B", "beta"),
    ],
)
def test_more_of_the_shell(script: str, expected: Any, tmp_path: Path) -> None:
    result = of(script.format(SWIFT))
    if isinstance(expected, str):
        assert problems(result) == {expected: IMPOSSIBLE, f"({expected})": MISSING}
        return
    assert problems(result) == {}
    found = saved(result, tmp_path)
    assert {key: found[key] for key in expected} == expected


def test_hosts_of_a_file_count(tmp_path: Path) -> None:
    line = (
        "colossalai run --nproc_per_node 2 --hostfile hosts train_dpo.py --pretrain m --dataset a"
    )
    lost = migrate(read_line(line, folder=tmp_path), PEERS["colossalchat"])
    assert problems(lost) == {"(devices)": MISSING}
    (tmp_path / "hosts").write_text("one\ntwo\n")
    result = migrate(read_line(line, folder=tmp_path), PEERS["colossalchat"])
    assert result.config.global_batch() == 2 * 2 * 4


LINEAR = "torch.optim.lr_scheduler.LinearLR"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(LINEAR, {"start_factor": 0.1, "total_iters": 2}), ("x.ConstantLR", {"factor": 1.0, "total_iters": 99})], ("constant", 2)),
        ([(LINEAR, {"start_factor": 0.1, "total_iters": 2}), ("x.CosineAnnealingLR", {"T_max": 7})], ("cosine", 2)),
        ([(LINEAR, {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 9})], ("linear", 0)),
        ([("x.ConstantLR", {"factor": 0.5, "total_iters": 99})], None),
        ([("x.CosineAnnealingLR", {"T_max": 70})], None),
        ([("x.StepLR", {"step_size": 3})], None),
    ],
)  # fmt: skip
def test_schedules_of_nemo_rl(parts: Any, expected: Any, tmp_path: Path) -> None:
    values = yaml.safe_load(PARENT)
    values["policy"]["scheduler"] = [{"name": name, "kwargs": more} for name, more in parts]
    values["policy"]["scheduler"].append({"milestones": [2]})
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(values))
    result = of(file)
    training = result.config.actor_train.training_args
    assert problems(result) == ({} if expected else {"policy.scheduler": IMPOSSIBLE})
    if expected:
        assert (training.lr_scheduler_type, training.warmup_steps) == expected


def test_the_backend_that_is_on_has_the_optimizer(tmp_path: Path) -> None:
    values = yaml.safe_load(PARENT)
    values["policy"]["dtensor_cfg"]["enabled"] = False
    values["policy"]["megatron_cfg"] = {
        "enabled": True,
        "optimizer": {"lr": 1e-7, "clip_grad": 0.5},
    }
    values["policy"]["max_grad_norm"] = 1.0
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(values))
    result = of(file)
    assert problems(result) == {}
    assert result.config.actor_train.training_args.learning_rate == 1e-7
    assert result.config.max_grad_norm == 0.5


@pytest.mark.parametrize(
    ("flags", "files"),
    [
        ("--dataset_name org/d", ("hf://datasets/org/d", None)),
        ("--dataset_name org/d --dataset_config c --eval_strategy epoch",
         ("hf://datasets/org/d:c/train", "hf://datasets/org/d:c/test")),
        ("--dataset_name org/d --dataset_train_split 'train[:9]'", None),
        ("--dataset_name ./here", ("here.jsonl", None)),
    ],
)  # fmt: skip
def test_data_sets_of_the_hub(flags: str, files: Any) -> None:
    result = of(f"trl dpo --model_name_or_path m {flags}")
    assert problems(result) == ({} if files else {"dataset_name": IMPOSSIBLE})
    if files:
        data = result.config.actor_train.data_args, result.config.validation.data_args
        assert (data[0].file_name, data[1].file_name) == files


# ---- files beside the config, and files that are not settings


def test_dataset_info_of_llama_factory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    entry = {"file_name": "pairs.json", "ranking": True, "columns": {"chosen": "chosen"}}
    registry = tmp_path / "data" / "dataset_info.json"
    registry.write_text(json.dumps({"mine": entry}))
    config = tmp_path / "x.yaml"
    config.write_text(
        "model_name_or_path: m\nstage: dpo\nbf16: true\ndataset: mine\nmax_samples: 10\n"
    )
    result = of(config)
    assert result.config.actor_train.data_args.file_name == "pairs.json"
    assert problems(result) == {}
    assert result.config.actor_train.data_args.max_samples == 10
    assert result.config.actor_train.data_args.dataset_dir == str(tmp_path / "data")
    assert result.config.actor_train.model_args.lora_alpha == 16.0
    renamed = {"prompt": "question", "chosen": "good", "rejected": "rejected"}
    registry.write_text(json.dumps({"mine": {**entry, "columns": renamed}}))
    found = of(config).config.actor_train.data_args.columns
    assert found == {"instruction": "question", "chosen": "good"}
    for other in (
        {"tags": {"user_tag": "client"}},
        {"ranking": False},
        {"columns": {"images": "i"}},
    ):
        registry.write_text(json.dumps({"mine": {**entry, **other}}))
        assert problems(of(config))["dataset"] == IMPOSSIBLE
    registry.unlink()
    assert problems(of(config)) == {"dataset": IMPOSSIBLE}  # which file, with which columns?


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("train.py", "x = 1", "calls none of TRL's trainers"), ("README.md", "# trl dpo", "holds no settings"),
     ("a.yaml", "compute_environment: LOCAL\ndistributed_type: NO\nmixed_precision: bf16\n", "configures accelerate")],
)  # fmt: skip
def test_files_without_settings_are_refused(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_file(tmp_path / name)
