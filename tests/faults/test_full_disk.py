"""A full disk during an export costs the best model and not the run; the last model is finished by the same command."""

from __future__ import annotations

import json

import pytest

from tests.faults.world import World

# At step 6 the best model is written before the last one.
FAULT = "step=3,phase=export.written,kind=enospc;step=6,phase=export.written,visit=2,kind=enospc"


@pytest.mark.parametrize("layout", ["one", "dp2"])
def test_a_full_disk_during_an_export(world: World, layout: str) -> None:
    changes = {"save_best": True}
    run = world.run(layout, changes)
    run_dir = run.config.run_dir
    assert set(run.start(FAULT)) == {9}, run.output()
    assert run.struck() == 2
    (missed,) = map(json.loads, (run_dir / "incidents.jsonl").read_text().splitlines())
    assert (missed["kind"], missed["step"], missed["folder"]) == (
        "missed_save",
        3,
        str(run_dir / "best_model"),
    )
    assert "could not be written (No space left on device)" in missed["reason"]
    assert "MISSED SAVE of the best model at step 3" in run.output()
    assert (
        f"{run_dir / 'model'}: could not be written (No space left on device). Free some"
        in run.output()
    )
    assert (run_dir / "best_model" / "model.safetensors").exists()
    assert not (run_dir / "model").exists()
    assert set(run.start()) == {0}, run.output()
    run.assert_like(world.clean(layout, changes))
