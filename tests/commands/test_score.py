"""`rather score`: the numbers of an independent padded computation, of an evaluation during training, of each slice."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.commands.score import wilson
from rather.config.run_config import DPOConfig
from rather.data.batch import TokenPair
from tests.commands.conftest import rather, rows_of, succeed, told, write
from tests.padded import padded_logps
from tests.tiny import make_pairs, metrics


def plainly_tokenised(tokenizer: Any, row: dict[str, str]) -> TokenPair:
    """By transformers' own call: the answer follows the prompt, EOS ends it, the common beginning is the prompt."""
    prompt = tokenizer(row["prompt"]).input_ids
    chosen, rejected = (
        [*tokenizer(row["prompt"] + row[side]).input_ids, tokenizer.eos_token_id]
        for side in ("chosen", "rejected")
    )
    start = next(
        i
        for i in range(len(prompt) + 1)
        if i == len(prompt) or {chosen[i], rejected[i]} != {prompt[i]}
    )
    spans = ((start, len(chosen)),), ((start, len(rejected)),)
    ids = (np.array(part, np.int32) for part in (chosen[:start], chosen[start:], rejected[start:]))
    return TokenPair(*ids, *spans)


@pytest.fixture(scope="module")
def real(team_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A real model, the same moved a little as its reference, and real pairs: as many as take a few seconds."""
    model = team_data / "models" / "stories260K"
    folder = tmp_path_factory.mktemp("real")
    reference = folder / "reference"
    moved, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model),
        AutoTokenizer.from_pretrained(model),
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    moved.save_pretrained(reference)
    tokenizer.save_pretrained(reference)
    with gzip.open(team_data / "pairs" / "stories260K_vader_onpolicy.jsonl.gz") as source:
        (folder / "pairs.jsonl").write_bytes(b"".join(next(source) for _ in range(16)))
    return {
        "model": model,
        "reference": reference,
        "pairs": folder / "pairs.jsonl",
        "tokenizer": tokenizer,
    }


def test_real_pairs_score_as_in_a_padded_forward(real: dict[str, Any], tmp_path: Path) -> None:
    """Text to numbers without a line of ours, against the command: every pair, and what follows from them."""
    out = tmp_path / "pairs.jsonl"
    cache = f"output_dir={tmp_path}"
    names = ("--reference", real["reference"], "--out", out)
    found = told(
        "score", real["model"], real["pairs"], "beta=0.2", "sequence_length=512", cache, *names
    )
    lines, rows = rows_of(out), rows_of(real["pairs"])
    assert [line["number"] for line in lines] == list(range(1, 17))
    pairs = [plainly_tokenised(real["tokenizer"], rows[line["number"] - 1]) for line in lines]
    sums = []
    for folder in (real["model"], real["reference"]):
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            parts = [
                padded_logps(plain, pairs[first : first + 32]) for first in range(0, len(pairs), 32)
            ]
        sums.append(torch.cat(parts))
    lengths = torch.tensor([[len(p.chosen), len(p.rejected)] for p in pairs])
    for name, expected in zip(("logps", "reference_logps"), sums, strict=True):
        ours = torch.tensor(
            [[line[f"{name}/chosen"], line[f"{name}/rejected"]] for line in lines],
            dtype=torch.float64,
        )
        assert ((ours - expected).abs() / lengths).max() < 2e-5, name
    rewards = 0.2 * (sums[0] - sums[1])
    margins = rewards[:, 0] - rewards[:, 1]
    assert [
        [line["tokens/chosen"], line["tokens/rejected"]] for line in lines
    ] == lengths.double().tolist()
    assert found["pairs"] == len(pairs)
    assert found["rewards/margins"] == pytest.approx(float(margins.mean()), abs=1e-4)
    assert found["rewards/chosen"] == pytest.approx(float(rewards[:, 0].mean()), abs=1e-4)
    unclear = int((margins.abs() < 1e-3).sum())
    assert found["rewards/accuracies"] == pytest.approx(
        float((margins > 0).double().mean()), abs=unclear / len(pairs)
    )
    assert found["loss"] == pytest.approx(float(torch.log1p(torch.exp(-margins)).mean()), abs=1e-4)
    low, high = found["rewards/margins_interval"]
    half = 1.959964 * float(margins.std()) / math.sqrt(len(margins))
    assert (high - low) / 2 == pytest.approx(half, rel=1e-3)


def test_slices_and_log_probs_alone(team_data: Path, real: dict[str, Any], tmp_path: Path) -> None:
    """Each category of a real file; without a reference both kinds of log-probs."""
    with gzip.open(
        team_data / "pairs" / "truthfulqa_pairs.jsonl.gz", "rt", encoding="utf-8"
    ) as file:
        rows = [json.loads(line) for line in file][::100]
    for row in rows:
        row["prompt"] = row.pop("messages")[0]["content"]
    pairs, out = write(tmp_path / "pairs.jsonl", *rows), tmp_path / "each.jsonl"
    words = ("score", real["model"], pairs, f"output_dir={tmp_path}", "--by", "category")
    found, lines = told(*words, "--out", out), rows_of(out)
    slices = found["by"]["category"]
    assert sum(part["pairs"] for part in slices.values()) == found["pairs"] == len(lines)
    assert len(slices) > 1
    assert not any(name.startswith("rewards") for name in found)
    for category, numbers in slices.items():
        own = [line for line in lines if line["category"] == category]
        per_token = [
            [line[f"logps/{s}"] / line[f"tokens/{s}"] for s in ("chosen", "rejected")]
            for line in own
        ]
        hits = sum(chosen > rejected for chosen, rejected in per_token) / len(own)
        assert numbers["logps_per_token/accuracies"] == pytest.approx(hits)
        assert numbers["logps/chosen"] == pytest.approx(
            sum(line["logps/chosen"] for line in own) / len(own)
        )
    table = rather(*words)
    assert "logps_per_token" in table.stdout
    assert f"category: {next(iter(slices))}" in table.stdout
    assert "95 %" in table.stdout


def test_a_slice_without_weight_has_a_dash(folder: Path, tmp_path: Path) -> None:
    row = '{"prompt": "w%d", "chosen": " w2", "rejected": " w3", "weight": %d, "source": "%s"}\n'
    (tmp_path / "pairs.jsonl").write_text(row % (1, 1, "a") + row % (4, 0, "b"))
    words = ("score", folder / "base", tmp_path / "pairs.jsonl", "--by", "source")
    done = succeed(*words, f"output_dir={tmp_path}", "sequence_length=64")
    assert "nan" not in done.stdout
    assert "all pairs of this slice have weight 0" in done.stdout
    assert "an interval of margins needs two pairs" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if "source: b" in line]
    assert lines == [["source:", "b", "1", *"-----"]] * 2


def test_a_run_scores_as_it_evaluated(run: DPOConfig, folder: Path) -> None:
    rest = (folder / "held_out.jsonl", f"output_dir={folder}", "--reference", folder / "base")
    found = told("score", run.run_dir, *rest)
    last = [line for line in metrics(run) if "eval/loss" in line][-1]
    own_words = {  # score has its own interval, and no figures of a whole held-out set
        "eval/pairs", "eval/rewards/accuracies_low", "eval/rewards/accuracies_high",
        "eval/rewards/accuracies_length_controlled", "eval/drift", "eval/calibrated_loss",
    }  # fmt: skip
    for name, value in last.items():
        if name.startswith("eval/") and name not in own_words:
            assert found[name.removeprefix("eval/")] == pytest.approx(value, abs=1e-6), name
    own = told("score", folder / "base", *rest)
    assert own["rewards/ties"] == 1.0
    assert own["rewards/accuracies"] == 0.0
    simpo = told("score", run.run_dir, *rest[:2], "pref_loss=simpo", "beta=2")
    assert simpo["rewards/chosen"] == pytest.approx(2 * simpo["logps_per_token/chosen"])


def test_checkpoints_and_adapters_are_models_too(
    run: DPOConfig, lora: DPOConfig, folder: Path
) -> None:
    """The result, the last checkpoint, the adapter on its base: one model under three names."""
    pairs, cache = folder / "held_out.jsonl", f"output_dir={folder}"
    result, checkpoint = (
        told("score", run.run_dir / name, pairs, cache) for name in ("model", "checkpoint-3")
    )
    assert checkpoint["logps/chosen"] == pytest.approx(result["logps/chosen"], abs=1e-9)
    earlier = told("score", run.run_dir / "checkpoint-2", pairs, cache)
    assert earlier["logps/chosen"] != pytest.approx(result["logps/chosen"], abs=1e-6)
    tuned = [
        told("score", lora.run_dir / name, pairs, cache)
        for name in ("model", "adapter", "checkpoint-3")
    ]
    base = told("score", folder / "base", pairs, cache)
    for found in tuned:
        assert found["logps/chosen"] == pytest.approx(tuned[0]["logps/chosen"], abs=1e-4)
    assert abs(tuned[0]["logps/chosen"] - base["logps/chosen"]) > 0.01


def test_weights_count(run: DPOConfig, tmp_path: Path) -> None:
    rows = rows_of(make_pairs(tmp_path / "plain.jsonl", 6))
    weighted = [{**row, "weight": float(i < 3)} for i, row in enumerate(rows)]
    some, all_of_them = (
        told("score", run.run_dir, write(tmp_path / name, *content), f"output_dir={tmp_path}")
        for name, content in (("some.jsonl", rows[:3]), ("weighted.jsonl", weighted))
    )
    names = "chosen", "margins", "accuracies_interval", "margins_interval"
    for name in (f"logps/{name}" for name in names):
        assert all_of_them[name] == pytest.approx(some[name], rel=1e-9), name


def test_the_interval_is_wilsons() -> None:
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson(1.0, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)
