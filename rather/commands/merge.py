"""`rather merge`: an adapter into the weights it was trained on, and proof that the model stayed the same."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rather.config.schema import ModelArgs
from rather.data.pack import pack
from rather.data.template import load_tokenizer
from rather.errors import ConfigError
from rather.model.check import TOLERANCE, two_pairs
from rather.model.digest import model_folder
from rather.model.export import merged_model, publish
from rather.model.policy import PolicyModel
from rather.parallel.load import load_policy, takes_4_bits

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Merged:
    """What was merged, and how far its log-probs are from those of base and adapter, per token."""

    base: str
    difference: float
    allowed: (
        float | None
    )  # None where the base was quantised in training: the difference is only told

    def __str__(self) -> str:
        rule = (
            "its base was quantised in training"
            if self.allowed is None
            else f"at most {self.allowed:g} is allowed"
        )
        return f"log-probs before and after differ by {self.difference:.2g} per token ({rule})"


def merge(
    adapter: str,
    out: Path,
    base: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    largest: int | None = None,
) -> Merged:
    """Writes the merged model to `out` after comparing log-probs of fixed tokens before and after.

    In the dtype of the base unless told, and in files of at most so many bytes.
    """
    from rather.model.adapters import (  # PEFT takes seconds to import
        adapter_folder,
        base_of,
        quantization_of,
    )

    if out.exists():
        raise ConfigError(f"--out {out}: is there already; name a folder that is not")
    folder = adapter_folder(adapter)
    name, revision = (base, None) if base else base_of(folder)
    found = model_folder(name, revision) if name else None
    if name is None or found is None or not found.exists():
        raise ConfigError(f"{folder}: its base is {name}, which is not here; name it with --base")
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    quantised = quantization_of(folder)
    held: dict[str, Any] = {"dtype": "fp32"}
    if quantised and not takes_4_bits():
        log.warning(
            "%s: no bitsandbytes here for its base in %s; compared with the base as it is",
            folder,
            quantised,
        )
    elif quantised:
        held = {"quantization": quantised}
    policy = load_policy(
        name, ModelArgs(adapter_name_or_path=str(folder), revision=revision, **held), device
    )
    before = log_probs(policy, device)
    own = (folder / "tokenizer_config.json").exists()
    tokenizer = (
        load_tokenizer(str(folder), None, False) if own else load_tokenizer(name, revision, False)
    )
    policy.causal_lm.config.dtype = dtype = dtype or policy.causal_lm.config.dtype
    temporary = merged_model(policy.causal_lm, found, folder, tokenizer, out, largest)
    del policy
    after = log_probs(load_policy(str(temporary), ModelArgs(dtype="fp32"), device), device)
    result = Merged(
        name,
        float((after - before).abs().max()),
        None if "quantization" in held else TOLERANCE[dtype],
    )
    _refuse_difference(result, temporary, out, dtype)
    publish(
        temporary,
        out,
        f"# {out.name}\n\n`{name}` with the adapter `{folder}` merged in by Rather: {result}.\n",
    )
    return result


def _refuse_difference(result: Merged, temporary: Path, out: Path, dtype: torch.dtype) -> None:
    if result.allowed is None or result.difference <= result.allowed:
        return
    shutil.rmtree(temporary)
    raise ConfigError(
        f"{out}: not written: {result}, and more than rounding to {dtype} explains. Is {result.base} the base that the "
        "adapter was trained on?"
    )


@torch.no_grad()
def log_probs(policy: PolicyModel, device: str) -> Tensor:
    """Of some fixed tokens."""
    (batch,) = pack(two_pairs(policy.vocabulary_size), budget=10**6)
    batch = batch.to(device)
    logps: Tensor = policy(batch)[0][batch.token_T]
    return logps.double().cpu()
