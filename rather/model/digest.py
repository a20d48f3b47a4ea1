"""Which model is it? A digest of the files that decide its log-probs, whatever the folder is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download

from rather.config.paths import is_local
from rather.data.cache import text_sha

# Fields of config.json that no forward pass reads: who wrote it, in which precision it lies on the disk, generation.
NOT_IN_A_FORWARD = frozenset({
    "_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype", "bos_token_id", "eos_token_id",
    "pad_token_id", "decoder_start_token_id", "output_attentions", "output_hidden_states", "return_dict", "id2label",
    "label2id", "problem_type", "task_specific_params",
})  # fmt: skip
FILES = ("*.safetensors", "*.py")


def model_folder(name: str, revision: str | None) -> Path | None:
    """The local folder of a model; of a hub name its snapshot. None where it cannot be had: loading it tells why."""
    if is_local(name):
        return Path(name).expanduser()
    try:
        wanted = [*FILES, "*.json"]
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"]
            )
        )
    except (OSError, ValueError):
        return None


def model_digest(folder: Path, sha: Callable[[Path], str]) -> str | None:
    """Weights, code that comes with them, and the config fields that enter a forward pass. `sha` hashes a file."""
    files = sorted(file for pattern in FILES for file in folder.glob(pattern))
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        contents = {file.name: sha(file) for file in files}
    except (OSError, ValueError):
        return None
    if not any(name.endswith(".safetensors") for name in contents):
        return None
    return text_sha(json.dumps([_forward_fields(config), contents], sort_keys=True))


def config_digest(name: str, revision: str | None) -> str | None:
    """Of the config fields alone; None where there is no file to read."""
    folder = model_folder(name, revision)
    try:
        config = json.loads((folder / "config.json").read_text("utf-8")) if folder else None
    except (OSError, ValueError):
        return None
    return text_sha(json.dumps(_forward_fields(config), sort_keys=True)) if folder else None


def _forward_fields(config: object) -> object:
    """Also inside the parts of a composed config, such as text_config."""
    if not isinstance(config, dict):
        return config
    return {
        key: _forward_fields(value) for key, value in config.items() if key not in NOT_IN_A_FORWARD
    }
