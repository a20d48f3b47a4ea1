"""Pairs/s and MFU of a mixture of experts on one GPU, ours and TRL's with its router loss on, in one run.

    python bench/gpu_moe.py --profile              # needs the `bench` extra; about five minutes
    python bench/gpu_moe.py --only ours --eager

A qwen3_moe with random weights: 3.0B weights, of which a token uses 0.55B in matrix products (8 of 64 experts, and the
head). MFU counts those alone, and neither recomputed activations nor the pass that counts the choices of a step. All
options are those of gpu_vs_trl.py.
"""

from __future__ import annotations

import sys

import gpu_vs_trl
from common import SHAPES, ExpertShape

NAME = "3B-A0.6B"


SHAPES[NAME] = ExpertShape("qwen3_moe", 1024, 26, 16, 4, 512, 151_936, False, 64, 8, 64)
for table, value in (
    (gpu_vs_trl.STEPS, 5),
    (gpu_vs_trl.TRL_BATCH, 8),
    (gpu_vs_trl.TRL_BATCH_LONG, 4),
    (gpu_vs_trl.GOAL_MFU, (0.25, 0.25)),
    (gpu_vs_trl.GOAL_RATIO, (2.0, 2.0)),
):
    table[NAME] = value  # type: ignore[index]

if __name__ == "__main__":
    sys.argv[1:1] = ["--model", NAME, "--lengths", "ultrafeedback"]
    gpu_vs_trl.main()
