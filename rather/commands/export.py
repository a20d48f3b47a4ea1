"""`rather export` and `rather merge`: write a model to a new folder and prove that it is the same.

The new files are opened again before the folder gets its name, and their log-probs of fixed tokens
are compared with those of the source.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rather.config.schema import ModelArgs
from rather.data.pack import pack
from rather.data.template import load_tokenizer
from rather.errors import ConfigError
from rather.model.check import TOLERANCE, two_pairs
from rather.model.export import merged_model, publish, whole_adapter, whole_model
from rather.model.files import model_folder
from rather.model.policy import PolicyModel
from rather.parallel.load import DTYPES, load_policy, takes_4_bits
from rather.run_folder.model_source import Weights, here, weights_of

log = logging.getLogger(__name__)
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(size: str) -> int:
    """Return the bytes of 5GB or 500MB: powers of ten, as in transformers."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)", size.strip(), re.IGNORECASE)
    if not found or float(found[1]) == 0:
        raise ConfigError(f"--shard-size {size}: write a number and KB, MB or GB, such as 5GB.")
    return int(float(found[1]) * UNITS[found[2].upper()])


def export(
    name: str,
    out: Path,
    *,
    adapter: bool = False,
    dtype: str | None = None,
    largest: int | None = None,
) -> str:
    """Write the folder `out`, complete or not at all; return how its log-probs compare.

    `adapter`: the adapter alone instead of merged; `dtype`: else that of the source; `largest`:
    bytes of a file.
    """
    _refuse_existing(out)
    if adapter and (dtype or largest):
        raise ConfigError(
            "--dtype and --shard-size do not apply to --adapter: it is one float32 file."
        )
    own = Path(name).expanduser() / "adapter"  # next to the model that it was merged into
    found = adapter and (own / "adapter_config.json").is_file()
    source = weights_of(str(own) if found else name)
    if not source.args.has_adapter:
        if adapter:
            raise ConfigError(f"--adapter: {name} has no adapter; export the model without it.")
        return _export_model(source, out, dtype, largest)
    if not adapter and source.checkpoint is None:
        return merge(str(source.args.adapter_name_or_path), out, dtype=dtype, largest=largest)
    policy, before = _load(source)
    weights = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    target = out if adapter else out.with_name(f"{out.name}-adapter")
    temporary = whole_adapter(
        policy.causal_lm, weights, (source.model, source.args), source.tokenizer(), target
    )
    del policy
    if adapter:
        changes = {"adapter_name_or_path": str(temporary), "revision": source.args.revision}
        args = source.args.of_other_weights().model_copy(update={**changes, "dtype": "fp32"})
        return _publish(source, source.model, temporary, out, before, torch.float32, args)
    try:
        return merge(str(temporary), out, dtype=dtype, largest=largest)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _export_model(source: Weights, out: Path, dtype: str | None, largest: int | None) -> str:
    policy, before = _load(source)
    config = policy.causal_lm.config
    config.dtype = DTYPES[dtype] if dtype else config.dtype
    temporary = whole_model(policy, {}, source.tokenizer(), out, largest)
    del policy
    args = ModelArgs(dtype="fp32")
    return _publish(source, str(temporary), temporary, out, before, config.dtype, args)


def _load(source: Weights) -> tuple[PolicyModel, Tensor]:
    policy = source.load(here(), "fp32")
    return policy, fixed_log_probs(policy)


def _publish(
    source: Weights,
    model: str,
    temporary: Path,
    out: Path,
    before: Tensor,
    dtype: torch.dtype,
    args: ModelArgs,
) -> str:
    """Open what was written, and publish it if it differs from the source by rounding only."""
    result = _compare(before, model, args, temporary, out, TOLERANCE[dtype],
                      f"does {source.name} contain numbers that {dtype} cannot represent?")  # fmt: skip
    folder = None if source.checkpoint else model_folder(source.model, source.args.revision)
    own = folder / "README.md" if folder else None  # the source's card may name a licence
    card = own.read_text(encoding="utf-8") if own and own.is_file() else f"# {out.name}\n"
    publish(temporary, out, f"{card}\nExported from `{source.name}` by Rather: {result}.\n")
    return result


def _compare(
    before: Tensor,
    model: str,
    args: ModelArgs,
    temporary: Path,
    out: Path,
    allowed: float | None,
    question: str,
) -> str:
    """Return how the log-probs differ; remove the temporary folder if by too much.

    `allowed` is None if the base was quantised in training: the difference is only reported.
    """
    try:
        after = fixed_log_probs(load_policy(model, args, here()))
        difference = float((after - before).abs().max())
        limit = "base quantised in training" if allowed is None else f"allowed: {allowed:g}"
        result = f"log-probs before and after differ by {difference:.2g} per token ({limit})"
        if allowed is not None and not difference <= allowed:
            raise ConfigError(f"{out}: not written: {result}; {question}")
        return result
    except BaseException:
        shutil.rmtree(temporary)
        raise


def merge(
    adapter: str,
    out: Path,
    base: str | None = None,
    *,
    dtype: str | None = None,
    largest: int | None = None,
) -> str:
    """Write adapter and base as one model to `out`; return how its log-probs compare."""
    from rather.model.adapters import (  # PEFT takes seconds to import
        adapter_folder,
        base_of,
        quantization_of,
    )

    _refuse_existing(out)
    folder = adapter_folder(adapter)
    name, revision = (base, None) if base else base_of(folder)
    found = model_folder(name, revision) if name else None
    if name is None or found is None or not found.exists():
        raise ConfigError(f"{folder}: its base model {name} is not here; pass it with --base.")
    quantised = quantization_of(folder)
    precision: dict[str, Any] = {"dtype": "fp32"}
    if quantised and not takes_4_bits():
        log.warning("%s: bitsandbytes is missing; comparing with the base in full precision instead "
                    "of %s", folder, quantised)  # fmt: skip
    elif quantised:
        precision = {"quantization": quantised}
    args = ModelArgs(adapter_name_or_path=str(folder), revision=revision, **precision)
    policy = load_policy(name, args, here())
    before = fixed_log_probs(policy)
    own = (folder / "tokenizer_config.json").exists()
    tokenizer = load_tokenizer(*((str(folder), None) if own else (name, revision)), False)
    config = policy.causal_lm.config
    config.dtype = written = DTYPES[dtype] if dtype else config.dtype
    temporary = merged_model(policy.causal_lm, found, folder, tokenizer, out, largest)
    del policy
    allowed = None if "quantization" in precision else TOLERANCE[written]
    result = _compare(before, str(temporary), ModelArgs(dtype="fp32"), temporary, out, allowed,
                      f"was the adapter trained on another base than {name}?")  # fmt: skip
    publish(
        temporary,
        out,
        f"# {out.name}\n\n`{name}` with the adapter `{folder}` merged by Rather: {result}.\n",
    )
    return result


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out}: already exists; choose a new folder.")


@torch.no_grad()
def fixed_log_probs(policy: PolicyModel) -> Tensor:
    """Return the log-probs of some fixed tokens."""
    (batch,) = pack(two_pairs(policy.vocabulary_size), budget=10**6)
    batch = batch.to(here())
    logps: Tensor = policy(batch)[0][batch.token_T]
    return logps.double().cpu()
