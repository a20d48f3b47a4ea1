"""The schema as a flat table of key paths, and messages about wrong keys and values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rather.config.compat import DEGREES, REMOVED, REMOVED_VALUES, Names
from rather.config.plugins import did_you_mean
from rather.config.redaction import looks_secret
from rather.config.schema import RunConfig
from rather.config.values import Section, accepted_types
from rather.files import JsonObject

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
PLURALS = {str: "texts", int: "whole numbers", float: "numbers"}
SPECIAL = {
    "lora_dropout": "0",
    "worker_cls": "a dotted import path or null",
    "device_mapping": "a list of device numbers, a range in text, or null",
    "eval_steps": "a whole number of steps, a fraction of the run between 0 and 1, or null",
    "save_steps": "a whole number of steps, a fraction of the run between 0 and 1, or null",
    "split": "a fraction between 0 and 1, a whole number of pairs, or null",
}
LISTED = 20  # keys of a group that a message lists
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}

TRAINING = "actor_train.training_args"
MODEL = "actor_train.model_args"
STRATEGY = "actor_train.strategy_args"
# Names that users of other trainers expect, and ROLL's old names -> a key, and the value to set if
# the other tool's value would not do.
OTHER_NAMES = {
    "lr": f"{TRAINING}.learning_rate",
    "batch_size": "train_batch_size",
    "global_batch_size": "train_batch_size",
    "micro_batch_size": f"{TRAINING}.per_device_train_batch_size",
    "gradient_accumulation": f"{TRAINING}.gradient_accumulation_steps",
    "accumulation_steps": f"{TRAINING}.gradient_accumulation_steps",
    "epochs": f"{TRAINING}.num_train_epochs",
    "num_epochs": f"{TRAINING}.num_train_epochs",
    "steps": "max_steps",
    "warmup": f"{TRAINING}.warmup_steps",
    "scheduler": f"{TRAINING}.lr_scheduler_type",
    "lr_scheduler": f"{TRAINING}.lr_scheduler_type",
    "optim": "precision: lean for 8-bit moments; the optimizer is always AdamW",
    "optimizer": "precision: lean for 8-bit moments; the optimizer is always AdamW",
    "grad_clip": "max_grad_norm",
    "model": "pretrain",
    "model_name": "pretrain",
    "model_path": "pretrain",
    "base_model": "pretrain",
    "ref_model": "reference.model_args.model_name_or_path",
    "tokenizer": f"{MODEL}.tokenizer_name_or_path",
    "torch_dtype": f"{MODEL}.dtype",
    "bf16": f"{MODEL}.dtype: bf16",
    "fp16": f"{MODEL}.dtype: fp16",
    "tf32": "precision",
    "load_in_4bit": f"{MODEL}.quantization: 4bit",
    "load_in_8bit": f"{MODEL}.quantization: 4bit (there are no 8-bit weights)",
    "quantization_bit": f"{MODEL}.quantization: 4bit",
    "lora_r": f"{MODEL}.lora_rank",
    "r": f"{MODEL}.lora_rank",
    "target_modules": f"{MODEL}.lora_target",
    "lora_target_modules": f"{MODEL}.lora_target",
    "peft": f"{MODEL}.lora_rank",
    "use_peft": f"{MODEL}.lora_rank",
    "gradient_checkpointing": f"{MODEL}.disable_gradient_checkpointing",
    **dict.fromkeys(("tp", "tensor_parallel_size", DEGREES["tp_size"]), f"{STRATEGY}.tp_size"),
    **dict.fromkeys(("pp", "pipeline_parallel_size", DEGREES["pp_size"]), f"{STRATEGY}.pp_size"),
    **dict.fromkeys(("cp", "sp", DEGREES["cp_size"]), f"{STRATEGY}.cp_size"),
    **dict.fromkeys(("ep", "expert_parallel_size", DEGREES["ep_size"]), f"{STRATEGY}.ep_size"),
    "gpus": "actor_train.device_mapping: list(range(0,N)) for N GPUs",
    "num_gpus": "actor_train.device_mapping: list(range(0,N)) for N GPUs",
    "n_gpus": "actor_train.device_mapping: list(range(0,N)) for N GPUs",
    "device": "platform",
    "deepspeed": "actor_train.strategy_args.strategy_name: zero3",
    "fsdp": "actor_train.strategy_args.strategy_name: fsdp2_train",
    "dataset": "actor_train.data_args.file_name",
    "dataset_name": "actor_train.data_args.file_name",
    "data": "actor_train.data_args.file_name",
    "data_path": "actor_train.data_args.file_name",
    "train_file": "actor_train.data_args.file_name",
    "eval_file": "validation.data_args.file_name",
    "eval_dataset": "validation.data_args.file_name",
    "val_size": "validation.data_args.split",
    "system": "actor_train.data_args.default_system",
    "system_prompt": "actor_train.data_args.default_system",
    "default_system_prompt": "actor_train.data_args.default_system",
    "max_train_samples": "actor_train.data_args.max_samples",
    "per_device_eval_batch_size": "actor_train.infer_batch_size",
    "max_length": "sequence_length",
    "max_seq_len": "sequence_length",
    "max_seq_length": "sequence_length",
    "cutoff_len": "sequence_length",
    "loss": "pref_loss",
    "save_total_limit": "max_ckpt_to_keep",
    "report_to": "track_with",
    "wandb": "track_with: wandb",
    "use_wandb": "track_with: wandb",
    "tensorboard": "track_with: tensorboard",
    "wandb_project": "tracker_kwargs.project",
    "run_name": "exp_name",
}
# Wrong values, and what was meant.
OTHER_WORDS = {"gpu": "cuda", "nvidia": "cuda", "dpo": "preference", "rm": "reward"}


@dataclass(frozen=True)
class Key:
    """One key of the YAML. `section` is the model of a group of keys, None for a value."""

    path: str
    parent: str
    name: str
    default: Any
    meaning: str
    accepted: tuple[Any, ...]
    limits: tuple[str, ...]
    section: type[Section] | None

    @property
    def choices(self) -> list[str]:
        """Return the words that the key accepts, if it takes one of a list."""
        words: list[str] = []
        for kind in self.accepted:
            if get_origin(kind) is Literal:
                words += get_args(kind)
        return words

    @property
    def only_text(self) -> bool:
        return str in self.accepted and not {int, float, bool} & set(self.accepted)

    @property
    def expects(self) -> str:
        """Return type and range in words."""
        if self.section:
            return "a group of keys"
        if self.name in SPECIAL:
            return SPECIAL[self.name]
        first, *alternatives = [_word(kind) for kind in self.accepted]
        return " or ".join([f"{first} {' and '.join(self.limits)}".strip(), *alternatives])

    def refusal(self, path: str, value: Any, reason: str) -> str:
        """Return why the key, or the entry `path` of a mapping, cannot have this value."""
        text = "null" if value is None else repr(value)[:80]
        text = "the value" if looks_secret(path) or isinstance(value, dict) else text
        if reason:
            return f"{text} cannot be used: {reason}"
        is_entry = path != self.path
        text += f" is not {f'an entry of {self.path}: ' if is_entry else ''}{self.expects}"
        if self.section:
            return f"{text} ({', '.join(self.section.model_fields)})"
        why = self.meaning.partition(" Range: ")[2]
        meant = self._meant(str(value))
        if meant:
            return f"{text}; did you mean '{meant}'?"
        if isinstance(value, int | float) and (is_entry or self.only_text):
            return f"{text}; write it in quotes if it is meant as text"
        return f"{text}: {why.removesuffix('.')}" if why else text

    def _meant(self, word: str) -> str | None:
        """Return the choice that a wrong word was probably meant to be."""
        synonym = OTHER_WORDS.get(word.lower())
        if synonym in self.choices:
            return synonym
        return next(iter(difflib.get_close_matches(word, self.choices, n=1)), None)


@cache
def table() -> dict[str, Key]:
    """Return every key path of the schema, groups before their members."""
    return {key.path: key for key in _walk(RunConfig, "")}


def _walk(model: type[Section], parent: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path = f"{parent}.{name}".lstrip(".")
        accepted = accepted_types(field.annotation)
        first = accepted[0]
        section = first if isinstance(first, type) and issubclass(first, Section) else None
        limits = tuple(_limits(field))
        default = None if section else field.default
        meaning = " ".join((field.description or "").split())
        yield Key(path, parent, name, default, meaning, accepted, limits, section)
        if section:
            yield from _walk(section, path)


def _limits(field: FieldInfo) -> Iterator[str]:
    """Yield '>= 1' for each bound of a number."""
    bounds = list(field.metadata)
    for member in get_args(field.annotation):  # in `Count | None` they are inside the union
        for annotation in get_args(member)[1:]:
            bounds += getattr(annotation, "metadata", ())
    for bound in bounds:
        for name, sign in BOUNDS.items():
            if hasattr(bound, name):
                yield f"{sign} {getattr(bound, name):,}"


def _word(kind: Any) -> str:
    origin = get_origin(kind)
    members = get_args(kind)
    if origin is Literal:
        return " | ".join(map(str, members))
    if origin is list:
        inner = accepted_types(members[0])[0]
        return f"a list of {PLURALS.get(inner, _word(inner))}"
    if origin is dict:
        return f"a mapping of names to {PLURALS.get(accepted_types(members[1])[0], 'values')}"
    return WORDS.get(kind, str(kind))


def nearest(path: str) -> str | None:
    """Return the key path that an unknown one was probably meant to be."""
    parent, _, name = path.rpartition(".")
    if name in OTHER_NAMES:
        return OTHER_NAMES[name].partition(":")[0]
    siblings = {key.name: key.path for key in table().values() if key.parent == parent}
    # The first path of each name: actor_train comes first in the schema, and is what people mean.
    anywhere = {key.name: key.path for key in reversed(table().values())}
    for candidates, cutoff in (
        (siblings, 0.8),
        (anywhere, 1),
        (siblings, 0.6),
        (dict.fromkeys(OTHER_NAMES), 0.8),
        (anywhere, 0.75),
    ):
        for similar in difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff):
            return candidates[similar] or nearest(similar)
    return None


def suggestion(path: str) -> str:
    """Return 'did you mean ...?' for an unknown key, or where to find the right one."""
    parent, _, name = path.rpartition(".")
    if ":" in OTHER_NAMES.get(name, ""):
        return f"; set {OTHER_NAMES[name]}"
    meant = nearest(path)
    if meant is None:
        siblings = [key.name for key in table().values() if key.parent == parent]
        if len(siblings) <= LISTED:
            return did_you_mean(path, siblings)
        return "; `rather config reference` lists all keys"
    group, _, name_in_group = meant.rpartition(".")
    if group == parent:
        return f"; did you mean '{name_in_group}'?"
    place = "" if group else " at the top level"
    return f"; did you mean '{meant}'{place}?"


def field_problems(error: ValidationError, data: JsonObject) -> dict[Names, str]:
    """Return one sentence per key; pydantic has an error for each member of a union."""
    texts: dict[Names, str] = {}
    for details in error.errors():
        # Only the beginning of pydantic's location is in the data; the rest names the member of a
        # union.
        names: Names = ()
        setting: Any = data
        for name in details["loc"]:
            if not isinstance(setting, Mapping) or name not in setting:
                break
            names = (*names, str(name))
            setting = setting[name]
        path = ".".join(names)
        if details["type"] == "extra_forbidden":
            text = REMOVED.get(path) or f"unknown key{suggestion(path)}"
        else:
            key = table().get(path) or table()[path.rpartition(".")[0]]
            reason = details["ctx"]["error"] if details["type"] == "value_error" else ""
            removed = REMOVED_VALUES.get(f"{path}={setting}")
            text = removed or key.refusal(path, setting, str(reason))
        texts.setdefault(names, text)
    return texts
