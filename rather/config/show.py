"""What a config says: effective values and their sources, one key explained, schema and
reference page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from rather.config.inherit import value_at
from rather.config.keys import Key, suggestion, table
from rather.config.masking import public_values
from rather.config.schema import DPOConfig
from rather.config.values import Section
from rather.errors import ConfigError

if TYPE_CHECKING:
    from rather.config.load import Loaded

PREFACE = """# Configuration

Every key of the YAML. This page is generated from the code (`rather config reference`); do not edit it.

A key that is not listed here is an error, and so is a value outside its range; all of them are named at once,
before anything is loaded. `null` stands for "not given". Any key can be set on the command line:
`rather train dpo.yaml beta=0.05 actor_train.training_args.learning_rate=1e-6`. `rather config show dpo.yaml`
prints the effective values and where each came from, `rather config explain KEY` one key. Sizes count pairs.

Keys that nobody wrote follow others: `reference` follows `actor_train` (model, precision, layout, devices,
sizes without gradients), `validation.data_args` follows `actor_train.data_args`, a policy without a model
takes `pretrain`. Values may refer to others: `${exp_name}`, `${oc.env:HF_TOKEN}`; what comes from the
environment is never written out.
"""


def show(loaded: Loaded) -> str:
    """All effective values as YAML, each with its source as a comment; secrets are hidden."""
    values = public_values(loaded.config)
    rows: list[tuple[str, str]] = []
    for path, key in table().items():
        indent = "  " * path.count(".")
        if key.section:
            rows.append((f"{indent}{key.name}:", ""))
        else:
            rows.append(
                (f"{indent}{key.name}: {_inline(value_at(values, path))}", loaded.sources[path])
            )
    width = min(60, max(len(text) for text, _ in rows))
    return (
        "\n".join(f"{text:<{width}}  # {source}" if source else text for text, source in rows)
        + "\n"
    )


def explain(loaded: Loaded | None, key: str) -> str:
    """One key: its value and source in a config if given, type and range, default, meaning."""
    known = table().get(key)
    if known is None:
        raise ConfigError(f"{key}: unknown key{suggestion(key)}")
    lines = [key, f"  meaning  {known.meaning}"]
    if known.section:
        return "\n".join([*lines, f"  keys     {', '.join(known.section.model_fields)}"]) + "\n"
    if loaded:
        value = _inline(value_at(public_values(loaded.config), key))
        lines.append(f"  value    {value}  ({loaded.sources[key]})")
    lines += [f"  takes    {known.expects}", f"  default  {_inline(known.default)}"]
    if known.why:
        lines.append(f"  range    {known.why}")
    return "\n".join(lines) + "\n"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file, for editors; ${...} may stand wherever a value does."""
    schema = DPOConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for owner in (schema, *schema["$defs"].values()):
        for name, entry in owner["properties"].items():
            owner["properties"][name] = _or_interpolation(entry)
    for name in ("defaults", "hydra"):  # Hydra's own keys
        schema["properties"][name] = {"description": "Read by Hydra."}
    return schema


def _or_interpolation(entry: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {
        name: entry.pop(name) for name in ("description", "default", "title") if name in entry
    }
    entry.pop("why", None)
    return {**said, "anyOf": [entry, {"type": "string", "pattern": r"\$\{.+\}"}]}


def reference_markdown() -> str:
    """The page docs/config.md."""
    parts = [PREFACE]
    groups = [
        base
        for base in reversed(DPOConfig.__mro__)
        if issubclass(base, Section) and base not in (Section, DPOConfig)
    ]
    for group in groups:
        keys = [
            key for key in table().values() if key.parent == "" and key.name in group.model_fields
        ]
        parts.append(f"## {group.__doc__}\n\n{_markdown_table(keys)}")
        parts += [
            _markdown_section(key, f"{'#' * 3} `{key.path}`")
            for top in keys
            for key in _sections(top)
        ]
    return "\n".join(parts)


def _sections(top: Key) -> list[Key]:
    return [
        key
        for key in table().values()
        if key.section and (key.path + ".").startswith(top.path + ".")
    ]


def _markdown_section(key: Key, title: str) -> str:
    assert key.section is not None
    keys = [member for member in table().values() if member.parent == key.path]
    return f"{title}\n\n{key.section.__doc__}\n\n{_markdown_table(keys)}"


def _markdown_table(keys: list[Key]) -> str:
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        default = "" if key.section else f"`{_inline(key.default)}`"
        meaning = key.meaning + (f" Range: {key.why}." if key.why else "")
        cells = (f"`{key.name}`", key.expects, default, meaning)
        rows.append(
            "| "
            + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells)
            + " |"
        )
    return "\n".join(rows) + "\n"


def _inline(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()
