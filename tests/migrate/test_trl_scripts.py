"""Python scripts with TRL's trainers are read without being run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rather.cli import app
from rather.config.inherit import value_at
from rather.errors import ConfigError
from rather.tools.migrate.engine import Migrated, guess, migrate
from rather.tools.migrate.peers import PEERS
from rather.tools.migrate.rules import IMPOSSIBLE, MISSING, UNKNOWN
from rather.tools.migrate.source import read_file, read_line

TRAINING, MODEL = "actor_train.training_args", "actor_train.model_args"
START = """
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainingArguments
from trl import (DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, ORPOConfig, ORPOTrainer, CPOConfig, CPOTrainer,
                 SFTConfig, SFTTrainer, RewardConfig, RewardTrainer)
raise SystemExit("this file must not run")
NAME = "org/model"
"""
SCRIPT = (
    START
    + """
RATE = 5e-6
model = AutoModelForCausalLM.from_pretrained(NAME, torch_dtype=torch.bfloat16, device_map="auto")
tokenizer = AutoTokenizer.from_pretrained(NAME)
tokenizer.pad_token = tokenizer.eos_token
rows = load_dataset("org/pairs", split="train")
args = DPOConfig(output_dir="out/run", beta=0.2, learning_rate=RATE, per_device_train_batch_size=2,
                 gradient_accumulation_steps=2 * 4, max_length=512)
lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = DPOTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer,
                     peft_config=lora)
trainer.train()
"""
)


def of(text: str, folder: Path) -> Migrated:
    file = folder / "train.py"
    file.write_text(text)
    source = read_file(file)
    return migrate(source, guess(source, PEERS))


def problems(result: Migrated) -> dict[str, str]:
    bad = (MISSING, IMPOSSIBLE, UNKNOWN)
    return {row.key: row.note for row in result.rows if row.status in bad}


@pytest.mark.defect("U14")
def test_literals_become_a_config(tmp_path: Path) -> None:
    result = of(SCRIPT, tmp_path)
    assert problems(result) == {}
    expected = {
        "pretrain": "org/model", "pref_loss": "sigmoid", "beta": 0.2, "sequence_length": 512,
        f"{TRAINING}.learning_rate": 5e-6, f"{TRAINING}.num_train_epochs": 3.0,
        f"{MODEL}.lora_rank": 16, f"{MODEL}.lora_alpha": 32, f"{MODEL}.lora_target": ["q_proj", "v_proj"],
        f"{MODEL}.dtype": "bf16", "actor_train.data_args.file_name": "hf://datasets/org/pairs",
    }  # fmt: skip
    found = {path: value_at(result.config, path) for path in expected}
    assert found | {"pref_loss": result.config.loss_names[0]} == expected
    assert result.config.global_batch() == 16


@pytest.mark.defect("U14")
def test_the_command_reads_a_script(tmp_path: Path) -> None:
    file, out = tmp_path / "train.py", tmp_path / "dpo.yaml"
    file.write_text(SCRIPT)
    done = CliRunner().invoke(app, ["migrate", str(file), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(out.read_text())["pretrain"] == "org/model"
    file.write_text(SCRIPT.replace("learning_rate=RATE", "learning_rate=read_rate()"))
    done = CliRunner().invoke(app, ["migrate", str(file), "--out", str(out), "--force"])
    assert done.exit_code == 2
    place = 1 + file.read_text().splitlines().index(
        next(line for line in file.read_text().splitlines() if "read_rate" in line)
    )
    said = f"learning_rate; train.py:{place}: read_rate() is only known when it runs"
    assert f"not determined: {said}" in done.output


# ---- what is only known when it runs


@pytest.mark.defect("U14")
@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("learning_rate=RATE", "learning_rate=config.rate", "learning_rate"),
        ("RATE = 5e-6", "RATE = 5e-6\nRATE = RATE * factor", "learning_rate"),
        ("RATE = 5e-6", "if fast:\n    RATE = 5e-6\nelse:\n    RATE = 1e-6", "learning_rate"),
        ("RATE = 5e-6", "for RATE in rates: pass", "learning_rate"),
        ("RATE = 5e-6", "RATE, _ = rates()", "learning_rate"),
        ("RATE = 5e-6", "RATE = 5e-6\nRATE *= 2", "learning_rate"),
        ("RATE = 5e-6", "RATE = 5e-6\ndef f():\n    global RATE\n    RATE = 1", "learning_rate"),
        ("learning_rate=RATE", "learning_rate=-'x'", "learning_rate"),
        ("learning_rate=RATE", "learning_rate=1 / 0", "learning_rate"),
        ("learning_rate=RATE", "learning_rate=10 ** 60 ** 60", "learning_rate"),
        ("learning_rate=RATE", "learning_rate=...", "learning_rate"),
        ("torch_dtype=torch.bfloat16", "torch_dtype=torch.get_default_dtype", "torch_dtype"),
        ("trainer.train()", "trainer.beta = 0.5\ntrainer.train()", "trainer.beta"),
        ("trainer.train()", "trainer.add_callback(x)\ntrainer.train()", "trainer.add_callback"),
        ("trainer = ", "lora.r = 2\ntrainer = ", "(adapter)"),
        ("beta=0.2", "beta=0.2 if strong else 0.1", "beta"),
        ("beta=0.2,", "**more,", "**more"),
        ("beta=0.2,", "beta=0.2, lr_scheduler_kwargs=dict(min_lr=1e-7, **more),",
         "lr_scheduler_kwargs"),
        ("trainer.train()", "args.beta = 0.5\ntrainer.train()", "beta"),
        ("from_pretrained(NAME, t", "from_pretrained(f(NAME), t", "model_name_or_path"),
        ("trainer = ", "model = setup(model)\ntrainer = ", "model_name_or_path"),
        ("trainer = ", "model.resize_token_embeddings(9)\ntrainer = ", "model_name_or_path"),
        ("trainer = ", "for p in model.parameters(): freeze(p)\ntrainer = ", "model_name_or_path"),
        ("AutoModelForCausalLM.from_pretrained(NAME,", "AutoModelForVision.from_pretrained(NAME,",
         "model_name_or_path"),
        ("device_map=", "rope_scaling={}, device_map=", "rope_scaling"),
        ("trainer = ", "tokenizer.chat_template = other\ntrainer = ", "tokenizer_name_or_path"),
        ("args = ", "rows = rows.map(change)\nargs = ", "dataset_name"),
        ("args = ", "rows = rows.select(range(9))\nargs = ", "dataset_name"),
        ("args = ", "rows['train'] = change(rows)\nargs = ", "dataset_name"),
        ("args = ", "rows.set_transform(change)\nargs = ", "dataset_name"),
        ('"org/pairs", split', '"org/pairs", revision="x", split', "dataset_name"),
        ("peft_config=lora", "peft_config=make_lora()", "(adapter)"),
        ("r=16,", "r=16, layers_to_transform=[0],", "layers_to_transform"),
        ("r=16,", 'r=16, bias="all",', "bias"),
        ("r=16,", "r=rank,", "lora_r"),
        ("peft_config=lora", "peft_config=lora, data_collator=mine", "data_collator"),
        ("peft_config=lora", "peft_config=lora, ref_model=other()", "(reference)"),
        ("peft_config=lora", "peft_config=lora, eval_dataset=held_out()", "(eval_dataset)"),
    ],
)  # fmt: skip
def test_what_is_not_a_literal_is_not_determined(
    before: str, after: str, key: str, tmp_path: Path
) -> None:
    assert before in SCRIPT
    found = problems(of(SCRIPT.replace(before, after, 1), tmp_path))
    assert list(found) == [key]
    assert found[key].startswith("train.py:")


def test_what_only_names_the_run_is_left_out(tmp_path: Path) -> None:
    text = SCRIPT.replace(
        'output_dir="out/run"', "output_dir=folder(), run_name=name(), report_to=x"
    )
    assert problems(of(text, tmp_path)) == {}


def test_a_list_that_is_changed_is_not_known(tmp_path: Path) -> None:
    text = SCRIPT.replace("lora = ", 'layers = ["q_proj"]\nlayers.append("v_proj")\nlora = ')
    text = text.replace('target_modules=["q_proj", "v_proj"]', "target_modules=layers")
    assert list(problems(of(text, tmp_path))) == ["lora_target_modules"]


def test_arguments_of_functions_are_not_known(tmp_path: Path) -> None:
    text = (
        START
        + """
def main(rate, size=4):
    args = DPOConfig(learning_rate=rate, per_device_train_batch_size=size, max_length=LENGTH)
    DPOTrainer(NAME, args=args, train_dataset=load_dataset("org/pairs", split="train"))
LENGTH = 256
"""
    )
    result = of(text, tmp_path)
    assert set(problems(result)) == {"learning_rate", "per_device_train_batch_size"}
    assert (result.config.pretrain, result.config.sequence_length) == ("org/model", 256)


def test_a_star_import_may_bind_any_name(tmp_path: Path) -> None:
    after = SCRIPT.replace("RATE = 5e-6", "RATE = 5e-6\nfrom own import *")
    assert {"learning_rate", "model_name_or_path"} <= set(problems(of(after, tmp_path)))
    assert problems(of(f"from own import *\n{SCRIPT}", tmp_path)) == {}


def test_names_of_an_enclosing_function_are_not_known(tmp_path: Path) -> None:
    text = (
        START
        + """
RATE = 1e-6
def outer(RATE):
    def inner():
        DPOTrainer(NAME, args=DPOConfig("out", learning_rate=RATE),
                   train_dataset=load_dataset("org/pairs", split="train"))
"""
    )
    assert list(problems(of(text, tmp_path))) == ["learning_rate"]


def test_the_main_block_is_no_branch(tmp_path: Path) -> None:
    start, body = SCRIPT.split("RATE = 5e-6")
    indented = "\n    ".join(f"RATE = 5e-6{body}".splitlines())
    text = f"{start}if __name__ == '__main__':\n    {indented}\n"
    assert problems(of(text, tmp_path)) == {}
    assert list(problems(of(f"{text}else:\n    RATE = 1\n", tmp_path))) == []
    before = "if __name__ == '__main__':\n    pass\nelse:\n    RATE = 1\n"
    moved = SCRIPT.replace("RATE = 5e-6", before)
    assert list(problems(of(moved, tmp_path))) == ["learning_rate"]


def test_another_trainer_than_the_script_calls_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["migrate", str(tmp_path / "train.py"), "--trainer", "kto"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "--trainer kto: train.py itself calls dpo" in done.output


# ---- trainers


BODY = 'Trainer(NAME, args={}Config(learning_rate=1e-6), train_dataset=load_dataset("org/d", split="train"))'


@pytest.mark.defect("U14")
@pytest.mark.parametrize(
    ("name", "task", "loss"),
    [("DPO", "preference", "sigmoid"), ("KTO", "unpaired", "kto"), ("ORPO", "preference", "orpo"),
     ("CPO", "preference", "cpo"), ("Reward", "reward", "bradley_terry")],
)  # fmt: skip
def test_each_trainer(name: str, task: str, loss: str, tmp_path: Path) -> None:
    result = of(START + name + BODY.format(name), tmp_path)
    assert problems(result) == {}
    assert (result.config.task, result.config.loss_names) == (task, [loss])


def test_a_config_is_named_by_its_place(tmp_path: Path) -> None:
    text = (
        START
        + 'SFTTrainer("m", SFTConfig(assistant_only_loss=True), train_dataset=load_dataset("org/d", split="x"))'
    )
    result = of(text, tmp_path)
    assert problems(result) == {}
    assert result.config.actor_train.data_args.score == "assistant"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print(1)", "calls none of TRL's trainers"),
        ("from own import DPOTrainer\nDPOTrainer('m')", "calls none of TRL's trainers"),
        ("import trl\nclass Mine(trl.DPOTrainer): pass\nMine('m')", "calls none of TRL's trainers"),
        ("import trl\ntrl.DPOTrainer('m')\ntrl.SFTTrainer('m')", "has several trainers"),
        ("import trl\na, = trl.TrlParser(x).parse_args_and_config()\ntrl.DPOTrainer('m', args=a)",
         "pass the command line that trains, with --line"),
        ("import trl\ntrl.DPOTrainer('m', args=make())", "train.py:2: args=make() is only known"),
        ("import (", "cannot be read as Python"),
        ("a = " + "-" * 100_000 + "1", "cannot be read as Python"),
    ],
)  # fmt: skip
def test_scripts_that_say_too_little_are_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as why:
        of(text, tmp_path)
    assert said in str(why.value)


def test_settings_of_older_versions_are_arguments_of_the_trainer(tmp_path: Path) -> None:
    text = (
        START
        + """
args = TrainingArguments("out", per_device_train_batch_size=4, bf16=True)
DPOTrainer("m", None, args=args, beta=0.3, max_length=700, max_prompt_length=300, tokenizer=None,
           train_dataset=load_dataset("json", data_files="a.jsonl", split="train"))
"""
    )
    result = of(text.replace(" tokenizer=None,", ""), tmp_path)
    assert problems(result) == {}
    config = result.config
    assert (config.beta, config.sequence_length) == (0.3, 700)
    assert config.actor_train.training_args.learning_rate == 5e-5  # not DPOConfig's
    assert config.actor_train.data_args.overlong == "truncate_prompt"
    assert config.actor_train.data_args.file_name == "a.jsonl"


# ---- model, reference and data


def test_a_rounded_model_with_an_adapter(tmp_path: Path) -> None:
    text = (
        START
        + """
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained(NAME, quantization_config=bits)
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
model.print_trainable_parameters()
DPOTrainer(model, args=DPOConfig("out"), train_dataset=load_dataset("org/d", split="train"))
"""
    )
    result = of(text, tmp_path)
    assert problems(result) == {}
    own = result.config.actor_train.model_args
    assert (own.lora_rank, own.lora_alpha, own.quantization) == (4, 8, "4bit")


@pytest.mark.parametrize(
    ("reference", "expected"),
    [("None", None), ("AutoModelForCausalLM.from_pretrained(NAME)", None),
     ('AutoModelForCausalLM.from_pretrained("org/other")', "org/other")],
)  # fmt: skip
def test_the_reference(reference: str, expected: str | None, tmp_path: Path) -> None:
    text = (
        START
        + f"DPOTrainer(NAME, {reference}, args=DPOConfig('out'), train_dataset=load_dataset('org/d', split='t'))"
    )
    result = of(text, tmp_path)
    assert problems(result) == {}
    written = result.values.get("reference", {}).get("model_args", {}).get("model_name_or_path")
    assert written == expected


@pytest.mark.parametrize(
    ("rows", "train", "held_out", "expected"),
    [
        ('load_dataset("org/d")', 'rows["train"]', 'rows["test"]',
         {"file_name": "hf://datasets/org/d", "held_out": "hf://datasets/org/d:test"}),
        ('load_dataset("org/d", "small", split="tr").shuffle(seed=1)', "rows", "None",
         {"file_name": "hf://datasets/org/d:small/tr", "held_out": None}),
        ('load_dataset("org/d", split="train").train_test_split(test_size=0.1)', 'rows["train"]', 'rows["test"]',
         {"file_name": "hf://datasets/org/d", "split": 0.1}),
        ('load_dataset("json", data_files={"train": "a.jsonl", "test": "b.jsonl"})', 'rows["train"]',
         'rows["test"]', {"file_name": "a.jsonl", "held_out": "b.jsonl"}),
        ('load_dataset("org/d", split="train")', "rows", 'load_dataset("org/e", split="dev")',
         {"file_name": "hf://datasets/org/d", "held_out": "hf://datasets/org/e:dev"}),
    ],
)  # fmt: skip
def test_the_data(rows: str, train: str, held_out: str, expected: Any, tmp_path: Path) -> None:
    text = (
        START
        + f"""
rows = {rows}
DPOTrainer(NAME, args=DPOConfig("out", eval_strategy="steps", eval_steps=5), train_dataset={train},
           eval_dataset={held_out})
"""
    )
    result = of(text, tmp_path)
    assert problems(result) == {}
    data, validation = result.config.actor_train.data_args, result.config.validation.data_args
    found = {
        "file_name": data.file_name,
        "held_out": validation.file_name,
        "split": validation.split,
    }
    assert {key: found[key] for key in expected} == expected


# ---- a script behind a command line


def test_a_launcher_of_a_script_says_how_many_devices(tmp_path: Path) -> None:
    (tmp_path / "my_run.py").write_text(SCRIPT)
    source = read_line("accelerate launch --num_processes 4 my_run.py", folder=tmp_path)
    result = migrate(source, guess(source, PEERS))
    assert problems(result) == {}
    assert result.config.global_batch() == 64


@pytest.mark.defect("U1")
def test_the_trainer_of_a_script_determines_what_its_config_file_trains(tmp_path: Path) -> None:
    parser = "args = trl.TrlParser(trl.KTOConfig).parse_args_and_config()\n"
    (tmp_path / "dpo.py").write_text(f"import trl\n{parser}trl.KTOTrainer('m', args=args)\n")
    (tmp_path / "x.yaml").write_text("model_name_or_path: m\ndataset_name: d.jsonl\nbeta: 0.3\n")
    source = read_line("python dpo.py --config x.yaml", folder=tmp_path)
    result = migrate(source, PEERS["trl"])
    assert problems(result) == {}
    assert (result.config.task, result.config.beta) == ("unpaired", 0.3)


# A script that leaves everything to its command line, as TRL's own do.
PLAIN = """
import trl
parser = trl.TrlParser((trl.ScriptArguments, trl.DPOConfig, trl.ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
data = load_dataset(script_args.dataset_name)
{extra}
trainer = trl.DPOTrainer(model_args.model_name_or_path, args=training_args{more}, train_dataset=data)
"""
IN_CODE = {
    "loss": ("training_args.loss_type = 'ipo'", "training_args.loss_type"),
    "config": ("training_args = trl.DPOConfig(beta=0.5)", "trl.DPOConfig"),
    "rows": ("data = data.filter(len)", "data.filter"),
    "file": ("data = load_dataset('org/other')", "load_dataset"),
    "model": ("model = AutoModelForCausalLM.from_pretrained('m')",
              "AutoModelForCausalLM.from_pretrained"),
    "adapter": ("peft = LoraConfig(r=4)", "LoraConfig"),
    "template": ("tokenizer.chat_template = text", "tokenizer.chat_template"),
    "argument": (", beta=0.5", "beta"),
}  # fmt: skip
LINE = "{} --model_name_or_path m --dataset_name d.jsonl --learning_rate 1e-6 --bf16"


@pytest.mark.parametrize("case", IN_CODE)
@pytest.mark.parametrize("call", ["python dpo.py", "torchrun --nproc_per_node 1 -m jobs.dpo"])
def test_a_script_with_a_command_line_may_decide_by_itself(
    tmp_path: Path, case: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script of a user is often called dpo.py; it is read, also as a module or from elsewhere."""
    code, key = IN_CODE[case]
    parts = {"extra": "", "more": code} if code.startswith(",") else {"extra": code, "more": ""}
    for script in (tmp_path / "dpo.py", tmp_path / "jobs" / "dpo.py"):
        script.parent.mkdir(exist_ok=True)
        script.write_text(PLAIN.format(**parts))
    monkeypatch.chdir(tmp_path)
    source = read_line(LINE.format(call), folder=tmp_path / "launch")
    row = problems(migrate(source, PEERS["trl"]))
    assert list(row) == [key]


def test_scripts_that_leave_all_to_the_command_line(tmp_path: Path) -> None:
    own = "import argparse, trl\nargs = argparse.ArgumentParser().parse_args()\ntrl.DPOTrainer()\n"
    other = "import mine\nmine.Trainer().train()\n"
    for text, expected in ((PLAIN.format(extra="", more=""), {}), (own, "(program)"),
                           (other, "(program)"), ("(", "(program)")):  # fmt: skip
        (tmp_path / "dpo.py").write_text(text)
        source = read_line(LINE.format("python dpo.py"), folder=tmp_path)
        assert set(problems(migrate(source, PEERS["trl"]))) == ({expected} if expected else set())
    (tmp_path / "dpo.py").unlink()
    result = migrate(read_line(LINE.format("python dpo.py"), folder=tmp_path), PEERS["trl"])
    assert "not here; taken to be trl's own" in [row.note for row in result.rows]
    for script in ("trl/scripts/dpo.py", "examples/scripts/dpo.py"):  # of a checkout of TRL
        (tmp_path / script).parent.mkdir(parents=True)
        (tmp_path / script).write_text("# moved\n")
        source = read_line(LINE.format(f"python {script}"), folder=tmp_path)
        assert problems(migrate(source, PEERS["trl"])) == {}


# ---- secrets


@pytest.mark.defect("U9")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("beta=0.2", 'beta=0.2, hub_token="canary-0123456789"'),
        ("beta=0.2", 'beta=0.2, hub_token=getenv("HF_TOKEN", "canary-0123456789")'),
        ("beta=0.2", 'beta=choose(token="canary-0123456789")'),
        ("beta=0.2", 'beta=getenv("API_KEY", "canary-0123456789")'),
        ("learning_rate=RATE", 'learning_rate=fetch("hf_canaryCANARYcanary123")'),
        ('load_dataset("org/pairs"', 'load_dataset("org/pairs", token="canary-0123456789"'),
        ('load_dataset("org/pairs"', 'read("org/pairs", api_key="canary-0123456789"'),
        ("from_pretrained(NAME, t", 'from_pretrained(NAME, token="canary-0123456789", t'),
    ],
)
def test_secrets_are_neither_shown_nor_written(before: str, after: str, tmp_path: Path) -> None:
    file, out = tmp_path / "train.py", tmp_path / "dpo.yaml"
    assert before in SCRIPT
    file.write_text(SCRIPT.replace(before, after, 1))
    for extra in ([], ["--json"]):
        done = CliRunner().invoke(app, ["migrate", str(file), "--out", str(out), "--force", *extra])
        assert done.exit_code in (0, 2), done.output
        assert "canary" not in done.output.lower()
    written = [file.read_text() for file in tmp_path.glob("*.yaml")]
    assert written
    assert "canary" not in "".join(written).lower()
