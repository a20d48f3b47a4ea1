"""Ask the self-check about every causal type of the installed transformers, by its default config.

python -m tests.model.survey      # a minute or two; writes tests/model/families.json and docs/families.md
"""

from __future__ import annotations

import json
import logging
import re
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rather.errors import ConfigError
from rather.model.check import check_family
from tests.model.test_hybrids import HYBRIDS

PINNED = Path(__file__).with_name("families.json")
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
TRAINS, OWN_WEIGHTS = "trains", "checked on its own weights"
# What a default config lacks, and released models have.
RELEASED: dict[str, dict[str, Any]] = {
    name: settings for name, settings in HYBRIDS.items() if "-" not in name
}
REASONS = {
    "differ from its own padded forward": "its packed log-probs differ from its padded forward",
    "does not accept packed pairs": "it does not take packed pairs",
    "experts cannot be checked": "its experts cannot be checked on a small copy",
}


def causal_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def result_of(name: str) -> str:
    try:
        config = AutoConfig.for_model(name, **RELEASED.get(name, {}))
    except Exception:
        return "no default config"
    if config.is_encoder_decoder:
        return "refused: an encoder-decoder"
    try:
        return TRAINS if check_family(config) else OWN_WEIGHTS
    except ConfigError as error:
        told = re.sub(r"\s+", " ", str(error))
        return "refused: " + next(why for part, why in REASONS.items() if part in told)


def survey() -> dict[str, str]:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = {}
        for name in causal_types():
            started = time.process_time()
            results[name] = result_of(name)
            print(f"{time.process_time() - started:6.1f} s  {name}: {results[name]}", flush=True)
        return results


def page(results: dict[str, str]) -> str:
    """The docs page: families by result."""
    by_result: dict[str, list[str]] = {}
    for name, result in results.items():
        by_result.setdefault(result, []).append(f"`{name}`")
    rows = [
        f"| {result} | {len(names)} | {', '.join(names)} |"
        for result, names in sorted(by_result.items(), key=lambda item: -len(item[1]))
    ]
    return "\n".join([
        "# Model families",
        "",
        "Every model is checked when it loads: packed log-probs must equal its own padded forward pass, on a small copy of its family and on",
        "its own weights. This table has every causal type of transformers, by the default config of its type; a test keeps it true.",
        "",
        "*Checked on its own weights* means that no small copy can be made of the default config. Such a model trains on one device if its",
        "weights pass the check. Checkpoints with a vision or audio tower train their language model on text pairs ([limits](limits.md)).",
        "",
        "| result | types | names in config.json (`model_type`) |",
        "|---|---|---|",
        *rows,
        "",
        "gpt-oss is read as it is released: experts of four bits (MXFP4) become bfloat16, exactly, as they are loaded, and the export is bfloat16.",
        "Other quantised weights are refused.",
        "",
        "Some families are limited. Sequences of `deepseek_v32` and `glm_moe_dsa` may have at most `index_topk` tokens, those of `llama4_text` at",
        "most `attention_chunk_size`: beyond, they attend to a part of the tokens. Layers that carry a state from token to token (`qwen3_5_text`,",
        "`qwen3_next`, `olmo_hybrid`, `lfm2`, `nemotron_h`, `falcon_h1`, `granitemoehybrid`) cannot be divided by `cp_size`. Layers that share keys",
        "(`gemma3n_text`, small Gemma 4) cannot be cut by `pp_size`. `tp_size` follows transformers' plan of a family and is refused without one.",
        "",
    ])  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    results = survey()
    PINNED.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    PAGE.write_text(page(results), "utf-8")


if __name__ == "__main__":
    main()
