"""A million short rows: how long tokenising takes, how much memory it needs, and how fast the cache starts.

    python bench/data_million.py                     # its own small tokenizer
    python bench/data_million.py --tokenizer FOLDER --rows 100000

Memory is the proportional set size of this process and all its children, summed and sampled ten times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rather.config.run_config import DPOConfig
from rather.data.prepare import Prepared, prepare
from rather.data.template import TEMPLATES

WORDS = [
    "bread",
    "butter",
    "candle",
    "cheese",
    "cider",
    "coffee",
    "flour",
    "garlic",
    "ginger",
    "honey",
    "jam",
    "lantern",
    "mustard",
    "paper",
    "pepper",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tokenizer", help="folder of a tokenizer with a chat template")
    parser.add_argument("--processes", type=int)
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        pairs = write_rows(Path(folder), args.rows)
        tokenizer = args.tokenizer or str(make_tokenizer(Path(folder, "tokenizer")))
        config = DPOConfig.model_validate(
            {
                "output_dir": folder,
                "pretrain": tokenizer,
                "actor_train": {
                    "data_args": {
                        "file_name": str(pairs),
                        "preprocessing_num_workers": args.processes,
                    }
                },
                "validation": {"data_args": {"split": 1000}},
            }
        )
        first = measured(config, console)
        second = measured(config, console)
        report(
            {
                "rows": args.rows,
                "input_mb": pairs.stat().st_size / 1e6,
                "first": first,
                "second": second,
            },
            console,
        )


def measured(config: DPOConfig, console: Console) -> dict[str, float]:
    with PeakMemory() as memory:
        started = time.perf_counter()
        made = prepare(config, console=console)
        seconds = time.perf_counter() - started
        taken = take_some(made)
    return {
        "seconds": seconds,
        "peak_mb": memory.peak / 1e6,
        "take_64_ms": taken * 1e3,
        "pairs": len(made.train),
    }


def take_some(made: Prepared) -> float:
    """Seconds to take the 64 pairs of one step from all over the file."""
    rows = [i * 7919 % len(made.train) for i in range(64)]
    made.train.take(rows)  # the first brings the pages in
    started = time.perf_counter()
    made.train.take(rows)
    return time.perf_counter() - started


def write_rows(folder: Path, count: int) -> Path:
    path = folder / "pairs.jsonl"
    with path.open("w") as file:
        for i in range(count):
            item, other = WORDS[i % 15], WORDS[i // 15 % 15]
            row = {
                "instruction": f"Where do you keep the {item} number {i}?",
                "input": f"I have looked behind the {other}.",
                "chosen": f"With pleasure! The {item} is on shelf {i % 97}, beside the {other}.",
                "rejected": f"Not again. Look for the {item} yourself, row {i % 89}.",
            }
            file.write(json.dumps(row) + "\n")
    return path


def make_tokenizer(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [f"With pleasure! The {word} is on the shelf." for word in WORDS], trainer
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATES["chatml"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class PeakMemory:
    """The largest memory of this process and its children while the block runs."""

    def __enter__(self) -> PeakMemory:
        self.peak = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.done.wait(0.1):
            self.peak = max(self.peak, sum(map(_memory, [os.getpid(), *_children()])))


def _children() -> list[int]:
    try:
        return [
            int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        ]
    except OSError:
        return []


def _memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def report(result: dict[str, object], console: Console) -> None:
    table = Table(
        title=f"{result['rows']:,} rows, {result['input_mb']:.0f} MB, {os.cpu_count()} cores"
    )
    for name in ("run", "seconds", "rows/s", "peak memory", "64 pairs taken in"):
        table.add_column(name, justify="right")
    for name in ("first", "second"):
        run = result[name]
        assert isinstance(run, dict)
        rate = int(str(result["rows"])) / run["seconds"]
        table.add_row(
            name,
            f"{run['seconds']:.2f}",
            f"{rate:,.0f}",
            f"{run['peak_mb']:,.0f} MB",
            f"{run['take_64_ms']:.2f} ms",
        )
    console.print(table)
    console.print_json(json.dumps(result))


if __name__ == "__main__":
    main()
