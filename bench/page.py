"""The tables of docs/speed.md from bench/results: prints them, or writes them into the page with --write."""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "speed.md"
RESULTS = ROOT / "bench" / "results"
MODELS = ("0.5B", "1.5B", "3B", "7B")
FLASH = ("135M", *MODELS, "1.5B_lora16", "7B_lora16")
LENGTHS = {"ultrafeedback": "UltraFeedback-like", "long": "long prompts", "four": "4 responses"}

Cells = dict[tuple[str, str, str], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(f"{name}\n{text}" for name, text in tables().items()))


def filled(page: str) -> str:
    """The page with each table between its two markers made anew."""
    for name, text in tables().items():
        page = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>{text}\n\g<2>", page, flags=re.DOTALL
        )
    return page


def tables() -> dict[str, str]:
    made = {"gpu": gpu_table(), "flash": flash_table()}
    made |= {"cpu": cpu_table(), "growth": growth_table()}
    return {name: "\n".join(lines) for name, lines in made.items()}


def gpu_table() -> Iterator[str]:
    names = (
        "",
        "pairs",
        "reference",
        "pairs/s",
        "strict MFU",
        "x light",
        "x TRL + Liger",
        "x TRL precomputed",
    )
    yield from heading(*names, "GiB, Rather / TRL", "Rather ran with")
    for model in MODELS:
        cells = read(f"gpu_vs_trl_{model}.json")
        for lengths, told in LENGTHS.items():
            for reference in ("online", "cached"):
                mine = cells["ours", lengths, reference]
                best = cells.get(("TRL, best", lengths, "online"))
                beside = (
                    cells.get(("TRL, precomputed", lengths, "cached"))
                    if reference == "cached"
                    else None
                )
                yield (
                    f"| {model} | {told} | {reference} | {mine['pairs_per_second']:.1f} | {mine['mfu']:.1%} | "
                    f"{mine['of_light']:.2f} | {times(mine, best)} | {times(mine, beside)} | "
                    f"{mine['peak_gib']:.0f} / {memory(beside or best)} | {mine['settings']} |"
                )


def flash_table() -> Iterator[str]:
    """UltraFeedback-like pairs with FlashAttention 4, whole models and adapters."""
    names = ("", "reference", "pairs/s", "strict MFU", "without gaps", "TRL, pairs/s", "x TRL")
    yield from heading(*names)
    for model in FLASH:
        cells = read(f"gpu_flash4_{model}.json")
        for reference, kind in (("online", "best"), ("cached", "precomputed")):
            mine = cells["ours", "ultrafeedback", reference]
            peer = cells.get((f"TRL, {kind}", "ultrafeedback", reference))
            # Counted for whole models: adapters need no products for the gradients of weights.
            shares = (mine["mfu"], mine["more"]["ceiling"]) if "lora" not in model else ()
            mfu, ceiling = (f"{share:.1%}" for share in shares) if shares else ("-", "-")
            name = model.replace("_lora", ", LoRA rank ")
            yield (
                f"| {name} | {reference} | {speed(mine)} | {mfu} | {ceiling} | "
                f"{speed(peer)} | {times(mine, peer)} |"
            )


def cpu_table() -> Iterator[str]:
    cells = read("cpu_vs_trl.json")
    names = (
        "pairs",
        "reference",
        "Rather, pairs/s",
        "x TRL, its defaults",
        "x TRL, its best settings",
    )
    yield from heading(*names, "GiB, Rather / TRL best")
    for lengths in ("ultrafeedback", "long"):
        default, best = (
            cells.get(("TRL, " + kind, lengths, "online")) for kind in ("defaults", "best settings")
        )
        for reference in ("online", "cached"):
            mine = cells["ours", lengths, reference]
            yield (
                f"| {LENGTHS[lengths]} | {reference} | {mine['pairs_per_second']:.2f} | {times(mine, default)} | "
                f"{times(mine, best)} | {mine['peak_gib']:.1f} / {memory(best, digits=1)} |"
            )


def growth_table() -> Iterator[str]:
    found = json.loads((RESULTS / "growth.json").read_text(encoding="utf-8"))
    yield from heading(
        "pairs", "driver, us a token", "with training, us a token", "driver's memory, MiB"
    )
    for row in found["results"]:
        yield f"| {row['pairs']:,} | {row['driver_us']:.2f} | {row['training_us']:.1f} | {row['process_mib']:.0f} |"


def heading(*names: str) -> tuple[str, str]:
    return f"| {' | '.join(names)} |", "|---" * len(names) + "|"


def speed(cell: dict[str, Any] | None) -> str:
    return f"{cell['pairs_per_second']:.1f}" if cell else "-"


def memory(cell: dict[str, Any] | None, digits: int = 0) -> str:
    return f"{cell['peak_gib']:.{digits}f}" if cell else "-"


def read(name: str) -> Cells:
    found = json.loads((RESULTS / name).read_text(encoding="utf-8"))["cells"]
    return {(cell["system"], cell["lengths"], cell["reference"]): cell for cell in found}


def times(fast: dict[str, Any], slow: dict[str, Any] | None) -> str:
    """How many times faster, step against the same step."""
    both = list(zip(fast["seconds"], slow["seconds"], strict=False)) if slow else []
    return f"{statistics.median(b / a for a, b in both):.2f}" if both else "-"


if __name__ == "__main__":
    main()
