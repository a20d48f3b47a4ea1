"""Read the settings of another trainer: a YAML or JSON file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rather.errors import ConfigError
from rather.files import JsonObject, parse_json, parse_yaml, yaml_text
from rather.tools.migrate import removed
from rather.tools.migrate.rules import NUMBER

TYPED_VARIABLE = re.compile(r"!!(?:float|int|bool)[ \t]+(\$\w+|\$\{\w+\})")
FORMATS = (".yaml", ".yml", ".json")
MAPPING_OF = ("compute_environment", "distributed_type")  # keys of accelerate's own file


def read_file(path: Path) -> JsonObject:
    """Read the keys and values of a YAML or JSON file."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: {removed.FILES.get(path.suffix, removed.LINE)}")
    try:
        text = yaml_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); pass a YAML or JSON file.") from None
    # `!!float $rate` is for a script to fill in. As a text it is reported with its key.
    text = TYPED_VARIABLE.sub(r'"\1"', text)
    try:
        values = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as {path.suffix[1:]}: {error}") from None
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path}: contains no keys and values.")
    if all(key in values for key in MAPPING_OF):
        raise ConfigError(
            f"{path}: configures accelerate, not a training; pass the file of the training."
        )
    settings: JsonObject = with_powers(values)
    return settings


def with_powers(value: Any) -> Any:
    """Convert 5e-7, which YAML 1.1 reads as text, to a number; other text stays text."""
    if isinstance(value, list):
        return [with_powers(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): with_powers(entry) for key, entry in value.items()}
    is_number = isinstance(value, str) and "e" in value.lower() and NUMBER.fullmatch(value)
    return float(value) if is_number else value
