"""`rather plan MODEL --methods`: which ways to train a model fit one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rather.cli import app
from rather.model.budget import LADDER, tokens_in
from rather.model.head import KEEP_BYTES
from rather.plan.memory import Device
from rather.plan.methods import LENGTHS, METHODS, methods_of

GIB = 1 << 30
SEVEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    "max_position_embeddings": 131072, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seven")
    (folder / "config.json").write_text(json.dumps(SEVEN))
    return folder


def test_what_fits_a_gpu_of_24_gib(seven: Path) -> None:
    found = {(m.name, m.length): m for m in methods_of(str(seven), Device("cuda", 24 * GIB), "l4")}
    assert found.keys() == {(name, length) for name in METHODS for length in LENGTHS}
    fitting = {name for name, length in found if length == 2048 and found[name, 2048].forecast.fits}
    assert fitting == {"LoRA", "LoRA on 4-bit weights"}
    memory = [found[name, 2048].forecast.parts.total for name in METHODS]
    assert memory[0] > memory[2] > memory[1] > memory[3]  # full, lean, on the host, LoRA
    assert all(method.pairs_per_second for method in found.values())
    assert not any(m.forecast.fits for (_, length), m in found.items() if length == 131_072)


def test_a_table_and_json(seven: Path) -> None:
    run = CliRunner().invoke
    shown = run(app, ["plan", str(seven), "--methods", "--gpu", "h200"])
    assert shown.exit_code == 0, shown.output
    assert "131,072 tokens" in shown.output
    assert "LoRA on 4-bit weights" in shown.output
    rows = json.loads(run(app, ["plan", str(seven), "--methods", "--gpu", "h200", "--json"]).output)
    (row,) = (r for r in rows if r["method"] == "LoRA" and r["sequence_length"] == 131_072)
    assert row["fits"]
    assert row["recompute"] == "full"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--gpu", "h300"], "--gpu h300: unknown"),
        (["--gpu", "h200", "--gpus", "2"], "takes a model and --gpu alone"),
        (["--gpu", "h200", "beta=0.1"], "takes a model and --gpu alone"),
    ],
)
def test_wrong_arguments(seven: Path, arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["plan", str(seven), *arguments, "--methods"])
    assert result.exit_code == 2
    assert reason in result.output


def test_tokens_beyond_the_kept_logits_need_no_memory_for_them() -> None:
    row, other = 300_000, 200_000
    kept = KEEP_BYTES["cuda"] // row
    room_of_kept = (kept - 4096) * (row + other)
    below = tokens_in(room_of_kept / 2, 4096, row + other, row)
    assert below == pytest.approx((kept + 4096) / 2, abs=LADDER["cuda"])
    above = tokens_in(room_of_kept + 10_000 * other, 4096, row + other, row)
    assert above == pytest.approx(kept + 10_000, abs=LADDER["cuda"])
    assert tokens_in(-1e12, 4096, row + other, row) == 0
