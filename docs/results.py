"""Tables of docs/generate.py that come from the measurements in bench/results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
GIB = 2**30
ADAPTED = ("gpt-oss-20B",)  # rows of bench/models_gpu.py that train adapters
SHORT = {
    "tp_size": "tp",
    "cp_size": "cp",
    "pp_size": "pp",
    "ep_size": "ep",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "shard_size": "shards of ",
    "sequence_parallel": ", sequence parallel",
    "use_distributed_optimizer": ", stage 1",
}


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def layout_rows() -> Iterator[list[str]]:
    """Yield memory and traffic of one rank in some layouts of large models."""
    shown: set[str] = set()
    for row in read("layouts_steps")["results"]:
        strategy = row["strategy_args"]["strategy_name"]
        degrees = [strategy]
        for key, value in row["strategy_args"]["strategy_config"].items():
            degrees.append(SHORT[key] if value is True else f"{SHORT[key]}{value}")
        state = row["weights"] + row["gradients"] + row["optimizer"]
        planned = row["planned"]["activations"] / row["activations"] - 1
        calls = row["collectives"].items()
        traffic = sum(size for name, (_, size) in calls if name != "wait_tensor")
        layout = f"{row['model']} on {row['devices']}: {' '.join(degrees).replace(' ,', ',')}"
        if layout in shown:  # further stages of a pipeline
            continue
        shown.add(layout)
        yield [
            layout,
            f"{row['weights'] / GIB:.2f}",
            f"{state / GIB:.2f}",
            f"{row['activations'] / GIB:.1f}",
            f"{planned:+.1%}",
            f"{traffic / GIB:.1f}",
        ]


def large_rows() -> Iterator[list[str]]:
    """Yield what long pairs and large models need on one H200."""
    long_pairs = read("long_gpu")["cells"]
    for cell in sorted(long_pairs, key=lambda cell: (cell["system"] == "TRL", cell["tokens"])):
        peer = " by TRL + Liger" if cell["system"] == "TRL" else ""
        what = f"7B, LoRA, a pair of {cell['tokens']:,} tokens{peer}"
        if "torch's" in cell.get("settings", ""):
            what += ", torch's attention"
        yield [what, *_memory_and(cell, "tokens_per_second", "{:,.0f} tokens/s")]
    for file, how in (
        ("large_gpu_4bit", "LoRA on 4-bit weights, {} pairs like UltraFeedback"),
        ("large_gpu_lean", "all weights, `precision: lean`, {} such pairs, reference cached"),
        ("large_gpu_host", "all weights, state on the host, {} such pairs, reference cached"),
    ):
        if not (RESULTS / f"{file}.json").exists():  # not measured yet
            continue
        for cell in read(file)["cells"]:
            if "same" in cell:
                continue
            model = cell["what"].partition(",")[0]
            row = _memory_and(cell, "pairs_per_second", "{:.2f} pairs/s")
            if "host_gib" in cell:
                row[0] += f", and {cell['host_gib']:.0f} of host memory"
            yield [f"{model}, {how.format(cell['pairs'])}", *row]


def family_rows() -> Iterator[list[str]]:
    """Yield families beyond plain attention on one H200, next to TRL where it was measured."""
    cells = read("models_gpu")["cells"]
    peers = {cell["lengths"]: cell for cell in cells if cell["system"] != "ours"}
    for cell in cells:
        if cell["system"] != "ours":
            continue
        is_adapter = cell["lengths"] in ADAPTED  # an MFU would count gradients of frozen weights
        peer = peers.get(cell["lengths"])
        padding, _, packing, largest = cell["more"]["packed minus padded"][:4]
        yield [
            cell["lengths"] + (", LoRA" if is_adapter else ""),
            f"{cell['pairs_per_second']:.1f}",
            "-" if is_adapter else f"{cell['mfu']:.1%}",
            f"{peer['pairs_per_second']:.1f}" if peer else "not run",
            f"{_times_as_fast(cell, peer):.2f}" if peer else "-",
            f"{cell['peak_gib']:.0f} / " + (f"{peer['peak_gib']:.0f}" if peer else "-"),
            f"{packing:.2g} (at most {largest:.2g})",
            f"{padding:.2g}",
        ]


def _times_as_fast(cell: Any, peer: Any) -> float:
    """Return the median over the steps that both have."""
    both = zip(cell["seconds"], peer["seconds"], strict=False)
    return statistics.median(theirs / ours for ours, theirs in both)


def _memory_and(cell: Any, speed: str, form: str) -> list[str]:
    """Return memory and speed of a cell, or why it has none."""
    if "failed" in cell:
        return ["-", "out of memory" if "out of memory" in cell["failed"] else "failed"]
    memory = f"{cell['peak_gib']:.1f}"
    if "forecast_gib" in cell:
        memory += f" ({cell['forecast_gib']:.1f})"
    return [memory, form.format(cell[speed])]


def merge_rows() -> Iterator[list[str]]:
    """Yield what a bf16 file keeps of an update."""
    for row in read("merge")["rows"]:
        numbers = (f"{row['kept']:.3f}", f"{row['change']:.2e}", f"{row['error']:.2e}")
        margins = (f"{row['true_margin']:.4f}", f"{row['margin']:.4f}")
        yield [row["training"], f"{row['rate']:g}", row["rounding"], *numbers, *margins]


def flip_rows() -> Iterator[list[str]]:
    """Yield how often routers choose other experts in another layout."""
    for row in read("router_flips")["results"]:
        for how in ("free", "replayed") if row["flips"] else ("free",):
            flips = row["flips"] if how == "free" else 0.0
            numbers = (f"{row[f'token_{how}']:.2g}", f"{row[f'margin_{how}']:.2g}")
            yield [row["dtype"], f"{row['router_scale']:g}", how, f"{flips:.1%}", *numbers]


def door_rows() -> Iterator[list[str]]:
    """Yield TRL's own scripts with only the imports replaced, and the public ones together."""
    facts = read("trl_door")
    for name, row in facts["TRL's own scripts"].items():
        speeds = row.get("speed", {})
        seconds = [speeds[system]["CPU seconds of a step"] for system in ("trl", "rather.trl")]
        yield [
            f"TRL's `scripts/{name}.py`",
            f"same losses, to {row['largest difference of a loss']:.0e}",
            *(f"{number}" for number in seconds),
            f"{row['times as fast']}",
            f"{row['times the operations']}",
        ]
    for outcome, count in facts["counts"].items():
        yield [f"{count} public scripts", outcome, "", "", "", ""]
