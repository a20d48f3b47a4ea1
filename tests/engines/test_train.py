"""`rather train` of ROLL's example with each engine has the loss curve of `torch`: make test-engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.ranks import DEEPSPEED, EXAMPLES, MEGATRON
from tests.house.source import ROOT
from tests.tiny import make_model, make_pairs

pytestmark = [
    pytest.mark.skipif(
        not (find_spec("deepspeed") and find_spec("megatron")),
        reason="deepspeed or megatron-core is not installed: make test-engines",
    ),
    pytest.mark.slow,
]

EXAMPLE = ROOT / "examples" / "qwen2.5-3B-dpo_megatron" / "dpo_config.yaml"
DETAILS = "actor_train.strategy_args.strategy_config"
TP = [f"{DETAILS}.tensor_model_parallel_size=2"]
RUNS = {
    "torch": [],
    "deepspeed": [
        f"actor_train.engine={EXAMPLES / DEEPSPEED}",
        "actor_train.strategy_args.strategy_name=zero2",
        f"~{DETAILS}.use_distributed_optimizer",
    ],
    "megatron": [f"actor_train.engine={EXAMPLES / MEGATRON}"],
    "megatron tp 2": [f"actor_train.engine={EXAMPLES / MEGATRON}", *TP],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("train")
    make_model(found / "model", max_position_embeddings=512, vocab_size=64)
    make_pairs(found / "pairs.jsonl", 96)
    return found


def arguments(folder: Path, name: str) -> list[str]:
    """Return the example on two CPU ranks, in float32 and without recomputed activations."""
    changed = {
        "exp_name": name.replace(" ", "-"),
        "pretrain": folder / "model",
        "actor_train.data_args.file_name": f"[{folder / 'pairs.jsonl'}]",
        "validation.data_args.file_name": folder / "pairs.jsonl",
        "global_template": "null",
        "output_dir": folder / "output",
        "logging_dir": folder / "logs",
        "checkpoint_config.output_dir": folder / "copies",
        "track_with": "null",
        "platform": "cpu",
        "max_steps": 4,
        "eval_steps": 100,
        "forgetting": "off",
        "report_html": "false",
        "num_gpus_per_node": 2,
        "actor_train.device_mapping": "[0,1]",
        "reference.device_mapping": "[0,1]",
        "actor_train.model_args.dtype": "fp32",
        "reference.model_args.dtype": "fp32",
        "actor_train.model_args.disable_gradient_checkpointing": "true",
        f"{DETAILS}.recompute_granularity": "null",
        "actor_train.training_args.learning_rate": "1e-3",
        "actor_train.training_args.warmup_steps": 0,
        "actor_train.training_args.per_device_train_batch_size": 8,
    }
    tp = TP[0] in RUNS.get(name, [])
    if tp:  # the same pairs a step on one data-parallel rank
        changed["actor_train.training_args.per_device_train_batch_size"] = 16
    own = [f"{key}={value}" for key, value in changed.items() if key != "tracker_kwargs"]
    return ["train", str(EXAMPLE), *own, "~tracker_kwargs", *RUNS[name]]


def losses(folder: Path, name: str) -> list[float]:
    file = folder / "output" / name.replace(" ", "-") / "metrics.jsonl"
    lines = map(json.loads, file.read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def run(folder: Path, name: str, *starter: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *starter, "-m", "rather", *arguments(folder, name)]
    if starter:
        command = [sys.executable, *starter, *command[len(starter) + 1 :]]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=environment, check=False
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-3000:]
    return text


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    run(folder, "torch", *TORCHRUN)
    return losses(folder, "torch")


@pytest.mark.parametrize("name", ["deepspeed", "megatron", "megatron tp 2"])
def test_the_loss_curve_under_torchrun(folder: Path, expected: list[float], name: str) -> None:
    text = run(folder, name, *TORCHRUN)
    assert losses(folder, name) == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 4
    assert expected[0] > expected[-1]
    engine = (MEGATRON if "megatron" in name else DEEPSPEED).partition("/")[0]
    assert f"run by the engine {engine} (experimental)" in text
    card = folder / "output" / name.replace(" ", "-") / "model" / "README.md"
    assert f"| engine | {engine} |" in card.read_text()


def test_the_loss_curve_on_ray(folder: Path, expected: list[float]) -> None:
    RUNS["deepspeed on Ray"] = RUNS["deepspeed"]
    run(folder, "deepspeed on Ray")
    assert losses(folder, "deepspeed on Ray") == pytest.approx(expected, rel=1e-5)
