"""A tiny real model, tokenizer and pair files for tests, made on the spot, and children that can be killed."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from threading import Event
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from rather.config.load import config_from_dict
from rather.config.run_config import DPOConfig
from rather.data.prepare import prepare
from rather.model.attention import IMPLEMENTATION
from rather.model.policy import PolicyModel

PRELOADED = [
    "rather.pipeline.pipeline",
    "tests.tiny",
    "tests.warm",
    "peft",
    "transformers.models.llama.modeling_llama",
]
WORDS = [f"w{i}" for i in range(60)]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}

TEXT: dict[str, Any] = {  # the same for any family, and for the language model of one with a tower
    **{name: size for name, size in SIZES.items() if name != "tie_word_embeddings"},
    "vocab_size": 63,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_model(
    folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Path:
    """A random Llama of a few thousand weights with a word-level tokenizer that adds its BOS."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    own = {"vocab_size": len(vocabulary), "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **own, **changes})).to(dtype).save_pretrained(folder)
    return folder


def make_pairs(file: Path, count: int, *, seed: int = 0) -> Path:
    """Ragged pairs of random words; chosen answers favour the first words, so there is something to learn."""
    draw = random.Random(seed)

    def words(low: int, high: int, pool: list[str]) -> str:
        return " ".join(draw.choices(pool, k=draw.randint(low, high)))

    rows = [
        {
            "prompt": words(2, 9, WORDS),
            "chosen": " " + words(1, 12, WORDS[:40]),
            "rejected": " " + words(1, 12, WORDS[20:]),
        }
        for _ in range(count)
    ]
    return write_rows(file, rows)


def write_rows(file: Path, rows: Iterable[Any]) -> Path:
    """Write a file of JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def until(ready: Callable[[], bool]) -> None:
    """Wait until something is so; fail after a minute."""
    pause = Event()
    for _ in range(6000):
        if ready():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen within a minute")


def make_config(folder: Path, **changes: Any) -> DPOConfig:
    """A run of a few small steps in `folder`, which gets a model and pairs. Dotted keys change it."""
    if not (folder / "base").exists():
        shutil.copytree(_model_and_pairs(), folder, dirs_exist_ok=True)
    return _config(folder, changes)


@cache
def _model_and_pairs() -> Path:
    """A folder with model, pairs and their tokens in the cache: tokenising starts two processes."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_model(folder / "base")
    make_pairs(folder / "pairs.jsonl", 40)
    make_pairs(folder / "held_out.jsonl", 9, seed=1)
    prepare(_config(folder, {}))
    (folder / "output" / ".cache" / "data" / "files.json").unlink()  # hashes by path
    return folder


def _config(folder: Path, changes: dict[str, Any]) -> DPOConfig:
    model, pairs, held_out = folder / "base", folder / "pairs.jsonl", folder / "held_out.jsonl"
    values: dict[str, Any] = {
        "exp_name": "run",
        "output_dir": str(folder / "output"),
        "logging_dir": str(folder / "logs"),
        "pretrain": str(model),
        "sequence_length": 64,
        "track_with": None,
        "report_html": False,
        "actor_train": {
            "data_args": {"file_name": str(pairs)},
            "training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 8},
        },
        "validation": {"data_args": {"file_name": str(held_out)}},
    }
    return config_from_dict(nest(values, changes))


def nest(values: dict[str, Any], changes: dict[str, Any], separator: str = "__") -> dict[str, Any]:
    """Set each key in the section that it names: actor_train__engine in the section actor_train."""
    for key, value in changes.items():
        *parents, last = key.split(separator)
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return values


class CalledCuda(str):
    """The name of the CPU for torch, and that of a GPU for code that asks whether it is one."""

    def __new__(cls, *_args: object) -> CalledCuda:
        return super().__new__(cls, "cpu")

    def startswith(self, prefix: Any, *args: Any) -> bool:
        return "cuda:0".startswith(prefix, *args)


def metrics(config: DPOConfig) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return rows_of(config.run_dir / "metrics.jsonl")


def is_time(key: str) -> bool:
    return key.startswith("time/") or key.endswith("_per_second")


def untimed(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lines of metrics without times and speeds, which differ from run to run."""
    return [{k: v for k, v in line.items() if not is_time(k)} for line in lines]


def tiny_policy(*, dtype: torch.dtype = torch.float32, **changes: Any) -> PolicyModel:
    """A random Llama in memory."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "vocab_size": 61, **changes})
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=IMPLEMENTATION, dtype=dtype
    )
    return PolicyModel(widen(model.eval()))


@torch.no_grad()
def widen(model: Any) -> Any:
    """Draw the weights of a model so wide that attention and head really matter."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.15)
    return model


def fork_context() -> ForkServerContext:
    """Return the context whose processes are forked from a server that has the heavy imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # all tests share the server, so they name the same
    return context


def in_child(work: Callable[..., Any], *args: Any) -> int:
    """Runs `work` in a process of its own, and returns its exit code."""
    child = fork_context().Process(target=_quietly, args=(work, *args))
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def train_on_two_ranks(config: dict[str, Any]) -> None:
    """Train in two processes, with the environment that torchrun would give them."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    children = []
    for rank in ("0", "1"):
        own = {**environment, "RANK": rank, "LOCAL_RANK": rank}
        child = fork_context().Process(target=_quietly, args=(_train_rank, own, config))
        child.start()
        children.append(child)
    for child in children:
        child.join(300)
        assert child.exitcode == 0


def _train_rank(environment: dict[str, str], config: dict[str, Any]) -> int:
    from rather.pipeline.pipeline import DPOPipeline

    os.environ.update(environment)
    return DPOPipeline(DPOConfig.model_validate(config)).run()


def _quietly(work: Callable[..., Any], *args: Any) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    torch.set_num_threads(1)
    raise SystemExit(work(*args))
