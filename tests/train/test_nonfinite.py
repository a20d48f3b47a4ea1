"""NaN and Inf never reach the weights; all ranks skip together and report where they were."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rather.checkpoint.checkpoint import open_checkpoint
from rather.config.run_config import DPOConfig
from rather.config.strategies import Layout
from rather.data.batch import PairLogps
from rather.data.pack import pack
from rather.errors import NonFiniteError
from rather.losses.objective import own_loss
from rather.optim.adamw import local
from rather.pipeline.guard import Guard
from rather.pipeline.pipeline import DPOPipeline
from rather.pipeline.progress import RunState
from rather.pipeline.steps import Step
from rather.run_folder.layout import Incidents
from rather.train.nonfinite import NOTHING_PASSES, NonFiniteReport, StepLimits
from rather.train.rank_trainer import RankTrainer, StepResult
from tests.faults import inject
from tests.padded import random_pairs
from tests.runs import assert_equal, incidents, saved, steps, trained
from tests.same.canonical import Setup, make_policy, make_step, pairs_of, trainer_on
from tests.same.cases import layout_of
from tests.same.pool import pool
from tests.tiny import make_config, metrics, rows_of, write_rows
from tests.train.test_trainer import trainer_of

SETUP = Setup(steps=3, layers=2, lr=1e-3)


# --- one rank, and several ---


def state_of(trainer: RankTrainer) -> dict[str, Tensor]:
    """Copies of everything a step changes, this rank's part: weights, masters, moments."""
    assert trainer.optimizer
    found = {name: local(parameter) for name, parameter in trainer.policy.named_parameters()}
    found |= {f"{name}.master": master for name, master in trainer.optimizer.masters.items()}
    return {
        name: tensor.detach().clone()
        for name, tensor in (found | trainer.optimizer.moments()).items()
    }


def struck(
    layout: Layout, folder: Path, fault: str, limits: StepLimits | None = None
) -> dict[str, Any]:
    """Three steps of one rank, of which the second is struck, or held by its limits. What it told, and what it left."""
    rank = dist.get_rank() if layout.devices > 1 else 0
    with inject.attached(fault, folder, rank=rank):
        return three_steps(trainer_on(layout, SETUP), limits)


def three_steps(
    trainer: RankTrainer,
    limits: StepLimits | None = None,
    second: AbstractContextManager[object] | None = None,
) -> dict[str, Any]:
    """What they told and left; `limits` and what is in force during it are of the second."""
    states, results = [state_of(trainer)], []
    for number, pairs in enumerate(pairs_of(SETUP), start=1):
        inject.at_step(number)
        step = make_step(pairs, trainer.mesh.size("dp"))
        own = step.dealt[trainer.mesh.rank("dp")]
        with second if second and number == 2 else nullcontext():
            results.append(
                trainer.train_step(own, step.reference, step.facts, limits if number == 2 else None)
            )
        states.append(state_of(trainer))
    assert trainer.optimizer
    updates, gradients = trainer.optimizer.updates, trainer.optimizer.gradients()
    return {"states": states, "results": results, "updates": updates, "gradients": gradients}


def assert_only_the_second_is_skipped(found: dict[str, Any], reason: str) -> None:
    assert [result.skip_reason for result in found["results"]] == [None, reason, None]
    assert_equal(found["states"][1], found["states"][2])
    for one, other in ((0, 1), (2, 3)):  # the others moved every weight
        before, after = found["states"][one], found["states"][other]
        assert not any(
            torch.equal(tensor, after[name]) for name, tensor in before.items() if tensor.numel()
        )
    assert (found["updates"], found["gradients"]) == (2, [])


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_one_process_skips_and_names_the_pairs(tmp_path: Path, phase: str) -> None:
    found = struck(Layout(1), tmp_path, f"step=2,phase={phase},rank=0,visit=2,kind=nan")
    assert_only_the_second_is_skipped(found, "nonfinite")
    result: StepResult = found["results"][1]
    assert math.isnan(result.loss) is (phase == "forward")
    assert math.isnan(result.grad_norm)
    second = make_step(pairs_of(SETUP)[1], 1).dealt[0][1]  # visit 2 is the second micro-batch
    assert result.nonfinite
    assert result.nonfinite.pairs == sorted(second.pair_P.tolist())
    assert result.nonfinite.ranks == [0]
    assert next(iter(result.nonfinite.layers)) == "model.norm.weight"  # nearest to the loss
    assert len(result.nonfinite.layers) == 5
    assert result.nonfinite.layers_lost == len(list(make_policy(SETUP).parameters()))


@pytest.mark.parametrize(("name", "phase"), [
    ("dp2", "forward"), ("dp2", "backward"), ("dp2 zero3", "forward"), ("dp2 zero3", "backward"), ("tp2", "backward"),
    ("pp2", "forward"),
])  # fmt: skip
def test_all_ranks_skip_together(tmp_path: Path, name: str, phase: str) -> None:
    found = pool(2).run(struck, layout_of(name), tmp_path, f"step=2,phase={phase},rank=1,kind=nan")
    for each in found:
        assert_only_the_second_is_skipped(each, "nonfinite")
    first, second = (each["results"][1] for each in found)
    assert str(first.nonfinite) == str(
        second.nonfinite
    )  # every rank tells the same; NaN is not equal to itself
    assert first.nonfinite.ranks == [1]
    dealt = make_step(pairs_of(SETUP)[1], layout_of(name).dp).dealt[-1]
    assert first.nonfinite.pairs == sorted(
        dealt[0].pair_P.tolist()
    )  # the first micro-batch of the last dp rank
    assert first.nonfinite.layers
    assert all(math.isnan(norm) for norm in first.nonfinite.layers.values())


@contextmanager
def one_infinite(trainer: RankTrainer) -> Iterator[None]:
    """One element of the gradient of one weight."""

    def overflow(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[3] = math.inf
        return gradient

    def watch(module: torch.nn.Module, _: object) -> None:
        hooks.append(
            module.weight.register_hook(overflow)
        )  # where weights are divided, it is whole only here

    layer = trainer.policy.get_submodule("causal_lm.model.layers.1.mlp.up_proj")
    hooks: list[Any] = [layer.register_forward_pre_hook(watch)]
    yield
    for hook in hooks:
        hook.remove()


def overflowed(layout: Layout) -> dict[str, Any]:
    trainer = trainer_on(layout, SETUP)
    return three_steps(trainer, second=one_infinite(trainer) if dist.get_rank() == 1 else None)


def test_an_infinite_gradient_of_one_rank_is_skipped_by_both() -> None:
    for found in pool(2).run(overflowed, layout_of("dp2")):
        assert_only_the_second_is_skipped(found, "nonfinite")
        assert_overflow_is_told(found["results"][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_infinite_gradient_is_skipped(dtype: torch.dtype) -> None:
    trainer = trainer_of(dtype)
    batches, reference = pack(random_pairs(3, 60), 10**6), {"sum": torch.zeros(3, 2)}
    before = state_of(trainer)
    with one_infinite(trainer):
        result = trainer.train_step(batches, reference)
    assert result.skip_reason == "nonfinite"
    assert_overflow_is_told(result)
    assert_equal(before, state_of(trainer))
    assert trainer.train_step(batches, reference).skip_reason is None
    assert trainer.optimizer
    assert trainer.optimizer.updates == 1


def assert_overflow_is_told(result: StepResult) -> None:
    assert math.isfinite(result.loss)
    assert not math.isfinite(result.grad_norm)
    assert result.nonfinite
    assert result.nonfinite.layers_lost == 1


def test_limits_skip_a_step_on_all_ranks(tmp_path: Path) -> None:
    for each in pool(2).run(struck, layout_of("dp2"), tmp_path, "", NOTHING_PASSES):
        assert_only_the_second_is_skipped(each, "spike")


def infinite(x: PairLogps) -> Tensor:
    """A loss of infinity for the second pair, with a gradient that is a number."""
    losses = x.policy[:, 0] * 1.0
    return torch.cat([losses[:1], losses[1:2].detach() * 0 + math.inf, losses[2:]])


def test_a_nonfinite_loss_counts_even_with_a_finite_gradient() -> None:
    trainer = trainer_of(loss=own_loss(infinite))
    before = state_of(trainer)
    batches = pack(random_pairs(3, 60), 10**6)
    result = trainer.train_step(batches, {"sum": torch.zeros(3, 2)})
    assert math.isfinite(result.grad_norm)
    assert result.skip_reason == "nonfinite"
    assert result.nonfinite
    assert result.nonfinite.pairs == [
        0,
        1,
        2,
    ]  # those of the micro-batch: no log-prob and no slope is lost
    assert result.nonfinite.layers_lost == 0
    assert sorted(result.nonfinite.layers.values(), reverse=True) == list(
        result.nonfinite.layers.values()
    )
    assert_equal(before, state_of(trainer))


# --- a whole run ---


@pytest.fixture
def fault(no_self_check: None) -> Iterator[Any]:
    """Attaches faults to the runs that follow."""
    yield lambda *parts: inject.arm(";".join(parts))
    inject.detach()


def nan_at(step: int) -> str:
    return f"step={step},phase=forward,role=actor_train,kind=nan"


def run(folder: Path, name: str, **changes: Any) -> tuple[DPOConfig, list[dict[str, Any]]]:
    changes = {"max_steps": 6, "actor_train__training_args__num_train_epochs": 2.0, **changes}
    config = trained(folder, name, **changes)
    return config, steps(config)


def test_a_skipped_step_is_logged_and_changes_nothing(shared: Path, fault: Any) -> None:
    fault(nan_at(3))
    config, lines = run(shared, "nan-skip", save_steps=1, max_ckpt_to_keep=0)
    assert_equal(saved(config, 2), saved(config, 3))
    assert not all(
        torch.equal(tensor, saved(config, 4)[name]) for name, tensor in saved(config, 3).items()
    )
    assert [line["skipped_iter"] for line in lines] == [0, 0, 1, 0, 0, 0]
    assert lines[2]["loss"] is lines[2]["grad_norm"] is None
    assert {"loss", "grad_norm"} <= lines[2]["nonfinite"].keys()
    assert lines[3]["lr"] == lines[2]["lr"] > lines[4]["lr"]  # the schedule waits for the update
    (told,) = incidents(config)
    assert (told["kind"], told["step"], told["action"]) == ("nonfinite", 3, "skip")
    assert (told["loss"], told["grad_norm"], told["ranks"]) == ("nan", "nan", [0])
    assert told["layers"]["model.norm.weight"] == "nan"
    rows = DPOPipeline(config).source.order.step(2).tolist()  # the step is one micro-batch
    assert sorted(pair["line"] for pair in told["pairs"]) == sorted(row + 1 for row in rows)
    assert {pair["file"] for pair in told["pairs"]} == {str(shared / "pairs.jsonl")}
    assert (told["found"], told["pair_count"]) == ("pairs", 8)


def test_one_skipped_step_does_not_spoil_its_log_line(shared: Path, fault: Any) -> None:
    """The means are those of the steps that had numbers; how many had none stands beside them."""
    fault(nan_at(5))
    _, lines = run(shared, "nan-line", logging_steps=3)
    fault()
    _, plain = run(shared, "nan-line-plain", logging_steps=1)
    assert [(line["step"], line["skipped_iter"], line["pairs"]) for line in lines] == [
        (3, 0, 24),
        (6, 1, 24),
    ]
    assert "nonfinite" not in lines[1]
    assert lines[1]["loss"] == pytest.approx((plain[3]["loss"] + plain[5]["loss"]) / 2, rel=1e-2)
    assert lines[0]["loss"] == pytest.approx(sum(line["loss"] for line in plain[:3]) / 3)


def test_pairs_are_named_by_their_own_ids(shared: Path, fault: Any, tmp_path: Path) -> None:
    rows = rows_of(shared / "pairs.jsonl")
    named = tmp_path / "named.jsonl"
    write_rows(named, ({**row, "id": f"pair {i}"} for i, row in enumerate(rows)))
    fault(nan_at(1))
    config, _ = run(shared, "nan-ids", max_steps=2, actor_train__data_args__file_name=str(named))
    (told,) = incidents(config)
    assert {pair["id"] for pair in told["pairs"]} == {
        f"pair {pair['line'] - 1}" for pair in told["pairs"]
    }


def test_stop_ends_the_run(shared: Path, fault: Any) -> None:
    fault(nan_at(3))
    with pytest.raises(
        NonFiniteError, match=r"step 3: loss nan.*on_nonfinite: stop.*weights are unchanged"
    ) as stop:
        run(shared, "nan-stop", on_nonfinite="stop")
    assert stop.value.exit_code == 6
    assert not list((shared / "output" / "nan-stop").glob("checkpoint-*"))


def test_too_many_in_a_row(shared: Path, fault: Any) -> None:
    fault(nan_at(1), nan_at(3), nan_at(4))
    config, lines = run(
        shared, "nan-in-a-row", max_nonfinite_steps=3
    )  # a step that is one begins the count anew
    assert [line["skipped_iter"] for line in lines] == [1, 0, 1, 1, 0, 0]
    assert [each["step"] for each in incidents(config)] == [1, 3, 4]
    with pytest.raises(
        NonFiniteError, match=r"step 4.*the last of 2 such steps in a row \(max_nonfinite_steps\)"
    ):
        run(shared, "nan-in-a-row-2", max_nonfinite_steps=2)


def test_the_count_continues_after_a_resume(shared: Path, fault: Any) -> None:
    fault(nan_at(3), nan_at(4))
    run(shared, "nan-counted", max_nonfinite_steps=2, max_steps=3)
    with pytest.raises(NonFiniteError, match=r"step 4.*the last of 2"):
        run(shared, "nan-counted", max_nonfinite_steps=2)


def test_a_rollback_leaves_the_step_out(shared: Path, fault: Any) -> None:
    fault(nan_at(5))
    config, lines = run(shared, "nan-rollback", on_nonfinite="rollback", save_steps=2)
    skipped, _ = run(shared, "nan-rollback-skip", save_steps=2)
    assert_equal(saved(skipped, 6), saved(config, 6))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["skipped_iter"] for line in lines] == [0, 0, 0, 0, 1, 0]
    assert [(each["kind"], each["step"], each.get("to")) for each in incidents(config)] == [
        ("nonfinite", 5, None), ("rollback", 5, 4),
    ]  # fmt: skip
    assert open_checkpoint(config.run_dir / "checkpoint-4").state["progress"]["rollbacks"] == [
        [4, 5]
    ]
    resumed, again = run(
        shared, "nan-rollback-on", resume_from_checkpoint=str(config.run_dir / "checkpoint-4")
    )
    assert_equal(saved(config, 6), saved(resumed, 6))  # a run that goes on leaves it out as well
    assert [line["skipped_iter"] for line in again] == [1, 0]


def test_a_rollback_without_a_checkpoint_goes_to_the_start(shared: Path, fault: Any) -> None:
    fault(nan_at(2))
    config, lines = run(shared, "nan-to-start", on_nonfinite="rollback", max_steps=3)
    skipped, _ = run(shared, "nan-to-start-skip", max_steps=3)
    assert_equal(saved(skipped, 3), saved(config, 3))
    assert [line["skipped_iter"] for line in lines] == [0, 1, 0]
    assert [line["step"] for line in metrics(config)] == [line["step"] for line in metrics(skipped)]
    assert incidents(config)[-1]["to"] == 0


def test_a_second_rollback_to_the_same_step_ends_the_run(shared: Path, fault: Any) -> None:
    fault(nan_at(3), nan_at(4))
    with pytest.raises(
        NonFiniteError,
        match="step 4: cannot roll back: there is no good checkpoint",
    ):
        run(shared, "nan-loop", on_nonfinite="rollback", save_steps=2)


def test_rollback_moves_a_synced_reference_back_too(shared: Path, fault: Any) -> None:
    fault(nan_at(5))
    synced = {
        "sync_ref_model": True,
        "ref_model_sync_steps": 3,
        "ref_model_mixup_alpha": 0.5,
        "save_steps": 2,
    }
    config, _ = run(shared, "nan-synced", on_nonfinite="rollback", **synced)
    skipped, _ = run(shared, "nan-synced-skip", **synced)
    assert_equal(saved(skipped, 6), saved(config, 6))
    assert metrics(config)[-1]["eval/loss"] == metrics(skipped)[-1]["eval/loss"]


# --- incidents.jsonl ---


def test_incidents_cost_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    blocked = Incidents(tmp_path / "file")  # no folder can be made there
    blocked.add("spike", 1, loss=math.inf)
    blocked.add("spike", 2)
    assert caplog.text.count("incident: ") == 2
    Incidents(tmp_path, silent=True).add("spike", 1)
    assert not (tmp_path / "incidents.jsonl").exists()


# --- counted in a row ---


class NoPairs:
    total_steps = 100

    def describe_pairs(self, step: Step, places: Any) -> list[dict[str, Any]]:
        return []


@pytest.mark.parametrize(
    ("between", "ends"), [("overflow", True), ("no_weight", True), ("spike", False), (None, False)]
)
def test_only_a_step_that_was_computed_breaks_a_row(
    tmp_path: Path, between: str | None, ends: bool
) -> None:
    """An fp16 overflow, or a step without weight, says nothing about the weights."""
    source: Any = NoPairs()
    guard = Guard("skip", 2, None, source, Incidents(tmp_path), RunState())
    step = Step([], [], [], number=3)
    numbers: Any = {
        "sums": {"loss": 1.0, "weight": 1.0},
        "policy": torch.empty(0, 2),
        "grad_norm": 1.0,
    }

    def result(reason: str | None) -> StepResult:
        report = NonFiniteReport([0], [0], {}, 0) if reason == "nonfinite" else None
        told: Any = {"skip_reason": reason, "nonfinite": report, "zeros_in_grad": None}
        return StepResult(**numbers, lr=1e-3, **told)

    guard.after_step(step, result("nonfinite"))
    guard.after_step(step, result(between))
    with pytest.raises(NonFiniteError) if ends else nullcontext():
        guard.after_step(step, result("nonfinite"))


def test_a_skipped_step_does_not_enter_the_running_mean(shared: Path, fault: Any) -> None:
    """BCO compares with the mean reward of all rows so far, and NaN would stay in it for ever."""
    fault(nan_at(3))
    changes = {"task": "unpaired", "pref_loss": "bco", "max_steps": 4, "exp_name": "nan-bco"}
    pipeline = DPOPipeline(make_config(shared, **changes))
    assert pipeline.run() == 0
    rows, mean = pipeline.progress.running
    assert pipeline.progress.skipped == {"nonfinite": 1}
    assert rows == 3 * 8
    assert math.isfinite(mean)
