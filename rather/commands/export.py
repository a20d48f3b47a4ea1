"""`rather export` and `rather merge`: write a model to a new folder and prove that it is the same.

The new files are opened again before the folder gets its name, and their log-probs of fixed tokens
are compared with those of the source.
"""

from __future__ import annotations

import logging
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rather.config.found import NO_TRUST, Trust
from rather.config.schema import ModelArgs
from rather.data.pack import pack
from rather.data.template import load_tokenizer
from rather.errors import ConfigError
from rather.files import read_bytes, read_json, refuse_outside
from rather.model.check import two_pairs
from rather.model.export import (
    FileCast,
    publish,
    whole_adapter,
    whole_model,
    write_model,
)
from rather.model.files import ModelFiles, model_folder, refuse_other_base, weight_files
from rather.model.megatron import model_files
from rather.model.policy import PolicyModel
from rather.model.reward import is_reward_model, merging_files, set_padding
from rather.optim.rounding import Rounding
from rather.parallel.load import DTYPES, load_policy, takes_4_bits
from rather.registry import tool
from rather.run_folder.model_source import Weights, here, weights_of

log = logging.getLogger(__name__)
# The mean difference of log-probs per token that rounding explains; another base differs by more.
ALLOWED = {torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.5}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(size: str) -> int:
    """Return the bytes of 5GB or 500MB: powers of ten, as in transformers."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)", size.strip(), re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise ConfigError(f"--shard-size {size}: write a number and KB, MB or GB, such as 5GB.")
    return int(float(match[1]) * UNITS[match[2].upper()])


def export(
    name: str,
    out: Path,
    *,
    adapter: bool = False,
    dtype: str | None = None,
    size: str | None = None,
    rounding: Rounding | None = None,
    trust: Trust = NO_TRUST,
) -> str:
    """Write the folder `out`, complete or not at all; return how its log-probs compare.

    `adapter`: the adapter alone instead of merged; `dtype`: else that of the source; `size`: of
    the largest file; `rounding`: else that of the run; `trust`: what the source may do.
    """
    _refuse_existing(out)
    largest = parse_size(size) if size else None
    options: Any = {"dtype": dtype, "largest": largest, "rounding": rounding, "trust": trust}
    if adapter and (dtype or size or rounding):
        raise ConfigError(
            "--dtype, --rounding and --shard-size do not apply to --adapter: it is one float32 "
            "file."
        )
    source = _adapter_of(name, trust) if adapter else weights_of(name, trust)
    has_adapter, own_rounding = source.args.has_adapter, source.rounding
    if has_adapter and not adapter and not source.checkpoint:
        return merge(str(source.args.adapter_name_or_path), out, None, own_rounding, **options)
    policy = source.load(here(), "fp32")
    before = fixed_log_probs(policy)
    args = ModelArgs(dtype="fp32", trust_remote_code=trust.remote_code)
    tokenizer = source.tokenizer()
    if policy.is_reward:
        set_padding(policy.causal_lm.config, tokenizer)
    if has_adapter:
        target = out if adapter else out.with_name(f"{out.name}-adapter")
        temporary = _write_adapter(policy, source, tokenizer, target)
        del policy
        if not adapter:
            try:
                return merge(str(temporary), out, None, own_rounding, **options)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        changes = {"adapter_name_or_path": str(temporary), "revision": source.args.revision}
        args = source.args.of_other_weights().model_copy(update={**changes, "dtype": "fp32"})
        model, cast = source.model, FileCast(torch.float32, own_rounding)
    else:
        config = policy.causal_lm.config
        config.dtype = DTYPES[dtype] if dtype else config.dtype
        towers = model_files(source.model, source.args, config)
        began = towers if source.checkpoint else None
        cast = FileCast(config.dtype, _asked(rounding, config.dtype) or own_rounding, began)
        temporary = whole_model(policy, {}, tokenizer, out, cast, largest, towers)
        model = str(temporary)
        del policy
    home = None if source.checkpoint else model_folder(source.model, source.args.revision)
    card = (_card_in(home) if home else "") or f"# {out.name}\n"
    card += f"\nExported from `{source.name}` by Rather: "
    return _publish(before, (model, args), temporary, out, card, cast, ALLOWED[cast.dtype])


def _write_adapter(policy: PolicyModel, source: Weights, tokenizer: Any, target: Path) -> Path:
    """Write the adapter next to `target`; return the folder."""
    weights = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    base = source.model, source.args
    return whole_adapter(policy.causal_lm, weights, base, tokenizer, target, source.trained_on)


def _card_in(folder: Path) -> str:
    """Return the card of a model folder, which may name a licence."""
    file = folder / "README.md"
    if not file.is_file():
        return ""
    refuse_outside(folder, file)
    try:
        return read_bytes(file).decode("utf-8", "replace")
    except ValueError as error:  # too large
        raise ConfigError(f"{file}: {error}") from error


def export_as(file_format: str, name: str, out: Path, **options: Any) -> str:
    """Write `out` in a format of another tool; return how the log-probs of its weights compare."""
    if file_format == "gguf":
        if out.suffix != ".gguf":
            raise ConfigError(f"--format gguf writes a file: end {out} with .gguf.")
        if find_spec("gguf") is None:
            raise ConfigError("--format gguf needs the package gguf; install rather[gguf].")
    _refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".tmp-{out.stem}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        comparison = export(name, folder, **options)
        tool(file_format)(folder, out, out.stem)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return comparison


def _adapter_of(name: str, trust: Trust) -> Weights:
    """Return the weights of a run, checkpoint or folder that has an adapter."""
    beside = Path(name).expanduser() / "adapter"  # the model that it was merged into
    has_own_folder = (beside / "adapter_config.json").is_file()
    if has_own_folder:
        refuse_outside(beside.parent, beside)
    source = weights_of(str(beside) if has_own_folder else name, trust)
    if not source.args.has_adapter:
        raise ConfigError(f"--adapter: {name} has no adapter; export the model without it.")
    return source


def merge(
    adapter: str,
    out: Path,
    base: str | None = None,
    default: Rounding = Rounding("dithered"),
    *,
    dtype: str | None = None,
    largest: int | None = None,
    rounding: Rounding | None = None,
    trust: Trust = NO_TRUST,
) -> str:
    """Write adapter and base as one model to `out`; return how its log-probs compare."""
    # PEFT takes seconds to import
    from rather.model.adapters import adapter_folder, base_of
    from rather.model.adapters import merge as merged_weights

    _refuse_existing(out)
    folder = adapter_folder(adapter)
    name, revision, quantised, trained_on = base_of(folder)
    if base:
        name, revision = base, None
    base_folder = model_folder(name, revision) if name else None
    if name is None or base_folder is None or not base_folder.exists():
        raise ConfigError(f"{folder}: its base model {name} is not here; pass it with --base.")
    if not trust.any_base:
        refuse_other_base(adapter, name, revision, trained_on)
    if quantised and not takes_4_bits():
        text = (
            "%s: bitsandbytes is missing; comparing with the base in full precision instead of %s"
        )
        log.warning(text, folder, quantised)
        quantised = None
    args = ModelArgs(
        adapter_name_or_path=str(folder),
        revision=revision,
        quantization=quantised,
        dtype=None if quantised else "fp32",
        trust_remote_code=trust.remote_code,
    )
    reward = is_reward_model(read_json(folder / "adapter_config.json"))
    policy = load_policy(name, args, here(), reward=reward)
    before = fixed_log_probs(policy)
    has_tokenizer = (folder / "tokenizer_config.json").exists()
    tokenizer = load_tokenizer(
        *((str(folder), None) if has_tokenizer else (name, revision)), trust.remote_code
    )
    config = policy.causal_lm.config
    config.dtype = DTYPES[dtype] if dtype else config.dtype
    files = ModelFiles(weight_files(base_folder), config)
    cast = FileCast(config.dtype, _asked(rounding, config.dtype) or default, files)
    if reward:
        set_padding(config, tokenizer)
        files = merging_files(weight_files(base_folder), policy.causal_lm)
    streams = merged_weights(files, folder, cast)
    temporary = write_model(policy.causal_lm, streams, tokenizer, out, largest, files)
    del policy
    card = f"# {out.name}\n\n`{name}` with the adapter `{folder}` merged by Rather: "
    merged = str(temporary), ModelArgs(dtype="fp32", trust_remote_code=trust.remote_code)
    allowed = None if quantised else ALLOWED[cast.dtype]
    return _publish(before, merged, temporary, out, card, cast, allowed)


def _publish(
    before: Tensor,
    model: tuple[str, ModelArgs],
    temporary: Path,
    out: Path,
    card: str,
    cast: FileCast,
    allowed: float | None,
) -> str:
    """Open what was written, and publish it if its log-probs differ by rounding only.

    `allowed` is None if the base was quantised in training: the difference is only reported.
    """
    try:
        became_zero = cast.became_zero
        written = Weights(str(out), model[0], model[0], model[1]).load(here())
        difference = float((fixed_log_probs(written) - before).abs().mean())
        limit = "base quantised in training" if allowed is None else f"allowed: {allowed:g}"
        measure = "scores" if written.is_reward else "log-probs"
        comparison = (
            f"{measure} before and after differ by {difference:.2g} per token on average ({limit})"
        )
        if allowed is not None and not difference <= allowed:
            raise ConfigError(
                f"{out}: not written: {comparison}; was an adapter trained on another base, or "
                "does the source contain numbers that the dtype cannot represent?"
            )
    except BaseException:
        shutil.rmtree(temporary)
        raise
    comparison += f"; {became_zero}" if became_zero else ""
    comparison += f"; {cast.kept}" if cast.kept.weights else ""
    publish(temporary, out, f"{card}{comparison}.\n")
    return comparison


def _asked(rounding: Rounding | None, dtype: torch.dtype) -> Rounding | None:
    if rounding and dtype != torch.bfloat16:
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError(f"--rounding is for bf16 files, and this one is {kind}; leave it out.")
    return rounding


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out}: already exists; choose a new name.")


@torch.no_grad()
def fixed_log_probs(policy: PolicyModel) -> Tensor:
    """Return the log-probs of some fixed tokens."""
    (batch,) = pack(two_pairs(policy.vocabulary_size), budget=10**6)
    batch = batch.to(here())
    logps: Tensor = policy(batch)[0][batch.token_T]
    return logps.double().cpu()
