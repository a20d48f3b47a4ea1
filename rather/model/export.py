"""Export trained weights as a folder for `from_pretrained`: weights, config, tokenizer, card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from torch import Tensor

from rather.checkpoint.sharded_tensors import ShardedFiles, TensorStream, safetensors_file
from rather.config.redaction import redact
from rather.config.schema import DPOConfig, ModelArgs
from rather.errors import DiskError
from rather.model.files import model_folder, weight_files
from rather.model.policy import PolicyModel

LARGEST_FILE = 4_000_000_000  # bytes, transformers' "4GB"


def export_model(
    policy: PolicyModel, weights: Mapping[str, Tensor], tokenizer: Any, folder: Path, card: str
) -> None:
    """Export `weights` (with the policy's names) in the dtype of the source model, atomically."""
    publish(whole_model(policy, weights, tokenizer, folder), folder, card)


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
    base = model_folder(name, args.revision)
    assert base is not None
    adapter = folder.with_name(folder.name.replace("model", "adapter"))  # best_model: best_adapter
    publish(whole_adapter(model, weights, source, tokenizer, adapter), adapter, card)
    publish(merged_model(model, base, adapter, tokenizer, folder), folder, card)


def whole_model(
    policy: PolicyModel,
    weights: Mapping[str, Tensor],
    tokenizer: Any,
    folder: Path,
    largest: int | None = None,
) -> Path:
    """Write a model that `publish` renames to `folder`, in files of at most so many bytes."""
    model = policy.causal_lm
    own = (model.config.dtype, model.generation_config)
    with _new_folder(folder, tokenizer) as temporary:
        model.generation_config = type(own[1])()  # save_pretrained refuses many valid ones
        try:
            state = _state(policy, weights)
            limit = largest or LARGEST_FILE
            model.save_pretrained(temporary, state_dict=state, max_shard_size=limit)
        finally:  # save_pretrained sets the dtype to that of the training
            model.config.dtype, model.generation_config = own
        _write_configs(model, temporary)
    return temporary


def _state(policy: PolicyModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of the Hugging Face model; tied weights stay one tensor."""
    model = policy.causal_lm
    trained = {
        id(parameter): weights.get(name, parameter).detach().to(model.config.dtype).cpu()
        for name, parameter in policy.named_parameters()
    }
    named = model.named_parameters(remove_duplicate=False)
    return dict(model.state_dict()) | {name: trained[id(parameter)] for name, parameter in named}


def whole_adapter(
    model: Any,
    weights: Mapping[str, Tensor],
    source: tuple[str, ModelArgs],
    tokenizer: Any,
    folder: Path,
) -> Path:
    """Write an adapter that `publish` renames to `folder`."""
    from rather.model.adapters import write_adapter  # PEFT takes seconds to import

    with _new_folder(folder, tokenizer) as temporary:
        write_adapter(temporary, model, weights, source)
    return temporary


def merged_model(
    model: Any, base: Path, adapter: Path, tokenizer: Any, folder: Path, largest: int | None = None
) -> Path:
    """Write a base with an adapter merged in; `publish` renames it to `folder`."""
    from rather.model.adapters import merge

    weights = merge(ShardedFiles(weight_files(base)), adapter, model.config.dtype)
    return _write_model(model, weights, tokenizer, folder, largest)


def _write_model(
    model: Any,
    weights: Mapping[str, TensorStream],
    tokenizer: Any,
    folder: Path,
    largest: int | None = None,
) -> Path:
    split = split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda weight: weight.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=largest or LARGEST_FILE,
    )
    with _new_folder(folder, tokenizer) as temporary:
        _write_configs(model, temporary)
        for file, names in split.filename_to_tensors.items():
            with open(temporary / file, "xb") as out:
                out.writelines(safetensors_file({name: weights[name] for name in names}, {}))
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2) + "\n"
            (temporary / "model.safetensors.index.json").write_text(text, "utf-8")
    return temporary


def _write_configs(model: Any, folder: Path) -> None:
    model.config.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    config.pop("quantization_config", None)  # of the training; the export is not quantised
    config["dtype"] = str(model.config.dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    model.generation_config.to_json_file(folder / "generation_config.json")


@contextmanager
def _new_folder(folder: Path, tokenizer: Any) -> Iterator[Path]:
    """Create the temporary folder that `publish` renames; the tokenizer is added at the end."""
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    with _removed_on_error(temporary, folder):
        temporary.mkdir(parents=True)
        yield temporary
        tokenizer.save_pretrained(temporary)


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


def publish(temporary: Path, folder: Path, card: str) -> None:
    """Add the card and rename a temporary folder to `folder`, atomically."""
    old = folder.with_name(f".old-{folder.name}")
    with _removed_on_error(temporary, folder):
        (temporary / "README.md").write_text(card, "utf-8")
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
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


def model_card(config: DPOConfig, step: int, pairs: int, *, with_reference: bool) -> str:
    """Return Markdown with the front matter that model hubs read."""
    training, settings = (
        config.actor_train.training_args,
        config.loss_numbers | config.loss_modifiers,
    )
    numbers = ", ".join(f"{key} {value}" for key, value in settings.items())
    reference = f"`{config.reference.model_path}`" if with_reference else "none"
    adapter = config.actor_train.model_args.adapter_settings or {}
    said = ", ".join(f"{key} {value}" for key, value in adapter.items() if value)
    row = f"\n| adapter | {said} |" if said else ""
    card = f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [rather, preference-alignment, {", ".join(config.loss_names)}]
---

# {config.exp_name}

`{config.actor_train.model_path}` aligned with preference pairs by Rather.

| | |
|---|---|
| loss | {" + ".join(config.loss_names)}{f" ({numbers})" if numbers else ""} |
| reference | {reference} |{row}
| pairs | {pairs} in training, {config.global_batch()} per step, {step} steps |
| learning rate | {training.learning_rate} ({training.lr_scheduler_type}) |
| sequence length | {config.sequence_length} |
| seed | {config.seed} |
"""
    return redact(card)  # a URL of a model may contain a password
