"""The types of config values: exact numbers, device lists, names, folders and worker classes."""

from __future__ import annotations

import keyword
import math
import re
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
)
from pydantic_core.core_schema import ValidationInfo

MASK = "***"
MOST_DEVICES = 65_536


def accepted_types(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, without `Annotated`; a plain type is a union of one."""
    if get_origin(annotation) is Annotated:
        return accepted_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for member in get_args(annotation) for part in accepted_types(member))
    return (annotation,)


def convert(value: Any, accepted: tuple[Any, ...]) -> Any:
    """Convert '1e-6' to a number, 1e3 to a count, 'true' to a switch. Leave the rest to be
    refused."""
    words = str in accepted or any(get_origin(kind) is Literal for kind in accepted)
    if isinstance(value, str) and bool in accepted and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, str) and not words and {int, float} & set(accepted):
        value = _number(value)
    if isinstance(value, float) and int in accepted and float not in accepted:
        return int(value) if value.is_integer() else value
    return value


def _number(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            if math.isfinite(number := kind(text)):
                return number
    return text


class Section(BaseModel):
    """A frozen group of keys. Unknown keys are refused, and values are only converted without
    loss."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),  # `model_args` is a key
        revalidate_instances="always",  # inherited values are filled into copies, never into a caller's object
        validate_default=True,  # which copies default sections, for the same reason
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _convert(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        if value is None and isinstance(field.default, Section | dict | list):
            return field.get_default()  # `reference:` with nothing under it
        return convert(value, accepted_types(field.annotation))


def device_list(value: Any) -> Any:
    """Read [0, 1], 0, "0-7", "0,2,4-6", "[0, 1]" or "list(range(0,8))" as device numbers."""
    if value is None:
        return None
    if isinstance(value, str):
        value = _devices_from_text(value.replace(" ", ""))
    devices = value if isinstance(value, list | range) else [value]
    if len(devices) > MOST_DEVICES:
        raise ValueError(f"{len(devices)} devices are more than the maximum of {MOST_DEVICES}")
    if not all(isinstance(device, int) and not isinstance(device, bool) for device in devices):
        raise ValueError('write device numbers as [0, 1], "0-7", "0,2,4-6" or "list(range(0,8))"')
    if not devices:
        raise ValueError("it names no device; remove the key to use the first one")
    if min(devices) < 0:
        raise ValueError(f"device {min(devices)} is negative; devices are counted from 0")
    if len(set(devices)) < len(devices):
        twice = next(device for device in devices if devices.count(device) > 1)
        raise ValueError(f"device {twice} is named twice")
    return list(devices)


def _devices_from_text(text: str) -> Any:
    call = re.fullmatch(r"(list\()?range\((-?\d+)(?:,(-?\d+))?(?:,(-?\d+))?\)(\))?", text)
    if call and bool(call[1]) == bool(call[5]):
        numbers = [int(number) for number in call.groups()[1:4] if number is not None]
        if numbers[2:] == [0]:
            raise ValueError("the step of range() is 0")
        return range(*numbers)
    body = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    devices: list[int] = []
    for part in body.split(",") if body else []:
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not span:
            return text
        first, last = int(span[1]), int(span[2] or span[1])
        if last < first:
            raise ValueError(f"'{part}' runs backwards; write {last}-{first}")
        if last - first >= MOST_DEVICES:
            return range(first, last + 1)
        devices += range(first, last + 1)
    return devices


def worker_class(value: Any) -> Any:
    """Accept a class, or a dotted path ('my_package.workers.MyWorker') that workers import."""
    if value is None or isinstance(value, type):
        return value
    parts = value.split(".") if isinstance(value, str) else [""]
    if len(parts) < 2 or any(keyword.iskeyword(part) or not part.isidentifier() for part in parts):
        raise ValueError("write a dotted import path such as 'my_package.workers.MyWorker'")
    return value


def class_path(value: Any) -> Any:
    """Return a worker class as its dotted path."""
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else value


def _check(is_valid: Callable[[Any], Any], message: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if is_valid(value):
            return value
        raise ValueError(message)

    return AfterValidator(check)


def _is_writable(value: str) -> bool:
    path = Path(value).expanduser().resolve()
    return bool(value.strip()) and path != path.parent and value.rstrip("/") != ".."


def _not_masked(value: dict[str, str]) -> dict[str, str]:
    for name in (name for name, text in value.items() if text == MASK):
        raise ValueError(
            f"{name} was masked when this file was written; set it to ${{oc.env:{name}}}"
        )
    return value


def _on_or_off(value: Any) -> Any:
    """YAML reads a bare on or off as true or false."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


Devices = Annotated[list[int] | None, BeforeValidator(device_list)]
WorkerClass = Annotated[
    Any,
    BeforeValidator(worker_class),
    PlainSerializer(class_path),
    WithJsonSchema({"type": ["string", "null"]}),
]
RunName = Annotated[
    str,
    _check(
        re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,128}").fullmatch,
        "it names a folder: 1 to 128 of the characters A-Z a-z 0-9 . _ -, and not '.' or '..'",
    ),
]
Folder = Annotated[
    str, _check(_is_writable, "runs are written there; name a folder of its own, such as ./output")
]
Environment = Annotated[dict[str, str], AfterValidator(_not_masked)]
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
OnOffAuto = Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)]
Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
UpToOne = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
BelowHalf = Annotated[float, Field(ge=0, lt=0.5)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NotNegativeInt = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
TwoOrMore = Annotated[int, Field(ge=2)]
FourOrMore = Annotated[int, Field(ge=4)]
