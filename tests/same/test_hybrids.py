"""Families with scans, convolutions and sinks, divided: the same log-probs and gradients, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from rather.config.schema import ModelArgs
from rather.config.strategies import Layout
from rather.data.pack import pack
from rather.model.attention import IMPLEMENTATION
from rather.model.check import packed_twin
from rather.model.policy import PolicyModel, pair_columns
from rather.parallel.context import spread_tokens
from rather.parallel.load import load_divided, load_policy
from rather.parallel.mesh import Mesh, build_mesh
from rather.parallel.shard import shard
from rather.parallel.stages import check_cut
from rather.parallel.tensor import check_split
from tests.cells import cells
from tests.model.test_hybrids import config_of, hybrid
from tests.padded import random_pairs
from tests.same.against_whole import columns_and_gradients, refusal
from tests.same.pool import pool

NO_PLAN = "transformers has no"
NO_SEQUENCE = "cannot be divided with sequence_parallel: true"
NO_STYLE = "which is not supported"
SHARES = "attend with the keys of earlier layers"
# Why tensor parallel is refused, alone and with sequence parallel, and why pipeline stages are; ""
# if they are not. Plans that name experts only (nemotron_h) leave the vocabulary to be divided.
REFUSED: dict[str, tuple[str, str, str]] = {
    "qwen3_5_text": ("", "", ""),
    "granite_swa": ("", "", ""),
    "dots1": ("", "", ""),
    "qwen3_5_moe_text": ("", NO_SEQUENCE, ""),
    "qwen3_next": ("", NO_SEQUENCE, ""),
    "olmo_hybrid": ("", NO_SEQUENCE, ""),
    "gemma4_text": ("", NO_SEQUENCE, "belongs to no stage"),
    "gemma4_text-shared keys": ("", NO_SEQUENCE, SHARES),
    "gemma4_text-experts": ("", "", ""),
    "nemotron_h": ("", NO_SEQUENCE, NO_PLAN),
    "granitemoehybrid": ("", NO_SEQUENCE, NO_PLAN),
    "lfm2_moe": ("", NO_SEQUENCE, NO_PLAN),
    "hunyuan_v1_moe": ("", NO_SEQUENCE, NO_PLAN),
    "hunyuan_v1_dense": (NO_PLAN, NO_PLAN, NO_PLAN),
    "gpt_oss": (NO_PLAN, NO_PLAN, ""),
    "lfm2": (NO_PLAN, NO_PLAN, NO_PLAN),
    "falcon_h1": (NO_PLAN, NO_PLAN, NO_PLAN),
    "gemma3n_text": ("cannot be divided", NO_SEQUENCE, SHARES),
    "llama4_text": (NO_STYLE, NO_STYLE, NO_PLAN),
    "deepseek_v32": (NO_STYLE, NO_STYLE, ""),
    "glm_moe_dsa": (NO_STYLE, NO_STYLE, "not enough values"),
    "deepseek_v2": (NO_STYLE, NO_STYLE, ""),
}


def split_refusal(name: str, sequence_parallel: bool) -> str:
    mesh = Mesh.build(tp=2)
    return refusal(check_split, config_of(name), mesh, sequence_parallel=sequence_parallel)


BOTH_WAYS = [
    (name, by_sequence)
    for name in ("qwen3_5_text", "granite_swa", "lfm2")
    for by_sequence in (False, True)
]
PLAIN = [
    "qwen3_5_moe_text",
    "qwen3_next",
    "gemma4_text-experts",
    "nemotron_h",
    "deepseek_v2",
    "falcon_h1",
]
BY_SEQUENCE = [
    "dots1",
    "gemma4_text",
    "olmo_hybrid",
    "granitemoehybrid",
    "gemma3n_text",
    "llama4_text",
]


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    cells(BOTH_WAYS, [(name, False) for name in PLAIN] + [(name, True) for name in BY_SEQUENCE]),
)
def test_tensor_parallel(name: str, sequence_parallel: bool) -> None:
    """`check_split` compares log-probs and all gradients of a divided twin with a whole one."""
    why = REFUSED[name][sequence_parallel]
    for message in pool(2).run(split_refusal, name, sequence_parallel):
        assert why in message
        assert bool(message) == bool(why)
        assert not why or f"'{name.split('-')[0]}'" in message


CUT_FAST = ["qwen3_5_text", "lfm2"]


@pytest.mark.parametrize(
    "name", cells(CUT_FAST, [each for each in REFUSED if each not in CUT_FAST])
)
def test_pipeline_stages(name: str) -> None:
    """`check_cut` compares a stage for each layer with the whole."""
    *_, why = REFUSED[name]
    said, family = refusal(check_cut, config_of(name)), name.split("-")[0]
    assert bool(said) == bool(why)
    assert not why or re.search(f"'{family}' cannot be cut into pipeline stages.*{why}", said)


def sharded(name: str) -> dict[str, Tensor]:
    """One rank of two: its share of the micro-batches, then whole summed gradients."""
    mesh = Mesh.build(shard=2)
    policy = PolicyModel(hybrid(name))
    policy.causal_lm.set_attn_implementation(IMPLEMENTATION)
    shard(policy, mesh, "zero3")
    found = columns_and_gradients(policy, batches()[mesh.rank("dp") :: 2])
    return {key: value.full_tensor() for key, value in found.items() if key.startswith("causal")}


def batches() -> list[Any]:
    return pack(random_pairs(6, 128), 90, ranks=2)


@pytest.mark.parametrize(
    "name", cells(["qwen3_5_text"], ["gemma4_text-experts", "lfm2_moe", "nemotron_h", "gpt_oss"])
)
def test_zero3(name: str) -> None:
    whole = PolicyModel(hybrid(name))
    whole.causal_lm.set_attn_implementation(IMPLEMENTATION)
    want = columns_and_gradients(whole, batches())
    for found in pool(2).run(sharded, name):
        for key, gradient in found.items():
            assert (gradient - want[key]).norm() <= 1e-4 * want[key].norm() + 1e-7, key


def context_refusal() -> str:
    twin, _ = packed_twin(AutoConfig.for_model("qwen3_5_text"))
    return refusal(spread_tokens, twin, Mesh.build(cp=2))


def test_context_parallel_of_a_scan_is_refused() -> None:
    assert set(pool(2).run(context_refusal)) == {
        "cp_size: 2: layers of 'qwen3_5_text' carry a state from token to token, so ranks cannot "
        "divide the tokens of a sequence; set cp_size to 1"
    }


def loaded_sums(folder: Path, layout: Layout) -> Tensor:
    policy = load_divided(
        str(folder), ModelArgs(), "cpu", build_mesh(layout, "cpu"), layout, trains=True
    )
    assert isinstance(policy, PolicyModel)
    (batch,) = pack(random_pairs(4, 100), 10**6)
    return pair_columns(policy, batch)["sum"].detach()


@pytest.mark.parametrize(
    "name",
    cells(["olmo_hybrid"], ["nemotron_h", "hunyuan_v1_dense", "hunyuan_v1_moe", "deepseek_v2"]),
)
def test_ranks_read_the_files_of_one(name: str, tmp_path: Path) -> None:
    """Also files whose names transformers changes, as those of OLMo hybrid and Nemotron-H."""
    hybrid(name).save_pretrained(tmp_path)
    whole = load_policy(str(tmp_path), ModelArgs(), "cpu")
    (batch,) = pack(random_pairs(4, 100), 10**6)
    want = pair_columns(whole, batch)["sum"].detach()
    for got in pool(2).run(loaded_sums, tmp_path, Layout(2, stage=3, shard=2)):
        assert torch.allclose(got, want, rtol=1e-5)
