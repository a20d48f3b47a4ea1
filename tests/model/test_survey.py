"""The list of families that train cannot rot: a new transformers shows its new types here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cells import cells
from tests.model.small import types
from tests.model.survey import PAGE, PINNED, PINNED_VERSION, TRAINS, page, result_of, results_of
from tests.tiny import _model_and_pairs

AGAIN = "run: python -m tests.model.survey"
LISTS: dict[str, dict[str, str]] = json.loads(PINNED.read_text("utf-8"))
RESULTS = LISTS[PINNED_VERSION]
# Those that people train in 2026.
TODAY = """
    llama mistral ministral3 qwen2 qwen3 qwen3_moe qwen3_5_text qwen3_5_moe_text qwen3_next gemma3_text
    gemma4_text gemma3n_text gpt_oss lfm2 lfm2_moe nemotron_h falcon_h1 granitemoehybrid olmo3 olmo_hybrid
    llama4_text deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe glm_moe_dsa smollm3 phi3 dots1
    hunyuan_v1_dense hunyuan_v1_moe minimax_m2 seed_oss
    gemma3 gemma4 llama4 llava_next mistral3 qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 smolvlm
    kimi_k25 qwen3_5_moe mistral_large4 longcat_flash flint
""".split()  # noqa: SIM905


def test_every_type_is_listed() -> None:
    assert sorted(RESULTS) == types(), AGAIN


def test_the_page_is_made_from_the_list() -> None:
    assert PAGE.read_text("utf-8") == page(LISTS), AGAIN


def test_no_type_fails_after_training_began() -> None:
    assert not [name for of in LISTS.values() for name in of if of[name].startswith("FAILED")]


def test_the_families_of_today_train() -> None:
    assert {name: RESULTS.get(name) for name in TODAY} == dict.fromkeys(TODAY, TRAINS)


@pytest.mark.defect("M2")
@pytest.mark.parametrize("name", cells(["falcon", "llama"], TODAY[1:]))
def test_a_type_is_as_listed(name: str, tmp_path: Path) -> None:
    assert result_of(results_of(name, _model_and_pairs())) == RESULTS[name], AGAIN
