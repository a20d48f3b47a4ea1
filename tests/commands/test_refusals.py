"""What each command refuses: exit code, command line, and the option, key or file that is named."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from rather.config.run_config import DPOConfig
from tests.cells import read_table
from tests.commands.conftest import exits
from tests.tiny import make_model

ROWS = {
    "answer": '{"prompt": "p", "responses": ["kind"], "ended": [true]}\n',
    "pair": '{"prompt": "w1", "chosen": " w2", "rejected": " w3", "weight": 0}\n',
    "prompt": '{"prompt": "w1"}\n',
    "completion": '{"prompt": "w1", "completion": "w2"}\n',
    "text": '{"text": "w2"}\n',
    "picture": '{"prompt": "w3", "images": ["a.png"]}\n',
}
FILES = {
    "dpo.yaml": "beta: 0.1\n",
    "rule.py": "def score(prompt, answer):\n    return 1\ndef fails(prompt, answer):\n    return 1 / 0\n",
    "a.jsonl": ROWS["answer"],
    "b.jsonl": ROWS["answer"],
    "longer.jsonl": ROWS["answer"] * 2,
    "prompts.jsonl": ROWS["prompt"],
    "second.jsonl": ROWS["prompt"] + ROWS["text"],
    "pictures.jsonl": ROWS["picture"],
    "weightless.jsonl": ROWS["pair"],
    "completions.jsonl": ROWS["completion"],
    "texts.jsonl": ROWS["text"],
    "torn.jsonl": "{",
    "nothing.jsonl": "",
}


@pytest.fixture(scope="module")
def place(
    run: DPOConfig, lora: DPOConfig, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A copy of the folder of trained runs, with files and folders that commands cannot use."""
    place = Path(shutil.copytree(folder, tmp_path_factory.mktemp("refusals"), dirs_exist_ok=True))
    for name, text in FILES.items():
        (place / name).write_text(text)
    (place / "empty").mkdir()
    (place / "linked").mkdir()
    (place / "linked" / "adapter").symlink_to(place / "output" / "lora" / "adapter")
    tokenizer = make_model(place / "other", hidden_size=16) / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w59"', '"z59"'))
    for name in ("with_a_link", "unfinished"):
        shutil.copytree(run.run_dir, place / name)
    (place / "with_a_link" / "model" / "added_tokens.json").symlink_to("/etc/passwd")
    shutil.rmtree(place / "unfinished" / "model")
    return place


def files_in(*folders: Path) -> set[Path]:
    files = {file for folder in folders for file in folder.rglob("*")}
    return {file for file in files if ".cache" not in file.parts}


# The exit code, and what it prints if not one line; the command; what its sentence holds.
REFUSED = """
    2 box | train dpo.yaml --beta 0.2 | write beta=0.2
    2 box | train dpo.yaml --beta=0.2 | write beta=0.2
    2 box | train dpo.yaml --learning-rate 1e-6 | actor_train.training_args.learning_rate=1e-6
    9 | data output/run/config.yaml output_dir=/proc/x | /proc/x ## X17
    9 | data output/run/config.yaml actor_train.data_args.cache_dir=/proc/x | /proc/x ## X17
    2 | health empty | empty: not a run folder
    2 | pairs empty | empty: not a run folder
    # init
    3 | init texts.jsonl --model base --out x.yaml | line 1: no two answers
    3 | init torn.jsonl --model base --out x.yaml | line 1: the last line is not complete
    3 | init nothing.jsonl --model base --out x.yaml | no rows
    2 | init completions.jsonl --out x.yaml | --model: name the model to train
    2 | init completions.jsonl --model ./no --out x.yaml | ./no: no such folder
    2 | init completions.jsonl --model empty --out x.yaml | empty: found no config.json
    # chat
    2 | chat output/run --prompt w5 --system w3 | output/run: a system message
    2 | chat output/run --prompt w5 --top-p 0.9 | set --temperature
    2 | chat output/run --prompt w5 --seed 3 | set --temperature
    2 | chat output/run --prompt w5 --temperature 1e-40 | --temperature must be 0 or at least 0.01 (got 1e-40)
    2 | chat output/run --prompt w5 --temperature inf | --temperature must be 0 or at least 0.01 (got inf)
    2 box | chat output/run --prompt w5 --temperature nan | Invalid value for '--temperature'
    2 box | chat output/run --prompt w5 --temperature 1 --seed 1000000000000000000000000000000 | Invalid value for '--seed'
    2 | chat dpo.yaml --prompt hello | dpo.yaml: is a file
    2 | chat nosuch --prompt hello | nosuch: neither a local folder
    # export
    2 | export output/run base | base: already exists
    2 | export output/run out --adapter | --adapter: output/run has no adapter
    2 | export output/lora out --adapter --dtype bf16 | do not apply to --adapter
    2 | export output/run out --shard-size 5apples | --shard-size 5apples
    2 | export linked out --adapter | outside of its folder
    2 | export output/run out --format gguf | end out with .gguf
    2 | export output/run out.gguf --format gguf --shard-size 1GB | do not apply to --format gguf
    # generate
    2 | generate output/run prompts.jsonl --out x.jsonl --answers 2 --temperature 0 | --answers: several answers with --temperature 0 would be equal
    2 | generate output/run prompts.jsonl --out x.jsonl --top-p 0.5 | --top-p needs
    2 | generate output/run prompts.jsonl --out x.jsonl --stop '' | --stop must not be empty
    2 | generate output/run prompts.jsonl --out x.jsonl --temperature 0.001 | --temperature must be 0 or at least 0.01 (got 0.001)
    2 | generate output/run prompts.jsonl --out x.jsonl --concurrency 2 | need --server
    3 | generate output/run second.jsonl --out x.jsonl | second.jsonl:2: no key 'prompt'
    3 | generate output/run pictures.jsonl --out x.jsonl | pictures.jsonl: a prompt has images
    # judge
    3 | judge a.jsonl longer.jsonl --with rule.py:score | same prompts
    2 | judge a.jsonl b.jsonl --with rule.py:missing | rule.py:missing: the file has no function or class of this name
    2 | judge a.jsonl b.jsonl --with rule.py | name the function, too, as in rule.py:score
    3 list | judge a.jsonl b.jsonl --with rule.py:fails | rule.py:fails, line 4: ZeroDivisionError
    2 | judge a.jsonl b.jsonl --with http://127.0.0.1:1 | --judge-model: name the model of the server
    2 | judge a.jsonl --with http://127.0.0.1:1 | --judge-model: name the model of the server
    3 | judge a.jsonl --with http://127.0.0.1:1 --judge-model m | a.jsonl:1: has one answer
    2 | judge a.jsonl --with rule.py:score --dry-run | --dry-run: has no effect with a rule
    2 | judge a.jsonl b.jsonl --with rule.py:score --out x.jsonl | --out: scores
    2 | judge a.jsonl --with base | --with base: is not a reward model
    # score
    2 | score output/run held_out.jsonl beta=0.05 | beta: rewards of loss 'sigmoid' need a reference
    2 | score output/run held_out.jsonl pref_loss=simpo --reference base | --reference: loss 'simpo' does not use a reference
    2 | score output/run held_out.jsonl max_steps=3 | max_steps: has no effect on a score
    3 table | score output/run held_out.jsonl --by sorce | --by sorce: no row has this column
    2 | score output/run held_out.jsonl --reference other | --reference other: its tokenizer differs
    2 | score output/run held_out.jsonl --out no/x.jsonl | no/x.jsonl: cannot be written
    2 | score output/run held_out.jsonl --out base | base: cannot be written
    2 | score output/run held_out.jsonl --reference empty | empty: contains neither
    2 | score bas held_out.jsonl | near it: base
    3 table | score output/run weightless.jsonl | weightless.jsonl: all pairs have weight 0 ## X7
    # push
    2 | push empty shop/kind --dry-run | empty: not a run folder
    2 | push output/run kind --dry-run | kind: name the repository
    2 | push with_a_link/model shop/kind --dry-run | added_tokens.json
    2 | push unfinished shop/kind --dry-run | unfinished: has no model
    # recipes
    2 | recipes show dop | unknown recipe 'dop'
"""


@pytest.mark.parametrize(("code", "line", "named"), read_table(REFUSED))
def test_a_line_that_cannot_work_is_refused(
    place: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, line: str, named: str
) -> None:
    """It names what is wrong in one sentence, and writes nothing."""
    monkeypatch.chdir(place)
    before = files_in(place, folder)
    exit_code, *form = code.split()
    printed = exits(int(exit_code), *shlex.split(line))
    assert named in " ".join(printed.split())
    assert form or re.fullmatch("rather: .*\n", printed)
    assert files_in(place, folder) == before
