"""Pairs/s and MFU of a mixture of experts on one GPU, ours and TRL's with its router loss on, in one run.

    python bench/gpu_moe.py --profile              # needs the `bench` extra; about five minutes
    python bench/gpu_moe.py --only ours --eager
    python bench/gpu_moe.py --only ours --model 30B-A3B --lora 16                  # adapters of attention
    python bench/gpu_moe.py --only ours --model 30B-A3B --lora 16 --lora-experts   # and of the experts

A qwen3_moe with random weights: 3.0B weights, of which a token uses 0.55B in matrix products (8 of 64 experts, and the
head). 30B-A3B has the shape of Qwen3-30B-A3B (8 of 128 experts), for adapters. MFU counts those alone, and neither
recomputed activations nor the pass that counts the choices of a step; with an adapter it counts the gradients of frozen
weights, which nobody computes, so only pairs/s can be compared. All options are those of gpu_vs_trl.py.
"""

from __future__ import annotations

import sys

import gpu_vs_trl
from common import SHAPES, ExpertShape

NAME, LARGE = "3B-A0.6B", "30B-A3B"

SHAPES[NAME] = ExpertShape("qwen3_moe", 1024, 26, 16, 4, 512, 151_936, False, 64, 8, 64)
SHAPES[LARGE] = ExpertShape("qwen3_moe", 2048, 48, 32, 4, 768, 151_936, False, 128, 8, 128)
for table, values in (
    (gpu_vs_trl.STEPS, (5, 2)),
    (gpu_vs_trl.TRL_BATCH, (8, 2)),
    (gpu_vs_trl.TRL_BATCH_LONG, (4, 1)),
    (gpu_vs_trl.GOAL_MFU, ((0.30, 0.30), (0.0, 0.0))),
    (gpu_vs_trl.GOAL_RATIO, ((8.0, 2.0), (0.0, 0.0))),
):
    table[NAME], table[LARGE] = values  # type: ignore[index]

if __name__ == "__main__":
    if "--model" not in sys.argv:
        sys.argv[1:1] = ["--model", NAME]
    sys.argv[1:1] = ["--lengths", "ultrafeedback"]
    gpu_vs_trl.main()
