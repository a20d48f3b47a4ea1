"""Layouts and tasks: what is trained on how many ranks, and must be what one process computes.

Tests of an axis are in its own file; whole runs of a layout are rows of FAST and WIDE.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from rather.config.strategies import SCHEDULES, Layout, Pipeline
from tests.same.canonical import EXPERTS, Setup

FLAGS = {
    "sequence": {"sequence_parallel": True},
    "host": {"host": True},
    "recomputed": {"recompute": "full"},
}


def layout_of(name: str) -> Layout:
    """Read a layout from its name: `dp4 zero3 shard2 tp2 sequence pp2 zbv`.

    zero1 to zero3 shard over all dp ranks if no `shard` is given.
    """
    fields: dict[str, Any] = {"dp": 1}
    for word in name.split():
        if word in SCHEDULES:
            fields["schedule"] = word
        elif word in FLAGS:
            fields |= FLAGS[word]
        else:
            key, number = re.findall(r"[a-z]+|\d+", word)
            fields["stage" if key == "zero" else key] = int(number)
    if "stage" in fields:
        fields = {"shard": fields["dp"], **fields}
    layout = Layout(**fields)
    pipeline = Pipeline.of(layout.pp, layout.schedule, fields.get("virtual"))
    return replace(layout, virtual=pipeline.virtual)


SIGMOID = Setup(steps=2)  # a full step, and a ragged one
MIXTURE = Setup("qwen3_moe", tied=False, steps=2, layers=2, router_loss=0.3)
STACKS = ("experts.gate_up_proj", "experts.down_proj")
TASKS: dict[str, Setup] = {
    "sigmoid": SIGMOID,
    "many steps": replace(SIGMOID, steps=10),
    **{loss: replace(SIGMOID, losses=(loss,)) for loss in ("ipo", "orpo", "simpo", "aot")},
    "sigmoid and sft": replace(SIGMOID, losses=("sigmoid", "sft")),
    "untied": replace(SIGMOID, tied=False),
    "qwen2": replace(SIGMOID, family="qwen2"),
    "qwen3": replace(SIGMOID, family="qwen3"),
    **{family: replace(MIXTURE, family=family) for family in EXPERTS},
    "qwen3_moe of 4 layers": replace(MIXTURE, layers=4),
    "adapters": replace(MIXTURE, adapted=("all-linear",)),
    "adapters of experts": replace(MIXTURE, adapted=("all-linear", *STACKS)),
}

# layout -> tasks. Each axis runs the loss that needs whole steps (aot), and all of them all tasks.
FAST = {
    "dp1 zero3": "sigmoid",
    "dp2": "sigmoid",
    "dp2 zero2": "sigmoid",
    "dp2 zero3": "sigmoid, adapters of experts",
    "dp4 zero3 shard2": "sigmoid",
    "tp2": "sigmoid",
    "tp2 sequence": "sigmoid",
    "cp2": "sigmoid",
    "pp2": "sigmoid",
    "pp2 cp2": "sigmoid",
    "pp2 interleaved": "sigmoid",
    "pp2 zbv": "sigmoid",
    "dp2 pp2 zbv": "untied",
    "dp4 zero3 ep2": "qwen3_moe",
    "dp2 zero3 ep2 tp2": "qwen3_moe",
    "dp2 zero1 ep2 pp2": "qwen3_moe",
}
WIDE = {
    "dp4": "sigmoid",
    "dp2 zero1": "sigmoid",
    "dp2 zero2 host": "many steps",
    "dp2 zero3": "aot, simpo, untied, qwen3",
    "dp4 zero3 shard2": "many steps",
    "tp2": "aot, untied",
    "tp2 sequence": "many steps, orpo, qwen2",
    "dp2 tp2": "sigmoid",
    "dp2 zero3 tp2 sequence": "sigmoid",
    "tp2 cp2 sequence": "sigmoid",
    "cp2": "aot, ipo, untied, qwen3",
    "cp4": "many steps",
    "dp2 cp2": "sigmoid",
    "dp2 zero3 cp2": "sigmoid",
    "pp2": "aot, sigmoid and sft",
    "pp2 recomputed": "sigmoid",
    "pp2 gpipe": "sigmoid",
    "dp2 zero1 pp2 interleaved": "sigmoid",
    "tp2 sequence pp2 interleaved": "sigmoid",
    "pp4 interleaved": "sigmoid",
    "pp2 zero_bubble": "many steps",
    "dp2 zero3 pp2 zero_bubble": "sigmoid",
    "pp4 zero_bubble virtual2": "sigmoid",
    "pp2 zbv": "untied, qwen3",
    "pp2 zbv recomputed": "sigmoid",
    "tp2 pp2 zbv": "sigmoid",
    "pp4 zbv": "sigmoid",
    "pp2 dualpipev": "many steps",
    "dp2 ep2": "qwen3_moe",
    "dp2 zero3 ep2 recomputed": "qwen3_moe",
    "dp4 zero1 ep2": "qwen3_moe",
    "dp4 zero3 ep2": "mixtral, olmoe, deepseek_v3, adapters",
    "dp4 zero3 shard2 ep4": "qwen3_moe",
    "dp2 zero3 ep2 tp2": "adapters",
    "dp2 zero3 ep2 tp2 sequence": "qwen3_moe",
    "dp2 zero3 ep2 tp2 cp2 sequence": "qwen3_moe",
    "dp2 zero1 ep2 tp2 pp2": "qwen3_moe",
    "dp4 zero1 ep2 pp2": "qwen3_moe",
    "dp2 zero1 ep2 pp2 interleaved": "qwen3_moe of 4 layers",
    "dp2 zero1 ep2 pp2 zbv": "qwen3_moe of 4 layers",
    "dp4 zero2 ep4 cp2": "qwen3_moe",
}


def rows(table: dict[str, str]) -> list[tuple[str, str]]:
    """Return (layout, task) of each run."""
    return [(layout, task) for layout, tasks in table.items() for task in tasks.split(", ")]
