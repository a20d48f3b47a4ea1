"""Check from its config alone whether a model can be divided by a layout."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import AutoConfig

from rather.config.schema import RoleConfig
from rather.config.strategies import layout

BY_HEADS = ("colwise", "rowwise")  # styles of transformers' plans that give each rank whole heads


def division_problems(name: str, role: RoleConfig) -> Iterator[str]:
    """Yield one sentence for each size that is not divisible; loading reports a bad config."""
    args, wanted = role.model_args, layout(role)
    try:
        config = AutoConfig.from_pretrained(
            role.model_path, revision=args.revision, trust_remote_code=args.trust_remote_code
        )
    except Exception:  # a config.json may be anything
        return
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if any(style in BY_HEADS and "att" in module for module, style in plan.items()):
        for key in ("num_attention_heads", "num_key_value_heads"):
            if (count := getattr(text, key, None)) and count % wanted.tp:
                key = f"{key}: {count} of {role.model_path}"
                yield f"{name}.strategy_args.tp_size: {wanted.tp} does not divide {key}"
    stages, layers = (
        wanted.pipeline.stages if wanted.pp > 1 else 1,
        getattr(text, "num_hidden_layers", None),
    )
    if layers and stages > layers:
        sizes = f"{wanted.pp} ranks x {wanted.virtual} = {stages} stages"
        less = f"{role.model_path} has only {layers} layers"
        yield f"{name}.strategy_args.pp_size: {sizes}, but {less}"
