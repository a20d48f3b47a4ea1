"""Real weights, real outcome: a 15M story model aligned to happy stories, timed beside a plain padded loop.

    RATHER_TEST_DATA=/path/to/data python bench/stories.py [--out DIR] [--timed-steps 3]

Trains stories15M on its own on-policy pairs (40 steps of 16 pairs, learning rate 5e-5, beta 0.1) with `rather train`,
judges fresh samples of base and result by VADER sentiment, and times optimizer steps of the same pairs in a plain loop:
Hugging Face's forward on padded rows, full log-softmax, torch AdamW. The loop is timed with both kinds of padding that
people use: every row to the sequence length, and every row to the longest of its batch. FLOPs stand beside the times:
on a CPU where matrix products take nearly all of the time, their ratio bounds what any exact method can gain.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from rather.config.load import load_config
from rather.data.batch import TokenPair
from rather.pipeline.pipeline import DPOPipeline

YAML = """\
exp_name: stories
pretrain: {model}
output_dir: {out}/output
logging_dir: {out}/logs
sequence_length: 256
beta: 0.1
max_steps: {steps}
actor_train:
  data_args: {{file_name: {pairs}, separator: " "}}
  training_args:
    {{learning_rate: 5.0e-5, per_device_train_batch_size: 16, num_train_epochs: 2, lr_scheduler_type: constant}}
validation:
  data_args: {{split: 88}}
"""
SAMPLES, NEW_TOKENS = 96, 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", default=os.environ.get("RATHER_TEST_DATA"), help="folder with models/ and pairs/"
    )
    parser.add_argument("--out", type=Path, default=Path("output/bench-stories"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--timed-steps",
        type=int,
        default=3,
        help="steps of each padded loop to time; 0 leaves it out",
    )
    args = parser.parse_args()
    if not args.data:
        parser.error("name the data folder with --data or RATHER_TEST_DATA")
    data = Path(args.data).resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    config_file = args.out / "stories.yaml"
    config_file.write_text(
        YAML.format(
            model=data / "models/stories15M",
            pairs=data / "pairs/stories15M_vader_onpolicy.jsonl.gz",
            out=args.out.resolve(),
            steps=args.steps,
        )
    )
    table = outcome(config_file)
    if args.timed_steps:
        table |= speed(config_file, args.timed_steps)
    table |= {
        "cpu": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    (args.out / "stories.json").write_text(json.dumps(table, indent=1) + "\n")
    print("\n| what | figure |\n|---|---|")
    for key, value in table.items():
        print(f"| {key} | {value:.4g} |" if isinstance(value, float) else f"| {key} | {value} |")


def outcome(config_file: Path) -> dict[str, Any]:
    """Trains with the command, then compares base and result."""
    subprocess.run(
        [sys.executable, "-m", "rather", "train", str(config_file), "--overwrite"], check=True
    )
    config = load_config(config_file)
    lines = [
        json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    prompts = held_out_prompts(config)
    return {
        "held-out pairs": lines[-1]["eval/pairs"],
        "held-out accuracy": lines[-1]["eval/rewards/accuracies"],
        "sentiment before": sentiment(config.actor_train.model_path, prompts),
        "sentiment after": sentiment(str(config.run_dir / "model"), prompts),
        "seconds per step, rather": statistics.median(
            line["pairs"] / line["pairs_per_second"] for line in lines if "pairs_per_second" in line
        ),
    }


def held_out_prompts(config: Any) -> list[list[int]]:
    pairs = DPOPipeline(config).data.evals[""]
    rows = [pairs.take([i % len(pairs)])[0].prompt.tolist() for i in range(SAMPLES)]
    return [list(map(int, row)) for row in rows]


@torch.no_grad()
def sentiment(model_path: str, prompts: Sequence[Sequence[int]]) -> float:
    """Mean VADER sentiment of one fresh continuation of each prompt; both story models end a story with token 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt")
    out = model.generate(
        **batch, do_sample=True, max_new_tokens=NEW_TOKENS, eos_token_id=[1, 2], pad_token_id=2
    )
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    judge = SentimentIntensityAnalyzer()
    return statistics.mean(judge.polarity_scores(text)["compound"] for text in texts)


def speed(config_file: Path, steps: int) -> dict[str, Any]:
    """Seconds and FLOPs of a step of the same pairs in a plain padded loop."""
    config = load_config(config_file)
    pipeline = DPOPipeline(config)
    batches = [pipeline.data.train.take(pipeline.source.order.step(n)) for n in range(steps + 1)]
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(config.actor_train.model_path, dtype=torch.float32)
        for _ in range(2)
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-5)
    table: dict[str, Any] = {"GFLOP per step, rather": _gflop(policy, _needed(batches[0]))}
    for name, width in (
        ("longest of the batch", None),
        ("sequence length", config.sequence_length),
    ):
        times = []
        for pairs in batches:
            began = time.perf_counter()
            padded_step(policy, reference, optimizer, pairs, width)
            times.append(time.perf_counter() - began)
        table[f"seconds per step, plain loop padded to the {name}"] = statistics.median(times[1:])
        table[f"GFLOP per step, plain loop padded to the {name}"] = _gflop(
            policy, _padded(batches[0], width)
        )
    return table


def padded_step(
    policy: Any, reference: Any, optimizer: Any, pairs: Sequence[TokenPair], width: int | None
) -> None:
    with torch.no_grad():
        reference_logps = padded_logps(reference, pairs, width)
    ratio = padded_logps(policy, pairs, width) - reference_logps
    loss = -torch.nn.functional.logsigmoid(0.1 * (ratio[:, 0] - ratio[:, 1])).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def padded_logps(model: Any, pairs: Sequence[TokenPair], width: int | None) -> torch.Tensor:
    rows = [
        np.concatenate([pair.prompt, side])
        for pair in pairs
        for side in (pair.chosen, pair.rejected)
    ]
    width = width or max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    seen, scored = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
        seen[i, : len(row)] = 1
        scored[i, len(pairs[i // 2].prompt) : len(row)] = True
    logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1]
    logps = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[..., 0]
    return (logps * scored[:, 1:]).sum(1).view(len(pairs), 2)


def _needed(pairs: Sequence[TokenPair]) -> tuple[int, int]:
    """Tokens through the blocks and rows through the head, each prompt once."""
    return sum(p.tokens for p in pairs), sum(len(p.chosen) + len(p.rejected) for p in pairs)


def _padded(pairs: Sequence[TokenPair], width: int | None) -> tuple[int, int]:
    longest = max(len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in pairs)
    tokens = 2 * len(pairs) * (width or longest)
    return tokens, tokens


def _gflop(model: Any, work: tuple[int, int]) -> float:
    """Matrix products of one step: three forward units of the policy, one of the reference (attention left out)."""
    tokens, rows = work
    head = model.get_output_embeddings().weight.numel()
    blocks = sum(p.numel() for name, p in model.named_parameters() if "layers" in name)
    return 4 * 2 * (blocks * tokens + head * rows) / 1e9


if __name__ == "__main__":
    main()
