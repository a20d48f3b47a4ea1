"""The schema as a flat table: every key path with its type and range in words, and what a wrong one meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rather.config.schema import DPOConfig
from rather.config.values import Section, accepted_types

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
PLURALS = {str: "texts", int: "whole numbers", float: "numbers"}
SPECIAL = {
    "worker_cls": "a dotted import path or null",
    "device_mapping": "a list of device numbers, a range in text, or null",
    "split": "a share between 0 and 1, a whole number of pairs, or null",
}
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}

# What people write who come from other trainers, and ROLL's old names.
OTHER_NAMES = {
    "lr": "actor_train.training_args.learning_rate",
    "batch_size": "train_batch_size",
    "micro_batch_size": "actor_train.max_tokens_per_microbatch_in_train",
    "epochs": "actor_train.training_args.num_train_epochs",
    "num_epochs": "actor_train.training_args.num_train_epochs",
    "scheduler": "actor_train.training_args.lr_scheduler_type",
    "grad_clip": "max_grad_norm",
    "model": "pretrain",
    "model_name": "pretrain",
    "ref_model": "reference.model_args.model_name_or_path",
    "tokenizer": "actor_train.model_args.tokenizer_name_or_path",
    "torch_dtype": "actor_train.model_args.dtype",
    "dataset": "actor_train.data_args.file_name",
    "train_file": "actor_train.data_args.file_name",
    "eval_file": "validation.data_args.file_name",
    "per_device_eval_batch_size": "actor_train.infer_batch_size",
    "max_length": "sequence_length",
    "max_seq_len": "sequence_length",
    "loss": "pref_loss",
    "save_total_limit": "max_ckpt_to_keep",
    "report_to": "track_with",
    "run_name": "exp_name",
}


@dataclass(frozen=True)
class Key:
    """One key of the YAML. `section` is the model of a group of keys, None for a value."""

    path: str
    field: FieldInfo
    section: type[Section] | None

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def default(self) -> Any:
        return None if self.section else self.field.get_default(call_default_factory=True)

    @property
    def meaning(self) -> str:
        return self.field.description or ""

    @property
    def why(self) -> str:
        """The reason of the range."""
        extra = self.field.json_schema_extra
        return str(extra.get("why", "")) if isinstance(extra, dict) else ""

    @property
    def accepted(self) -> tuple[Any, ...]:
        return accepted_types(self.field.annotation)

    @property
    def choices(self) -> list[str]:
        """The words of a key that takes words of a list."""
        return [
            word for kind in self.accepted if get_origin(kind) is Literal for word in get_args(kind)
        ]

    @property
    def only_text(self) -> bool:
        return str in self.accepted and not {int, float, bool} & set(self.accepted)

    @property
    def expects(self) -> str:
        """Type and range in words."""
        if self.section:
            return "a group of keys"
        if self.name in SPECIAL:
            return SPECIAL[self.name]
        words = [_word(kind) for kind in self.accepted]
        words[0] = " ".join([words[0], *_limits(self.field)])
        return " or ".join(words)


@cache
def table() -> dict[str, Key]:
    """Every key path of the schema, groups before their members."""
    return {key.path: key for key in _walk(DPOConfig, "")}


def _walk(model: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        first = accepted_types(field.annotation)[0]
        section = first if isinstance(first, type) and issubclass(first, Section) else None
        yield Key(f"{prefix}{name}", field, section)
        if section:
            yield from _walk(section, f"{prefix}{name}.")


def _limits(field: FieldInfo) -> list[str]:
    """[">= 0", "and < 0.5"]"""
    bounds = [
        f"{sign} {getattr(limit, bound):,}"
        for limit in field.metadata
        for bound, sign in BOUNDS.items()
        if hasattr(limit, bound)
    ]
    return [bounds[0], *(f"and {bound}" for bound in bounds[1:])] if bounds else []


def _word(kind: Any) -> str:
    origin, members = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(str(member) for member in members)
    if origin is list:
        inner = accepted_types(members[0])[0]
        return f"a list of {PLURALS.get(inner, _word(inner))}"
    if origin is dict:
        return f"a mapping of names to {PLURALS.get(accepted_types(members[1])[0], 'values')}"
    return WORDS.get(kind, str(kind))


def nearest(path: str) -> str | None:
    """The key path that an unknown one was probably meant to be."""
    known = table()
    parent, _, name = path.rpartition(".")
    siblings = {key.name: key.path for key in known.values() if key.parent == parent}
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.8)
    if near:
        return siblings[near[0]]
    elsewhere = _first_of_each_name(known)
    if name in elsewhere:
        return elsewhere[name]
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
        return siblings[near[0]]
    near = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.75)
    return elsewhere[near[0]] if near else None


def _first_of_each_name(known: dict[str, Key]) -> dict[str, str]:
    """Name -> its path; actor_train comes first in the schema, and is what people mean."""
    first: dict[str, str] = {}
    for path, key in known.items():
        first.setdefault(key.name, path)
    return first


NEVER_IN_A_FILE = {
    "tracker_kwargs.api_key": "; keys are not kept in files: run `wandb login`, or set WANDB_API_KEY (SWANLAB_API_KEY)"
}


def suggestion(path: str) -> str:
    """'did you mean ...?' for an unknown key; a neighbour by its name, a key elsewhere by its whole path."""
    if path in NEVER_IN_A_FILE:
        return NEVER_IN_A_FILE[path]
    meant = nearest(path)
    if meant is None:
        parent = path.rpartition(".")[0]
        names = [key.name for key in table().values() if key.parent == parent]
        return f"; keys here: {', '.join(names)}" if names else ""
    same_place = meant.rpartition(".")[0] == path.rpartition(".")[0]
    return f"; did you mean '{meant.rpartition('.')[2] if same_place else meant}'?"
