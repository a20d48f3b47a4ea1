"""The model that a bfloat16 run leaves is the model that it trained, bit by bit."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from rather.checkpoint import manifest
from rather.checkpoint.checkpoint import open_checkpoint
from rather.commands.export import export, merge
from rather.config.found import signed
from rather.config.run_config import DPOConfig
from rather.errors import CheckpointError, ConfigError
from rather.optim.rounding import Rounding
from rather.pipeline.pipeline import DPOPipeline
from rather.run_folder.model_source import weights_of
from tests.runs import assert_equal
from tests.tiny import make_config, make_model, metrics

ACTOR = "actor_train__training_args__"
RUN: dict[str, Any] = {
    "actor_train__model_args__dtype": "bf16",
    f"{ACTOR}learning_rate": 2e-6,  # a step of bfloat16 is 1e-4 at a typical weight
    f"{ACTOR}lr_scheduler_type": "constant",
    f"{ACTOR}num_train_epochs": 2.0,  # of five steps
    "max_steps": 6,
    "save_steps": 3,
    "max_ckpt_to_keep": 0,
}
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2}
DITHERED, NEAREST = Rounding("dithered"), Rounding("nearest")
SOURCES = ("bfloat16", "float32")
pytestmark = pytest.mark.usefixtures("no_self_check")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in bfloat16 and in float32, with the pairs."""
    found = {source: tmp_path_factory.mktemp(source) for source in SOURCES}
    for source, folder in found.items():
        make_config(folder)
        make_model(folder / "base", dtype=getattr(torch, source))
    return found


@pytest.fixture(scope="module")
def trained(folders: dict[str, Path]) -> dict[str, tuple[DPOConfig, dict[str, Tensor]]]:
    """Whole runs from both sources, and the weights that they computed with at the end."""
    made = {}
    for source, folder in folders.items():
        config = make_config(folder, **RUN, save_best=True, eval_steps=3)
        made[source] = config, run(config)
    return made


def run(config: DPOConfig) -> dict[str, Tensor]:
    """Train, and return the weights of the last forward pass."""
    pipeline = DPOPipeline(config)
    assert pipeline.run() == 0
    policy = pipeline.actor_train.trainer.policy
    return {name: p.detach().bfloat16() for name, p in policy.named_parameters()}


def file_of(folder: Path) -> dict[str, Tensor]:
    return {f"causal_lm.{n}": t for n, t in load_file(folder / "model.safetensors").items()}


def masters_of(config: DPOConfig, step: int = 6, group: str = "model") -> dict[str, Tensor]:
    return open_checkpoint(config.run_dir / f"checkpoint-{step}").tensors(group)


@pytest.mark.parametrize("source", SOURCES)
def test_untrained_the_policy_is_the_reference(trained: Any, source: str) -> None:
    """Log-probs are equal, not just close: all rewards are 0."""
    lines = metrics(trained[source][0])
    first = lines[0] | lines[1]
    for reward in ("rewards/chosen", "rewards/rejected", "eval/rewards/chosen"):
        assert first[reward] == 0.0


def test_every_file_holds_the_weights_of_the_last_forward_pass(
    trained: Any, tmp_path: Path
) -> None:
    config, forward = trained["bfloat16"]
    masters, source = masters_of(config), file_of(config.run_dir.parents[1] / "base")
    nearest = {name: NEAREST.rounded(name, master) for name, master in masters.items()}
    assert any(not nearest[name].equal(weight) for name, weight in forward.items())
    assert any(not source[name].equal(weight) for name, weight in forward.items())
    assert_equal(file_of(config.run_dir / "model"), forward)
    said = export(str(config.run_dir / "checkpoint-6"), tmp_path / "out")
    assert_equal(file_of(tmp_path / "out"), forward)
    assert "the file keeps" in said
    for name in ("checkpoint-6", "model"):  # as chat, score and board do
        loaded = weights_of(str(config.run_dir / name)).load("cpu")
        assert_equal({n: p.bfloat16() for n, p in loaded.named_parameters()}, forward)


def test_the_best_model_holds_the_weights_of_its_forward_pass(folders: Any, trained: Any) -> None:
    """Which evaluation is the best one depends on the CPU; a run that ends there is compared."""
    config, _ = trained["bfloat16"]
    losses = {line["step"]: line["eval/loss"] for line in metrics(config) if "eval/loss" in line}
    best = min(losses, key=losses.__getitem__)
    ends_there = make_config(folders["bfloat16"], exp_name="best", **{**RUN, "max_steps": best})
    assert_equal(file_of(config.run_dir / "best_model"), run(ends_there))


def test_a_float32_source_keeps_its_dtype_and_is_rounded_alike(
    trained: Any, tmp_path: Path
) -> None:
    config, forward = trained["float32"]
    assert_equal(file_of(config.run_dir / "model"), masters_of(config))
    for name in ("checkpoint-6", "model"):
        export(str(config.run_dir / name), tmp_path / name, dtype="bf16")
        assert_equal(file_of(tmp_path / name), forward)
        loaded = weights_of(str(config.run_dir / name)).load("cpu")
        assert_equal({n: p.bfloat16() for n, p in loaded.named_parameters()}, forward)


@pytest.mark.parametrize("source", SOURCES)
def test_a_resumed_run_has_the_bits_of_a_whole_one(folders: Any, trained: Any, source: str) -> None:
    config, forward = trained[source]
    run(make_config(folders[source], exp_name="cut", **{**RUN, "max_steps": 3}))
    again = make_config(folders[source], exp_name="cut", **RUN)
    assert_equal(run(again), forward)
    assert_equal(masters_of(again), masters_of(config))


def test_a_moving_reference_resumes_with_its_low_bits(folders: Any) -> None:
    folder = folders["bfloat16"]
    whole = make_config(folder, exp_name="synced", **RUN, **SYNCED)
    run(whole)
    run(make_config(folder, exp_name="synced-cut", **{**RUN, "max_steps": 3}, **SYNCED))
    cut = make_config(folder, exp_name="synced-cut", **RUN, **SYNCED)
    run(cut)
    moved = masters_of(whole, group="reference")
    assert any((t.view(torch.int32) & 0xFFFF).any() for t in moved.values())
    assert_equal(masters_of(cut, group="reference"), moved)
    assert_equal(masters_of(cut), masters_of(whole))


def test_parameters_kept_in_float32_are_rounded_only_in_the_file(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["input_layernorm"])
    # Llama's own layers do not mix dtypes; float32 products of rounded weights do.
    monkeypatch.setattr("rather.parallel.load.cpu_has_bf16", lambda: False)
    config = make_config(folders["bfloat16"], exp_name="wide", **{**RUN, "max_steps": 3})
    pipeline = DPOPipeline(config)
    assert pipeline.run() == 0
    policy = pipeline.actor_train.trainer.policy
    weights, file = dict(policy.named_parameters()), file_of(config.run_dir / "model")
    for name, master in masters_of(config, 3).items():
        rounded = DITHERED.rounded(name, master)
        assert file[name].equal(rounded)
        is_kept = "input_layernorm" in name
        assert weights[name].equal(master if is_kept else rounded.to(weights[name].dtype)), name
        assert not is_kept or not master.equal(rounded.float())
    assert {buffer.dtype for buffer in policy.buffers()} == {torch.float32}


def share(said: str) -> float:
    """Return the share of the update that an export says it keeps."""
    (found,) = re.findall(r"the file keeps (-?[\d.]+) ?% of the update", said)
    return float(found) / 100


def test_every_export_says_what_it_keeps(trained: Any, tmp_path: Path) -> None:
    config, _ = trained["bfloat16"]
    checkpoint, shares = str(config.run_dir / "checkpoint-6"), {}
    for name, options in {
        "own": {},
        "nearest": {"rounding": NEAREST},
        "bf16": {"dtype": "bf16", "rounding": DITHERED},
        "fp16": {"dtype": "fp16"},
        "fp32": {"dtype": "fp32"},
    }.items():
        shares[name] = share(export(checkpoint, tmp_path / name, **options))
        card = (tmp_path / name / "README.md").read_text()
        assert share(card) == shares[name]
    assert share((config.run_dir / "model" / "README.md").read_text()) == shares["own"]
    assert shares["own"] == shares["bf16"] == pytest.approx(1, abs=0.15)
    assert shares["nearest"] < 0.5
    assert shares["fp16"] == pytest.approx(1, abs=0.15)
    assert shares["fp32"] == 1
    assert_equal(file_of(tmp_path / "fp32"), masters_of(config))
    masters = masters_of(config)
    nearest = {name: NEAREST.rounded(name, master) for name, master in masters.items()}
    assert_equal(file_of(tmp_path / "nearest"), nearest)
    with pytest.raises(ConfigError, match="--rounding is for bf16 files, and this one is float32"):
        export(checkpoint, tmp_path / "wide", dtype="fp32", rounding=NEAREST)
    assert not (tmp_path / "wide").exists()


def test_a_merged_adapter_says_what_it_keeps(folders: Any, tmp_path: Path) -> None:
    changes = {**RUN, "actor_train__model_args__lora_rank": 2}
    config = make_config(folders["bfloat16"], exp_name="lora", **changes)
    run(config)
    adapter, out, shares = str(config.run_dir / "adapter"), tmp_path, {}
    for name, options in {
        "own": {},
        "nearest": {"rounding": NEAREST},
        "fp32": {"dtype": "fp32"},
    }.items():
        shares[name] = share(merge(adapter, out / name, **options))
        assert share((out / name / "README.md").read_text()) == shares[name]
    assert shares["own"] == pytest.approx(1, abs=0.2)
    assert shares["nearest"] < 0.5
    assert shares["fp32"] == 1
    assert share((config.run_dir / "model" / "README.md").read_text()) == shares["own"]
    checkpoint = str(config.run_dir / "checkpoint-6")
    export(checkpoint, out / "checkpoint")
    for name in ("checkpoint", "own"):
        assert_equal(file_of(out / name), file_of(config.run_dir / "model"))
    with pytest.raises(ConfigError, match=r"--rounding .* not apply to --adapter"):
        export(checkpoint, out / "adapter", adapter=True, rounding=NEAREST)


# --- checkpoints from before `rounding` ---


@pytest.fixture(scope="module")
def nearest(folders: dict[str, Path]) -> tuple[DPOConfig, dict[str, Tensor]]:
    config = make_config(folders["bfloat16"], exp_name="nearest", **RUN, rounding="nearest")
    return config, run(config)


def older(nearest: DPOConfig, name: str) -> Path:
    """Copy a run, as it was at step 3 under a version without `rounding`."""
    folder = Path(shutil.copytree(nearest.run_dir, nearest.run_dir.with_name(name)))
    for made in ("checkpoint-6", "model"):
        shutil.rmtree(folder / made)
    (folder / ".finished").unlink()
    (folder / "LATEST").write_text("checkpoint-3\n")
    text = (folder / "config.yaml").read_text()
    # Signed again, as its own run would have.
    text = text.partition("\n")[2].replace("rounding: nearest\n", "")
    (folder / "config.yaml").write_text(signed(text))
    path = folder / "checkpoint-3"
    state = json.loads((path / "state.json").read_text())
    assert state["identity"].pop("rounding") == "nearest"
    data = json.dumps(state).encode()
    (path / "state.json").write_bytes(data)
    step, files = manifest.read_manifest(path)
    changed = {**files, "state.json": (len(data), hashlib.sha256(data).hexdigest())}
    (path / "manifest.json").write_bytes(manifest.manifest_bytes(step, changed))
    return folder


def test_an_older_checkpoint_continues_as_nearest(folders: Any, nearest: Any) -> None:
    config, forward = nearest
    folder = older(config, "older")
    at_3 = weights_of(str(folder)).load("cpu")
    for name, master in masters_of(config, 3).items():
        expected = NEAREST.rounded(name, master)
        assert at_3.get_parameter(name).bfloat16().equal(expected)
    again = make_config(folders["bfloat16"], exp_name="older", **RUN)
    assert_equal(run(again), forward)
    assert_equal(masters_of(again), masters_of(config))
    for name, weight in file_of(folder / "model").items():
        halves = (masters_of(config)[name].view(torch.int32) & 0xFFFF) == 0x8000  # become even
        assert weight[~halves].equal(forward[name][~halves]), name


def test_another_rounding_is_refused(folders: Any, nearest: Any) -> None:
    older(nearest[0], "asked")
    for name in ("asked", "nearest"):
        changes = {**RUN, "max_steps": 9, "rounding": "dithered"}
        with pytest.raises(CheckpointError, match="rounding: nearest then, dithered now"):
            DPOPipeline(make_config(folders["bfloat16"], exp_name=name, **changes)).run()


# --- the reference's cache, and what cannot be ---


@pytest.mark.parametrize("source", SOURCES)
def test_the_cache_is_shared_if_rounding_changes_nothing(
    folders: Any, trained: Any, nearest: Any, source: str
) -> None:
    config = make_config(
        folders[source], exp_name="cached", **{**RUN, "max_steps": 1}, rounding="nearest"
    )
    run(config)
    told = json.loads((config.run_dir / "report.json").read_text())["reference"]
    expected = json.loads((trained[source][0].run_dir / "report.json").read_text())["reference"]
    assert (told["cache"] == expected["cache"]) == (source == "bfloat16")
    assert (told["pairs_computed"] == 0) == (source == "bfloat16")
