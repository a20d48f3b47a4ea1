"""What `make test` leaves to `make test-all`: further cells of a matrix of which the others run every time."""

from __future__ import annotations

import re

WIDE = (
    r"tests/train/test_outcome\.py",  # minutes of real training on all cores
    r"tests/cluster/test_cluster\.py::test_every_placing.*\[(apart 2\+[12]|together|in turn)\]",
    r"tests/cluster/test_cluster\.py::test_the_first_cause_is_told\[(memory|nonfinite|alike)-",
    r"tests/cluster/test_adapters\.py::test_killed_and_gone_on",
    r"tests/cluster/test_example\.py",  # eight workers
    r"tests/cluster/test_deadlines\.py::test_on_ray_the_deadline.*\[(first step|evaluation|reference)\]",
    r"tests/cluster/test_hang\.py::test_on_ray.*\[(sleep|mismatch)\]",
    r"tests/cluster/test_hang\.py::test_under_torchrun_one.*\[stop\]",
    r"tests/cluster/test_orphans\.py::.*(start\[(workers|torchrun)\]|rank\[ray\])",
    r"tests/cluster/test_signals\.py::test_on_ray.*\[(actor_train-compute_log_probs-2|reference-compute_log_probs-4)\]",
    r"tests/cluster/test_supervision\.py::test_a_run_whose_ray_is_gone.*\[raylet\]",
    r"tests/faults/test_full_disk\.py::.*\[ray\]",
    r"tests/faults/test_soak\.py::.*\[one-8-2\]",
    r"tests/same/test_elastic\.py::.*\[(zero1-(1|zero3)|(1|zero3)-zero1|zero2-tp2|tp2-zero2)\]",
    r"tests/same/test_elastic\.py::test_any_layout.*\[(zero3|tp2|pp2|cp2)-(zero3|tp2|pp2|cp2)\]",
    r"tests/same/test_adapters\.py::test_a_checkpoint_goes_on.*\[(pissa-1-zero3|lora-zero3-1|lora-1-dp2)\]",
    r"tests/same/test_tensor\.py::test_(losses_and_families|beside_other_axes)\[sequence parallel",
    r"tests/same/test_stages\.py::test_models_and_losses\[zbv",
    r"tests/same/test_context\.py::test_(every_family|the_canonical_run)\[4\]",
)


def is_wide(test: str) -> bool:
    return any(re.match(pattern, test) for pattern in WIDE)
