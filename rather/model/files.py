"""The files of a model or adapter folder: where it is, what it contains, and its digest.

A folder comes from others: names and links that lead out of it are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download

from rather.config.paths import is_local
from rather.data.cache import text_sha
from rather.errors import ConfigError
from rather.files import read_json, refuse_outside

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Fields of config.json that no forward pass reads: its author, the dtype on the disk, generation.
NOT_IN_A_FORWARD = frozenset({
    "_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype", "bos_token_id",
    "eos_token_id", "pad_token_id", "decoder_start_token_id", "output_attentions",
    "output_hidden_states", "return_dict", "id2label", "label2id",
    "problem_type", "task_specific_params",
})  # fmt: skip
CONTENT = ("*.safetensors", "*.py")


def model_folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model, or the snapshot of a hub name; None if it is unavailable."""
    if is_local(name):
        return Path(name).expanduser()
    try:
        wanted = [*CONTENT, "*.json"]
        found = snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"]
        )
        return Path(found)
    except (OSError, ValueError):  # loading the model will report why
        return None


def weight_files(folder: Path | None) -> list[Path]:
    """Return the one file of weights, or those in the index, in the order of transformers."""
    if folder is None:
        raise FileNotFoundError("neither a folder nor a hub model that is available")
    names, index = [WEIGHTS], folder / INDEX
    if not (folder / WEIGHTS).exists() and index.exists():
        try:
            listed = read_json(index)["weight_map"]
            names = sorted(set(map(str, listed.values())))
        except Exception as error:  # a stranger's file may be anything
            raise ConfigError(f"{index}: is not an index of weight files ({error!r})") from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{index}: lists {name!r}; only .safetensors files next to it are read"
            )
        refuse_outside(folder, folder / name)
    return [folder / name for name in names]


def model_digest(folder: Path, sha: Callable[[Path], str]) -> str | None:
    """Return a digest of all that decides the log-probs: weights, code, and config fields.

    `sha` hashes a file. None if there are no weights or the files cannot be read.
    """
    try:
        files = sorted(file for pattern in CONTENT for file in folder.glob(pattern))
        contents = {file.name: sha(file) for file in files}
        if any(name.endswith(".safetensors") for name in contents):
            return text_sha(json.dumps([_forward_fields(folder), contents], sort_keys=True))
    except (OSError, ValueError):
        pass
    return None


def config_digest(name: str, revision: str | None) -> str | None:
    """Return a digest of the config fields alone; None if the file cannot be read."""
    folder = model_folder(name, revision)
    try:
        return text_sha(json.dumps(_forward_fields(folder), sort_keys=True)) if folder else None
    except (OSError, ValueError):
        return None


def _forward_fields(folder: Path) -> object:
    """Return the config fields that a forward pass reads, also in parts such as text_config."""

    def select(config: object) -> object:
        if not isinstance(config, dict):
            return config
        return {key: select(value) for key, value in config.items() if key not in NOT_IN_A_FORWARD}

    return select(read_json(folder / "config.json"))
