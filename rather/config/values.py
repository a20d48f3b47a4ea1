"""The types of config values, and the base class of all sections."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
)
from pydantic_core.core_schema import ValidationInfo

from rather.config.plugins import did_you_mean
from rather.config.reserved import RESERVED_IN_TEMPLATES
from rather.files import JsonObject, real_path

MASK = "***"
WIN_RATE = "eval/win_rate"
FORGETTING = "eval/forgetting/"  # how the names of its metrics begin
BY_CHANCE = 0.05  # right answers count as lost if chance loses so many less often than this
MOST_DEVICES = 65_536
STORE = "s3://"  # how the address of an object store begins
HUB_DATASET = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<split>[\w./-]+))?"
)
REMOTE = (STORE, "hf://")  # data that is downloaded
RUN_NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,128}")
PISSA = re.compile(r"pissa(_niter_[1-9]\d*)?")


def _accepted_types(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, without `Annotated`; a plain type is a union of one."""
    if get_origin(annotation) is Annotated:
        return accepted_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = map(accepted_types, get_args(annotation))
        return tuple(chain.from_iterable(members))
    return (annotation,)


# A config asks thousands of times.
accepted_types: Callable[[Any], tuple[Any, ...]] = cache(_accepted_types)


class Section(BaseModel):
    """A frozen group of keys that refuses unknown keys and only converts values without loss."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),  # `model_args` is a key
        revalidate_instances="always",  # inherited values go into copies, not a caller's objects
        validate_default=True,  # which copies default sections, for the same reason
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _convert(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert '1e-6' to a number, 1e3 to a count and 'True' to a switch."""
        field = cls.model_fields[str(info.field_name)]
        accepted = accepted_types(field.annotation)
        if value is None and isinstance(field.default, Section | dict | list):
            return field.get_default()  # `reference:` with nothing under it
        if isinstance(value, str):
            is_text = any(kind is str or get_origin(kind) is Literal for kind in accepted)
            is_switch = bool in accepted and value.lower() in ("true", "false")
            with suppress(ValueError):
                value = json.loads(value.lower()) if is_switch or not is_text else value
        is_count = isinstance(value, float) and int in accepted and float not in accepted
        return int(value) if is_count and value.is_integer() else value


def section_problems(section: type[Section], values: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for every unknown key and every wrong value."""
    try:
        section.model_validate(values)
    except ValidationError as error:
        for details in error.errors():
            key = str(details["loc"][0])
            if details["type"] == "extra_forbidden":
                yield key, f"unknown key{did_you_mean(key, section.model_fields)}"
            else:
                yield key, f"{details['input']!r} is not allowed: {details['msg']}"


def device_list(value: Any) -> Any:
    """Read [0, 1], 0, "0-7", "0,2,4-6" or "list(range(0,8))" as device numbers."""
    if isinstance(value, str):
        value = _devices_from_text(value.replace(" ", ""))
    if value is None:
        return None
    devices = value if isinstance(value, list) else [value]
    are_numbers = all(type(device) is int and 0 <= device < MOST_DEVICES for device in devices)
    if not devices or not are_numbers or len(set(devices)) < len(devices):
        raise ValueError(
            f"write different device numbers from 0 to {MOST_DEVICES - 1} as "
            '[0, 1], "0-7", "0,2,4-6" or "list(range(0,8))"'
        )
    return devices


def _devices_from_text(text: str) -> Any:
    inner = text[5:-1] if text.startswith("list(") and text.endswith(")") else text
    if call := re.fullmatch(r"range\((\d{1,5}(?:,\d{1,5}){0,2})\)", inner):
        return list(range(*map(int, call[1].split(","))))
    devices: list[int] = []
    for span_text in text.split(","):
        span = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", span_text)
        new = range(int(span[1]), int(span[2] or span[1]) + 1) if span else ()
        if not new or len(devices) > MOST_DEVICES:
            return text
        devices += new
    return devices


ROLL_WORKER = "roll.pipeline.dpo.actor_worker.ActorWorker"  # means Rather's own


def worker_class(value: Any) -> Any:
    """Accept a class, or a dotted path that workers import."""
    value = None if value == ROLL_WORKER else value
    is_path = isinstance(value, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", value)
    if value is None or isinstance(value, type) or is_path:
        return value
    raise ValueError("write a dotted import path such as 'my_package.workers.MyWorker'")


def engine_name(value: Any) -> Any:
    """Accept FILE.py:Class, as an absolute path, or the name of an installed engine."""
    if match := re.fullmatch(r"(.+\.py)(:[^\W\d]\w*)", str(value)):
        return f"{Path(match[1]).expanduser().absolute()}{match[2]}"
    if re.fullmatch(r"[^\W\d][\w-]*", str(value)):
        return value
    raise ValueError("write torch, FILE.py:Class, or the name of an installed engine")


def _check(is_valid: Callable[[Any], Any], message: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if is_valid(value):
            return value
        raise ValueError(message)

    return AfterValidator(check)


def _is_writable(value: str) -> bool:
    path = real_path(Path(value).expanduser())
    is_folder = path != path.parent and value.rstrip("/") != ".." and "://" not in value
    return bool(value.strip()) and is_folder


Devices = Annotated[list[int] | None, BeforeValidator(device_list)]
WorkerClass = Annotated[
    Any,
    BeforeValidator(worker_class),
    PlainSerializer(
        lambda each: f"{each.__module__}.{each.__qualname__}" if isinstance(each, type) else each
    ),
    WithJsonSchema({"type": ["string", "null"]}),
]
EngineName = Annotated[str, BeforeValidator(engine_name)]
RunName = Annotated[
    str,
    _check(
        RUN_NAME.fullmatch,
        "it names a folder: 1 to 128 of the characters A-Z a-z 0-9 . _ -, and not '.' or '..'",
    ),
]
Folder = Annotated[
    str, _check(_is_writable, "runs are written there; name a folder of its own, such as ./output")
]
FolderOrStore = Annotated[
    str,
    _check(
        lambda value: re.fullmatch(rf"{STORE}[\w.-]+(/.*)?", value) or _is_writable(value),
        "copies are written there; name a folder, or an object store: s3://bucket/name",
    ),
]
Environment = Annotated[
    dict[str, str],
    _check(
        lambda value: MASK not in value.values(),
        f"{MASK} was masked when this file was written; set the variable to ${{oc.env:NAME}}",
    ),
]
Metric = Annotated[
    str,
    _check(
        lambda value: value.startswith("eval/"),
        "names of evaluation metrics begin with 'eval/', such as eval/loss",
    ),
]
HeldOut = Annotated[
    float | int | None,
    _check(
        lambda value: value is None or 0 < value < 1 or (isinstance(value, int) and value > 0),
        "it must be a fraction between 0 and 1 (0.05) or a whole number of pairs >= 1",
    ),
]
Interval = Annotated[
    float | int | None,
    _check(
        lambda value: value is None or 0 < value < 1 or (isinstance(value, int) and value > 0),
        "it must be a whole number of steps >= 1 or a fraction of the run between 0 and 1 (0.1)",
    ),
]
# YAML reads a bare on or off as true or false.
OnOffAuto = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(lambda value: {"True": "on", "False": "off"}.get(str(value), value)),
]
Text = Annotated[str, Field(min_length=1)]
ForgettingTexts = Annotated[
    str,
    BeforeValidator(lambda value: "off" if value is False else value),
    Field(min_length=1),
]
SystemMessage = Annotated[
    str,
    _check(
        bool,
        "it must not be empty, because templates differ in what they write then; null leaves it to "
        "the template, and a template without a system message writes none",
    ),
]
TemplateKwargs = Annotated[
    dict[str, bool | int | float | str | None],
    _check(
        lambda value: not set(value) & set(RESERVED_IN_TEMPLATES),
        f"it must not set {', '.join(RESERVED_IN_TEMPLATES)}, which come from the rows",
    ),
]
Initialization = Annotated[
    bool | Text,
    _check(
        lambda value: value in (True, "gaussian") or PISSA.fullmatch(str(value)),
        "it must be true, gaussian, pissa or pissa_niter_4 (any number)",
    ),
]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Zero = Annotated[float, Field(ge=0, le=0)]
Share = Annotated[float, Field(gt=0, le=1)]
UpToOne = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
BelowHalf = Annotated[float, Field(ge=0, lt=0.5)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NotNegativeInt = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
TwoOrMore = Annotated[int, Field(ge=2)]
FourOrMore = Annotated[int, Field(ge=4)]
