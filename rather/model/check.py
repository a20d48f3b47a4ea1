"""Load-time self-check: packed log-probs must equal the model's own padded forward.

A family that does not use transformers' attention interface would train on wrong log-probs without
an error (falcon was off by 1e-2 per token). So each model is checked twice: a small twin in float32
with a window of 8 tests the family's code on 40-token pairs; the loaded weights test the kernels of
this device.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from rather.data.batch import PairBatch, TokenPair
from rather.data.pack import pack
from rather.errors import LIMITS, ConfigError
from rather.model.attention import IMPLEMENTATION
from rather.model.policy import PolicyModel
from rather.model.towers import leave_tower_out, set_attention, tower_class

# Each text is logged once: policy and reference may be the same model, and the API checks at each
# step.
_warn = cache(logging.getLogger(__name__).warning)

TOLERANCE = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 0.02,
    torch.bfloat16: 0.1,
}  # relative, per token


# Lengths from which a family attends otherwise: with a sparse index, or in chunks.
SWITCHES = ("index_topk", "attention_chunk_size")
LONGEST = 64  # tokens, more than the pairs of a check have
PER_LAYER = "hidden_size_per_layer_input"  # Gemma's further embeddings; 0: none
MOST_LAYERS = 12  # of a twin
# Keys of a config.json, or their ends, whose ids stand for images or sounds, or end a text.
SPECIAL = ("_token_id", "_token_ids", "_token_index", "_patch_id")
LOGIT_KEYS = ("logit_scale", "logits_scaling", "final_logit_softcapping")
OTHER_LISTS = ("moe_layers", "mlp_multipliers", "ssm_multipliers")  # not one entry a layer

_families: dict[str, bool] = {}  # results of this process: policy and reference are often alike


def check_family(config: PretrainedConfig) -> bool:
    """Refuse a family whose packed log-probs differ from padded ones; False without a twin."""
    key = f"{type(config)} {config.to_dict() | {'_name_or_path': None}}"
    if key not in _families:
        _families[key] = _check_family(config)
    return _families[key]


def _check_family(config: PretrainedConfig) -> bool:
    has_experts = experts_of(config) > 0
    key, chosen = _chosen(config)
    if has_experts and chosen is not None and not 0 < chosen <= experts_of(config):
        raise ConfigError(
            f"{key} of config.json is {chosen}, but a layer has "
            f"{experts_of(config)} experts; correct the file."
        )
    try:
        twin = twin_of(config)
        routed_outputs: list[tuple[Any, Any]] = []
        if has_experts:
            (_, router), *_ = routers_of(twin)
            router.register_forward_hook(
                lambda module, _inputs, output: routed_outputs.append((module, output))
            )
        _padded(twin, two_pairs(twin.config.get_text_config().vocab_size)[0])
        if has_experts:
            routed(*routed_outputs[0])
    except Exception as error:
        if has_experts:
            raise ConfigError(
                f"model family '{config.model_type}' cannot be trained: its experts cannot be "
                f"checked on a small model ({error}); use another model."
            ) from error
        return False  # a config that cannot be shrunk is only checked on its real weights
    check_model(PolicyModel(twin))
    return True


def experts_of(config: PretrainedConfig) -> int:
    """Return the number of experts of a layer among which a router chooses; 0 for a dense model."""
    text = config.get_text_config()
    if getattr(text, "enable_moe_block", True) is False:
        return 0
    lists = (getattr(text, name, None) or () for name in ("layers_block_type", "mlp_layer_types"))
    kinds = set(chain.from_iterable(lists))
    if kinds & {"mlp", "dense"} and not kinds & {"moe", "sparse"}:  # a dense Nemotron-H
        return 0
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    return max(int(getattr(text, key, None) or 0) for key in keys)


def chosen_of(config: PretrainedConfig) -> int:
    """Return how many experts of a layer a token uses."""
    return _chosen(config)[1] or 0


def _chosen(config: PretrainedConfig) -> tuple[str, int | None]:
    text = config.get_text_config()
    keys = [key for key in ("num_experts_per_tok", "top_k_experts") if hasattr(text, key)]
    key = keys[0] if keys else "num_experts_per_tok"
    return key, getattr(text, key, None)


def routed(router: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, scores and chosen experts from what a router returns.

    That of Llama 4 returns scores of all experts, which are 0 for those that are not chosen.
    """
    logits = outputs[-1] if len(outputs) == 2 else outputs[0]
    if not logits.is_floating_point():  # GraniteMoe and LongCat-Flash in transformers 5.17
        raise ValueError("its router returns no logits in this version of transformers")
    if len(outputs) == 2:
        return logits, outputs[0], logits.topk(router.top_k, dim=1).indices
    _, scores, chosen = outputs
    return logits, scores, chosen


def expert_blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) of each layer's router and experts, `gate` or `router` and `experts`."""
    for name, module in model.named_modules():
        router = getattr(module, "gate", None) or getattr(module, "router", None)
        has_experts = isinstance(getattr(module, "experts", None), nn.Module)
        if has_experts and isinstance(router, nn.Module):
            yield name, module


def routers_of(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield (number of its layer, router) for each layer with experts."""
    for name, block in expert_blocks(model):
        yield (
            int(re.findall(r"\.(\d+)(?=\.|$)", name)[-1]),
            getattr(block, "gate", None) or block.router,
        )


@torch.no_grad()
def check_model(policy: PolicyModel, longest: int | None = None) -> None:
    """Refuse loaded weights on which this device's kernels disagree with the padded forward.

    The pairs have at most `longest` tokens; None: as many as the family attends to at once.
    """
    model = policy.causal_lm
    refused = f"model family '{model.config.model_type}' cannot be trained"
    text = model.config.get_text_config()
    shortest = min((getattr(text, key, None) or LONGEST for key in SWITCHES), default=LONGEST)
    vocabulary = min(policy.vocabulary_size, text.vocab_size)  # Mllama embeds more than its words
    pairs = two_pairs(vocabulary, longest or shortest, special_ids(model.config))
    try:
        set_attention(model, "eager")
        padded = torch.cat([_padded(model, pair) for pair in pairs])
        set_attention(model, IMPLEMENTATION)
        (batch,) = pack(pairs, budget=10**6, at_end=policy.is_reward)
        batch = batch.to(str(model.device))

        def error_per_token() -> float:
            packed = policy(batch)[0][batch.token_T].double()
            return float(((packed - padded).abs() / (1 + padded.abs())).max())

        worst = error_per_token()
    except Exception as error:
        raise ConfigError(f"{refused}: it does not accept packed pairs ({error})") from error
    if not worst <= TOLERANCE[model.dtype]:
        policy.scale, policy.softcap = 1.0, None
        if error_per_token() <= TOLERANCE[model.dtype]:
            keys = [key for key in LOGIT_KEYS if getattr(text, key, None)]
            raise ConfigError(
                f"{refused}: its class in transformers leaves out {' and '.join(keys)} of "
                "config.json; set it to 1, or a soft-cap to null, to train what the class computes."
            )
        raise ConfigError(
            f"{refused}: its packed log-probs differ from its own padded forward by {worst:.2g} "
            "per token. It does not use transformers' attention interface; choose another family."
        )


def check_length(config: PretrainedConfig, tokens: int) -> None:
    """Refuse sequences longer than the positions of a family; warn if positions are rotary.

    With longrope and dynamic scaling, rotary frequencies depend on the longest sequence of a
    micro-batch, so packing would change log-probs.
    """
    text = config.get_text_config()
    limit = positions = getattr(text, "max_position_embeddings", None)
    if rope := getattr(text, "rope_parameters", None):
        limits = {"longrope": rope.get("original_max_position_embeddings"), "dynamic": limit}
        limit = limits.get(rope.get("rope_type"))
    if limit and tokens > limit:
        raise ConfigError(
            f"sequence_length: {tokens} exceeds the {limit} positions on which '{text.model_type}' "
            f"can be trained; set it to at most {limit}"
        )
    for key in SWITCHES:
        switch = getattr(text, key, None)
        if switch and tokens > switch and not agrees_beyond(text, key):
            raise ConfigError(
                f"sequence_length: {tokens} exceeds {key}: {switch} of '{text.model_type}', from "
                "which on it attends to a part of the tokens only, which packed pairs cannot; set "
                f"it to at most {switch}"
            )
    if positions and tokens > positions:
        _warn(
            f"sequence_length: {tokens} exceeds max_position_embeddings of '{text.model_type}', "
            f"{positions}; longer sequences have positions for which it was not made"
        )


def agrees_beyond(config: PretrainedConfig, key: str) -> bool:
    """Return whether a family's packed log-probs are right beyond a length that switches code."""
    family = f"{type(config)} {key}"
    if family not in _families:
        try:
            twin = twin_of(config, **{key: 8})
            check_model(PolicyModel(twin), longest=LONGEST)
            _families[family] = True
        except ConfigError:
            _families[family] = False
    return _families[family]


def refuse_tower(config: PretrainedConfig) -> None:
    """Refuse a model in memory with a tower: it could not be left out of the caller's object."""
    if tower_class(config):
        raise ConfigError(
            f"model: '{config.model_type}' has a vision or audio tower; train it from its folder "
            f"with `rather train`, which leaves the tower as it is; {LIMITS}"
        )


def special_ids(config: PretrainedConfig) -> set[int]:
    """Return the tokens of a config that are not words, such as the placeholder of an image."""
    ids: set[Any] = set()
    sections = [config.to_dict()]
    for section in sections:
        for key, value in section.items():
            if isinstance(value, dict):
                sections.append(value)
            elif str(key).endswith(SPECIAL):
                ids.update(value if isinstance(value, list) else [value])
    return ids - {None}


def two_pairs(vocab: int, longest: int = LONGEST, special: Collection[int] = ()) -> list[TokenPair]:
    """Return two pairs of 40 tokens and fewer; of shorter sequences where `longest` is less."""
    share = min(1.0, longest / 42)

    def fewer(tokens: int) -> int:
        return max(1, int(tokens * share))

    lengths = ((12, 28, 21), (20, 9, 20))
    return random_pairs(vocab, [(fewer(p), fewer(c), fewer(r)) for p, c, r in lengths], special)


def random_pairs(
    vocab: int, lengths: Iterable[tuple[int, int, int]], special: Collection[int] = ()
) -> list[TokenPair]:
    """Return pairs with these numbers of tokens in prompt, chosen and rejected answer.

    They are the same at each call, without the `special` tokens.
    """
    random = np.random.default_rng(0)
    words = np.setdiff1d(np.arange(vocab), list(special))
    pairs = []
    for p, c, r in lengths:
        prompt, chosen, rejected = (
            words[random.integers(0, len(words), n)].astype(np.int32) for n in (p, c, r)
        )
        pairs.append(TokenPair(prompt, chosen, rejected, ((p, p + c),), ((p, p + r),)))
    return pairs


def _padded(model: Any, pair: TokenPair) -> Tensor:
    """Return the token log-probs of both answers by the model's own forward."""
    logps = []
    for response in (pair.chosen, pair.rejected):
        tokens = np.concatenate([pair.prompt, response]).astype(np.int64)
        ids = torch.from_numpy(tokens).to(model.device)[None]
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        if hasattr(model, "score"):
            logps.append(output.logits[0].double())
            continue
        log_softmax = torch.log_softmax(output.logits[0, :-1].float(), dim=-1)
        scored = log_softmax.gather(1, ids[0, 1:, None])
        logps.append(scored[len(pair.prompt) - 1 :, 0].double())
    return torch.cat(logps)


def twin_of(config: PretrainedConfig, kv_heads: int = 2, **changes: int) -> Any:
    """Return a small random model of the family in float32; `changes` are made to its config."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # the CPU's only: fork_rng restores no GPU's
        small = _shrunken(config.get_text_config(), kv_heads)
        for key, number in changes.items():
            setattr(small, key, number)
        options: dict[str, Any] = {
            "dtype": torch.float32,
            "attn_implementation": "eager",  # the config's own choice may be a kernel from a hub
            # Without an answer transformers asks on the console. A config of remote code is
            # trusted.
            "trust_remote_code": type(config).__module__.startswith("transformers_modules."),
        }
        causal: Any = AutoModelForCausalLM
        if (full_class := tower_class(config)) and type(small) not in causal._model_mapping:
            twin = _text_of(full_class, config, small)
        else:
            twin = causal.from_config(small, **options)
        twin = twin.eval()
        for parameter in twin.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)  # wide enough that attention matters
    return twin


def _text_of(whole: Any, config: PretrainedConfig, text: PretrainedConfig) -> Any:
    """Return the language model of a checkpoint whose language model has no class of its own."""
    full_config = copy.deepcopy(config)
    full_config.text_config = text
    for key in ("depth", "num_hidden_layers"):
        if getattr(full_config.vision_config, key, None):
            setattr(full_config.vision_config, key, 1)
    return leave_tower_out(whole._from_config(full_config, attn_implementation="eager"))


def packed_twin(config: PretrainedConfig, kv_heads: int = 2) -> tuple[PolicyModel, PairBatch]:
    """Return a small random policy of the family, and two packed pairs for it."""
    twin = PolicyModel(twin_of(config, kv_heads))
    set_attention(twin.causal_lm, IMPLEMENTATION)
    (batch,) = pack(two_pairs(twin.vocabulary_size), budget=10**6)
    return twin, batch


def _shrunken(config: PretrainedConfig, few: int) -> PretrainedConfig:
    """Return a small config of the family: a layer of each kind, few heads, a window of 8."""
    small = copy.deepcopy(config)
    layers = _kept_layers(config)
    differing = small.to_dict().get("per_layer_config") or {}
    if differing:
        small.per_layer_config = None  # until the fewer layers have their own
    old_head_dim = getattr(small, "head_dim", None)
    if not old_head_dim:
        old_head_dim = small.hidden_size // small.num_attention_heads
    for key, size in _small_sizes(config, small, layers, few).items():
        if before := getattr(small, key, None):
            is_list = isinstance(before, list) and not isinstance(size, list)
            count = len(layers) if is_list and len(before) == config.num_hidden_layers else 0
            with suppress(AttributeError):  # falcon computes its head_dim from the others
                setattr(small, key, [size] * (count or len(before)) if is_list else size)
    _shrink_rope(small, old_head_dim)
    if differing:
        by_layer = {int(layer): values for layer, values in differing.items()}
        small.per_layer_config = {
            number: _shrunken_layer(by_layer[layer], old_head_dim, few)
            for number, layer in enumerate(layers)
            if layer in by_layer
        }
    return small


def _small_sizes(
    config: PretrainedConfig, small: PretrainedConfig, layers: Sequence[int], few: int
) -> dict[str, Any]:
    """Return the sizes of a twin. `small` is a copy of the config without settings per layer."""
    heads, kv_heads = small.num_attention_heads, getattr(small, "num_key_value_heads", None)
    return {
        "num_hidden_layers": len(layers),
        **{
            key: [values[layer] for layer in layers]
            for key, values in _per_layer_lists(config).items()
        },
        "hidden_size": 32 * few,
        "num_attention_heads": 2 * few,
        "num_key_value_heads": 2 * few if kv_heads == heads else few,
        "head_dim": 16,
        "intermediate_size": 96,
        "intermediate_size_mlp": 96,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 128,
        "num_kv_shared_layers": sum(_shares_keys(config, layer) for layer in layers),
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "qk_head_dim": 32 if getattr(small, "qk_rope_head_dim", None) else 16,
        "v_head_dim": 16,
        "index_head_dim": 32,
        "index_n_heads": 2,
        "vocab_size": 128,
        "sliding_window": 8,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **_expert_sizes(config, layers),
        **_scan_sizes(few),
        # Positions at which a family changes what it computes: the pairs reach beyond these, and
        # not beyond those.
        "floor_scale": 8,
        **{key: max(LONGEST, getattr(config, key, None) or 0) for key in SWITCHES},
    }


def _expert_sizes(config: PretrainedConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Return the sizes of a dense layer, if there are any, and of one with experts.

    Of several groups two are left.
    """
    return {
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_local_experts": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": min(2, getattr(config, "num_experts_per_tok", None) or 2),
        "top_k_experts": 2,
        "n_group": min(2, getattr(config, "n_group", None) or 1),
        "topk_group": 1,
        "first_k_dense_replace": min(1, getattr(config, "first_k_dense_replace", None) or 0),
        "num_dense_layers": sum(_is_dense(config, layer) for layer in layers),
        "moe_layers": [n for n, layer in enumerate(layers) if _has_experts(config, layer)],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0] if getattr(config, "mlp_only_layers", None) else [],
    }


def _scan_sizes(few: int) -> dict[str, int]:
    """Return sizes of linear attention (Qwen3.5, OLMo hybrid) and Mamba-2 (Nemotron-H, Granite)."""
    return {
        "linear_num_key_heads": few,
        "linear_num_value_heads": 2 * few,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "mamba_num_heads": 4 * few,
        "mamba_n_heads": 4 * few,
        "mamba_head_dim": 16,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64 * few,
        "mamba_d_state": 16,
        "ssm_state_size": 16,
        "mamba_expand": 2,
        "n_groups": few,
        "mamba_n_groups": few,
    }


def shorten(config: PretrainedConfig, layers: Sequence[int]) -> None:
    """Reduce a config to some of its layers."""
    lists = {key: [all_[n] for n in layers] for key, all_ in _per_layer_lists(config).items()}
    differing = config.to_dict().get("per_layer_config") or {}
    by_layer = {int(layer): values for layer, values in differing.items()}
    shared = sum(_shares_keys(config, layer) for layer in layers)
    if by_layer:
        config.per_layer_config = None
    for key, values in {**lists, "num_hidden_layers": len(layers)}.items():
        with suppress(AttributeError):  # nemotron_h counts its list
            setattr(config, key, values)
    if shared_keys(config):
        config.num_kv_shared_layers = shared
    if by_layer:
        differing_layers: dict[int | str, dict[str, Any]] = {
            n: by_layer[layer] for n, layer in enumerate(layers) if layer in by_layer
        }
        config.per_layer_config = differing_layers or None


def _shrunken_layer(values: dict[str, Any], head_dim: int, few: int) -> dict[str, Any]:
    """Return what is different in a layer: wider heads, or another number of them."""
    small = {"head_dim": 16 * max(1, values.get("head_dim", head_dim) // head_dim)}
    if "num_key_value_heads" in values:
        small["num_key_value_heads"] = few
    return small


def _shrink_rope(small: PretrainedConfig, old_head_dim: int) -> None:
    rope = getattr(small, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor", 1.0)
    if "mrope_section" in rope:  # of 8 frequencies: time, height, width
        rope["mrope_section"] = [int(share * count) for count in (2, 2, 4)]
    if share != 1 and hasattr(small, "qk_rope_head_dim"):
        rope["partial_rotary_factor"] = 1.0  # of the twin's head_dim, which is qk_rope_head_dim
    for name in rope.keys() & {"short_factor", "long_factor"}:  # one number per frequency
        rope[name] = rope[name][: len(rope[name]) * 16 // old_head_dim]


def _per_layer_lists(config: PretrainedConfig) -> dict[str, list[Any]]:
    """Return the settings that have an entry for each layer."""
    return {
        key: entries
        for key, entries in vars(config).items()
        if isinstance(entries, list)
        and len(entries) == config.num_hidden_layers
        and key not in OTHER_LISTS
    }


def _kept_layers(config: PretrainedConfig) -> list[int]:
    """Return the first layer of each kind, at least two layers."""
    first: dict[Any, int] = {}
    lists = _per_layer_lists(config).values()
    for layer in range(config.num_hidden_layers):
        kind = (
            *(str(values[layer]) for values in lists),
            _shares_keys(config, layer),
            _is_dense(config, layer),
            _has_experts(config, layer),
        )
        first.setdefault(kind, layer)
    if len(first) > MOST_LAYERS:
        raise ValueError(f"its {len(first)} layers differ from one another")
    layers = sorted(first.values())
    unused = [layer for layer in range(config.num_hidden_layers) if layer not in layers]
    return sorted(layers + unused[: max(0, 2 - len(layers))])


def shared_keys(config: PretrainedConfig) -> int:
    """Return how many layers, the last ones, attend with the keys of earlier layers."""
    return int(getattr(config.get_text_config(), "num_kv_shared_layers", None) or 0)


def _shares_keys(config: PretrainedConfig, layer: int) -> bool:
    return layer >= int(config.num_hidden_layers) - shared_keys(config)


def _is_dense(config: PretrainedConfig, layer: int) -> bool:
    return layer < int(getattr(config, "num_dense_layers", None) or 0)


def _has_experts(config: PretrainedConfig, layer: int) -> bool:
    return layer in (getattr(config, "moe_layers", None) or ())


def over_layers(config: PretrainedConfig, key: str) -> list[int]:
    """Return the values of a number that may differ between layers, such as the width of heads."""
    if getattr(config, "is_heterogeneous", False):
        values = [getattr(layer, key, None) for layer in config.per_layer_config]
    else:
        values = [getattr(config, key, None)]
    return sorted({int(number) for number in values if number})
