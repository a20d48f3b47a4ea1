"""Every task on every layout: metrics and weights are those of one process. Killed anywhere, the
same command ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cells import cells
from tests.faults.points import kill
from tests.faults.runs import Run
from tests.faults.world import World
from tests.same.test_experts import make_experts
from tests.tiny import metrics, rows_of, untimed, write_rows

TASKS: dict[str, dict[str, Any]] = {
    "kto": {"task": "unpaired"},
    "bco": {"task": "unpaired", "pref_loss": "bco"},
    "apo": {"task": "unpaired", "pref_loss": "apo_zero_unpaired"},
    "sft": {"task": "sft"},
    "reward": {"task": "reward"},
    "regression": {"task": "reward", "pref_loss": "regression"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"strategy_name": "ddp"},
    "zero3": {"strategy_name": "zero3"},
    "tp2": {"tp_size": 2},
    "sequence": {"tp_size": 2, "strategy_config": {"sequence_parallel": True}},
    "pp2": {"pp_size": 2},
    "cp2": {"cp_size": 2},
    "ep2": {"ep_size": 2},
}
FAST = [("kto", "zero3")]
# Each task and each layout once.
WIDE = [("bco", "pp2"), ("apo", "dp2"), ("sft", "cp2"), ("regression", "tp2"), ("reward", "sequence"),
        ("reward", "ep2")]  # fmt: skip


def changes_of(task: str, world: World, layout: str = "", **own: Any) -> dict[str, Any]:
    """Return the settings of a run; steps so small that rounding stays rounding."""
    experts = own.pop("experts", "qwen3_moe" if layout == "ep2" else "")
    changes: dict[str, Any] = TASKS[task] | own
    changes["actor_train__training_args"] = {"learning_rate": 1e-5, "adam_epsilon": 1e-6}
    if task == "regression":
        file = str(scored(world.folder / "scored.jsonl", world.folder / "pairs.jsonl"))
        changes |= {f"{role}__data_args__file_name": file for role in ("actor_train", "validation")}
    if layout:
        changes["actor_train__strategy_args"] = LAYOUTS[layout]
    if experts:
        base = world.folder / experts
        found = base if base.exists() else make_experts(base, experts, torch.float32)
        changes["pretrain"] = str(found)
    return changes


def scored(file: Path, pairs: Path) -> Path:
    """Write each answer of some pairs with a score."""
    each = [
        {"prompt": row["prompt"], "completion": row[side], "score": score + len(row[side]) / 50}
        for row in rows_of(pairs)
        for side, score in (("chosen", 1.0), ("rejected", -1.0))
    ]
    return write_rows(file, each)


def ended(world: World, name: str, layout: str, changes: dict[str, Any]) -> Run:
    """Return a run that was trained without a fault; once for each name."""
    run = world.run(layout, changes, name)
    if not run.config.run_dir.exists():
        run.until_it_ends("")
    return run


def assert_same(got: Run, expected: Run) -> None:
    assert_same_metrics(got, expected)
    weights, wanted = (
        load_file(run.config.run_dir / "model" / "model.safetensors") for run in (got, expected)
    )
    assert weights.keys() == wanted.keys()
    worst = max(float((weights[name] - weight).abs().max()) for name, weight in wanted.items())
    assert worst < 1e-7


def assert_same_metrics(got: Run, expected: Run) -> None:
    lines, wanted = (untimed(metrics(run.config)) for run in (got, expected))
    for one, other in zip(lines, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6), one.get("step")


@pytest.mark.parametrize(("task", "layout"), cells(FAST, WIDE))
def test_the_layout_does_not_matter(world: World, task: str, layout: str) -> None:
    experts = "qwen3_moe" if layout == "ep2" else ""
    alone = changes_of(task, world, experts=experts)
    expected = ended(world, f"task-{task}-{experts or 'alone'}", "one", alone)
    got = ended(world, f"task-{task}-{layout}", "dp2", changes_of(task, world, layout))
    assert_same(got, expected)


@pytest.mark.parametrize("task", ["regression"])
def test_adapters(world: World, task: str) -> None:
    changes = changes_of(task, world, actor_train__model_args={"lora_rank": 4})
    alone = ended(world, f"task-{task}-lora", "one", changes)
    changes |= {"actor_train__strategy_args": LAYOUTS["zero3"]}
    assert_same(ended(world, f"task-{task}-lora-zero3", "dp2", changes), alone)


@pytest.mark.parametrize(
    ("task", "layout", "fault"),
    [
        ("kto", "zero3", kill("backward", rank=1)),
        ("bco", "pp2", kill("optimizer.done", rank=1)),
        ("reward", "ep2", kill("save.write.sync", rank=1)),
    ],
)
def test_killed_and_resumed(world: World, task: str, layout: str, fault: str) -> None:
    changes = changes_of(task, world, layout)
    expected = ended(world, f"task-{task}-{layout}", "dp2", changes).outcome()
    run = world.run("dp2", changes)
    run.until_it_ends(fault)
    run.assert_like(expected)


@pytest.mark.wide
def test_correction_biases_stay_as_they_are(world: World) -> None:
    """Routers of DeepSeek-V3 on two stages: the run is that of one process, biases are float32."""
    make_experts(world.folder / "deepseek_v3", "deepseek_v3")  # in bfloat16
    experts = {"experts": "deepseek_v3", "actor_train__model_args": {"dtype": "fp32"}}
    alone = ended(world, "deepseek", "one", changes_of("sft", world, **experts))
    run = ended(world, "deepseek-pp2", "dp2", changes_of("sft", world, "pp2", **experts))
    assert_same_metrics(run, alone)
    found, source = (
        load_file(Path(folder) / "model.safetensors")
        for folder in (run.config.run_dir / "model", run.config.pretrain)
    )
    biases = [name for name in source if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], source[name])


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize("task", ["kto", "reward"])
def test_on_ray(world: World, task: str) -> None:
    """Two workers, and a reference of its own if the task has one."""
    changes = changes_of(task, world) | {"actor_train__device_mapping": [0, 1]}
    has_reference = TASKS[task]["task"] == "unpaired"
    changes |= {"reference__device_mapping": [2] if has_reference else [0, 1]}
    got = ended(world, f"task-{task}-ray", "ray", changes)
    assert_same(got, ended(world, f"task-{task}-alone", "one", changes_of(task, world)))
