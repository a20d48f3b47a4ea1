"""Train one step of every type of the installed transformers, export it, and open the export.

python -m tests.model.survey                # half an hour; writes families.json, docs/families.md
python -m tests.model.survey gemma3 llama   # only shows what comes out

A type is each model_type that answers with text: causal language models, and those with a tower for
images or sounds. Its default config is made small, and a random model is saved as transformers
saves it: in the names of released checkpoints, and, if they differ, in those of its own modules.
`rather train` takes one step. The class of the checkpoint then opens the export, whose names must
be those of the source, and its log-probs those of the trained policy.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from rather.cluster import worker
from rather.errors import ConfigError
from rather.model.policy import PolicyModel
from rather.pipeline.pipeline import DPOPipeline
from tests.model.small import PAIRS, small_model, tower_types, types
from tests.padded import packed_logps, padded_logps
from tests.tiny import PRELOADED, _model_and_pairs, make_config

PINNED = Path(__file__).with_name("families.json")
PINNED_VERSION = "5.22.2"  # of constraints.txt
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
TRAINS, FAILED, UNTRIED, REFUSED = "trains, exports, opens, equal", "FAILED", "not tried", "refused"
FORMS: dict[str, dict[str, Any]] = {"released": {}, "modules": {"save_original_format": False}}
REASONS = {
    "this kind of AutoModel": "transformers has no causal class for it",
    "cannot be opened: 'rather'": "its tower takes no other attention than its own",
    "leaves out": "its class leaves out a factor of its logits",
    "differ from its own padded forward": "its packed log-probs differ from its padded forward",
    "does not accept packed pairs": "it does not take packed pairs",
    "experts cannot be checked": "its experts cannot be checked on a small copy",
    "do not fill the model": "its weights do not fill the class that trains",
    "cannot open what it saved": "transformers cannot open what it saves",
    "does not appear to have a file": "its class needs further files",
    "No module named": "it needs a further package",
    "requires the": "it needs a further package",
    "no small model": "its default config makes no small model",
}


@contextmanager
def recorded_export() -> Iterator[list[torch.Tensor]]:
    """Record the log-probs of the trained policy at its export."""
    logps: list[torch.Tensor] = []
    export_run = worker.export_run

    def record(policy: PolicyModel, *args: Any) -> Any:
        with torch.no_grad():
            logps.append(packed_logps(policy, PAIRS))
        return export_run(policy, *args)

    worker.export_run = record
    try:
        yield logps
    finally:
        worker.export_run = export_run


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    tensors = load_file(folder / "model.safetensors")
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def logps_of(model_class: Any, folder: Path) -> torch.Tensor:
    """Return the log-probs of a folder that plain transformers opens without a complaint."""
    model, info = model_class.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], f"{kind}: {sorted(map(str, info[kind]))[:3]}"
    return padded_logps(model.eval(), PAIRS)


@torch.no_grad()
def result_of_form(model: Any, form: str, prepared: Path, folder: Path) -> str:
    """Train, export and open a model that is saved in this form."""
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    config = make_config(
        folder,
        max_steps=1,
        validation=None,
        pref_loss="simpo",  # needs no reference model
        actor_train__training_args={"learning_rate": 1e-3, "per_device_train_batch_size": 4},
        actor_train__model_args__tokenizer_name_or_path=str(folder / "words"),
    )
    base, exported = folder / "base", config.run_dir / "model"
    base.rename(folder / "words")
    shutil.copytree(folder / "words", base, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(base, **FORMS[form])
    try:
        before = padded_logps(model, PAIRS)
    except (TypeError, ValueError):  # a class that runs on images only
        before = torch.zeros(len(PAIRS), 2)
    else:
        try:
            assert torch.allclose(logps_of(type(model), base), before, rtol=1e-4)
        except Exception as error:
            return f"{UNTRIED}: transformers cannot open what it saved: {_short(error)}"
    with recorded_export() as logps:
        try:
            with torch.enable_grad():
                assert DPOPipeline(config).run() == 0
        except ConfigError as error:
            return f"{FAILED if logps else REFUSED}: {_short(error)}"
    source, export = shapes_of(base), shapes_of(exported)
    names = f"{len(source)} -> {len(export)} names: {sorted(source.items() ^ export.items())[:3]}"
    try:
        after = logps_of(type(model), exported)
    except Exception as error:
        return f"{FAILED}: does not open: {_short(error)}; {names}"
    if not torch.allclose(after, logps[0], rtol=1e-4):
        return f"{FAILED}: log-probs differ by {(after - logps[0]).abs().max():.2g}; {names}"
    if torch.allclose(after, before, rtol=1e-4):
        return f"{FAILED}: nothing was learned"
    return TRAINS if source == export else f"{FAILED}: {names}"


def _short(error: BaseException) -> str:
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:400]


def results_of(name: str, prepared: Path) -> dict[str, str]:
    """Return the result of a type by form; `prepared` has pairs and their tokens."""
    try:
        model = small_model(name)
    except Exception as error:
        return {"released": f"{UNTRIED}: no small model: {_short(error)}"}
    results: dict[str, str] = {}
    shapes: list[Any] = []
    for form, options in FORMS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                model.save_pretrained(Path(folder) / "saved", **options)
                shapes.append(shapes_of(Path(folder) / "saved"))
                if shapes[-1] not in shapes[:-1]:
                    results[form] = result_of_form(model, form, prepared, Path(folder))
            except Exception as error:
                results[form] = f"{FAILED}: {_short(error)}"
    return results


def result_of(results: dict[str, str]) -> str:
    """Return what the page says of a type: the worst of its forms."""
    kinds = (FAILED, UNTRIED, REFUSED, TRAINS)
    kind, result = next((k, r) for k in kinds for r in results.values() if r.startswith(k))
    if kind in (FAILED, TRAINS):
        return kind
    return f"{kind}: {next((why for part, why in REASONS.items() if part in result), result)}"


def _in_child(name: str, prepared: Path, file: Path) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    file.write_text(json.dumps(results_of(name, prepared)), "utf-8")


def survey(names: list[str], folder: Path, limit: float, workers: int) -> dict[str, str]:
    """Write a file with the results of each type; those in the folder are not asked again."""
    folder.mkdir(parents=True, exist_ok=True)
    prepared = _model_and_pairs()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "tests.model.survey"])

    def ask(name: str) -> dict[str, str]:
        file, started = folder / f"{name}.json", time.monotonic()
        if not file.exists():
            child = context.Process(target=_in_child, args=(name, prepared, file))
            child.start()
            child.join(limit)
            child.kill()
            child.join()
        if not file.exists():
            why = f"{FAILED}: exit code {child.exitcode} within {limit} s"
            file.write_text(json.dumps({"released": why}), "utf-8")
        results: dict[str, str] = json.loads(file.read_text("utf-8"))
        print(f"{time.monotonic() - started:6.1f} s  {name}: {results}", flush=True)
        return results

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(names, map(result_of, pool.map(ask, names)), strict=True))


def page(results: dict[str, dict[str, str]]) -> str:
    """The docs page: how many types have each result by version of transformers, and which."""
    towers, pinned = tower_types(), results[PINNED_VERSION]
    total = Counter(result for of in results.values() for result in of.values())
    counts, names = [], []
    for kind in sorted(total, key=lambda kind: (-total[kind], kind)):
        numbers = [str([*of.values()].count(kind)) for of in results.values()]
        counts.append(f"| {kind} | {' | '.join(numbers)} |")
        of_kind = [name for name, result in pinned.items() if result == kind]
        for group, is_tower in (("language models", False), ("with a tower", True)):
            listed = [f"`{name}`" for name in of_kind if (name in towers) == is_tower]
            names += [f"| {kind} | {group} | {', '.join(listed)} |"] if listed else []
    return "\n".join([
        "# Model families",
        "",
        "Every model is checked when it loads: packed log-probs must equal its own padded forward pass, on a small copy of its family and on",
        "its own weights. Beyond that, a small random checkpoint of every type of transformers that answers with text has been trained for one",
        "step by `rather train`, exported, and opened by plain transformers, whose log-probs are then those of the trained policy",
        "(`python -m tests.model.survey`). Checkpoints have the names of released ones, by transformers' conversion mapping, and, if they differ,",
        "also those of its modules. Whatever is refused is refused before training. Checkpoints with a vision or audio tower train their",
        "language model on text pairs ([limits](limits.md)).",
        "",
        f"| result: types by version of transformers | {' | '.join(results)} |",
        f"|---|{'---|' * len(results)}",
        *counts,
        "",
        f"With transformers {PINNED_VERSION}, by `model_type` in config.json:",
        "",
        "| result | | types |",
        "|---|---|---|",
        *names,
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument(
        "--folder", type=Path, help="keeps results; a second call goes on with the rest"
    )
    parser.add_argument("--limit", type=float, default=200, help="seconds of a type")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    results = survey(options.names or types(), folder, options.limit, options.workers)
    if not options.names:
        pinned = json.loads(PINNED.read_text("utf-8")) | {transformers.__version__: results}
        pinned = dict(sorted(pinned.items()))
        PINNED.write_text(json.dumps(pinned, indent=1) + "\n", "utf-8")
        PAGE.write_text(page(pinned), "utf-8")


if __name__ == "__main__":
    main()
