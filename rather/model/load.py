"""A Hugging Face folder or hub name -> a PolicyModel in eval mode, checked before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from rather.config.schema import ModelArgs
from rather.errors import ConfigError
from rather.model.attention import IMPLEMENTATION
from rather.model.check import check_family, check_model
from rather.model.policy import PolicyModel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def compute_dtype(args: ModelArgs, device: str) -> torch.dtype:
    """What the model runs in: as told, else bfloat16 on a GPU and float32 on a CPU."""
    return DTYPES[args.dtype or ("bf16" if device.startswith("cuda") else "fp32")]


def load_policy(name: str, args: ModelArgs, device: str, *, recompute: bool = False) -> PolicyModel:
    """Weights on the device, dropout off, every weight present and finite, attention proven on this family."""
    common: dict[str, Any] = {"revision": args.revision, "trust_remote_code": args.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(name, **common)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model '{name}': cannot be opened: {_first_line(error)}") from error
    check_family(config)
    source_dtype = config.dtype or torch.float32
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=compute_dtype(args, device),
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,  # other formats unpickle
            output_loading_info=True,
            **common,
        )
    except OSError as error:
        raise ConfigError(f"model '{name}': its weights cannot be opened: {_first_line(error)}") from error
    causal_lm, info = loaded
    _refuse_partial(name, info)
    causal_lm.config.dtype = source_dtype
    causal_lm.to(device).eval()  # eval mode everywhere: no dropout in policy or reference
    _refuse_nonfinite(name, causal_lm)
    if recompute:
        _recompute_layers(causal_lm)
    policy = PolicyModel(causal_lm)
    check_model(policy)
    return policy


def freeze(policy: PolicyModel) -> PolicyModel:
    return policy.requires_grad_(False)


def same_weights(a: str, b: str) -> bool:
    """Do two names mean the same folder or hub model?"""
    return a == b or (Path(a).exists() and Path(b).exists() and Path(a).resolve() == Path(b).resolve())


def _recompute_layers(causal_lm: Any) -> None:
    """Activation checkpointing per layer. transformers does it only in training mode, which is also what switches
    dropout on: so the layer modules alone are put in training mode, their children stay in eval."""
    causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in causal_lm.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


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


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
