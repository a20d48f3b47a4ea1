"""Text pairs on checkpoints with a vision tower: the language model trains, the rest stays bit for bit."""

from __future__ import annotations

import logging
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rather.config.schema import ModelArgs
from rather.config.strategies import Layout
from rather.data.pack import pack
from rather.files import read_json
from rather.model import towers
from rather.model.files import TOWER, model_digest, weights_digest
from rather.model.policy import pair_columns
from rather.model.sizes import sizes_of
from rather.parallel.load import load_divided, load_policy
from rather.parallel.mesh import build_mesh
from rather.parallel.stages import Stages
from rather.pipeline.pipeline import DPOPipeline
from tests.cells import cells
from tests.model.towers import make_checkpoint
from tests.padded import packed_logps, padded_logps, random_pairs
from tests.same.pool import pool
from tests.tiny import make_config

WEIGHTS = "model.safetensors"
LORA = {
    "actor_train__model_args__lora_rank": 4,
    "actor_train__model_args__lora_target": "all-linear",
}


def trained(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Train a checkpoint for two steps; return its run folder."""
    changes["actor_train__model_args__tokenizer_name_or_path"] = str(folder / "words")
    config = make_config(folder, max_steps=2, **changes)
    (folder / "base").rename(
        folder / "words"
    )  # transformers has its own tokenizer for a Qwen folder
    make_checkpoint(folder / "base", name, dtype)
    assert DPOPipeline(config).run() == 0
    return config.run_dir


def current_name(name: str) -> str:
    """Return the name in today's classes; checkpoints of Qwen2-Audio have an older one."""
    name = re.sub(r"^language_model\.model\.", "model.language_model.", name)
    name = re.sub(r"^(audio_tower|multi_modal_projector)\.", r"model.\1.", name)
    return name.replace("language_model.lm_head.", "lm_head.")


def assert_only_language_changed(source: Path, exported: Path) -> None:
    before, after = (
        {current_name(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
        for folder in (source, exported)
    )
    assert before.keys() == after.keys()
    frozen = {name for name in before if TOWER.search(name)}
    assert frozen
    for name in frozen:
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name]), name
    changed = [
        name for name in before.keys() - frozen if not torch.equal(before[name], after[name])
    ]
    assert len(changed) > 10
    processor = "preprocessor_config.json"
    assert (source / processor).read_bytes() == (exported / processor).read_bytes()


@pytest.mark.parametrize(
    "name", cells(["gemma3", "qwen2_5_vl"], ["qwen3_5", "mistral3", "llama4", "qwen2_audio"])
)
def test_the_language_model_trains_and_the_tower_stays(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    towers._report.cache_clear()
    caplog.set_level(logging.INFO, "rather")
    run = trained(tmp_path, name)
    assert_only_language_changed(tmp_path / "base", run / "model")
    frozen = sum(
        tensor.numel()
        for key, tensor in load_file(tmp_path / "base" / WEIGHTS).items()
        if TOWER.search(key)
    )
    kind = "audio" if name == "qwen2_audio" else "vision"
    assert f"{kind} tower frozen: {frozen:,} parameters, text only" in caplog.messages
    architecture = read_json(tmp_path / "base" / "config.json")["architectures"][0]
    opened, info = getattr(transformers, architecture).from_pretrained(
        run / "model", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert read_json(run / "model" / "config.json")["architectures"] == [architecture]
    policy = load_policy(str(run / "model"), ModelArgs(), "cpu")
    pairs = random_pairs(4, 60)
    got = packed_logps(policy, pairs)
    assert torch.allclose(got, padded_logps(opened.eval(), pairs), rtol=1e-5, atol=1e-5)


def test_a_bfloat16_tower_stays_bit_for_bit(tmp_path: Path) -> None:
    run = trained(tmp_path, "gemma3", torch.bfloat16)
    assert_only_language_changed(tmp_path / "base", run / "model")


@pytest.mark.parametrize("name", cells(["gemma3"], ["qwen3_5", "qwen2_audio", "llama4"]))
def test_an_adapter_trains_and_merges(name: str, tmp_path: Path) -> None:
    run = trained(tmp_path, name, **LORA)
    before, after = (load_file(path / WEIGHTS) for path in (tmp_path / "base", run / "model"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before if TOWER.search(key))
    assert not any(
        TOWER.search(key) for key in load_file(run / "adapter/adapter_model.safetensors")
    )
    assert any(not torch.equal(before[key], after[key]) for key in before)


def test_a_checkpoint_of_a_run_has_no_tower(tmp_path: Path) -> None:
    run = trained(tmp_path, "gemma3", save_steps=2)
    files = [*run.rglob("*.safetensors")]
    saved = [file for file in files if "checkpoint" in str(file.relative_to(run))]
    assert saved
    for file in saved:
        assert not any(TOWER.search(key) for key in load_file(file))


def test_digests_leave_the_tower_out(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "base", "gemma3")

    def digests() -> tuple[str | None, str | None]:
        return model_digest(folder, lambda f: sha256(f.read_bytes()).hexdigest()), weights_digest(
            folder
        )

    def change(is_tower: bool) -> None:
        tensors = load_file(folder / WEIGHTS)
        name = next(key for key in sorted(tensors) if bool(TOWER.search(key)) == is_tower)
        tensors[name] += 1
        save_file(tensors, folder / WEIGHTS)

    first = digests()
    assert None not in first
    change(is_tower=True)
    assert digests() == first
    change(is_tower=False)
    assert not set(digests()) & set(first)


def test_a_plan_counts_the_language_model_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "base", "gemma3")
    policy = load_policy(str(folder), ModelArgs(), "cpu")
    weights = sum(parameter.numel() for parameter in policy.parameters())
    assert sizes_of(str(folder), ModelArgs()).weights == weights


def test_a_tower_that_is_left_out_twice_is_counted_once(tmp_path: Path) -> None:
    """As ranks do: when they make the model, and again before they read its weights."""
    folder = make_checkpoint(tmp_path / "base", "gemma3")
    causal_lm = load_policy(str(folder), ModelArgs(), "cpu").causal_lm
    parameters = causal_lm.left_out
    assert towers.leave_tower_out(causal_lm).left_out == parameters > 0


LAYOUTS = {
    "zero3": Layout(2, stage=3, shard=2),
    "tp2": Layout(1, tp=2),
    "pp2": Layout(1, pp=2),
}


def divided_sums(folder: Path, layout: Layout, args: ModelArgs) -> torch.Tensor | None:
    mesh = build_mesh(layout, "cpu")
    policy = load_divided(str(folder), args, "cpu", mesh, layout, trains=True)
    (batch,) = pack(random_pairs(4, 60), 10**6)
    if isinstance(policy, Stages):
        found = policy.columns([batch], ())
        return found[0]["sum"] if found else None
    return pair_columns(policy, batch)["sum"].detach()


@pytest.mark.parametrize(
    "cell",
    ["gemma3-pp2", "gemma3-tp2", "qwen3_5-zero3", "qwen2_5_vl-tp2", "mistral3-pp2", "qwen2_audio-zero3"],
)  # fmt: skip
def test_divided_it_is_the_same(cell: str, tmp_path: Path) -> None:
    name, layout = cell.split("-")
    folder = make_checkpoint(tmp_path / "base", name)
    whole = load_policy(str(folder), ModelArgs(), "cpu")
    want = packed_logps(whole, random_pairs(4, 60)).detach()
    results = pool(2).run(divided_sums, folder, LAYOUTS[layout], ModelArgs())
    for got in results:
        assert got is None or torch.allclose(got, want, rtol=1e-5)
    assert any(got is not None for got in results)
