"""Adapters of the LoRA family, through PEFT: small trained matrices next to frozen weights.

PEFT replaces the linear layers of the Hugging Face model; whatever else runs the model sees no
difference. With adapters off, it is the base model. If an adapter does not start with zero effect,
a frozen copy of its start is kept as the reference.

The start of an adapter depends on the seed, the layer name and the base weights alone: however a
model is sharded, each rank takes its part of the same numbers.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, LoraModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rather.checkpoint.sharded_tensors import (
    ShardedFiles,
    ShardSpec,
    TensorStream,
    safetensors_file,
)
from rather.config.adapters import PISSA
from rather.config.schema import ActorModelArgs, ModelArgs
from rather.errors import CheckpointError, ConfigError
from rather.model.files import model_folder, refuse_outside
from rather.model.policy import START

TRAINED = "default"  # PEFT's name of the trained adapter; its frozen start is the adapter START
CONFIG, WEIGHTS, NOTES = "adapter_config.json", "adapter_model.safetensors", "rather.json"
ALL_LINEAR = "all-linear"
KNOWN = (  # keys that an adapter's config may set; all others must have PEFT's default
    "r", "lora_alpha", "target_modules", "modules_to_save", "use_rslora", "use_dora",
    "lora_dropout", "task_type", "peft_type", "base_model_name_or_path", "revision",
    "inference_mode", "init_lora_weights", "auto_mapping", "peft_version",
    "megatron_core", "runtime_config", "qalora_group_size",
)  # fmt: skip
_MATRIX = re.compile(r"(.+)\.(lora_A|lora_B|lora_magnitude_vector)\.(?:default|reference)\.weight")
_WHOLE = re.compile(r"(.+)\.modules_to_save\.(?:default|reference)\.(.+)")
_PEFT = "base_model.model."  # the prefix of every name in an adapter's file


# --- which adapter ---


def adapter_config(args: ModelArgs) -> LoraConfig:
    """Return PEFT's config of the adapter in a role's settings: a new or an existing one."""
    if args.adapter_name_or_path is not None:
        return saved_config(adapter_folder(args.adapter_name_or_path))
    assert isinstance(args, ActorModelArgs)
    rank = args.lora_rank or 8
    targets = _names(args.lora_target or ALL_LINEAR)
    return LoraConfig(
        r=rank,
        lora_alpha=_number(args.lora_alpha or 2 * rank),
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        modules_to_save=_names(args.modules_to_save or args.additional_target or []) or None,
        use_rslora=args.use_rslora,
        use_dora=args.use_dora,
        init_lora_weights=args.init_lora_weights,  # type: ignore[arg-type]
        task_type="CAUSAL_LM",
    )


def adapter_folder(name: str) -> Path:
    folder = model_folder(name, None)
    if folder is None or not (folder / CONFIG).exists() or not (folder / WEIGHTS).exists():
        raise ConfigError(
            f"adapter_name_or_path: {name} is not a PEFT adapter; use a folder with {CONFIG} and "
            f"{WEIGHTS}, or the hub name of one"
        )
    for file in (CONFIG, WEIGHTS):
        refuse_outside(folder, file)
    return folder


def saved_config(folder: Path) -> LoraConfig:
    """Return the config of an adapter on the disk; refuse one with unknown features."""
    values = _values(folder, CONFIG)
    plain = LoraConfig().to_dict()
    odd = [
        key
        for key, value in values.items()
        if key not in KNOWN and value and value != plain.get(key)
    ]
    if values.get("peft_type") != "LORA" or odd:
        kind = (
            ", ".join(f"{key}: {values[key]}" for key in odd)
            or f"peft_type: {values.get('peft_type')}"
        )
        raise ConfigError(
            f"adapter_name_or_path: {folder} has {kind}; only LoRA and its variants are supported"
        )
    own = {key: values[key] for key in KNOWN[:6] if values.get(key) is not None}
    return LoraConfig(**own, init_lora_weights=True, task_type="CAUSAL_LM")


def base_of(folder: Path) -> tuple[str | None, str | None]:
    """Return name and revision of the base model, as an adapter's config gives them."""
    values = _values(folder, CONFIG)
    return values.get("base_model_name_or_path"), values.get("revision")


def quantization_of(folder: Path) -> Any:
    """Return the quantization of the base in training, as Rather recorded it; None without one."""
    return _values(folder, NOTES).get("quantization") if (folder / NOTES).exists() else None


def _values(folder: Path, name: str) -> dict[str, Any]:
    refuse_outside(folder, name)
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder / name}: cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{folder / name}: is not the config of an adapter")
    return values


def config_of(causal_lm: Any) -> LoraConfig | None:
    """Return the config of the adapter in a model; None without one."""
    found: LoraConfig | None = getattr(causal_lm, "peft_config", {}).get(TRAINED)
    return found


def adapter_digest(folder: Path) -> str:
    digest = sha256()
    for name in (CONFIG, WEIGHTS):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _names(value: str | list[str]) -> list[str]:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _number(value: float) -> Any:
    """Return a whole number as an int, as PEFT writes it."""
    return int(value) if float(value).is_integer() else value


# --- into a model ---


def inject(causal_lm: Any, args: ModelArgs, *, keeps_start: bool = False) -> None:
    """Add the adapter to the model, also on the meta device, and freeze all else.

    `AdapterWeights` has its values. PiSSA's start is always kept: the export subtracts it.
    """
    config = adapter_config(args)
    start = config.init_lora_weights
    config.init_lora_weights = False
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of tied weights and second adapters
            tuner = LoraModel(causal_lm, config, TRAINED)
            if keeps_start or _is_pissa(start):
                tuner.peft_config[START] = config
                tuner.inject_adapter(causal_lm, START)
    except ValueError as error:
        raise ConfigError(f"lora_target: {str(error).splitlines()[0]}") from error
    config.init_lora_weights = start
    causal_lm.peft_config = {TRAINED: config}
    _refuse_unused(causal_lm, config)
    _refuse_others(causal_lm)
    for name, parameter in causal_lm.named_parameters():
        parameter.requires_grad_(f".{TRAINED}." in name)


def _is_pissa(init: Any) -> bool:
    return isinstance(init, str) and bool(PISSA.fullmatch(init))


def _refuse_unused(causal_lm: Any, config: LoraConfig) -> None:
    """Refuse names that PEFT silently ignores. A string is the pattern of an existing adapter."""
    targets = [] if isinstance(config.target_modules, str) else sorted(config.target_modules or [])
    whole = config.modules_to_save or []
    for key, names, kind in (
        ("lora_target", targets, LoraLayer),
        ("modules_to_save", whole, ModulesToSaveWrapper),
    ):
        found = [name for name, module in causal_lm.named_modules() if isinstance(module, kind)]
        unused = [
            name for name in names if not any(f".{one}".endswith(f".{name}") for one in found)
        ]
        if unused:
            raise ConfigError(f"{key}: the model has no module named {', '.join(unused)}")


def _refuse_others(causal_lm: Any) -> None:
    """Refuse modules that PEFT accepts but that could not be merged or would never be called."""
    layers = [
        module for module in causal_lm.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    inside = {id(module) for layer in layers for module in layer.modules()}
    for name, module in causal_lm.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if id(module) not in inside or not isinstance(module.get_base_layer(), nn.Linear):
            raise ConfigError(
                f"lora_target: {name} is not a linear layer inside the decoder layers, and only "
                "those can have an adapter; to train it whole, add it to modules_to_save"
            )
    ends = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    tied = causal_lm.config.get_text_config().tie_word_embeddings
    if tied and any(isinstance(end, ModulesToSaveWrapper) for end in ends):
        raise ConfigError(
            "modules_to_save: the embedding of this model is also its head (tie_word_embeddings), "
            "and a trained copy of one would untie them; remove both"
        )


def tuned_layers(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)
    ]


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """Run the model as its own reference: with the frozen start of its adapter, or the base alone.

    PEFT's own switches also turn gradients off and on, and FSDP2 would keep them off.
    """
    layers = tuned_layers(model)
    kept = any(
        START in getattr(layer, kind, ())
        for layer in layers
        for kind in ("lora_A", "modules_to_save")
    )
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    for layer in layers:
        layer._active_adapter, layer._disable_adapters = (
            ([START], False) if kept else (layer._active_adapter, True)
        )
    try:
        yield
    finally:
        for layer, (active, disabled) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = active, disabled


# --- what it begins with ---


class AdapterWeights:
    """The weights of a model with an adapter, from the files of the base and of the adapter.

    Read like `ShardedFiles`. PiSSA moves the start of its adapter out of the base.
    """

    def __init__(self, base: ShardedFiles, config: LoraConfig, args: ModelArgs, seed: int) -> None:
        self.base, self.config, self.seed = base, config, seed
        path = args.adapter_name_or_path
        self.saved = _open_adapter(adapter_folder(path), base) if path is not None else None
        self.changes_base = _is_pissa(config.init_lora_weights)
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def __contains__(self, name: str) -> bool:
        match = _MATRIX.fullmatch(name)
        if self.saved is not None and (match or _WHOLE.fullmatch(name)):
            return _saved_name(name) in self.saved
        return (f"{match[1]}.weight" if match else base_name(name)) in self.base

    def shape(self, name: str) -> tuple[int, ...]:
        match = _MATRIX.fullmatch(name)
        if self.saved is not None and (match or _WHOLE.fullmatch(name)):
            return self.saved.shape(_saved_name(name))
        if not match:
            return self.base.shape(base_name(name))
        out, inner = self.base.shape(f"{match[1]}.weight")
        rank = self.config.r
        return {"lora_A": (rank, inner), "lora_B": (out, rank), "lora_magnitude_vector": (out,)}[
            match[2]
        ]

    def read(self, name: str, spec: ShardSpec) -> Tensor:
        if match := _MATRIX.fullmatch(name):
            return self._matrices(match[1])[match[2]][spec.slices].clone()
        if self.changes_base and name.endswith(".base_layer.weight"):
            return self._matrices(name.removesuffix(".base_layer.weight"))["base"][
                spec.slices
            ].clone()
        if self.saved is not None and _WHOLE.fullmatch(name):
            return self.saved.read(_saved_name(name), spec)
        return self.base.read(base_name(name), spec)

    def _matrices(self, module: str) -> dict[str, Tensor]:
        """Return the whole matrices of one layer; the last one is kept for the next read."""
        if self._last[0] != module:
            self._last = (
                module,
                self._read_saved(module) if self.saved is not None else self._initialize(module),
            )
        return self._last[1]

    def _read_saved(self, module: str) -> dict[str, Tensor]:
        assert self.saved is not None
        kinds = ["lora_A", "lora_B", *(["lora_magnitude_vector"] if self.config.use_dora else [])]
        return {
            kind: self.saved[_saved_name(f"{module}.{kind}.{TRAINED}.weight")] for kind in kinds
        }

    def _initialize(self, module: str) -> dict[str, Tensor]:
        """Return PEFT's own start of a layer, on the CPU in float32."""
        name = f"{module}.weight"
        out, inner = self.base.shape(name)
        asks = self.changes_base or self.config.use_dora
        linear = nn.Linear(inner, out, bias=False, device="meta")
        linear.weight = nn.Parameter(
            self.base[name].float() if asks else torch.empty(out, inner), requires_grad=False
        )
        seed = int.from_bytes(sha256(f"{self.seed} {module}".encode()).digest()[:7], "big")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # the CPU's only: fork_rng restores no GPU's
            layer: Any = LoraLinear(
                linear, TRAINED, self.config, r=self.config.r, lora_alpha=self.config.lora_alpha
            )
        start = {
            kind: getattr(layer, kind)[TRAINED].weight.detach() for kind in ("lora_A", "lora_B")
        }
        if self.config.use_dora:
            start["lora_magnitude_vector"] = layer.lora_magnitude_vector[TRAINED].weight.detach()
        if self.changes_base:
            start["base"] = linear.weight.detach()
            # The sign of singular vectors is arbitrary: ranks on different machines must choose the
            # same.
            rows = start["lora_A"]
            signs = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True)).sign()
            start |= {"lora_A": rows * signs, "lora_B": start["lora_B"] * signs.T}
        return start


def base_name(name: str) -> str:
    """Return the base's name of a frozen weight, or of the start of a module trained whole."""
    if match := _WHOLE.fullmatch(name):
        return f"{match[1]}.{match[2]}"
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _saved_name(name: str) -> str:
    """Return a trained weight's name in an adapter's file."""
    if match := _MATRIX.fullmatch(name):
        end = "" if match[2] == "lora_magnitude_vector" else ".weight"
        return f"{_PEFT}{match[1]}.{match[2]}{end}"
    return f"{_PEFT}{base_name(name)}"


# --- onto the disk ---


def write_adapter(
    folder: Path,
    config: LoraConfig,
    weights: Mapping[str, Tensor],
    base: str,
    revision: str | None,
    quantized: str | None,
) -> None:
    """Write what PeftModel.from_pretrained opens. `weights` have the policy's names; float32."""

    def of(adapter: str) -> dict[str, Tensor]:
        names = [name for name in weights if f".{adapter}." in name]
        return {
            _saved_name(name.removeprefix("causal_lm.")): weights[name].float() for name in names
        }

    saved, began, values = of(TRAINED), of(START), config.to_dict()
    if _is_pissa(config.init_lora_weights):
        saved = {name: _difference(name, saved[name], began.get(name)) for name in saved}
        values["r"] = 2 * config.r
        values["lora_alpha"] = _number(
            config.lora_alpha * (math.sqrt(2) if config.use_rslora else 2)
        )
    values |= {
        "base_model_name_or_path": base,
        "revision": revision,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    values["target_modules"] = sorted(config.target_modules or [])
    (folder / CONFIG).write_text(
        json.dumps(values, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8"
    )
    if quantized:
        (folder / NOTES).write_text(
            json.dumps({"quantization": quantized}) + "\n", encoding="utf-8"
        )
    with open(folder / WEIGHTS, "xb") as file:
        for chunk in safetensors_file(
            {name: TensorStream.of(saved[name]) for name in sorted(saved)}, {}
        ):
            file.write(chunk)


def _difference(name: str, now: Tensor, began: Tensor | None) -> Tensor:
    """PiSSA: relative to the original base, the adapter is B A - B0 A0."""
    if name.endswith("lora_A.weight") and began is not None:
        return torch.cat([now, began])
    if name.endswith("lora_B.weight") and began is not None:
        return torch.cat([now, -began], dim=1)
    return now


# --- into the base ---


def merge(base: ShardedFiles, adapter: Path, dtype: torch.dtype) -> dict[str, TensorStream]:
    """Return the base with an adapter merged in, computed in float32 as each weight is written."""
    config, saved = saved_config(adapter), _open_adapter(adapter, base)
    return {name: _merge_weight(name, base, config, saved, dtype) for name in sorted(base)}


def _open_adapter(adapter: Path, base: ShardedFiles) -> ShardedFiles:
    """Open the matrices of an adapter; refuse those of another model."""
    try:
        saved = ShardedFiles([adapter / WEIGHTS])
    except CheckpointError as error:
        raise ConfigError(f"adapter_name_or_path: {error}") from error
    changed = {_module_of(own) or own for own in (name.removeprefix(_PEFT) for name in saved)}
    if foreign := changed - set(base):
        raise ConfigError(
            f"{adapter}: the adapter belongs to another model: the base has no {min(foreign)}"
        )
    return saved


def _module_of(name: str) -> str | None:
    """Return the base weight that an adapter's matrix changes."""
    match = re.fullmatch(r"(.+)\.lora_(A\.weight|B\.weight|magnitude_vector)", name)
    return f"{match[1]}.weight" if match else None


def _merge_weight(
    name: str, base: ShardedFiles, config: LoraConfig, saved: ShardedFiles, dtype: torch.dtype
) -> TensorStream:
    if _PEFT + name in saved:
        return saved.stream(_PEFT + name, dtype)
    module = _PEFT + name.removesuffix(".weight")
    if f"{module}.lora_A.weight" not in saved:
        return base.stream(name, dtype)

    def parts() -> Iterator[Tensor]:
        a, b = (saved[f"{module}.lora_{matrix}.weight"].float() for matrix in "AB")
        weight = base[name].float() + _scale(config) * (b @ a)
        if config.use_dora:
            weight *= (saved[f"{module}.lora_magnitude_vector"].float() / weight.norm(dim=1))[
                :, None
            ]
        yield weight.to(dtype)

    return TensorStream(dtype, base.shape(name), parts)


def _scale(config: LoraConfig) -> float:
    return float(config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r))
