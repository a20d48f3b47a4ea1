"""Small trained runs that all tests of the commands look at: of whole weights and of an adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from rather.cli import app
from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from tests.tiny import make_config, write_rows
from tests.tiny import rows_of as rows_of

SHORT = {"max_steps": 3, "save_steps": 2}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}w0 {{ m.content }} {% elif m.role == 'user' %}"
    "w1 {{ m.content }} {% else %}w2 {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w2 {% endif %}"
)


def rather(*args: object, input: str | None = None) -> Result:
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    return CliRunner().invoke(app, [str(arg) for arg in args], env=environment, input=input)


def succeed(*args: object, **options: Any) -> Result:
    done = rather(*args, **options)
    assert done.exit_code == 0, done.output
    return done


def exits(codes: int | tuple[int, ...], *args: object) -> str:
    """Run a command that must end with this exit code, or one of these; return what it printed."""
    done = rather(*args)
    expected = codes if isinstance(codes, tuple) else (codes,)
    assert done.exit_code in expected, (args, done.output, done.exception)
    return done.output


def refusal(code: int, *args: object) -> str:
    """What a command prints that ends with this exit code, as one line."""
    return " ".join(exits(code, *args).split())


def told(*args: object) -> Any:
    """What a command prints as JSON."""
    return json.loads(succeed(*args, "--json").stdout)


def json_of(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def write(file: Path, *rows: Any) -> Path:
    return write_rows(file, rows)


def plainly(folder: Path, text: str, count: int) -> str:
    """The greedy answer by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    causal_lm: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    out = causal_lm.generate(ids, do_sample=False, max_new_tokens=count)[0, ids.shape[1] :]
    return str(tokenizer.decode(out, skip_special_tokens=True))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of verdicts for one test: two servers may have the same port one after the other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rather" / "verdicts"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="session")
def trained(folder: Path) -> Callable[..., DPOConfig]:
    """Trains a run of this name in the folder that all share."""

    def train(name: str, **changes: Any) -> DPOConfig:
        torch.set_num_threads(1)
        # A GPU's own choice is bf16, which the comparisons of this folder are too exact for.
        config = make_config(
            folder, exp_name=name, actor_train__model_args__dtype="fp32", **SHORT, **changes
        )
        if not (config.run_dir / "model").exists():
            DPOPipeline(config).run()
        return config

    return train


@pytest.fixture(scope="session")
def run(trained: Callable[..., DPOConfig]) -> DPOConfig:
    return trained("run")


@pytest.fixture(scope="session")
def lora(trained: Callable[..., DPOConfig]) -> DPOConfig:
    rates = {"actor_train__training_args__learning_rate": 0.05}
    return trained("lora", actor_train__model_args__lora_rank=4, **rates)


@pytest.fixture(scope="session")
def model(run: DPOConfig) -> Path:
    """The trained model, without a template: no process that renders has to start."""
    return run.run_dir / "model"


@pytest.fixture(scope="session")
def chat_model(model: Path, folder: Path) -> Path:
    """The trained model with a chat template."""
    copy = Path(shutil.copytree(model, folder / "chat_model"))
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return copy


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lengths = (2, 9, 4, 4, 7, 1, 3)
    texts = [" ".join(f"w{(3 * i + j) % 30}" for j in range(n)) for i, n in enumerate(lengths)]
    rows = ({"prompt": text, "id": number} for number, text in enumerate(texts))
    return write(tmp_path / "prompts.jsonl", *rows)
