"""What a config says: public values, values with their sources, one key, schema, reference page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from rather.config.compat import ALIASES
from rather.config.inherit import value_at
from rather.config.keys import OTHER_NAMES, Key, nearest, suggestion, table
from rather.config.redaction import looks_secret, public_url, redact, url_secrets
from rather.config.run_config import DPOConfig
from rather.config.schema import LossConfig, RunConfig
from rather.config.values import MASK, Section
from rather.errors import ConfigError
from rather.files import JsonObject

PREFACE = """# Configuration

Every key of the YAML. This page is generated from the code (`rather config reference`); do not edit it.

A key that is not listed here is an error, and so is a value outside its range; all of them are named at once,
before anything is loaded. `null` stands for "not given". Any key can be set on the command line:
`rather train dpo.yaml beta=0.05 actor_train.training_args.learning_rate=1e-6`. `rather config show dpo.yaml`
prints the effective values and where each came from, `rather config explain KEY` one key. Sizes count pairs.

Unset keys inherit from other keys: `reference` from `actor_train` (model, precision, layout, devices,
sizes without gradients), `validation.data_args` from `actor_train.data_args`, a policy without a model
from `pretrain`. Values may refer to others: `${exp_name}`, `${oc.env:HF_TOKEN}`; what comes from the
environment is never written out.
"""

JUDGE = "with"  # the key of a judge, which may be the address of a server


def secret_values(values: Any, secret: bool = False) -> Iterator[str]:
    """Yield every text under a key named like a secret, and what a judge's address hides."""
    if isinstance(values, dict):
        for name, content in values.items():
            yield from secret_values(content, looks_secret(str(name)))
            if name == JUDGE:
                yield from url_secrets(str(content))
    elif isinstance(values, list):
        for entry in values:
            yield from secret_values(entry, secret)
    elif secret and isinstance(values, str):
        yield values


def public_values(config: DPOConfig) -> JsonObject:
    """Return all effective values without secrets; a key that follows a hidden one is hidden."""
    values = config.model_dump()
    shown: JsonObject = _masked(values, config.unresolved, config.unresolved)
    for path, source in config.followed.items():
        if value_at(values, path) == value_at(values, source):
            parent, _, name = path.rpartition(".")
            value_at(shown, parent)[name] = value_at(shown, source)
    return shown


def _masked(value: Any, text: Any, root: Any, name: str = "") -> Any:
    """Return a value without secrets. `text` is the value as it is written in the file `root`."""
    if isinstance(text, str) and _reads_environment(text, root):
        return text
    if isinstance(value, dict):
        texts: Any = text if isinstance(text, dict) else {}
        return {
            key: _masked(content, texts.get(key), root, str(key)) for key, content in value.items()
        }
    if isinstance(value, list):
        texts = text if isinstance(text, list) and len(text) == len(value) else [None] * len(value)
        return [
            _masked(entry, entry_text, root, name)
            for entry, entry_text in zip(value, texts, strict=True)
        ]
    if looks_secret(name) and value is not None:
        return MASK
    if name == JUDGE:
        value = value and public_url(value)
    # A git commit looks like an old W&B key.
    return redact(value) if isinstance(value, str) and name != "revision" else value


def _reads_environment(text: str, root: Any) -> bool:
    """Whether a text takes anything from the environment, itself or through keys that it names.

    Relative names are not followed: such a text is hidden.
    """
    if "oc.env" in text or re.search(r"\$\{\s*\.", text):
        return True
    key_paths = re.findall(r"\$\{\s*([\w.]+)\s*\}", text)
    return any(_reads_environment(str(value_at(root, path)), root) for path in key_paths)


def changed_settings(config: DPOConfig) -> JsonObject:
    """Return every key that is not at its default, without secrets, and its source."""
    defaults = {path: key.default for path, key in table().items()}
    # As JSON gives them back, so that a path and its text are equal.
    values, defaults = json.loads(json.dumps([public_values(config), defaults], default=str))
    changed = {}
    for path, key in table().items():
        setting, default = value_at(values, path), defaults[path]
        has_parent = not key.parent or value_at(values, key.parent) is not None
        if has_parent and not key.section and setting != default:
            inherited = config.followed.get(path)
            source = f"follows {inherited}" if inherited else "set in Python"
            source = config.sources.get(path, source)
            changed[path] = {"value": setting, "default": default, "from": source}
    return changed


def show(config: DPOConfig) -> str:
    """Return all effective values as YAML, each with its source as a comment."""
    values = public_values(config)
    rows = []
    for path, key in table().items():
        indent = "  " * path.count(".")
        if key.section:
            rows.append((f"{indent}{key.name}:", ""))
        else:
            text = f"{indent}{key.name}: {_inline(value_at(values, path))}"
            rows.append((text, f"  # {config.sources[path]}"))
    width = min(60, max(len(text) for text, _ in rows))
    lines = [f"{text:<{width}}{comment}".rstrip() for text, comment in rows]
    return "\n".join(lines) + "\n"


def _meant_path(path: str) -> str:
    """Return the path of the key that a path or another tool's word means."""
    if path in table():
        return path
    if path in ALIASES:  # an entry of strategy_config
        return ALIASES[path].key
    meant = nearest(path)
    if meant and (path in OTHER_NAMES or meant.rpartition(".")[2] == path):
        return meant
    raise ConfigError(f"{path}: unknown key{suggestion(path)}")


def explain(config: DPOConfig | None, path: str) -> str:
    """Return a key's meaning, value and source in a config if given, type and range, default."""
    path = _meant_path(path)
    key = table()[path]
    lines = [path, f"  meaning  {key.meaning}"]
    other_words = [name for name, alias in ALIASES.items() if alias.key == path]
    if other_words:
        lines.append(f"  also as  {', '.join(other_words)}")
    if path in ALIASES:
        lines.append(f"  sets     {ALIASES[path].key}")
    namesakes = [
        entry.path for entry in table().values() if entry.name == key.name and entry.path != path
    ]
    if namesakes:
        lines.append(f"  also     {', '.join(namesakes)}")
    if key.section:
        lines.append(f"  keys     {', '.join(key.section.model_fields)}")
    else:
        if config:
            shown = _inline(value_at(public_values(config), path))
            lines.append(f"  value    {shown}  ({config.sources[path]})")
        lines += [f"  takes    {key.expects}", f"  default  {_inline(key.default)}"]
    return "\n".join(lines) + "\n"


def json_schema() -> JsonObject:
    """Return the JSON Schema of a config file; ${...} is allowed wherever a value is."""
    schema = DPOConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for owner in (schema, *schema["$defs"].values()):
        for name, entry in owner["properties"].items():
            about = {
                key: entry.pop(key) for key in ("description", "default", "title") if key in entry
            }
            about["anyOf"] = [entry, {"type": "string", "pattern": r"\$\{.+\}"}]
            owner["properties"][name] = about
    for name in ("defaults", "hydra"):
        schema["properties"][name] = {"description": "Read by Hydra."}
    return schema


def reference_markdown() -> str:
    """Return the page docs/config.md."""
    chapters = [PREFACE]
    for group in reversed(DPOConfig.__mro__):
        if issubclass(group, Section) and group not in (Section, LossConfig, RunConfig, DPOConfig):
            tops = [key for key in table().values() if key.path in group.model_fields]
            chapters.append(f"## {group.__doc__}\n\n{_markdown_table(tops)}")
            for key in table().values():
                if key.section and key.path.partition(".")[0] in group.model_fields:
                    members = [member for member in table().values() if member.parent == key.path]
                    title = f"### `{key.path}`\n\n{key.section.__doc__}"
                    chapters.append(f"{title}\n\n{_markdown_table(members)}")
    return "\n".join(chapters)


def _markdown_table(keys: list[Key]) -> str:
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        default = "" if key.section else f"`{_inline(key.default)}`"
        cells = (f"`{key.name}`", key.expects, default, key.meaning)
        texts = [cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells]
        rows.append(f"| {' | '.join(texts)} |")
    return "\n".join(rows) + "\n"


def _inline(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()
