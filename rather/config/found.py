"""What the config.yaml of a run folder may say to a command that opens the folder.

A run folder may come from anybody, so its config is data, and one function decides about it for
every command: `found_values` keeps the keys in ALLOWED and no other. It fills in no `${...}`, and
keeps no address, no number of processes or devices, and no folder to write to.

A name of a model, a data file or a template is kept if it leads into the run folder itself. What
is outside of it counts only if the user has typed it: in the config of a run that they started
themselves, or now, with --trust-paths. To know its own runs, Rather signs every config.yaml that it
writes with a key that only this user can read.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rather.config.compat import DEGREES
from rather.config.inherit import set_at
from rather.config.paths import TEMPLATE_SUFFIXES, is_local
from rather.config.schema import LOSS_MODIFIERS, LOSS_NUMBERS, DataArgs, TrainingArgs
from rather.config.values import RUN_NAME, device_list
from rather.errors import ConfigError
from rather.files import JsonObject, own, parse_json, parse_yaml, read_bytes, real_path, yaml_text

log = logging.getLogger(__name__)

ACTOR, REFERENCE, VALIDATION = "actor_train", "reference", "validation"
MODEL_NAMES = (
    "pretrain", "model_name_or_path", "tokenizer_name_or_path", "adapter_name_or_path",
    "config_from",
)  # fmt: skip
MODEL_KEYS = (*MODEL_NAMES[1:], "revision", "dtype", "model_type", "quantization")
ADAPTER_KEYS = (
    "lora_rank", "lora_alpha", "lora_target", "lora_dropout", "modules_to_save",
    "additional_target", "use_rslora", "use_dora", "init_lora_weights",
)  # fmt: skip
DATA_NAMES = ("file_name", "corrections")
DATA_KEYS = (
    "template", "format", "columns", "label_threshold", "score", "overlong", "max_prompt_length",
    "separator", "special_tokens", "encoding", "max_samples", "default_system",
    "chat_template_kwargs", "image_max_pixels", "image_min_pixels",
)  # fmt: skip
# Numbers, switches, words from a fixed list and names of columns. A key that is missing here is
# not read from a found config: add one only if no value of it opens, writes or starts anything.
# `parity` was removed; a run that was trained with it had other tokens and is refused.
TOP_KEYS = (
    "seed", "deterministic", "platform",
    "max_steps", "eval_steps", "metric_for_best_model", "early_stopping_patience", "on_nonfinite",
    "max_nonfinite_steps", "spike",
    "pretrain", "task", "pref_loss", "loss_weights", "loss_type", "parity", "ipo", "loss_args",
    "use_ref_model", "disable_reference_model", "sync_ref_model", "ref_model_mixup_alpha",
    "ref_model_sync_steps", "max_grad_norm", "precision", "rounding",
    *LOSS_NUMBERS, *LOSS_MODIFIERS,
    "sequence_length", "global_template", "apply_loss_mask", "chosen_key", "rejected_key",
    "ranked_pairs", "min_gap", "max_length_gap", "group_responses", "on_bad", "max_bad_fraction",
)  # fmt: skip
ALLOWED = (
    *TOP_KEYS,
    *(f"{ACTOR}.model_args.{key}" for key in (*MODEL_KEYS, *ADAPTER_KEYS, "moe_aux_loss_coef")),
    *(f"{ACTOR}.training_args.{key}" for key in TrainingArgs.model_fields),
    *(f"{ACTOR}.data_args.{key}" for key in (*DATA_KEYS, *DATA_NAMES, "weights")),
    *(f"{REFERENCE}.model_args.{key}" for key in MODEL_KEYS),
    f"{REFERENCE}.cache.enabled",
    *(f"{VALIDATION}.data_args.{key}" for key in (*DATA_KEYS, "file_name", "split")),
)
# All that a result needs of its run, its card, and a checkpoint.
OF_A_RESULT = (f"{ACTOR}.model_args.dtype", "rounding")
OF_A_CARD = (
    "pretrain", *(f"{ACTOR}.model_args.{key}" for key in ("model_name_or_path", "revision")),
    f"{REFERENCE}.model_args.model_name_or_path",
)  # fmt: skip
OF_A_CHECKPOINT = (
    "seed", "task", "rounding", "pretrain", "global_template", f"{ACTOR}.data_args.template",
    *(key for key in ALLOWED
      if key.startswith((f"{ACTOR}.model_args.", f"{REFERENCE}.model_args."))),
)  # fmt: skip
# Where a command may write next to a run folder.
WRITTEN = (".cache", ".cache/data", ".cache/reference", ".cache/vision", "logs")
TEMPLATE_NAMES = ("template", "global_template")
NAMES = {*MODEL_NAMES, *DATA_NAMES, *TEMPLATE_NAMES}
ADDRESSES = ("s3:", "hf:")  # also what a joined path begins with
SIGNATURE = "# Written by your own rather train: "  # the first line; a comment for YAML
KEY_BYTES = 32
UNRESOLVED = "is not filled in from the environment; write the path itself and add --trust-paths"
STRANGE = (
    "Your own `rather train` did not write this file as it is now. If you trust its names, add "
    "--trust-paths."
)


@dataclass(frozen=True)
class Trust:
    """What the user of a command has allowed a folder to do."""

    remote_code: bool = False  # run the Python files of its model
    paths: bool = False  # name models and files outside of it
    any_base: bool = False  # put an adapter on another base than the one it was trained on


NO_TRUST = Trust()


class Missing:
    """Stands for a key that is not written; null is a value."""


def found_values(
    path: Path, trust: Trust = NO_TRUST, keys: Collection[str] = ALLOWED
) -> JsonObject:
    """Return those of `keys` in a run folder's config.yaml that a command may use.

    Raise one ConfigError with every name that it may not use.
    """
    text = yaml_text(path, own)
    try:
        written = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(written, dict):
        raise ConfigError(f"{path}: the file must hold keys and values, such as `pretrain: ...`")
    run_dir = path.absolute().parent
    home = run_dir.parent  # where the folder is now
    names = _Names(run_dir, is_trusted=trust.paths or is_signed(text))
    allowed: JsonObject = {}
    for key in keys:
        setting = _written_at(written, key)
        if setting is Missing:
            continue
        if key.rpartition(".")[2] in NAMES:
            setting = names.checked(key, setting, written)
        elif _has_interpolation(setting):
            log.warning("%s: %s: %s is not filled in; the default is used", path, key, setting)
            continue
        set_at(allowed, key, setting)
    if names.problems:
        raise ConfigError([*names.problems.values(), *names.advice])
    if keys is ALLOWED:
        _keep_pairs_per_step(allowed, written)
        if not trust.paths:
            _refuse_links(home, run_dir.name)
    allowed |= {"output_dir": str(home), "logging_dir": str(home / "logs")}
    if RUN_NAME.fullmatch(run_dir.name):
        allowed["exp_name"] = run_dir.name
    for role in (ACTOR, REFERENCE):
        set_at(allowed, f"{role}.model_args.trust_remote_code", trust.remote_code)
    return allowed


def in_run_folder(path: Path) -> bool:
    return (path.absolute().parent / "metrics.jsonl").exists()


def is_found(path: Path) -> bool:
    """Whether a YAML is in a run folder that this user's own `rather train` did not write."""
    config = path.absolute().parent / "config.yaml"
    try:
        return in_run_folder(path) and not is_signed(yaml_text(config, own))
    except (OSError, ValueError):
        return True


def _written_at(values: Any, key: str) -> Any:
    """Return the plain value of a key path, or Missing."""
    for name in key.split("."):
        if not isinstance(values, dict) or name not in values:
            return Missing
        values = values[name]
    try:
        return parse_json(json.dumps(values, default=str))  # 1: x has a number as its key in YAML
    except (TypeError, ValueError) as error:  # such as a date as a key, or .nan
        raise ConfigError(f"{key}: is not a value that a config can have ({error})") from None


def _has_interpolation(value: Any) -> bool:
    return "${" in json.dumps(value)


@dataclass
class _Names:
    """Decides which models, data files and templates a found config may name."""

    run_dir: Path
    is_trusted: bool
    problems: dict[str, str] = field(default_factory=dict)  # name -> the first problem with it
    advice: list[str] = field(default_factory=list)

    def checked(self, key: str, value: Any, written: JsonObject) -> Any:
        """Return the value of a key that names something, data files as absolute paths."""
        try:
            return self._checked(key, value, written)
        except (OSError, RuntimeError, ValueError) as error:  # a null byte, ~ of an unknown user
            self._refuse(key, str(value)[:100], f"is not a path ({error})")
            return value

    def _checked(self, key: str, value: Any, written: JsonObject) -> Any:
        name = key.rpartition(".")[2]
        if _has_interpolation(value):
            self._refuse(key, str(value), UNRESOLVED)
        elif name in DATA_NAMES:
            folder = _written_at(written, f"{key.rpartition('.')[0]}.dataset_dir")
            return self._located(key, value, folder)
        elif isinstance(value, str) and (name not in TEMPLATE_NAMES or _is_file_name(value)):
            self._check(key, value, is_hub_name=name in MODEL_NAMES and not is_local(value))
        return value

    def _located(self, key: str, value: Any, folder: Any) -> Any:
        """Return file names, also in lists and named sets, as local paths; refuse addresses."""
        if isinstance(value, list):
            return [self._located(key, entry, folder) for entry in value]
        if isinstance(value, dict):
            return {name: self._located(key, files, folder) for name, files in value.items()}
        if not isinstance(value, str) or not value:
            return value
        # The folder may be an address, or its first half.
        data_args = DataArgs(dataset_dir=folder if isinstance(folder, str) and folder else None)
        path = str(data_args.locate(value))
        if path.startswith(ADDRESSES) or value.startswith(ADDRESSES):
            self._refuse(key, value, "is an address; a config in a run folder downloads nothing")
        elif _has_interpolation(path):
            self._refuse(key, path, UNRESOLVED)
        else:
            self._check(key, path)
        return os.path.abspath(path)

    def _check(self, key: str, name: str, *, is_hub_name: bool = False) -> None:
        target = real_path(Path(name).expanduser())
        is_inside = not is_hub_name and target.is_relative_to(real_path(self.run_dir))
        if not is_inside and not self.is_trusted:
            why = "is a model of the hub" if is_hub_name else "is outside of the run folder"
            self._refuse(key, name, why)
            self.advice = [STRANGE]

    def _refuse(self, key: str, name: str, why: str) -> None:
        file = self.run_dir / "config.yaml"
        self.problems.setdefault(name, f"{file}: {key}: {name} {why}")


def _is_file_name(template: str) -> bool:
    """Whether a template may be a file, and not the name of one that Rather has."""
    looks_like_one = "/" in template or template.endswith(TEMPLATE_SUFFIXES)
    return looks_like_one or os.path.lexists(Path(template).expanduser())


def _refuse_links(home: Path, run_name: str) -> None:
    """Refuse links in the place of folders that a command writes to."""
    for name in (*WRITTEN, f"logs/{run_name}-planted"):
        if (home / name).is_symlink():
            raise ConfigError(
                f"{home / name}: is a link, and it came with the run folder; replace it by a "
                "folder, or add --trust-paths if you trust it"
            )


def _keep_pairs_per_step(allowed: JsonObject, written: JsonObject) -> None:
    """Accumulate on one device the pairs that the devices of the run had in a step."""
    key = f"{ACTOR}.training_args.gradient_accumulation_steps"
    try:
        devices = len(device_list(_written_at(written, f"{ACTOR}.device_mapping")) or [0])
        devices_per_replica = prod(_written_degrees(written))
        steps = int(_written_at(allowed, key))
    except (TypeError, ValueError):
        return  # a run on one device, or values that the validation refuses
    if devices > 1:
        set_at(allowed, key, steps * max(1, devices // devices_per_replica))


def _written_degrees(written: JsonObject) -> list[int]:
    """Return the degrees of tp, pp and cp that a config names. Runs write every word down."""
    degrees = []
    for name in ("tp_size", "pp_size", "cp_size"):
        words = (name, f"strategy_config.{name}", f"strategy_config.{DEGREES[name]}")
        sizes = [_written_at(written, f"{ACTOR}.strategy_args.{word}") for word in words]
        degrees.append(next((int(size) for size in sizes if size not in (Missing, None)), 1))
    return degrees


# --- Rather's own signature ---


def signed(text: str) -> str:
    """Return the text of a config.yaml with this user's signature; without it if impossible."""
    signature = _signature(text, make=True)
    return f"{SIGNATURE}{signature}\n{text}" if signature else text


def is_signed(text: str) -> bool:
    """Whether this user's own run wrote a config.yaml, and nobody changed it since."""
    first_line, _, signed_text = text.partition("\n")
    signature = _signature(signed_text) if first_line.startswith(SIGNATURE) else None
    return signature is not None and hmac.compare_digest(
        first_line.removeprefix(SIGNATURE).encode(), signature.encode()
    )


def _signature(text: str, *, make: bool = False) -> str | None:
    try:
        key = _key(make=make)
    except (OSError, RuntimeError, ValueError):  # no home folder, or not one to write to
        return None
    return hmac.digest(key, text.encode(), "sha256").hex()


def _key(*, make: bool) -> bytes:
    """Return the key of this user, and make it if there is none."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(state) / "rather" / "run.key"
    if make and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = file.with_name(f".{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(KEY_BYTES))
            os.close(descriptor)
            os.link(draft, file)  # a second process may be as far; the first one wins
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    status = file.lstat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(f"{file}: other users can read it")
    key = read_bytes(file, KEY_BYTES, own)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{file}: is not a key")
    return key
