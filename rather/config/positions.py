"""Where each key of a YAML file stands, and what is wrong with the file before its values mean
anything.

Hydra drops positions, so the file is read a second time as a tree of nodes, without constructing
anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from rather.errors import ConfigError

MOST_BYTES = 1_000_000
MOST_VALUES = 20_000  # a config has some hundred; an alias bomb has 10^9
PLAIN_TAG = "tag:yaml.org,2002:"


def read_nodes(path: Path) -> yaml.MappingNode:
    """The tree of a YAML file, or a ConfigError that says why it cannot be a config."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file ({path.absolute()}){_neighbours(path)}")
    if path.is_dir():
        names = ", ".join(sorted(p.name for p in path.glob("*.yaml"))) or "no .yaml file"
        raise ConfigError(f"{path}: is a folder; name the YAML file inside it ({names})")
    if path.suffix != ".yaml":
        raise ConfigError(f"{path}: a config file is named *.yaml; rename it to {path.stem}.yaml")
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(
            f"{path}: {path.stat().st_size:,} bytes; a config has at most {MOST_BYTES:,}. Is it a data file?"
        )
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(_syntax(path, error)) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply for a config") from None
    if node is None:
        raise ConfigError(
            f"{path}: the file is empty; a config needs at least pretrain and actor_train.data_args.file_name"
        )
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path.name}:{node.start_mark.line + 1}: the file must hold keys and values, not {_kind(node)}"
        )
    if _size(node, {}) > MOST_VALUES:
        raise ConfigError(
            f"{path}: its aliases unfold to more than {MOST_VALUES:,} values; write the file without them"
        )
    return node


def node_problems(node: yaml.Node, file: str) -> Iterator[str]:
    """Duplicate keys, objects to construct and foreign tags, wherever they stand."""
    for owner, prefix in _mappings(node, ""):
        first: dict[str, int] = {}
        for key, value in owner.value:
            line, name = key.start_mark.line + 1, str(key.value)
            where = f"{prefix}{name} ({file}:{line})"
            if name in first:
                yield f"{where}: this key stands in line {first[name]} already; keep one of them"
            elif name == "_target_":
                yield f"{where}: a config never names code to run; remove it"
            for tag in {
                n.tag for n in (key, value) if not n.tag.startswith(PLAIN_TAG) or "python" in n.tag
            }:
                yield f"{where}: the tag {tag} is not allowed; write a plain value"
            first.setdefault(name, line)


def key_lines(node: yaml.Node) -> dict[str, int]:
    """Key path -> line, counted from 1. A later entry wins over one that a merge (`<<`) brought
    in."""
    lines: dict[str, int] = {}
    for owner, prefix in _mappings(node, ""):
        for key, _ in owner.value:
            if key.tag != f"{PLAIN_TAG}merge":
                lines[f"{prefix}{key.value}"] = key.start_mark.line + 1
    return lines


def _mappings(node: yaml.Node, prefix: str) -> Iterator[tuple[yaml.MappingNode, str]]:
    """Every mapping with the path of its keys; merged ones first, under the path they are merged
    into."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _mappings(item, f"{prefix}[].")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag == f"{PLAIN_TAG}merge":
                yield from _mappings(value, prefix)
        yield node, prefix
        for key, value in node.value:
            if key.tag != f"{PLAIN_TAG}merge":
                yield from _mappings(value, f"{prefix}{key.value}.")


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Values after all aliases are written out; an alias to its own parent is endless."""
    if id(node) not in sizes:
        sizes[id(node)] = MOST_VALUES + 1  # until known: only a loop reads this
        children = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        sizes[id(node)] = 1 + sum(_size(child, sizes) for child in children)
    return sizes[id(node)]


def _syntax(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{path.name}:{mark.line + 1}" if mark else path.name
    reason = getattr(error, "problem", None) or str(error).splitlines()[0]
    return (
        f"{where}: not YAML: {reason}; check colons, quotes and indentation (spaces, no tabs) there"
    )


def _neighbours(path: Path) -> str:
    names = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    return f"; there: {', '.join(names[:5])}" if names else ""


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else f"the single value {node.value!r}"
