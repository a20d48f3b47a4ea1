"""Load a Hugging Face folder or hub name as a PolicyModel in eval mode, and check it.

On several ranks no process ever holds a whole model: it is made without memory, divided, and each
rank then reads its own slices of the files.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, BitsAndBytesConfig, GenerationConfig
from transformers.utils import logging as hf_logging
from transformers.utils.import_utils import is_bitsandbytes_available
from transformers.utils.peft_utils import find_adapter_config_file

from rather.checkpoint.sharded_tensors import ShardedFiles, ShardSpec
from rather.config.schema import ModelArgs, RoleConfig
from rather.config.strategies import Layout
from rather.errors import ConfigError
from rather.files import inspect_folder
from rather.model.attention import IMPLEMENTATION
from rather.model.check import check_family, check_model
from rather.model.files import LoadedWeights, ModelFiles, model_folder, weight_files
from rather.model.megatron import checkpoint_folder, model_files
from rather.model.mixers import report_scan
from rather.model.policy import PolicyModel
from rather.model.reward import HEAD, RewardFiles, auto_class, new_head
from rather.model.towers import leave_tower_out, new_model, report_tower
from rather.model.vision import keep_tower
from rather.optim.rounding import Rounding
from rather.parallel.apply import divide
from rather.parallel.mesh import Mesh
from rather.parallel.shard import places, shard_rounding
from rather.parallel.stages import Stages

# Keys of a config.json with which transformers would fetch kernels, or read other files.
REFUSED = {
    "quantization_config": "quantised weights cannot be trained; name the model in its full "
    "precision",
    "transformers_weights": "weights are read from model.safetensors and its shards; rename the "
    "file",
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CPU_WITH_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # flags in /proc/cpuinfo

log = logging.getLogger(__name__)


class Start(NamedTuple):
    """How an adapter begins: the seed, and whether the model keeps a frozen copy of the start."""

    seed: int = 0
    kept: bool = False


def device_of(role: RoleConfig, rank: int = 0, per_node: int | None = None) -> str:
    """Return the device of a rank by its role's device_mapping, or the CPU without a GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    number = role.devices[rank]
    number = number % per_node if per_node else number
    if number >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"device_mapping: GPU {number} is not here; the {count} found are counted from 0."
        )
    return f"cuda:{number}"


def compute_dtype(args: ModelArgs, device: str) -> torch.dtype:
    """Return the dtype of the model: as configured, else bfloat16 on a GPU and float32 on a CPU."""
    return DTYPES[args.dtype or ("bf16" if device.startswith("cuda") else "fp32")]


@cache
def cpu_has_bf16() -> bool:
    """Return whether this CPU multiplies bfloat16 numbers; without, torch is 70 times slower."""
    file = Path("/proc/cpuinfo")
    return file.exists() and bool(CPU_WITH_BF16.intersection(file.read_text("utf-8").split()))


def stored_dtype(args: ModelArgs, device: str) -> torch.dtype:
    """Return the dtype that parameters are stored and multiplied in.

    A CPU without bfloat16 instructions multiplies float32 numbers that are rounded to bfloat16.
    """
    compute = compute_dtype(args, device)
    slow = compute == torch.bfloat16 and device == "cpu" and not cpu_has_bf16()
    return torch.float32 if slow else compute


def precision_name(role: RoleConfig, device: str, rounding: str) -> str:
    """Return a name of everything about precision that decides a frozen model's log-probs."""
    args = role.model_args
    compute = compute_dtype(role.model_args, device)
    name = str(compute).removeprefix("torch.")
    if stored_dtype(args, device) != compute:
        name += "-in-float32"
    folder = model_folder(role.model_path, args.revision)
    if compute == torch.bfloat16 and rounding == "dithered" and folder:
        stored = ModelFiles(weight_files(folder))
        name += "-dithered" if set(_dtypes(stored).values()) - {compute} else ""
    return name


def _dtypes(stored: ModelFiles) -> dict[str, torch.dtype]:
    """Return the dtypes of all tensors. Their names must be printable: transformers prints them."""
    dtypes = {key: stored.dtype(key) for key in stored}
    if odd := next((key for key in dtypes if not key.isprintable()), None):
        raise ValueError(f"the name of a tensor has control characters: {odd[:80]!r}")
    return dtypes


def same_weights(a: str, b: str) -> bool:
    """Return whether two names mean the same folder or hub model."""
    return a == b or (Path(a).exists() and Path(a).resolve() == Path(b).resolve())


def takes_4_bits() -> bool:
    return bool(is_bitsandbytes_available())


def _in_4_bits(device: str, compute: torch.dtype, stored: ModelFiles) -> dict[str, Any]:
    if stored.is_packed:
        raise ConfigError(
            "quantization: 4bit reads neither MXFP4 weights nor Megatron checkpoints; remove it, or "
            "save the model as plain weights first"
        )
    if not takes_4_bits():
        raise ConfigError(
            "quantization: 4bit needs bitsandbytes; install rather[quantization], or remove the key"
        )
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
    return {"device_map": {"": device}, "quantization_config": config}


def load_policy(
    name: str,
    args: ModelArgs,
    device: str,
    *,
    exact: bool = False,
    start: Start = Start(),
    rounding: Rounding = Rounding(),
    reward: bool = False,
    frozen: Collection[str] | None = None,
) -> PolicyModel:
    """Load a model: no dropout, all weights present and finite, attention verified.

    With `exact`, weights that half precision would round are also kept exactly, for the optimizer.
    With `reward`, the model has a head of one row, which is new if the files have none.
    `frozen` names the parts outside the language model that images reach and that do not train; if
    it is None, all of them are left out.
    """
    if not sys.stderr.isatty():
        hf_logging.disable_progress_bar()
    config, _ = _config(name, args)
    source_dtype = config.dtype or torch.float32
    compute = compute_dtype(args, device)
    stored_in = stored_dtype(args, device)
    exact = exact and compute != torch.float32
    with _opening(name, "weights"):
        plain = model_files(name, args, config) or ModelFiles([])
        stored = _of_task(plain, config, start, reward=reward)
        dtypes = _dtypes(plain)
        keeps = exact and not args.has_adapter
        rounds = _rounds_weights(dtypes, compute, keeps=keeps, in_4_bits=bool(args.quantization))
    options = _in_4_bits(device, stored_in, stored) if args.quantization else {}
    dtype = torch.float32 if rounds else compute
    if stored.is_packed:
        causal_lm = _from_files(name, config, dtype, args, stored, device, reward=reward)
        loading_info: dict[str, Any] = {"missing_keys": ()}
    else:
        causal_lm, loading_info = _from_pretrained(
            name, args, config, dtype, reward=reward, **options
        )
    if reward:
        _begin_head(causal_lm, loading_info, start.seed)
    _refuse_bad_weights(name, causal_lm, loading_info, dtypes)
    _arrange_tower(causal_lm, frozen)
    float32_weights: dict[str, Tensor] = {}
    if rounds:
        float32_weights = _round_weights(causal_lm, rounding, compute, device, keeps=keeps)
    # `.to(dtype)` would round the rotary buffers as well.
    causal_lm = causal_lm if args.quantization else causal_lm.to(device)
    causal_lm.config.dtype = source_dtype
    source = _adapt(causal_lm, stored, args, start) if args.has_adapter else None
    policy = PolicyModel(causal_lm).eval()  # no dropout in policy or reference
    policy.rounding = rounding
    policy.exact = float32_weights
    if source:
        names = _names_of_adapter(policy, changes_base=source.changes_base)
        _fill(name, policy, Mesh(), source, device, names, dtype=compute, exact=exact)
    if stored_in != compute:
        _hold_weights(policy, compute, stored_in)
    report_scan(policy, device)
    check_model(policy)
    return policy


def _arrange_tower(causal_lm: Any, frozen: Collection[str] | None) -> None:
    if frozen is None:
        leave_tower_out(causal_lm)
        report_tower(causal_lm)
    else:
        keep_tower(causal_lm, frozen)


def _rounds_weights(
    dtypes: dict[str, torch.dtype], compute: torch.dtype, *, keeps: bool, in_4_bits: bool
) -> bool:
    """Return whether weights are read in float32 first and then rounded by Rather's own rule."""
    if not set(dtypes.values()) - {compute}:
        return False
    return keeps or (compute == torch.bfloat16 and not in_4_bits)


def _hold_weights(policy: PolicyModel, compute: torch.dtype, stored_in: torch.dtype) -> None:
    """Store the weights of one dtype, rounded already, in a wider one."""
    half = {key: p for key, p in policy.named_parameters() if p.dtype == compute}
    for parameter in half.values():
        parameter.data = parameter.data.to(stored_in)
    policy.rounding = replace(policy.rounding, held=frozenset(half))


def _from_pretrained(
    name: str,
    args: ModelArgs,
    config: Any,
    dtype: torch.dtype | str,
    *,
    reward: bool = False,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Return (the model, what transformers says about the weights that it read)."""
    loader = auto_class(config, reward=reward)
    verbosity = hf_logging.get_verbosity()
    if reward:  # transformers reports that the head is new
        hf_logging.set_verbosity_error()
    with _opening(name, "weights"):
        causal_lm, loading_info = loader.from_pretrained(  # nosec B615
            name,
            config=config,
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,  # other formats unpickle
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported in the info, which the caller checks
            **options,
        )
    hf_logging.set_verbosity(verbosity)
    return causal_lm, loading_info


def _from_files(
    name: str,
    config: Any,
    dtype: torch.dtype,
    args: ModelArgs,
    stored: ModelFiles,
    device: str,
    *,
    reward: bool,
) -> Any:
    """Return a model on its device that is read from the files one weight at a time.

    transformers would keep packed weights packed, or unpack them to bfloat16 whatever the dtype.
    """
    with _opening(name, "weights"), _parameters_without_memory():
        causal_lm = _new_model(name, config, dtype, args, None, reward=reward)
    _read_buffers(name, causal_lm, stored)
    _fill(name, PolicyModel(causal_lm), Mesh(), stored, device, dtype=dtype, exact=False)
    return causal_lm


def _new_model(
    name: str,
    config: Any,
    dtype: torch.dtype,
    args: ModelArgs,
    frozen: Collection[str] | None,
    *,
    reward: bool,
) -> Any:
    """Return a model without its weights; its folder may have settings of its answers."""
    folder = model_folder(args.config_from or name, args.revision)
    causal_lm = new_model(
        auto_class(config, reward=reward),
        config,
        dtype=dtype,
        attn_implementation=IMPLEMENTATION,
        trust_remote_code=args.trust_remote_code,
        keeps_tower=frozen is not None,
    )
    if not reward and folder and (folder / "generation_config.json").exists():
        causal_lm.generation_config = GenerationConfig.from_pretrained(folder)  # local  # nosec B615
    return causal_lm


def _names_of_adapter(policy: PolicyModel, *, changes_base: bool) -> list[str]:
    """Return the names of parameters that come with an adapter.

    PiSSA also takes from the base what it moves into the adapter.
    """
    changed = (".base_layer.weight",) if changes_base else ()
    return [
        key
        for key, _ in policy.named_parameters()
        if ".lora_" in key or ".modules_to_save." in key or key.endswith(changed)
    ]


def _round_weights(
    causal_lm: Any, rounding: Rounding, compute: torch.dtype, device: str, *, keeps: bool
) -> dict[str, Tensor]:
    """Move a float32 model to its device in half precision; if it `keeps` them, return the weights.

    One weight at a time: a whole float32 model may not fit.
    """
    float32_weights: dict[str, Tensor] = {}
    wide = re.compile("|".join(causal_lm._keep_in_fp32_modules_strict or ["$^"]))
    for key, parameter in causal_lm.named_parameters():
        if wide.search(key):
            continue
        weight = parameter.detach().to(device)
        if keeps and parameter.requires_grad:
            float32_weights[f"causal_lm.{key}"] = weight
        parameter.data = rounding.cast(key, weight, compute)
    return float32_weights


def load_divided(
    name: str,
    args: ModelArgs,
    device: str,
    mesh: Mesh,
    layout: Layout,
    *,
    trains: bool,
    compiled: bool = False,
    start: Start = Start(),
    rounding: Rounding = Rounding(),
    reward: bool = False,
    frozen: Collection[str] | None = None,
) -> PolicyModel | Stages:
    """Load what this rank holds of a model; trained shards are float32. Collective."""
    config = _divisible(name, args)
    source_dtype = config.dtype or torch.float32
    compute = stored_dtype(args, device)
    dtype = torch.float32 if trains and mesh.sums_gradients else compute
    with _opening(name, "weights"), _parameters_without_memory():
        plain = model_files(name, args, config) or ModelFiles(weight_files(None))
        # By the files: config.json may name another dtype.
        is_rounded = bool(set(_dtypes(plain).values()) - {dtype})
        stored: Any = _of_task(plain, config, start, reward=reward)
        causal_lm = _new_model(name, config, dtype, args, frozen, reward=reward)
        _arrange_tower(causal_lm, frozen)
    if not reward and args.config_from is None:
        stored = _complete(stored, causal_lm, config, name, args)
    _read_buffers(name, causal_lm, stored)
    if args.has_adapter:
        with _parameters_without_memory():
            stored = _adapt(causal_lm, stored, args, start)
    causal_lm.config.dtype = source_dtype
    exact = trains and dtype != torch.float32 and (is_rounded or args.has_adapter)

    def fill(model: PolicyModel) -> None:
        _fill(name, model, mesh, stored, "cpu" if layout.host else device, exact=exact)
        for module in model.modules():
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else buffer.to(device)

    policy = PolicyModel(causal_lm).eval()
    report_scan(policy, device)
    _freeze(policy, compute, everything=not trains)
    forward_dtype = compute_dtype(args, device)
    is_held = forward_dtype != compute
    policy.rounding = shard_rounding(policy, rounding.kind, forward_dtype, always=is_held)
    divided = divide(policy, mesh, layout, compute=compute, compiled=compiled, fill=fill)
    divided.rounding = replace(policy.rounding, places=places(divided, mesh))
    return divided


def _divisible(name: str, args: ModelArgs) -> Any:
    """Return the config of a model that can be divided among ranks; refuse others."""
    if args.quantization:
        raise ConfigError(
            "quantization: 4bit is for one process; start it without torchrun and ray.address"
        )
    config, proven = _config(name, args)
    if not proven:
        raise ConfigError(
            f"model family '{config.model_type}' cannot be divided: its packed log-probs can be "
            "compared with its own padded forward on the whole model only; train it on one "
            "device, or choose another family."
        )
    return config


def _read_buffers(name: str, causal_lm: Any, stored: ModelFiles) -> None:
    """Read the buffers that the files hold; the others were computed from the config."""
    saved = causal_lm.state_dict()
    for key, buffer in causal_lm.named_buffers():
        if key in saved:
            buffer.data = _read(name, stored, key, ShardSpec.full(buffer.shape))


def _freeze(policy: PolicyModel, compute: torch.dtype, *, everything: bool) -> None:
    """Give the parameters that do not train the dtype of products."""
    for parameter in policy.parameters():
        parameter.requires_grad_(parameter.requires_grad and not everything)
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(compute)


def _complete(stored: Any, causal_lm: Any, config: Any, name: str, args: ModelArgs) -> Any:
    """Return the stored weights, or those of the whole model if files lack a name of the model."""
    for key, _ in causal_lm.named_parameters():
        if key not in stored:
            return _read_whole(name, args, config, key)
    return stored


def _read_whole(name: str, args: ModelArgs, config: Any, missing: str) -> LoadedWeights:
    """Return the weights of a model whose files have other names than the model.

    Only transformers knows how they are renamed and put together, for a whole model at a time.
    """
    log.info("%s: its files have no %s; each rank reads the whole model on the host", name, missing)
    loaded, loading_info = _from_pretrained(name, args, config, "auto")
    _refuse_bad_weights(name, loaded, loading_info, {})
    return LoadedWeights(loaded.state_dict())


def _config(name: str, args: ModelArgs) -> tuple[Any, bool]:
    """Return the model's config, and whether a twin has verified its family."""
    if args.config_from is None and checkpoint_folder(Path(name).expanduser()):
        raise ConfigError(
            f"model '{name}': is a Megatron checkpoint; set model_args.config_from to a model with "
            "the same config.json and tokenizer"
        )
    name = args.config_from or name
    inspect_folder(name, args.revision)
    with _opening(name, "config"):
        # transformers would silently apply an adapter next to a model, or in its place.
        if adapter_config := find_adapter_config_file(name, revision=args.revision):
            raise ConfigError(
                f"model '{name}': holds an adapter ({Path(adapter_config).name}); name a model "
                "without one here, and the folder of an adapter in adapter_name_or_path"
            )
        config = AutoConfig.from_pretrained(  # nosec B615
            name, revision=args.revision, trust_remote_code=args.trust_remote_code
        )
        packing = getattr(config, "quantization_config", None) or {}
        if isinstance(packing, dict) and packing.get("quant_method") == "mxfp4":
            del config.quantization_config  # ModelFiles unpacks them
        for key, advice in REFUSED.items():
            if getattr(config, key, None):
                raise ValueError(f"config.json has {key}: {advice}")
    return config, check_family(config)


def _of_task(plain: ModelFiles, config: Any, start: Start, *, reward: bool) -> ModelFiles:
    """Return the weights of a model, or those of a reward model with its head."""
    if not reward:
        return plain
    if plain.folder is None:
        raise ConfigError("task: reward reads safetensors files only")
    width = config.get_text_config().hidden_size
    return RewardFiles(weight_files(plain.folder), width, start.seed)


def _begin_head(causal_lm: Any, info: dict[str, Any], seed: int) -> None:
    """Give the head of a reward model its start if the files have none."""
    if HEAD in info["missing_keys"]:
        info["missing_keys"] = set(info["missing_keys"]) - {HEAD}
        weight = causal_lm.score.weight
        weight.data = new_head(weight.shape[1], seed).to(weight.dtype)


def _adapt(causal_lm: Any, stored: ShardedFiles, args: ModelArgs, start: Start) -> Any:
    """Put the adapter of a role into the model, and return the source of all values."""
    from rather.model.adapters import AdapterWeights, inject  # PEFT takes seconds to import

    inject(causal_lm, args, keeps_start=start.kept)
    return AdapterWeights(stored, args, start.seed)


def _fill(
    name: str,
    policy: PolicyModel,
    mesh: Mesh,
    stored: Any,
    device: str,
    names: Collection[str] | None = None,
    *,
    exact: bool,
    dtype: torch.dtype | None = None,
) -> None:
    """Give parameters (all, or `names`) their values; shared ones stay shared."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in policy.modules():
        for key, held in module._parameters.items():
            holders.setdefault(id(held), []).append((module, key))
    specs = places(policy, mesh)
    for long_name, parameter in list(policy.named_parameters()):
        if names is not None and long_name not in names:
            continue
        weight = _read(name, stored, long_name.removeprefix("causal_lm."), specs[long_name])
        trained = parameter.requires_grad
        target = dtype or parameter.dtype
        if exact and trained:
            policy.exact[long_name] = weight.float().to(device)
        weight = weight.to(device)
        # The optimizer rounds the float32 parameters that it trains.
        if target == torch.bfloat16 or (long_name in policy.rounding.held and not trained):
            weight = policy.rounding.rounded(long_name, weight, specs[long_name])
        weight = weight.to(target)
        if isinstance(parameter, DTensor):  # from_local would leave the host
            sharded: Any = torch.empty_like(parameter, dtype=weight.dtype, device=device)
            sharded.to_local().copy_(weight)
            weight = sharded
        filled = nn.Parameter(weight, requires_grad=parameter.requires_grad)
        for module, where in holders[id(parameter)]:
            setattr(module, where, filled)


def _read(name: str, stored: Any, key: str, place: ShardSpec) -> Tensor:
    if key not in stored or stored.shape(key) != place.whole:
        state = f"has the shape {stored.shape(key)}" if key in stored else "is not there"
        raise ConfigError(
            f"model '{name}': the weights do not fill the model: {key} of {place.whole} {state}. A "
            "model that is stored under older names is read whole on one device and can be saved "
            "again from there"
        )
    weight: Tensor = stored.read(key, place)
    if not weight.is_floating_point():
        raise ConfigError(f"model '{name}': weights that are whole numbers: {key}")
    if not torch.isfinite(weight).all():
        raise ConfigError(f"model '{name}': weights that are not finite numbers: {key}")
    return weight


def _refuse_bad_weights(
    name: str, causal_lm: Any, info: dict[str, Any], dtypes: dict[str, torch.dtype]
) -> None:
    weights = {key for key, _ in causal_lm.named_parameters()}
    integers = [key for key in weights & dtypes.keys() if not dtypes[key].is_floating_point]
    nonfinite = [key for key, p in causal_lm.named_parameters() if not torch.isfinite(p).all()]
    lists = {
        "the weights do not fill the model; missing keys": info.get("missing_keys"),
        "the weights do not fill the model; mismatched keys": info.get("mismatched_keys"),
        "weights that are whole numbers": integers,
        "weights that are not finite numbers": nonfinite,
    }
    for problem, keys in lists.items():
        if keys:
            raise ConfigError(f"model '{name}': {problem}: {', '.join(map(str, sorted(keys)[:5]))}")


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Create parameters on the meta device in this block; the few buffers stay real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _opening(name: str, what: str) -> Iterator[None]:
    """Turn whatever the libraries raise about an unusable folder into one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        message = " ".join(line.strip() for line in lines[:2])
        if "trust_remote_code" in str(error):
            message += " If you trust it: --trust-remote-code, or model_args.trust_remote_code."
        raise ConfigError(f"model '{name}': its {what} cannot be opened: {message}") from error
