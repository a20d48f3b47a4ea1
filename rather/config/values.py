"""The kinds of values that keys hold: numbers without loss, device lists, names, folders, worker classes."""

from __future__ import annotations

import keyword
import math
import re
import types
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


def knob(default: Any, meaning: str, *, why: str = "", **limits: Any) -> Any:
    """A field with its meaning, its range, and the reason of the range for the error message."""
    given: dict[str, Any] = {"default_factory" if isinstance(default, type) else "default": default}
    return Field(
        **given, description=meaning, json_schema_extra={"why": why} if why else None, **limits
    )


def accepted_types(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, seen through `Annotated`; a plain type is a union of one."""
    if get_origin(annotation) is Annotated:
        return accepted_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for member in get_args(annotation) for part in accepted_types(member))
    return (annotation,)


def lossless(value: Any, accepted: tuple[Any, ...]) -> Any:
    """'1e-6' for a number, 1e3 for a count, 'true' for a switch are taken; the rest is left to be refused."""
    words = str in accepted or any(get_origin(kind) is Literal for kind in accepted)
    if isinstance(value, str) and bool in accepted and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, str) and not words and (int in accepted or float in accepted):
        value = _number(value)
    if (
        isinstance(value, float)
        and int in accepted
        and float not in accepted
        and value.is_integer()
    ):
        return int(value)
    return value


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        try:
            number = float(text)
        except ValueError:
            return text
    return number if math.isfinite(number) else text


class Section(BaseModel):
    """A group of keys: unknown ones are refused, values converted only without loss, nothing changes."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),  # `model_args` is a key of ours
        revalidate_instances="always",  # following keys are filled into copies, never into a caller's object
    )

    @field_validator("*", mode="before")
    @classmethod
    def _take_lossless(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        if (
            value is None and field.default_factory is not None
        ):  # `reference:` with nothing under it
            return field.get_default(call_default_factory=True)
        return lossless(value, accepted_types(field.annotation))


def device_list(value: Any) -> Any:
    """[0, 1], 0, "0-7", "0,2,4-6", "[0, 1]" or "list(range(0,8))" -> device numbers, without eval."""
    if value is None:
        return None
    if isinstance(value, str):
        value = _devices_from_text(value.replace(" ", ""))
    devices = value if isinstance(value, list) else [value]
    if not all(isinstance(device, int) and not isinstance(device, bool) for device in devices):
        raise ValueError(
            'device numbers are written as [0, 1], "0-7", "0,2,4-6" or "list(range(0,8))"'
        )
    if not devices:
        raise ValueError("it names no device; leave the key out to take the first one")
    if min(devices) < 0:
        raise ValueError(f"device {min(devices)} is negative; devices are counted from 0")
    if len(set(devices)) < len(devices):
        twice = next(device for device in devices if devices.count(device) > 1)
        raise ValueError(f"device {twice} is named twice")
    return devices


def _devices_from_text(text: str) -> Any:
    call = re.fullmatch(r"(list\()?range\((-?\d+)(?:,(-?\d+))?(?:,(-?\d+))?\)(\))?", text)
    if call and bool(call[1]) == bool(call[5]):
        numbers = [int(number) for number in call.groups()[1:4] if number is not None]
        if numbers[2:] == [0]:
            raise ValueError("the step of range() is 0")
        return _listed(range(*numbers))
    body = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    devices: list[int] = []
    for part in body.split(",") if body else []:
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not span:
            return text
        first, last = int(span[1]), int(span[2] or span[1])
        if last < first:
            raise ValueError(f"'{part}' runs backwards; write {last}-{first}")
        devices += _listed(range(first, last + 1))
    return devices


def _listed(numbers: range) -> list[int]:
    if len(numbers) > MOST_DEVICES:
        raise ValueError(
            f"{len(numbers)} devices are more than the {MOST_DEVICES} that can be named"
        )
    return list(numbers)


def worker_class(value: Any) -> Any:
    """A class, or the dotted path of one ('my_package.workers.MyWorker'); imported where workers are made."""
    if value is None or isinstance(value, type):
        return value
    parts = value.split(".") if isinstance(value, str) else []
    if len(parts) < 2 or not all(
        part.isidentifier() and not keyword.iskeyword(part) for part in parts
    ):
        raise ValueError(
            "a worker class is written as a dotted import path such as 'my_package.workers.MyWorker'"
        )
    return value


def class_path(value: Any) -> Any:
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else value


def run_name(value: str) -> str:
    if value in (".", "..") or not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", value):
        raise ValueError(
            "it names a folder: 1 to 128 of the characters A-Z a-z 0-9 . _ -, and not '.' or '..'"
        )
    return value


def writable_folder(value: str) -> str:
    path = Path(value).expanduser()
    if not value.strip() or path.resolve() == path.resolve().parent or value.rstrip("/") == "..":
        raise ValueError(
            "runs are written under this folder; name one of their own, such as ./output"
        )
    return value


def evaluation_metric(value: str) -> str:
    if not value.startswith("eval/"):
        raise ValueError(
            "the best model is chosen by evaluation; names begin with 'eval/', such as eval/loss"
        )
    return value


def not_masked(value: dict[str, str]) -> dict[str, str]:
    for name in (name for name, text in value.items() if text == MASK):
        raise ValueError(
            f"{name} was masked when this file was written; put ${{oc.env:{name}}} in its place"
        )
    return value


def held_out(value: float | int | None) -> float | int | None:
    if value is None or (isinstance(value, int) and value >= 1) or 0 < value < 1:
        return value
    raise ValueError("it must be a share between 0 and 1 (0.05) or a whole number of pairs >= 1")


Devices = Annotated[list[int] | None, BeforeValidator(device_list)]
WorkerClass = Annotated[
    Any,
    BeforeValidator(worker_class),
    PlainSerializer(class_path),
    WithJsonSchema({"type": ["string", "null"]}),
]
RunName = Annotated[str, AfterValidator(run_name)]
Folder = Annotated[str, AfterValidator(writable_folder)]
Environment = Annotated[dict[str, str], AfterValidator(not_masked)]
Metric = Annotated[str, AfterValidator(evaluation_metric)]
HeldOut = Annotated[float | int | None, AfterValidator(held_out)]
Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


def _on_or_off(value: Any) -> Any:
    """YAML reads a bare on or off as true or false."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


OnOffAuto = Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)]
