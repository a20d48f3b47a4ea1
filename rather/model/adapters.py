"""Adapters of the LoRA family, through PEFT: small trained matrices next to frozen weights.

PEFT replaces the linear layers of the Hugging Face model, and wraps its stacked experts; whatever
else runs the model sees no difference. With adapters off, it is the base model. If an adapter does not start with zero effect,
a frozen copy of its start is kept as the reference.

The start of an adapter depends on the seed, the layer name and the base weights alone: however a
model is sharded, each rank takes its part of the same numbers.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from peft import (
    LoraConfig,
    LoraModel,
    PeftConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from peft.tuners import lora
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from rather.checkpoint.sharded_tensors import (
    Cast,
    ShardedFiles,
    ShardSpec,
    TensorStream,
    safetensors_file,
)
from rather.config.compat import read_object
from rather.config.paths import is_local
from rather.config.schema import ActorModelArgs, ModelArgs, split_names
from rather.config.values import PISSA
from rather.errors import CheckpointError, ConfigError
from rather.files import inspect_folder, refuse_outside, regular
from rather.model.adapted_experts import (
    AdaptedExperts,
    changed_stack,
    factors_of,
    first_factors,
    is_stack,
)
from rather.model.check import expert_blocks
from rather.model.files import ModelFiles, model_folder
from rather.model.layers import layers_of
from rather.model.policy import START
from rather.model.vision import FAMILIES, family_of

LoraLinear = lora.Linear
TRAINED = "default"  # PEFT's name of the trained adapter; its frozen start is the adapter START
CONFIG, WEIGHTS, NOTES = "adapter_config.json", "adapter_model.safetensors", "rather.json"
ALL_LINEAR = "all-linear"
KNOWN = (  # keys that an adapter's config may set; all others must have PEFT's default
    "r", "lora_alpha", "target_modules", "target_parameters", "modules_to_save", "use_rslora",
    "use_dora", "lora_dropout", "task_type", "base_model_name_or_path", "revision",
    "inference_mode", "init_lora_weights", "auto_mapping", "peft_version",
    "megatron_core", "runtime_config", "qalora_group_size",
)  # fmt: skip
MOST_NAMES = 10_000  # of layers


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_NAMES and all(map(_is_text, value))


CHECKS: dict[str, Callable[[Any], bool]] = {  # of values in an adapter's config
    "r": lambda value: type(value) is int and value > 0,
    "lora_alpha": lambda value: type(value) in (int, float) and math.isfinite(value),
    "target_modules": lambda value: _is_text(value) or _are_names(value),
    "target_parameters": _are_names,
    "modules_to_save": _are_names,
    "base_model_name_or_path": _is_text,
    "revision": _is_text,
    "base_weights": _is_text,
}
# Families in which PEFT refuses these layers: their kernels read the weights themselves.
MAMBA = ("falcon_h1", "nemotron_h")
PARTS_OF_EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
MAMBA_PARTS = {"out_proj", "conv1d"}
NAMES_OF_EXPERTS = "name stacked experts as experts.gate_up_proj and experts.down_proj"
_PEFT = "base_model.model."  # the prefix of every name in an adapter's file


# --- which adapter ---


def adapter_config(args: ModelArgs) -> LoraConfig:
    """Return PEFT's config of the adapter in a role's settings: a new or an existing one."""
    if args.adapter_name_or_path is not None:
        return saved_config(adapter_folder(args.adapter_name_or_path))
    assert isinstance(args, ActorModelArgs)
    rank = args.lora_rank or 8
    targets = split_names(args.lora_target or ALL_LINEAR)
    stacks = [target for target in targets if is_stack(target)]
    modules = [target for target in targets if target not in stacks]
    return LoraConfig(
        r=rank,
        lora_alpha=_number(args.lora_alpha or 2 * rank),
        target_modules=ALL_LINEAR if modules == [ALL_LINEAR] else modules,
        target_parameters=stacks or None,
        modules_to_save=split_names(args.modules_to_save or []) or None,
        use_rslora=args.use_rslora,
        use_dora=args.use_dora,
        init_lora_weights=args.init_lora_weights,  # type: ignore[arg-type]
        task_type="CAUSAL_LM",
    )


def _number(value: float) -> Any:
    """Return a whole number as an int, as PEFT writes it."""
    return int(value) if float(value).is_integer() else value


def adapter_folder(name: str) -> Path:
    folder = model_folder(name, None)
    if folder is None or not (folder / CONFIG).exists() or not (folder / WEIGHTS).exists():
        raise ConfigError(
            f"adapter_name_or_path: {name} is not a PEFT adapter; use a folder with {CONFIG} and "
            f"{WEIGHTS}, or the hub name of one"
        )
    inspect_folder(folder)
    return folder


def saved_config(folder: Path) -> LoraConfig:
    """Return the config of an adapter on the disk; refuse one with unknown features."""
    values, plain = {"peft_type": None, **_values(folder, CONFIG)}, LoraConfig().to_dict()
    if values.get("exclude_modules") in [family.excluded for family in FAMILIES.values()]:
        del values["exclude_modules"]  # written here, for PEFT
    odd = [
        f"{key}: {value}"
        for key, value in values.items()
        if key not in KNOWN and (value or key == "peft_type") and value != plain.get(key)
    ]
    if odd:
        raise ConfigError(
            f"adapter_name_or_path: {folder} has {', '.join(odd)}; only LoRA and its variants are "
            "supported"
        )
    settings = {key: values[key] for key in KNOWN[:7] if values.get(key) is not None}
    if isinstance(settings.get("target_modules"), str):
        # An untrusted regular expression may never end; the file has the names that it matched.
        settings["target_modules"] = _adapted_linears(_open(folder))
    return LoraConfig(**settings, init_lora_weights=True, task_type="CAUSAL_LM")


def _adapted_linears(saved: Iterable[str]) -> list[str]:
    names = [name.removeprefix(_PEFT) for name in saved]
    names = [name for name in names if ".lora_" in name and not changed_stack(name, ())]
    return sorted({name.partition(".lora_")[0] for name in names})


class Base(NamedTuple):
    """What an adapter's folder says about its base; None if unknown."""

    name: str | None
    revision: str | None
    quantization: Any  # in training
    weights: str | None  # their digest in training


def base_of(folder: Path) -> Base:
    """Return the base of an adapter."""
    values = _values(folder, CONFIG)
    notes = _values(folder, NOTES) if (folder / NOTES).exists() else {}
    name, revision = values.get("base_model_name_or_path"), values.get("revision")
    return Base(name, revision, notes.get("quantization"), notes.get("base_weights"))


def _values(folder: Path, name: str) -> dict[str, Any]:
    refuse_outside(folder, folder / name)
    values = read_object(folder / name)
    for key, is_good in CHECKS.items():
        if (value := values.get(key)) is not None and not is_good(value):
            shown = str(value)[:100]
            raise ConfigError(f"{folder / name}: {key}: {shown} is not what an adapter has there")
    return values


def adapter_digest(folder: Path) -> str:
    digest = sha256()
    for name in (CONFIG, WEIGHTS):
        with open(folder / name, "rb", opener=regular) as file:
            file_digest(file, lambda: digest)
    return digest.hexdigest()


# --- into a model ---


def inject(causal_lm: Any, args: ModelArgs, *, keeps_start: bool = False) -> None:
    """Add the adapter to the model, also on the meta device, and freeze all else.

    `AdapterWeights` has its values. PiSSA's start is always kept: the export subtracts it.
    """
    config = adapter_config(args)
    _refuse_large_rank(causal_lm, config.r)
    stacks = sorted(config.target_parameters or ())
    if stacks:
        _refuse_with_experts(args, config)
    has_experts = any(True for _ in expert_blocks(causal_lm))
    if config.target_modules == ALL_LINEAR and (names := _linear_names(causal_lm)) is not None:
        config.target_modules = sorted(names)
    if hasattr(causal_lm, "score"):  # the new head of a reward model is trained whole
        config.task_type = "SEQ_CLS"
        config.modules_to_save = sorted({*(config.modules_to_save or ()), "score"})
    if getattr(causal_lm, "sees_images", False):  # an adapter is of the language model
        config.exclude_modules = family_of(causal_lm.config).excluded
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
        reason = str(error).splitlines()[0]
        if has_experts:
            reason += f"; {NAMES_OF_EXPERTS}"
        raise ConfigError(f"lora_target: {reason}") from error
    config.init_lora_weights = start
    config.target_parameters = stacks or None  # PEFT may have added others
    causal_lm.peft_config = {TRAINED: config}
    _refuse_unsupported(causal_lm, config)
    AdaptedExperts.replace(causal_lm)
    for name, parameter in causal_lm.named_parameters():
        parameter.requires_grad_(f".{TRAINED}." in name)
    for module in causal_lm.modules():
        # On some CPUs bitsandbytes repacks 4-bit weights in the first pass without gradients. From
        # then on it multiplies in bfloat16, and no gradient passes through.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _linear_names(causal_lm: Any) -> set[str] | None:
    """Return the layers that all-linear means; None if PEFT finds the same ones."""
    inside = {m: n for layer in layers_of(causal_lm) for n, m in layer.named_modules()}
    outside = [m for m in causal_lm.modules() if isinstance(m, nn.Linear) and m not in inside]
    has_experts = any(True for _ in expert_blocks(causal_lm))
    is_mamba = causal_lm.config.get_text_config().model_type in MAMBA
    ends = (causal_lm.get_output_embeddings(), getattr(causal_lm, "score", None))
    if not has_experts and not is_mamba and all(linear in ends for linear in outside):
        return None
    # Routers may be linear layers that return more than a tensor.
    names = {n.split(".")[-1] for m, n in inside.items() if type(m) is nn.Linear}
    if has_experts:  # PEFT takes names of shared experts for those of stacked experts
        names -= PARTS_OF_EXPERTS
    return names - MAMBA_PARTS if is_mamba else names


def _is_pissa(init: Any) -> bool:
    return bool(PISSA.fullmatch(str(init)))


def _refuse_large_rank(causal_lm: Any, rank: int) -> None:
    """Refuse a rank above the widest layer: a run folder's config could fill the memory with it."""
    layers = [module for module in causal_lm.modules() if isinstance(module, nn.Linear)]
    width = max((max(layer.in_features, layer.out_features) for layer in layers), default=0)
    if rank > width:
        raise ConfigError(f"lora_rank: {rank} must be at most {width}, the widest layer")


def _refuse_with_experts(args: ModelArgs, config: LoraConfig) -> None:
    """Refuse settings that adapters of experts do not have."""
    for key, is_set in (
        ("quantization", args.quantization),
        ("use_dora", config.use_dora),
        ("init_lora_weights=pissa", _is_pissa(config.init_lora_weights)),
    ):
        if is_set:
            names = ", ".join(sorted(config.target_parameters or ()))
            raise ConfigError(f"lora_target: {names} cannot be combined with {key}; remove one")


def _refuse_unsupported(causal_lm: Any, config: LoraConfig) -> None:
    """Refuse names that PEFT silently ignores, and modules that could not be merged or called."""
    tuned = tuned_layers(causal_lm)
    _refuse_nonlinear(causal_lm, tuned, config.target_parameters or ())
    # PEFT has replaced all-linear by the names.
    targets = config.target_modules if not isinstance(config.target_modules, str) else ()
    for key, names, kind in (
        ("lora_target", targets, LoraLayer),
        ("lora_target", config.target_parameters, ParamWrapper),
        ("modules_to_save", config.modules_to_save, ModulesToSaveWrapper),
    ):
        names_of_kind = [_target(name, m) for name, m in tuned.items() if isinstance(m, kind)]
        for target in sorted(names or ()):
            if not any(name.endswith(f".{target}") for name in names_of_kind):
                raise ConfigError(f"{key}: the model has no module named {target}")
    ends = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    text = causal_lm.config.get_text_config()
    tied = getattr(text, "tie_word_embeddings", None)
    if tied is None:
        tied = causal_lm.config.tie_word_embeddings
    if tied and any(isinstance(end, ModulesToSaveWrapper) for end in ends):
        raise ConfigError(
            "modules_to_save: the embedding of this model is also its head (tie_word_embeddings), "
            "and a trained copy of one would untie them; remove both"
        )


def _target(name: str, module: Any) -> str:
    """Return the name that a target of PEFT is compared with."""
    if isinstance(module, ParamWrapper):
        name = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
    return f".{name}"


def _refuse_nonlinear(causal_lm: Any, tuned: Mapping[str, Any], stacks: Collection[str]) -> None:
    """Refuse adapters of anything but linear layers, and these stacks, in the decoder layers."""
    inside = {id(module) for layer in layers_of(causal_lm) for module in layer.modules()}
    for name, module in tuned.items():
        if not isinstance(module, BaseTunerLayer):
            continue
        stack = changed_stack(f"{name}.lora_A", stacks)
        is_known = isinstance(module.get_base_layer(), nn.Linear)
        if isinstance(module, ParamWrapper):
            is_known = f".{stack}" == _target(name, module)
        if id(module) in inside and is_known:
            continue
        problem = (
            f"lora_target: {name} is not a linear layer inside the decoder layers, and only those "
            "can have an adapter; to train it whole, add it to modules_to_save"
        )
        if stack:
            problem = f"lora_target: {name}: {NAMES_OF_EXPERTS}"
        raise ConfigError(problem)


def tuned_layers(model: nn.Module) -> dict[str, Any]:
    kinds = (BaseTunerLayer, ModulesToSaveWrapper)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


# The layers of each model, and whether they keep the start of their adapter: a GPU would wait while
# they are looked for in every step.
_switched: WeakKeyDictionary[nn.Module, tuple[list[Any], bool]] = WeakKeyDictionary()


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """Run the model as its own reference: with the frozen start of its adapter, or the base alone.

    PEFT's own switches also turn gradients off and on, and FSDP2 would keep them off.
    """
    if model not in _switched:
        keeps_start = any(f".{START}." in name for name, _ in model.named_parameters())
        _switched[model] = list(tuned_layers(model).values()), keeps_start
    layers, keeps_start = _switched[model]
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    for layer in layers:
        if keeps_start:
            layer._active_adapter = [START]
        layer._disable_adapters = not keeps_start
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

    def __init__(self, base: ShardedFiles, args: ModelArgs, seed: int) -> None:
        self.base, self.config, self.seed = base, adapter_config(args), seed
        self.stacks = self.config.target_parameters or ()
        path = args.adapter_name_or_path
        self.saved = _open_adapter(adapter_folder(path), base) if path is not None else None
        self.changes_base = _is_pissa(self.config.init_lora_weights)
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def _stored(self, name: str) -> tuple[ShardedFiles, str]:
        """Return where a weight is stored and its name there; for a new matrix, its layer's."""
        stored_name = _adapter_name(name)
        if self.saved is not None and stored_name:
            return self.saved, stored_name
        return self.base, _base_name(name, self.stacks)

    def __contains__(self, name: str) -> bool:
        files, stored = self._stored(name)
        return stored in files

    def shape(self, name: str) -> tuple[int, ...]:
        files, stored = self._stored(name)
        new = self._new_matrix(name, stored)
        return files.shape(stored) if new is None else tuple(new.shape)

    def read(self, name: str, spec: ShardSpec) -> Tensor:
        files, stored = self._stored(name)
        new = self._new_matrix(name, stored)
        return files.read(stored, spec) if new is None else new[spec.slices].clone()

    def _new_matrix(self, name: str, layer: str) -> Tensor | None:
        """Return what a new adapter begins with, or what PiSSA leaves of the base."""
        kind = re.search(r"\.(lora_\w+)", name)
        changed = self.changes_base and name.endswith(".base_layer.weight")
        if self.saved is not None or not (kind or changed):
            return None
        if self._last[0] != layer:  # the matrices of a layer are read one after another
            self._last = (layer, self._initialize(layer))
        return self._last[1][kind[1] if kind else "base"]

    def _initialize(self, name: str) -> dict[str, Tensor]:
        """Return PEFT's own start of the layer with this weight, on the CPU in float32."""
        text = f"{self.seed} {name.removesuffix('.weight')}"
        seed = int.from_bytes(sha256(text.encode()).digest()[:7], "big")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # the CPU's only: fork_rng restores no GPU's
            shape = self.base.shape(name)
            if len(shape) == 3:
                return first_factors(shape, self.config, TRAINED)
            return self._initialize_linear(name, *shape)

    def _initialize_linear(self, name: str, outer: int, inner: int) -> dict[str, Tensor]:
        linear = nn.Linear(inner, outer, bias=False, device="meta")
        asks = self.changes_base or self.config.use_dora
        weight = self.base[name].float() if asks else torch.empty(outer, inner)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        layer: Any = LoraLinear(
            linear, TRAINED, self.config, r=self.config.r, lora_alpha=self.config.lora_alpha
        )
        kinds = ["lora_A", "lora_B", *(["lora_magnitude_vector"] if self.config.use_dora else [])]
        start = {kind: getattr(layer, kind)[TRAINED].weight.detach() for kind in kinds}
        if self.changes_base:
            start["base"] = linear.weight.detach()
            # The sign of singular vectors is arbitrary: all machines must choose the same.
            rows = start["lora_A"]
            signs = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True)).sign()
            start |= {"lora_A": rows * signs, "lora_B": start["lora_B"] * signs.T}
        return start


def _base_name(name: str, stacks: Collection[str]) -> str:
    """Return the base's name of a weight; of an adapter's matrix, that of the weight it changes.

    `stacks` are the names in target_parameters.
    """
    if stack := changed_stack(name, stacks):
        return stack
    name = re.sub(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.)", "", name)
    return re.sub(r"\.lora_.*", ".weight", name)


def _adapter_name(name: str) -> str | None:
    """Return the name in an adapter's file of a weight that it trains, else None."""
    stored_name = re.sub(rf"\.({TRAINED}|{START})(?=\.)", "", name)
    stored_name = stored_name.replace(".modules_to_save.", ".")
    stored_name = stored_name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
    return None if stored_name == name else _PEFT + stored_name


# --- onto the disk ---


def write_adapter(
    folder: Path,
    causal_lm: Any,
    weights: Mapping[str, Tensor],
    source: tuple[str, ModelArgs],
    trained_on: str | None,
) -> None:
    """Write what PeftModel.from_pretrained opens. `weights` have the policy's names; float32.

    `trained_on` is the digest of the base's weights, None if it is unknown.
    """
    base, args = source
    if is_local(base):
        base = str(Path(base).expanduser().absolute())
    config: LoraConfig = causal_lm.peft_config[TRAINED]
    saved, began = (
        {
            str(_adapter_name(name.removeprefix("causal_lm."))): weights[name].float()
            for name in weights
            if f".{adapter}." in name
        }
        for adapter in (TRAINED, START)
    )
    # A tower that is left out has layers of the same names.
    has_tower = getattr(causal_lm, "left_out", False)
    targets = _adapted_linears(saved) if has_tower else config.target_modules
    values = config.to_dict() | {
        "base_model_name_or_path": base,
        "revision": args.revision,
        "init_lora_weights": True,
        "inference_mode": True,
        "target_modules": sorted(targets or []),
    }
    if _is_pissa(config.init_lora_weights):  # relative to the original base: B A - B0 A0
        for name, start in began.items():
            if name.endswith("lora_A.weight"):
                saved[name] = torch.cat([saved[name], start])
            elif name.endswith("lora_B.weight"):
                saved[name] = torch.cat([saved[name], -start], dim=1)
        growth = math.sqrt(2) if config.use_rslora else 2
        values |= {"r": 2 * config.r, "lora_alpha": _number(config.lora_alpha * growth)}
    text = json.dumps(values, indent=2, sort_keys=True, default=str)
    (folder / CONFIG).write_text(text + "\n", "utf-8")
    _write_notes(folder, {"quantization": args.quantization, "base_weights": trained_on})
    streams = {name: TensorStream.of(saved[name]) for name in sorted(saved)}
    with open(folder / WEIGHTS, "xb") as file:
        file.writelines(safetensors_file(streams, {}))


def _write_notes(folder: Path, notes: Mapping[str, Any]) -> None:
    if any(notes.values()):
        text = json.dumps({key: note for key, note in notes.items() if note})
        (folder / NOTES).write_text(text + "\n", "utf-8")


def peft_shapes(folder: Path, base: Any) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of what PEFT adds to an empty base, by an adapter's config."""
    with torch.device("meta"):
        adapted = get_peft_model(base, PeftConfig.from_pretrained(str(folder)))
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


# --- into the base ---


def merge(base: ModelFiles, adapter: Path, cast: Cast) -> dict[str, TensorStream]:
    """Return the base with an adapter merged in, computed in float32 as each weight is written."""
    merging = _Merging(base, adapter, cast)
    return {name: merging.stream(name) for name in sorted(base.weights)}


class _Merging:
    def __init__(self, base: ShardedFiles, adapter: Path, cast: Cast) -> None:
        self.config, self.saved = saved_config(adapter), _open_adapter(adapter, base)
        self.base, self.cast = base, cast
        rank = self.config.r
        self.scale = self.config.lora_alpha / (math.sqrt(rank) if self.config.use_rslora else rank)
        stacks = self.config.target_parameters or ()
        self.modules = {  # in the adapter, by the weights that they change
            _base_name(name.removeprefix(_PEFT), stacks): name.removesuffix(".lora_A.weight")
            for name in self.saved
            if name.endswith(".lora_A.weight")
        }
        # The experts of a layer are written one after another, from two stacks.
        self.factors = lru_cache(2)(self._factors)

    def stream(self, name: str) -> TensorStream:
        if _PEFT + name in self.saved:
            return self.saved.stream(_PEFT + name, self.cast)
        if name in self.modules:
            is_stack = len(self.base.shape(name)) == 3
            changed = partial(self._stack if is_stack else self._matrix, name, self.modules[name])
            return TensorStream(self.cast.dtype, self.base.shape(name), changed)
        return self.base.stream(name, self.cast)

    def _factors(self, module: str) -> tuple[Tensor, Tensor]:
        a, b = (self.saved[f"{module}.lora_{matrix}.weight"].float() for matrix in "AB")
        return factors_of(a, b, len(a) // self.config.r)

    def _matrix(self, name: str, module: str) -> Iterator[Tensor]:
        ((a_RI,), (b_OR,)) = self.factors(module)
        weight = self.base[name].float() + self.scale * (b_OR @ a_RI)
        if self.config.use_dora:
            magnitude = self.saved[f"{module}.lora_magnitude_vector"].float()
            weight *= (magnitude / weight.norm(dim=1))[:, None]
        yield self.cast(name, weight, ShardSpec.full(weight.shape))

    def _stack(self, name: str, module: str) -> Iterator[Tensor]:
        for expert, (a_RI, b_OR) in enumerate(zip(*self.factors(module), strict=True)):
            spec = ShardSpec.full(self.base.shape(name)).narrow(0, expert, 1)
            weight = self.base.read(name, spec).float() + self.scale * (b_OR @ a_RI)
            yield self.cast(name, weight, spec)


def _open(adapter: Path) -> ShardedFiles:
    try:
        return ShardedFiles([adapter / WEIGHTS])
    except CheckpointError as error:
        raise ConfigError(f"adapter_name_or_path: {error}") from error


def _open_adapter(adapter: Path, base: ShardedFiles) -> ShardedFiles:
    """Open the matrices of an adapter; refuse those of another model."""
    saved, stacks = _open(adapter), saved_config(adapter).target_parameters or ()
    changed = {_base_name(name.removeprefix(_PEFT), stacks) for name in saved}
    if foreign := {name for name in changed if name not in base}:
        raise ConfigError(
            f"{adapter}: the adapter belongs to another model: the base has no {min(foreign)}"
        )
    return saved
