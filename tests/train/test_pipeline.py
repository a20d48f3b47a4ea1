"""The loop: when it evaluates, saves and stops, what it refuses, and that every setting has its effect."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rather.checkpoint.checkpoint import open_checkpoint
from rather.cluster.memory import Peak
from rather.cluster.worker import ActorWorker
from rather.config.run_config import DPOConfig
from rather.config.strategies import layout
from rather.data.batch import Columns
from rather.errors import ConfigError, NonFiniteError
from rather.losses.objective import configure
from rather.model.budget import Budget
from rather.optim.rounding import Rounding
from rather.parallel.mesh import build_mesh
from rather.pipeline.pipeline import DPOPipeline
from rather.pipeline.steps import Packing
from rather.run_folder import control
from rather.train.rank_trainer import StepResult
from tests.runs import assert_equal, exported, run, saved, trained
from tests.tiny import make_config, make_model, make_pairs, metrics, tiny_policy, untimed

TRAINING = "actor_train__training_args__"
EPOCHS = f"{TRAINING}num_train_epochs"  # 40 pairs in steps of 8: 5 steps an epoch


pytestmark = pytest.mark.usefixtures("no_self_check")


def evaluations(lines: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines if any(key.startswith("eval/") for key in line)]


def checkpoints(folder: Path) -> list[str]:
    return sorted(
        (path.name for path in folder.glob("checkpoint-*")),
        key=lambda name: int(name.split("-")[1]),
    )


# --- what a run writes ---

TRAIN_KEYS = [
    "step", "epoch", "loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/ties",
    "rewards/margins", "logps/chosen", "logps/rejected", "sft_loss", "lengths/chosen", "lengths/rejected",
    "logps/chosen_below_reference", "kl", "rewards/length_correlation", "grad_norm", "lr", "pairs", "tokens", "skipped_iter",
    "pairs_per_second", "tokens_per_second", "time/reference", "time/train", "time/wait",
]  # fmt: skip


def test_a_plain_run(shared: Path) -> None:
    config, lines = run(shared, "plain", max_steps=3, report_html=True)
    first_evaluation, first, *_, last, last_evaluation = lines
    assert list(first) == TRAIN_KEYS
    whole_set = ("pairs", "drift", "calibrated_loss", "rewards/accuracies_low",
                 "rewards/accuracies_high", "rewards/accuracies_length_controlled")  # fmt: skip
    assert set(first_evaluation) == {"step", "epoch"} | {
        f"eval/{key}" for key in (*TRAIN_KEYS[2:16], *whole_set)
    }
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first_evaluation["eval/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert (first_evaluation["eval/rewards/accuracies"], first_evaluation["eval/pairs"]) == (0, 9)
    assert (first["pairs"], first["epoch"], last["epoch"]) == (8, 0.2, 0.6)
    assert last_evaluation["eval/loss"] < first_evaluation["eval/loss"]
    assert [line["lr"] for line in lines if "lr" in line] == pytest.approx(
        [1e-3, 1e-3 * 2 / 3, 1e-3 / 3]
    )
    written = {path.name for path in config.run_dir.iterdir() if not path.name.startswith(".")}
    files = {
        "metrics.jsonl",
        "config.yaml",
        "data_report.json",
        "report.json",
        "reference.log",
        "ledger.arrows",
    }
    files |= {"plan.json", "starts.jsonl", "report.html"}
    assert written == files | {"checkpoint-3", "LATEST", "model"}
    assert json.loads((config.run_dir / "data_report.json").read_text())


def test_the_data_ends_first(shared: Path) -> None:
    """A final checkpoint and model all the same; the last step of an epoch is smaller and divides by its own count."""
    config, lines = run(
        shared, "data-ends", max_steps=50, **{f"{TRAINING}per_device_train_batch_size": 12}
    )
    assert [line["pairs"] for line in lines if "loss" in line] == [12, 12, 12, 4]
    assert checkpoints(config.run_dir) == ["checkpoint-4"]
    assert (config.run_dir / "model").exists()


def test_a_line_covers_the_steps_since_the_last(shared: Path) -> None:
    _, every = run(shared, "every-line", max_steps=5)
    _, some = run(shared, "some-lines", max_steps=5, logging_steps=2)
    lines = [line for line in some if "loss" in line]
    single = [line for line in every if "loss" in line]
    assert [(line["step"], line["pairs"]) for line in lines] == [(2, 16), (4, 16), (5, 8)]
    for key in ("loss", "rewards/margins", "sft_loss"):
        assert lines[0][key] == pytest.approx((single[0][key] + single[1][key]) / 2, rel=1e-9)
        assert lines[2][key] == single[4][key]


# --- evaluation ---


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, [0, 5, 10]),
        ({"eval_steps": 3}, [0, 3, 5, 6, 9, 10]),
        ({"eval_steps": 5}, [0, 5, 10]),
        ({"max_steps": 7}, [0, 5, 7]),
        ({"validation": {}}, []),
    ],
)
def test_when_it_evaluates(shared: Path, changes: dict[str, Any], steps: list[int]) -> None:
    """At the start, every eval_steps, after each epoch, at the end; never twice at one step."""
    name = "-".join(["evaluates", *changes, *map(str, steps)])
    _, lines = run(shared, name, **{EPOCHS: 2.0}, **changes)
    assert evaluations(lines) == steps


def test_several_named_sets(shared: Path) -> None:
    other = make_pairs(shared / "other.jsonl", 5, seed=9)
    held_out = shared / "held_out.jsonl"
    sets = {"main": str(held_out), "other": str(other)}
    _, named = run(shared, "named", max_steps=2, validation={"data_args": {"file_name": sets}})
    _, plain = run(shared, "unnamed", max_steps=2)
    assert [line["eval/main/loss"] for line in named if "eval/main/loss" in line] == [
        line["eval/loss"] for line in plain if "eval/loss" in line
    ]
    assert named[0]["eval/other/pairs"] == 5
    assert evaluations(named) == [0, 2]


def test_a_held_out_split(shared: Path) -> None:
    _, lines = run(shared, "split", validation={"data_args": {"split": 10}})
    assert lines[0]["eval/pairs"] == 10
    assert sum(line.get("pairs", 0) for line in lines) == 30


def test_evaluation_chunks_do_not_matter(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(shared, exp_name="whole-set")
    records = []
    for chunk in (256, 4, 1):
        monkeypatch.setattr("rather.pipeline.evaluation.EVALUATION_CHUNK", chunk)
        pipeline = DPOPipeline(config)
        pipeline.initialize()
        records += [pipeline.evaluate(), pipeline.evaluate()]
    for record in records[1:]:
        assert record == pytest.approx(records[0], rel=1e-6)


def scripted(config: DPOConfig, *values: float, metric: str = "eval/loss") -> DPOPipeline:
    """Return a pipeline whose evaluations give these values."""
    pipeline, left = DPOPipeline(config), iter(values)
    pipeline.evaluators = [lambda *_: {metric: next(left)}]
    return pipeline


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("eval/loss", (0.9, 0.5, 0.3, 0.3, 0.4), 2),
        ("eval/rewards/accuracies", (0.1, 0.8, 0.6, 0.8, 0.2), 1),
        ("eval/rewards/margins", (5.0, 1.0, 2.0, 3.0, 4.0), 0),
    ],
)
def test_the_best_model_is_kept(
    shared: Path, metric: str, values: tuple[float, ...], best: int
) -> None:
    name = "best-" + metric.replace("/", "-")
    every = {"eval_steps": 1, "save_steps": 1, "max_ckpt_to_keep": 0}
    config = make_config(
        shared, exp_name=name, max_steps=4, save_best=True, metric_for_best_model=metric, **every
    )
    assert scripted(config, *values, metric=metric).run() == 0
    if best:
        expected = saved(config, best, "model")
    else:
        base = load_file(shared / "base" / "model.safetensors")
        expected = {f"model/causal_lm.{key}": weight for key, weight in base.items()}
    stored = exported(config, "best_model")
    assert_equal({f"model/causal_lm.{key}": weight for key, weight in stored.items()}, expected)
    assert f"{best} steps" in (config.run_dir / "best_model" / "README.md").read_text()


def test_early_stopping_ends_the_run_for_good(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"max_steps": 9, EPOCHS: 2.0, "eval_steps": 1, "early_stopping_patience": 2}
    config = make_config(shared, exp_name="early", **given)
    with caplog.at_level(logging.INFO, "rather"):
        assert scripted(config, 0.9, 0.5, 0.6, 0.5, 0.1).run() == 0
        lines = metrics(config)
        assert [line["step"] for line in lines if "lr" in line] == [1, 2, 3]
        assert evaluations(lines) == [0, 1, 2, 3]
        assert checkpoints(config.run_dir) == ["checkpoint-3"]
        assert "Early stopping at step 3: eval/loss was best at step 1 (" in caplog.text
        model = {f"model/causal_lm.{key}": weight for key, weight in exported(config).items()}
        assert_equal(model, saved(config, 3, "model"))
        caplog.clear()
        assert DPOPipeline(config).run() == 0
    assert "is finished at step 3" in caplog.text
    assert metrics(config) == lines


# --- checkpoints ---


def test_old_checkpoints_are_deleted_and_copies_are_made(shared: Path, tmp_path: Path) -> None:
    copies = {"checkpoint_config": {"type": "file_system", "output_dir": str(tmp_path / "copies")}}
    config, _ = run(shared, "keep", max_steps=4, save_steps=1, max_ckpt_to_keep=2, **copies)
    assert checkpoints(config.run_dir) == ["checkpoint-3", "checkpoint-4"]
    copied = config.checkpoint_copy_dir
    assert copied.is_relative_to(tmp_path / "copies")
    assert checkpoints(copied) == ["checkpoint-3", "checkpoint-4"]
    assert (
        open_checkpoint(copied / "checkpoint-4").state
        == open_checkpoint(config.run_dir / "checkpoint-4").state
    )
    elsewhere = make_config(
        shared,
        exp_name="from-copy",
        max_steps=5,
        resume_from_checkpoint=str(copied / "checkpoint-4"),
    )
    assert DPOPipeline(elsewhere).run() == 0
    assert metrics(elsewhere)[-1]["step"] == 5


# --- roles and their workers ---


class Loud(ActorWorker):
    """A loss of the user's own."""

    def build_loss(self) -> Any:
        return lambda x: x.policy.sum(1) * 0 + 7


@pytest.mark.parametrize("given", [Loud, "tests.train.test_pipeline.Loud"], ids=["class", "path"])
def test_a_custom_worker_class(shared: Path, given: Any) -> None:
    _, lines = run(
        shared, f"own-{isinstance(given, str)}", max_steps=1, actor_train__worker_cls=given
    )
    assert [line.get("loss", line.get("eval/loss")) for line in lines] == [7, 7, 7]


class Perturbed(ActorWorker):
    """Holds other weights than those it names."""

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        super().initialize(total_steps, model)
        with torch.no_grad():
            next(self.trainer.policy.parameters()).mul_(1.01)


class Shifted(Perturbed):
    """Far enough to be seen in bfloat16 as well."""

    def compute_log_probs(self, batches: Any) -> Columns:
        return {name: column - 5 for name, column in super().compute_log_probs(batches).items()}


@pytest.mark.parametrize(
    ("dtype", "worker", "name"),
    [("fp32", Perturbed, "base"), ("bf16", Shifted, "base"), ("fp32", Perturbed, "link")],
)
def test_step_zero_finds_a_reference_with_other_weights(
    shared: Path, tmp_path: Path, dtype: str, worker: type, name: str
) -> None:
    """Also if both roles name one folder in two ways."""
    (tmp_path / "link").symlink_to(shared / "base")
    changes = {"actor_train__model_args__dtype": dtype, "reference__worker_cls": worker}
    if name == "link":
        changes["reference__model_args__model_name_or_path"] = str(tmp_path / name)
    config = make_config(shared, exp_name=f"zero-{dtype}-{name}", **changes)
    with pytest.raises(
        ConfigError, match=r"log-probs of the same weights \(.*base\) differ by .* per token"
    ) as caught:
        DPOPipeline(config).run()
    assert caught.value.exit_code == 2
    assert checkpoints(config.run_dir) == []
    assert not (config.run_dir / "model").exists()


def test_an_intentionally_different_reference_is_logged_and_used(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = make_model(shared / "other-base", seed=5)
    with caplog.at_level(logging.INFO, "rather"):
        _, lines = run(
            shared, "intent", max_steps=1, reference__model_args__model_name_or_path=str(other)
        )
    assert "differ by intent" in caplog.text
    assert lines[1]["loss"] != pytest.approx(math.log(2), rel=1e-4)
    assert lines[1]["rewards/ties"] == 0


def test_half_precision_trains_from_the_exact_weights(shared: Path) -> None:
    """The masters start from the float32 file, not from what bfloat16 leaves of it."""
    pipeline = DPOPipeline(
        make_config(shared, exp_name="masters", actor_train__model_args__dtype="bf16")
    )
    pipeline.initialize()
    source = load_file(shared / "base" / "model.safetensors")
    trainer = pipeline.actor_train.trainer
    for name, master in trainer.weights().items():
        assert master.cpu().equal(source[name.removeprefix("causal_lm.")])
    for name, parameter in trainer.policy.named_parameters():
        rounded = Rounding("dithered").rounded(name, source[name.removeprefix("causal_lm.")])
        assert parameter.cpu().equal(rounded.to(parameter.dtype))
    assert {buffer.dtype for buffer in trainer.policy.buffers()} == {torch.float32}
    assert trainer.policy.exact == {}


# --- memory ---


class ShortOnce(ActorWorker):
    """Runs out of memory once, in its second step."""

    steps = 0

    def train_step(self, *args: Any, **options: Any) -> StepResult:
        ShortOnce.steps += 1
        if ShortOnce.steps == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().train_step(*args, **options)


@pytest.mark.defect("R5")
def test_a_resumed_run_has_the_micro_batches_that_fitted_before(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last bits of all later steps would differ."""
    monkeypatch.setattr("rather.pipeline.guard.SMALLEST_BUDGET", 8)
    monkeypatch.setattr(ShortOnce, "steps", 0)
    changes = {"actor_train__worker_cls": ShortOnce, "pair_ledger": False}
    whole, expected = run(shared, "short-once", max_steps=5, **changes)
    ShortOnce.steps = 0
    run(shared, "short-resumed", max_steps=5, save_steps=3, max_ckpt_to_keep=0, **changes)
    resumed = make_config(shared, exp_name="short-resumed", max_steps=5, **changes)
    for name in ("checkpoint-5", ".finished"):
        path = resumed.run_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    pipeline = DPOPipeline(resumed)
    assert pipeline.run() == 0
    assert pipeline.actor_train.fitted == {"recompute": "none", "narrow_gradients": False}
    assert untimed(expected) == untimed(metrics(resumed))
    assert_equal(saved(resumed, 5, "model"), saved(whole, 5, "model"))
    tokens = [open_checkpoint(resumed.run_dir / f"checkpoint-{step}").state["micro_batches"]
              for step in (3, 5)]  # fmt: skip
    assert tokens[0] == tokens[1]


def test_a_resume_recomputes_at_least_as_much_and_keeps_narrow_gradients(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = ActorWorker(make_config(shared), "actor_train")
    worker.layout, worker.compiled = layout(worker.worker_config), False
    worker.mesh, worker.peak = build_mesh(worker.layout, "cpu"), Peak("cpu")
    worker.trainer = SimpleNamespace(
        policy=tiny_policy(), narrow_gradients=lambda: True, numbers=dict
    )
    monkeypatch.setattr(
        "rather.cluster.worker.choose_budget", lambda *_, at_least, **__: Budget(64, at_least)
    )
    for fitted in (
        {"recompute": "selective", "narrow_gradients": True},
        {"recompute": "none", "narrow_gradients": False},
    ):
        worker.fitted, worker.has_narrow_gradients = fitted, False
        assert worker.plan(10) == 64
        assert worker.numbers() == {"fitted": fitted}


def packing_of(config: DPOConfig) -> Packing:
    return Packing(config.actor_train, config.reference, "cpu")


def test_a_resume_takes_the_sizes_of_a_checkpoint_as_limits(shared: Path) -> None:
    packing = packing_of(make_config(shared))
    first = packing.state()
    packing.set_train_tokens(4096)
    packing.tokens |= {"train": 512, "reference": 1024}
    saved = json.loads(json.dumps(packing.state()))
    again = packing_of(make_config(shared))
    again.restore(saved)
    again.set_train_tokens(4096)
    assert again.tokens == {**first["tokens"], "train": 512, "reference": 1024}
    smaller = packing_of(make_config(shared))
    smaller.restore(saved)
    smaller.set_train_tokens(256)  # another device has less memory
    assert smaller.tokens["train"] == 256
    own_size = {"actor_train__max_tokens_per_microbatch_in_train": 2048}
    changed = packing_of(make_config(shared, **own_size))
    changed.restore(saved)
    changed.set_train_tokens(2048)
    assert changed.tokens["train"] == 2048
    assert changed.tokens["reference"] == 1024
    older = packing_of(make_config(shared))
    older.restore({})
    assert older.state() == first


# --- precision and devices ---


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_on_the_cpu(shared: Path, dtype: str) -> None:
    changes = {"max_steps": 5, f"{TRAINING}learning_rate": 1e-3}
    config, lines = run(shared, f"half-{dtype}", actor_train__model_args__dtype=dtype, **changes)
    _, exact = run(shared, f"exact-{dtype}", **changes)
    assert lines[1]["loss"] == pytest.approx(math.log(2), rel=1e-3)
    assert lines[-1]["eval/loss"] == pytest.approx(exact[-1]["eval/loss"], rel=0.01)
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    state = open_checkpoint(config.run_dir / "checkpoint-5").state["trainer"]
    assert ("loss_scale" in state) is (dtype == "fp16")
    stored = exported(config)
    assert {weight.dtype for weight in stored.values()} == {torch.float32}  # as the source
    assert any(
        not torch.equal(w, w.bfloat16().float()) for w in stored.values()
    )  # the masters, not their image


class Overflowing(ActorWorker):
    """Starts with a loss scale that float16 cannot hold."""

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        super().initialize(total_steps, model)
        if self.trainer.optimizer and self.trainer.optimizer.loss_scale:
            self.trainer.optimizer.loss_scale.value = 2.0**29


def test_an_overflow_moves_the_data_and_not_the_learning_rate(shared: Path) -> None:
    changes = {"actor_train__model_args__dtype": "fp16", "actor_train__worker_cls": Overflowing}
    config, lines = run(shared, "overflow", max_steps=20, **{EPOCHS: 4.0}, **changes)
    train = [line for line in lines if "lr" in line]
    skipped = [line["skipped_iter"] for line in train]
    lost = sum(skipped)
    assert 0 < lost < 20
    assert skipped == [1] * lost + [0] * (20 - lost)
    assert train[0]["grad_norm"] is None
    assert train[0]["nonfinite"].keys() == {"grad_norm"}
    assert [line["lr"] for line in train] == pytest.approx(
        [1e-3 * (1 - max(0, step - lost) / 20) for step in range(20)]
    )
    state = open_checkpoint(config.run_dir / "checkpoint-20").state["trainer"]
    assert (state["updates"], state["loss_scale"]) == (20 - lost, [2.0 ** (29 - lost), 20 - lost])


def test_the_loss_scale_of_float16_is_restored_at_resume(shared: Path) -> None:
    """Each step overflows and halves the scale; a new scale would begin far below, at 2**16."""
    half = {"actor_train__model_args__dtype": "fp16"}
    with pytest.raises(NonFiniteError, match="no update was made: 2 of 2 steps were skipped"):
        run(shared, "scaled", max_steps=2, actor_train__worker_cls=Overflowing, **half)
    with pytest.raises(NonFiniteError, match="no update was made: 3 of 3 steps were skipped"):
        run(shared, "scaled", max_steps=3, **half)
    config = make_config(shared, exp_name="scaled")
    assert [line["skipped_iter"] for line in metrics(config) if "lr" in line] == [1, 1, 1]
    for step in (2, 3):
        state = open_checkpoint(config.run_dir / f"checkpoint-{step}").state["trainer"]
        assert (state["updates"], state["loss_scale"]) == (0, [2.0 ** (29 - step), 0])


class NotANumber(ActorWorker):
    def build_loss(self) -> Any:
        return lambda x: x.policy[:, 0] * math.nan


def test_a_pause_ends_when_a_stop_is_requested(shared: Path) -> None:
    """By a signal, or from another shell; `failure_backoff` may be long."""
    config = make_config(shared, exp_name="pause")
    with closing(DPOPipeline(config)) as pipeline, control.lock(config.run_dir):
        (config.run_dir / f"{control.CONTROL}-{control.STOP}-1").touch()
        pipeline._pause(3600)
        assert pipeline.stop.signal


def test_deterministic_kernels(shared: Path) -> None:
    _, lines = run(shared, "deterministic", max_steps=2, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    _, plain = run(shared, "plain-kernels", max_steps=2)
    assert [line.get("loss") for line in lines] == [line.get("loss") for line in plain]


# --- what is refused ---


def asking(loss: str, **modifiers: Any) -> type:
    """A worker whose pair loss needs what the config does not ask for: the driver would not send it."""
    build = {"build_loss": lambda _self: configure([loss], {}, modifiers=modifiers)}
    return type("Asking", (ActorWorker,), build)


WORKER = "actor_train__worker_cls"
MEMORY = "strategy_args__gpu_memory_utilization"  # of a CPU
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"save_best": True, "metric_for_best_model": "eval/rewards/accuracy"},
        "'eval/rewards/accuracy' eval/rewards/accuracies",
    ),
    ({WORKER: dict}, "actor_train.worker_cls subclass"),
    ({WORKER: "collections.OrderedDict"}, "actor_train.worker_cls subclass"),
    ({WORKER: "tests.train.test_pipeline.Quiet"}, "'tests.train.test_pipeline.Quiet' imported"),
    ({WORKER: "no_such_module.Worker"}, "'no_such_module.Worker' imported"),
    ({WORKER: asking("sigmoid", ld_alpha=0.5)}, "build_loss PairLoss shared"),
    ({WORKER: asking("odpo")}, "build_loss PairLoss margin"),
    ({WORKER: asking("sigmoid", use_weighting=True)}, "build_loss PairLoss squares"),
    ({WORKER: asking("aot")}, "build_loss PairLoss whole"),
    ({f"actor_train__{MEMORY}": 0.5}, "actor_train.strategy_args.gpu_memory_utilization remove"),
    ({f"reference__{MEMORY}": 0.5}, "reference.strategy_args.gpu_memory_utilization remove"),
    ({"sequence_length": 129, "pretrain": "dynamic"}, "sequence_length: 129 128"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_a_run_refuses(shared: Path, changes: dict[str, Any], words: str) -> None:
    if "pretrain" in changes:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        base = make_model(shared / changes["pretrain"], rope_parameters=rope)
        changes = {**changes, "pretrain": str(base)}
    with pytest.raises(ConfigError) as refused:
        DPOPipeline(make_config(shared, exp_name="refused", **changes)).run()
    assert all(word in str(refused.value) for word in words.split())


# --- settings that must have an effect ---


class Watching(ActorWorker):
    """Remembers how many pairs each micro-batch without gradients had, and the environment."""

    seen: dict[str, list[list[int]]]

    def compute_log_probs(self, batches: Any) -> Columns:
        type(self).seen.setdefault(self.role, []).append([len(batch.pair_P) for batch in batches])
        return super().compute_log_probs(batches)

    def build_loss(self) -> Any:
        type(self).environment = {
            key: value for key, value in os.environ.items() if key.startswith("TEST_RATHER")
        }
        return super().build_loss()


def test_infer_batch_size_changes_bins_and_no_result(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watching, "seen", {}, raising=False)
    workers = {
        "actor_train__worker_cls": Watching,
        "reference__worker_cls": Watching,
        "max_steps": 2,
    }
    _, plain = run(shared, "bins", **workers)
    assert Watching.seen == {"actor_train": [[9], [9]], "reference": [[9], [8], [8]]}
    Watching.seen.clear()
    sizes = {"actor_train__infer_batch_size": 5, "reference__infer_batch_size": 3}
    _, smaller = run(shared, "smaller-bins", **workers, **sizes)
    assert {len(bins) for bins in Watching.seen["actor_train"]} == {2}
    assert {len(bins) for bins in Watching.seen["reference"]} == {3}
    assert max(size for bins in Watching.seen["actor_train"] for size in bins) == 5
    assert max(size for bins in Watching.seen["reference"] for size in bins) == 3
    Watching.seen.clear()
    _, budgeted = run(
        shared, "budget", **workers, actor_train__max_tokens_per_microbatch_in_infer=60
    )
    assert (
        min(len(bins) for bins in [*Watching.seen["actor_train"], *Watching.seen["reference"]]) > 2
    )
    for other in (smaller, budgeted):
        for one, another in zip(plain, other, strict=True):
            for key in one.keys() & {"loss", "eval/loss", "grad_norm", "eval/rewards/margins"}:
                assert another[key] == pytest.approx(one[key], rel=1e-5, abs=1e-8)


def test_environment_variables_reach_the_worker(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watching, "seen", {}, raising=False)
    for name in ("TEST_RATHER_A", "TEST_RATHER_B"):
        monkeypatch.setenv(name, "before")
    own = {
        "actor_train__system_envs": {"TEST_RATHER_B": "role"},
        "actor_train__worker_cls": Watching,
    }
    both = {"TEST_RATHER_A": "top", "TEST_RATHER_B": "top"}
    run(shared, "environment", max_steps=1, system_envs=both, **own)
    assert Watching.environment == {"TEST_RATHER_A": "top", "TEST_RATHER_B": "role"}


def test_zeros_in_the_gradient_on_request(shared: Path) -> None:
    _, lines = run(shared, "zeros", max_steps=1, **{f"{TRAINING}log_num_zeros_in_grad": True})
    assert lines[1]["num_zeros_in_grad"] >= 0
    assert "num_zeros_in_grad" not in lines[0]


@pytest.mark.parametrize(
    "change",
    [
        {"beta": 0.5},
        {"label_smoothing": 0.2},
        {"ipo": True},
        {"seed": 7},
        {"max_grad_norm": 1e-3},
        {f"{TRAINING}data_seed": 7},
        {f"{TRAINING}learning_rate": 1e-4},
        {f"{TRAINING}weight_decay": 0.5},
        {f"{TRAINING}adam_beta1": 0.5},
        {f"{TRAINING}adam_beta2": 0.5},
        {f"{TRAINING}adam_epsilon": 1e-2},
        {f"{TRAINING}lr_scheduler_type": "constant"},
        {f"{TRAINING}warmup_steps": 2},
        {f"{TRAINING}warmup_ratio": 0.5},
        {f"{TRAINING}lr_scheduler_kwargs": {"min_lr": 5e-4}},
        {f"{TRAINING}gradient_accumulation_steps": 2},
        {"train_batch_size": 4, f"{TRAINING}per_device_train_batch_size": 4},
        {"actor_train__data_args__weights": [2.0]},
    ],
    ids=lambda change: next(iter(change)).removeprefix(TRAINING),
)
def test_a_setting_changes_the_trained_weights(shared: Path, change: dict[str, Any]) -> None:
    whole = shared / "output" / "compared"
    if not whole.exists():
        run(shared, "compared", max_steps=3, validation={})
    name = "changed-" + next(iter(change))
    config = trained(shared, name, max_steps=3, validation={}, **change)
    plain, changed = load_file(whole / "model" / "model.safetensors"), exported(config)
    assert any(not torch.allclose(plain[key], changed[key], rtol=1e-4, atol=1e-7) for key in plain)
    shutil.rmtree(config.run_dir)


def test_recomputation_changes_no_bit(shared: Path) -> None:
    key = "actor_train__model_args__disable_gradient_checkpointing"
    one, other = (
        trained(shared, f"recompute-{off}", max_steps=3, **{key: off}) for off in (True, False)
    )
    assert_equal(exported(one), exported(other))


# --- the length of a run ---


@pytest.mark.defect("X8")
@pytest.mark.defect("U10")
def test_a_finished_run_names_what_ended_it_and_what_differs_now(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rate = "actor_train__training_args__learning_rate"
    epochs = "actor_train__training_args__num_train_epochs"
    config = make_config(shared, exp_name="ended", max_steps=99, **{epochs: 0.2})
    with caplog.at_level(logging.INFO, "rather"):
        assert DPOPipeline(config).run() == 0
        unreached = "max_steps: 99 cannot be reached: num_train_epochs (0.2) ends the run after 1 "
        assert caplog.text.count(unreached) == 1
        caplog.clear()
        assert DPOPipeline(config).run() == 0
        assert "is finished at step 1; num_train_epochs ended it; raise num_train" in caplog.text
        assert "trained with other settings" not in caplog.text
        caplog.clear()
        other = make_config(shared, exp_name="ended", **{epochs: 0.2, rate: 0.5}, max_steps=1)
        assert DPOPipeline(other).run() == 0
    assert "is finished at step 1; max_steps ended it; raise max_steps" in caplog.text
    changed = "and is not trained again: learning_rate was 0.001 and is now 0.5"
    assert caplog.text.count(changed) == 1


@pytest.mark.defect("U19")
def test_a_smoke_test_shortens_the_warm_up_and_says_so(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warm_up = {"actor_train__training_args__warmup_steps": 20}
    config = make_config(shared, exp_name="smoke", max_steps=2, **warm_up)
    assert DPOPipeline(config).run() == 0
    assert caplog.text.count("warmup_steps: 20 is more than the 2 steps of this run; warm") == 1
    assert [line["lr"] for line in metrics(config) if "lr" in line] == [1e-3, 5e-4]
