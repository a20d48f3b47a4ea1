"""Names in files are a format: checkpoints and caches of older versions must still open.

Every name is written out here as a literal, so that a rename in the code fails a test. An identity
field that one side does not know counts as unchanged: a renamed field would silently switch its
guard off.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rather.checkpoint import checkpoint, manifest, sharded_tensors
from rather.config.schema import ActorModelArgs
from rather.data import prepare
from rather.files import text_sha
from rather.pipeline.checks import GUARDS
from rather.run_folder import control, names
from tests.checkpoint.runs import config_of, train

STATE = {
    "progress", "metrics_bytes", "metrics_sha256", "identity", "schedule", "trainer",
    "ledger_bytes", "ledger_sha256",
    "progress.step", "progress.window", "progress.best", "progress.best_step",
    "progress.stale_evaluations", "progress.stopped_early", "progress.unevaluated",
    "progress.nonfinite", "progress.rollbacks", "progress.history", "progress.skipped",
    "progress.idle", "progress.base", "progress.base.eval/drift",
    "progress.running", "progress.judged", "progress.best_scores",
    "progress.window.sums", "progress.window.pairs", "progress.window.tokens",
    "progress.window.skipped", "progress.history.losses", "progress.history.norms",
    "identity.data", "identity.tokenizer", "identity.chat template", "identity.model",
    "identity.reference", "identity.model config", "identity.reference config", "identity.loss",
    "identity.reference weights",
    "identity.synced reference", "identity.engine", "identity.seed", "identity.global batch", "identity.adapter",
    "identity.grouped responses", "identity.rounding", "identity.data.pairs", "identity.data.parts",
    "identity.chat template.name", "identity.chat template.sha256",
    "identity.loss.losses", "identity.loss.rpo_alpha", "identity.loss.pref_ftx",
    "identity.loss.f_divergence_type", "identity.loss.f_alpha_divergence_coef",
    "identity.loss.ld_alpha", "identity.loss.use_weighting", "identity.loss.soft_labels",
    "identity.loss.reference_free", "trainer.updates",
    "trainer.fitted", "trainer.fitted.recompute", "trainer.fitted.narrow_gradients",
    "micro_batches", "micro_batches.tokens", "micro_batches.tokens.train",
    "micro_batches.tokens.actor_train", "micro_batches.tokens.reference",
    "micro_batches.configured", "micro_batches.configured.train",
    "micro_batches.configured.actor_train", "micro_batches.configured.reference",
    "schedule.optimizer steps", "schedule.learning_rate", "schedule.lr_scheduler_type",
    "schedule.lr_scheduler_kwargs", "schedule.weight_decay", "schedule.adam_beta1",
    "schedule.adam_beta2", "schedule.adam_epsilon", "schedule.per_device_train_batch_size",
    "schedule.gradient_accumulation_steps", "schedule.warmup_steps", "schedule.warmup_ratio",
    "schedule.num_train_epochs", "schedule.max_grad_norm", "schedule.data_seed",
    "schedule.log_num_zeros_in_grad", "schedule.dtype",
}  # fmt: skip
GUARDED = {
    "data": ("data", "data commits"),
    "tokenizer": ("tokenizer", "chat template"),
    "model": (
        "model",
        "model config",
        "model weights",
        "adapter",
        "rounding",
        "frozen parts",
        "tower",
    ),
    "reference": ("reference", "reference config", "reference weights", "synced reference"),
    "loss": ("loss",),
    "engine": ("engine",),
    "seed": ("seed",),
    "batch": ("global batch", "grouped responses"),
}
ADAPTER = [
    "adapter_name_or_path", "additional_target", "init_lora_weights", "lora_alpha", "lora_rank",
    "lora_target", "modules_to_save", "quantization", "use_dora", "use_rslora",
]  # fmt: skip
CACHE_KEY = [
    "encoding", "files", "layout", "overlong", "score", "separator", "sequence_length",
    "special_tokens", "template", "tokenizer", "version",
]  # fmt: skip
LAYOUT = ["columns", "format", "ranked_pairs"]
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 2}


@pytest.fixture(scope="module")
def saved(folder: Path) -> Path:
    assert train(folder, "synced", **SYNCED) == 0
    return config_of(folder, "synced", **SYNCED).run_dir / "checkpoint-2"


def names_in(values: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield path + key
        if isinstance(value, dict) and path + key != "progress.window.sums":
            yield from names_in(value, f"{path}{key}.")


def header_of(file: Path) -> dict[str, Any]:
    with file.open("rb") as data:
        (size,) = struct.unpack("<Q", data.read(8))
        header: dict[str, Any] = json.loads(data.read(size))
        return header


def test_names_in_the_state(saved: Path) -> None:
    state = json.loads((saved / "state.json").read_text())
    assert set(names_in(state)) == STATE
    assert {name: fields for name, (fields, _) in GUARDS.items()} == GUARDED
    assert sorted(ActorModelArgs(lora_rank=4).adapter_settings or {}) == ADAPTER


def test_names_of_groups_and_tensors(saved: Path) -> None:
    found = checkpoint.open_checkpoint(saved)
    assert set(found.groups) == {"model", "optimizer", "reference", "rng"}
    weights = set(found.stored("model"))
    assert "causal_lm.model.layers.0.self_attn.q_proj.weight" in weights
    assert all(name.startswith("causal_lm.") for name in weights)
    moments = {f"{name}.{kind}" for name in weights for kind in ("exp_avg", "exp_avg_sq")}
    assert set(found.stored("optimizer")) == moments
    assert set(found.stored("rng")) == {"cpu"}


def test_headers_and_manifest(saved: Path) -> None:
    assert header_of(saved / "model-00001.safetensors")["__metadata__"] == {"format": "pt"}
    assert sharded_tensors.HEADER_KEY == "pieces"
    written = json.loads((saved / "manifest.json").read_text())
    assert list(written) == ["schema", "step", "files", "manifest_sha256"]
    assert {tuple(entry) for entry in written["files"].values()} == {("size", "sha256")}
    assert (manifest.SCHEMA, written["schema"]) == (1, 1)


def test_names_of_files(saved: Path) -> None:
    assert (saved.parent / "LATEST").read_text() == "checkpoint-2\n"
    assert (control.LOCK, control.CONTROL, control.TAKEN) == (".lock", ".control", ".taken")
    assert (names.INCIDENTS, names.FINISHED) == ("incidents.jsonl", ".finished")
    assert names.REFERENCE_LOG == "reference.log"
    assert {
        "metrics.jsonl", "config.yaml", "data_report.json", "LATEST", "model",
        "report.json", "starts.jsonl", "plan.json", ".finished",
    } <= {path.name for path in saved.parent.iterdir()}  # fmt: skip


def test_the_key_of_the_data_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of prepared pairs is a digest of these settings by name."""
    hashed: list[str] = []

    def recording(text: str) -> str:
        hashed.append(text)
        return text_sha(text)

    monkeypatch.setattr(prepare, "text_sha", recording)
    prepare.prepare(config_of(folder, "prepared"))
    recipes = [json.loads(text) for text in hashed if text.startswith('{"encoding"')]
    assert recipes
    for recipe in recipes:
        assert sorted(recipe) == CACHE_KEY
        assert sorted(recipe["layout"]) == LAYOUT
