"""A Hugging Face folder or hub name -> a PolicyModel in eval mode, checked before anything is trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rather.config.schema import ModelArgs, RoleConfig
from rather.errors import ConfigError
from rather.model.attention import IMPLEMENTATION
from rather.model.check import check_family, check_model
from rather.model.policy import PolicyModel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def device_of(role: RoleConfig) -> str:
    """The device of a role on one device: the first of its device_mapping; the CPU where there is no GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    number = (role.device_mapping or [0])[0]
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"device_mapping: GPU {number} is not here; the {torch.cuda.device_count()} found are counted from 0."
        )
    return f"cuda:{number}"


def compute_dtype(args: ModelArgs, device: str) -> torch.dtype:
    """What the model runs in: as told, else bfloat16 on a GPU and float32 on a CPU."""
    return DTYPES[args.dtype or ("bf16" if device.startswith("cuda") else "fp32")]


def load_policy(name: str, args: ModelArgs, device: str, *, exact: bool = False) -> PolicyModel:
    """Weights on the device, dropout off, every weight present and finite, attention proven on this family.

    With `exact`, weights that half precision would round are kept beside it, for an optimizer to start from.
    """
    if not sys.stderr.isatty():
        disable_progress_bar()
    common: dict[str, Any] = {"revision": args.revision, "trust_remote_code": args.trust_remote_code}
    with _opening(f"model '{name}': its config"):
        config = AutoConfig.from_pretrained(name, **common)
    check_family(config)
    source_dtype, compute = config.dtype or torch.float32, compute_dtype(args, device)
    rounded = exact and compute in (torch.bfloat16, torch.float16) and source_dtype != compute
    with _opening(f"model '{name}': its weights"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=torch.float32 if rounded else compute,
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,  # other formats unpickle
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told in the info, and refused below by name
            **common,
        )
    causal_lm, info = loaded
    _refuse_partial(name, info)
    causal_lm.config.dtype = source_dtype
    _refuse_nonfinite(name, causal_lm.to(device))
    policy = PolicyModel(causal_lm).eval()  # eval mode everywhere: no dropout in policy or reference
    if rounded:
        policy.exact = {key: parameter.detach() for key, parameter in policy.named_parameters()}
        for parameter in policy.parameters():  # not `.to`, which would round the rotary buffers as well
            parameter.data = parameter.data.to(compute)
    check_model(policy)
    return policy


def freeze(policy: PolicyModel) -> PolicyModel:
    return policy.requires_grad_(False)


def same_weights(a: str, b: str) -> bool:
    """Do two names mean the same folder or hub model?"""
    return a == b or (Path(a).exists() and Path(b).exists() and Path(a).resolve() == Path(b).resolve())


@contextmanager
def _opening(what: str) -> Iterator[None]:
    """Whatever the libraries raise about a folder that they cannot use becomes one sentence."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{what} cannot be opened: {' '.join(line.strip() for line in lines[:2])}") from error


def _refuse_partial(name: str, info: dict[str, Any]) -> None:
    problems = [
        f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, info[kind]))[:5])}"
        for kind in ("missing_keys", "mismatched_keys")
        if info.get(kind)
    ]
    if problems:
        raise ConfigError(f"model '{name}': the weights do not fill the model ({'; '.join(problems)})")


def _refuse_nonfinite(name: str, causal_lm: Any) -> None:
    bad = [key for key, weight in causal_lm.named_parameters() if not torch.isfinite(weight).all()]
    if bad:
        raise ConfigError(f"model '{name}': weights that are not finite numbers: {', '.join(bad[:5])}")
