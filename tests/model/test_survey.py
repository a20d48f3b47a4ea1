"""The list of families that train cannot rot: a new transformers shows its new types here."""

from __future__ import annotations

import json

import pytest

from rather.model import check
from tests.cells import cells
from tests.model.survey import PAGE, PINNED, TRAINS, causal_types, page, result_of

AGAIN = "run: python -m tests.model.survey"
RESULTS: dict[str, str] = json.loads(PINNED.read_text("utf-8"))
FAST = ["qwen3_5_text", "falcon", "gpt_oss"]


def test_every_causal_type_is_listed() -> None:
    assert sorted(RESULTS) == causal_types(), AGAIN


def test_the_page_is_made_from_the_list() -> None:
    assert PAGE.read_text("utf-8") == page(RESULTS), AGAIN


@pytest.mark.parametrize(
    "name", cells(FAST, [name for name in sorted(RESULTS) if name not in FAST])
)
def test_a_type_is_as_listed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_families", {})
    assert result_of(name) == RESULTS[name], AGAIN


def test_the_families_of_today_train() -> None:
    """Those that people train in 2026."""
    names = """
        llama mistral ministral3 qwen2 qwen3 qwen3_moe qwen3_5_text qwen3_5_moe_text qwen3_next gemma3_text
        gemma4_text gemma3n_text gpt_oss lfm2 lfm2_moe nemotron_h falcon_h1 granitemoehybrid olmo3 olmo_hybrid
        llama4_text deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe glm_moe_dsa smollm3 phi3 dots1
        hunyuan_v1_dense hunyuan_v1_moe minimax_m2 seed_oss
    """.split()  # noqa: SIM905
    assert {name: RESULTS.get(name) for name in names} == dict.fromkeys(names, TRAINS)
