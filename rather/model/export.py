"""Export trained weights as a folder for `from_pretrained`: weights, config, tokenizer, card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rather.checkpoint.sharded_tensors import ShardedFiles, TensorStream, safetensors_file
from rather.config.paths import is_local
from rather.config.schema import ModelArgs
from rather.errors import DiskError
from rather.model.files import model_folder, weight_files
from rather.model.policy import PolicyModel

LARGEST_FILE = 4_000_000_000  # bytes, transformers' "4GB"


def export_model(
    policy: PolicyModel, weights: Mapping[str, Tensor], tokenizer: Any, folder: Path, card: str
) -> None:
    """Export `weights` (with the policy's names) in the dtype of the source model, atomically."""
    publish(whole_model(policy, weights, tokenizer, folder), folder, card)


def whole_model(
    policy: PolicyModel,
    weights: Mapping[str, Tensor],
    tokenizer: Any,
    folder: Path,
    largest: int | None = None,
) -> Path:
    """Write a model that `publish` renames to `folder`, in files of at most so many bytes."""
    model = policy.causal_lm
    dtype = model.config.dtype
    with _new_folder(folder) as temporary:
        try:
            with _any_generation_config(model, temporary / "generation_config.json"):
                state = _state(policy, weights, dtype)
                model.save_pretrained(temporary, state_dict=state, max_shard_size=largest or "4GB")
        finally:
            model.config.dtype = dtype  # save_pretrained sets it to the dtype of the training
        _set_dtype(temporary / "config.json", dtype)
        tokenizer.save_pretrained(temporary)
    return temporary


def export_stored(
    model: Any, stored: ShardedFiles, tokenizer: Any, folder: Path, card: str
) -> None:
    """Export weights that several ranks have written to files; `model` gives only its configs.

    They are streamed: at most some rows of one weight are in memory.
    """
    dtype = model.config.dtype
    weights = {
        name.removeprefix("causal_lm."): stored.stream(name, dtype) for name in sorted(stored)
    }
    publish(_write_model(model, weights, tokenizer, folder), folder, card)


def export_adapter(
    model: Any,
    weights: Mapping[str, Tensor],
    source: tuple[str, ModelArgs],
    tokenizer: Any,
    folder: Path,
    card: str,
) -> None:
    """Export the adapter for PEFT next to `folder`, and the merged model in `folder`."""
    name, args = source
    base, adapter = model_folder(name, args.revision), adapter_export(folder)
    assert base is not None
    publish(whole_adapter(model, weights, source, tokenizer, adapter), adapter, card)
    publish(merged_model(model, base, adapter, tokenizer, folder), folder, card)


def whole_adapter(
    model: Any,
    weights: Mapping[str, Tensor],
    source: tuple[str, ModelArgs],
    tokenizer: Any,
    folder: Path,
) -> Path:
    """Write an adapter that `publish` renames to `folder`."""
    from rather.model.adapters import config_of, write_adapter

    name, args = source
    config, base = config_of(model), model_folder(name, args.revision)
    assert config is not None
    assert base is not None
    with _new_folder(folder) as temporary:
        named = str(base.absolute()) if is_local(name) else name
        write_adapter(temporary, config, weights, named, args.revision, args.quantization)
        tokenizer.save_pretrained(temporary)
    return temporary


def merged_model(
    model: Any, base: Path, adapter: Path, tokenizer: Any, folder: Path, largest: int | None = None
) -> Path:
    """Write a base with an adapter merged in; `publish` renames it to `folder`."""
    from rather.model.adapters import merge

    weights = merge(ShardedFiles(weight_files(base)), adapter, model.config.dtype)
    return _write_model(model, weights, tokenizer, folder, largest)


def adapter_export(folder: Path) -> Path:
    """Return the adapter's folder: model -> adapter, best_model -> best_adapter."""
    return folder.with_name(folder.name.replace("model", "adapter"))


def _write_model(
    model: Any,
    weights: Mapping[str, TensorStream],
    tokenizer: Any,
    folder: Path,
    largest: int | None = None,
) -> Path:
    """Write all files but the card into a temporary folder."""
    with _new_folder(folder) as temporary:
        model.config.save_pretrained(temporary)
        _set_dtype(temporary / "config.json", model.config.dtype)
        model.generation_config.to_json_file(temporary / "generation_config.json")
        _write_weights(temporary, weights, largest)
        tokenizer.save_pretrained(temporary)
    return temporary


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Create the temporary folder that `publish` renames."""
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    with _removed_on_error(temporary, folder):
        temporary.mkdir(parents=True)
        yield temporary


@contextmanager
def _removed_on_error(temporary: Path, folder: Path) -> Iterator[None]:
    """Remove the temporary folder on any error; report a disk error as one."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # The writer of safetensors does not raise OSError.
        if not isinstance(error, OSError | SafetensorError):
            raise
        cause = getattr(error, "strerror", None) or error
        raise DiskError(
            f"{folder}: could not be written ({cause}). Free some disk space and run the same "
            "command again; an earlier export is unchanged."
        ) from error


def _write_weights(folder: Path, weights: Mapping[str, TensorStream], largest: int | None) -> None:
    """Write one file, or several with the index that transformers reads."""
    shards: list[dict[str, TensorStream]] = [{}]
    for name, weight in weights.items():
        if shards[-1] and sum(each.nbytes for each in shards[-1].values()) + weight.nbytes > (
            largest or LARGEST_FILE
        ):
            shards.append({})
        shards[-1][name] = weight
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(names) > 1 else ["model.safetensors"]
    for file, shard in zip(names, shards, strict=True):
        with open(folder / file, "xb") as out:
            for chunk in safetensors_file(shard, {}):
                out.write(chunk)
    if len(names) > 1:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {
            "metadata": {"total_size": sum(w.nbytes for w in weights.values())},
            "weight_map": places,
        }
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )


def publish(temporary: Path, folder: Path, card: str) -> None:
    """Add the card and rename a temporary folder to `folder`, atomically."""
    with _removed_on_error(temporary, folder):
        (temporary / "README.md").write_text(card, encoding="utf-8")
        for file in temporary.rglob("*"):
            _sync(file)
        _sync(temporary)
        _replace(temporary, folder)


def _state(
    policy: PolicyModel, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the state dict of the Hugging Face model; tied weights stay one tensor."""
    trained: dict[int, Tensor] = {}
    for name, parameter in policy.named_parameters():
        trained[id(parameter)] = weights.get(name, parameter).detach().to(dtype).cpu()
    state: dict[str, Tensor] = dict(policy.causal_lm.state_dict())
    for name, parameter in policy.causal_lm.named_parameters(remove_duplicate=False):
        state[name] = trained[id(parameter)]
    return state


@contextmanager
def _any_generation_config(model: Any, file: Path) -> Iterator[None]:
    """Write the source's generation config as it is; save_pretrained refuses many valid ones."""
    own = model.generation_config
    model.generation_config = type(own)()
    try:
        yield
    finally:
        model.generation_config = own
    own.to_json_file(file)


def _set_dtype(config_file: Path, dtype: torch.dtype) -> None:
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)  # of the training; the export is not quantised
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _replace(temporary: Path, folder: Path) -> None:
    old = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    try:
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        _sync(folder.parent)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
