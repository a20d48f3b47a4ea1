"""What each command refuses: exit code, command line, and the option, key or file that is named."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from rather.config.run_config import DPOConfig
from tests.commands.conftest import refusal
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
X7, X17 = (pytest.mark.defect(name) for name in ("X7", "X17"))


@pytest.fixture(scope="module")
def place(run: DPOConfig, lora: DPOConfig, folder: Path) -> Path:
    """The folder of the trained runs, with files and folders that commands cannot use."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    (folder / "linked").mkdir()
    (folder / "linked" / "adapter").symlink_to(lora.run_dir / "adapter")
    tokenizer = make_model(folder / "other", hidden_size=16) / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w59"', '"z59"'))
    for name in ("with_a_link", "unfinished"):
        shutil.copytree(run.run_dir, folder / name)
    (folder / "with_a_link" / "model" / "added_tokens.json").symlink_to("/etc/passwd")
    shutil.rmtree(folder / "unfinished" / "model")
    return folder


@pytest.mark.parametrize(
    ("code", "line", "named"),
    [
        (2, "train dpo.yaml --beta 0.2", "write beta=0.2"),
        (2, "train dpo.yaml --beta=0.2", "write beta=0.2"),
        (2, "train dpo.yaml --learning-rate 1e-6", "actor_train.training_args.learning_rate=1e-6"),
        pytest.param(9, "data output/run/config.yaml output_dir=/proc/x", "/proc/x", marks=X17),
        pytest.param(
            9, "data output/run/config.yaml actor_train.data_args.cache_dir=/proc/x", "/proc/x",
            marks=X17,
        ),
        (2, "health empty", "empty: not a run folder"),
        (2, "pairs empty", "empty: not a run folder"),
        # init
        (3, "init texts.jsonl --model base --out x.yaml", "line 1: no two answers"),
        (3, "init torn.jsonl --model base --out x.yaml", "line 1: "),
        (3, "init nothing.jsonl --model base --out x.yaml", "no rows"),
        (2, "init completions.jsonl --out x.yaml", "--model"),
        (2, "init completions.jsonl --model ./no --out x.yaml", "./no: no such folder"),
        (2, "init completions.jsonl --model empty --out x.yaml", "empty: found no config.json"),
        # chat
        (2, "chat output/run --prompt w5 --system w3", "output/run: a system message"),
        (2, "chat output/run --prompt w5 --top-p 0.9", "set --temperature"),
        (2, "chat output/run --prompt w5 --seed 3", "set --temperature"),
        (2, "chat output/run --prompt w5 --temperature 1e-40", "--temperature"),
        (2, "chat output/run --prompt w5 --temperature inf", "--temperature"),
        (2, "chat output/run --prompt w5 --temperature nan", "--temperature"),
        (2, f"chat output/run --prompt w5 --temperature 1 --seed {10**30}", "--seed"),
        (2, "chat dpo.yaml --prompt hello", "dpo.yaml: is a file"),
        (2, "chat nosuch --prompt hello", "nosuch: neither a local folder"),
        # export
        (2, "export output/run base", "base: already exists"),
        (2, "export output/run out --adapter", "--adapter: output/run"),
        (2, "export output/lora out --adapter --dtype bf16", "do not apply to --adapter"),
        (2, "export output/run out --shard-size 5apples", "--shard-size 5apples"),
        (2, "export linked out --adapter", "outside of its folder"),
        (2, "export output/run out --format gguf", "end out with .gguf"),
        (2, "export output/run out.gguf --format gguf --shard-size 1GB", "--format gguf"),
        # generate
        (2, "generate output/run prompts.jsonl --out x.jsonl --answers 2 --temperature 0", "--answers: "),
        (2, "generate output/run prompts.jsonl --out x.jsonl --top-p 0.5", "--top-p needs"),
        (2, "generate output/run prompts.jsonl --out x.jsonl --stop ''", "--stop"),
        (2, "generate output/run prompts.jsonl --out x.jsonl --temperature 0.001", "--temperature"),
        (2, "generate output/run prompts.jsonl --out x.jsonl --concurrency 2", "need --server"),
        (3, "generate output/run second.jsonl --out x.jsonl", "second.jsonl:2: no key 'prompt'"),
        (3, "generate output/run pictures.jsonl --out x.jsonl", "images"),
        # judge
        (3, "judge a.jsonl longer.jsonl --with rule.py:score", "same prompts"),
        (2, "judge a.jsonl b.jsonl --with rule.py:missing", "rule.py:missing"),
        (2, "judge a.jsonl b.jsonl --with rule.py", "rule.py:score"),
        (3, "judge a.jsonl b.jsonl --with rule.py:fails", "rule.py:fails, line 4: ZeroDivisionError"),
        (2, "judge a.jsonl b.jsonl --with http://127.0.0.1:1", "--judge-model"),
        (2, "judge a.jsonl --with http://127.0.0.1:1", "--judge-model"),
        (3, "judge a.jsonl --with http://127.0.0.1:1 --judge-model m", "a.jsonl:1: has one answer"),
        (2, "judge a.jsonl --with rule.py:score --dry-run", "--dry-run: has no effect with a rule"),
        (2, "judge a.jsonl --with base --judge-rubric r", "--judge-rubric: has no effect with a reward"),
        (2, "judge a.jsonl --with http://127.0.0.1:1 --judge-model m --judge-rubric rule.py --judge-template r", "--judge-template: has no effect with a server with a rubric"),
        (2, "judge a.jsonl --with http://127.0.0.1:1 --judge-model m --judge-rubric rule.py", "--judge-rubric rule.py: must show answer"),
        (2, "judge a.jsonl b.jsonl --with rule.py:score --out x.jsonl", "--out: scores"),
        (2, "judge a.jsonl --with base", "--with base: is not a reward model"),
        # score
        (2, "score output/run held_out.jsonl beta=0.05", "beta: "),
        (2, "score output/run held_out.jsonl pref_loss=simpo --reference base", "--reference: "),
        (2, "score output/run held_out.jsonl max_steps=3", "max_steps: "),
        (3, "score output/run held_out.jsonl --by sorce", "--by sorce: "),
        (2, "score output/run held_out.jsonl --reference other", "--reference other: "),
        (2, "score output/run held_out.jsonl --out no/x.jsonl", "no/x.jsonl: cannot be written"),
        (2, "score output/run held_out.jsonl --out base", "base: cannot be written"),
        (2, "score output/run held_out.jsonl --reference empty", "empty: contains neither"),
        (2, "score bas held_out.jsonl", "bas: "),
        pytest.param(3, "score output/run weightless.jsonl", "weightless.jsonl: ", marks=X7),
        # push
        (2, "push empty shop/kind --dry-run", "empty: not a run folder"),
        (2, "push output/run kind --dry-run", "kind: name the repository"),
        (2, "push with_a_link/model shop/kind --dry-run", "added_tokens.json"),
        (2, "push unfinished shop/kind --dry-run", "unfinished: has no model"),
        # recipes
        (2, "recipes show dop", "unknown recipe 'dop'"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_work_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, code: int, line: str, named: str
) -> None:
    """It names what is wrong in one sentence, and writes nothing."""
    monkeypatch.chdir(place)
    before = {file for file in place.rglob("*") if ".cache" not in file.parts}
    assert named in refusal(code, *shlex.split(line))
    assert {file for file in place.rglob("*") if ".cache" not in file.parts} == before
