"""Names of the Hugging Face hub: models, and datasets `hf://datasets/ORG/NAME[@revision][:[config/]split]`.

The revision is resolved to a commit, and every file is of that commit. What was downloaded for an
address is recorded, so that the same address works without a network.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

from rather.config.paths import is_local, nearest_names
from rather.config.values import HUB_DATASET
from rather.errors import ConfigError, DataError
from rather.files import (
    HUB_SECONDS,
    ask_hub,
    check_hub_model,
    hub_answered,
    parse_yaml,
    read_bytes,
    read_json,
    replace_own,
    text_sha,
    why_not_from_hub,
)

log = logging.getLogger(__name__)

CARD = "README.md"
MOST_CARD_BYTES = 4 << 20
DATA_FILE = re.compile(r"(?!.*(^|/)(\.|dataset_infos?\.json|dataset_dict\.json|state\.json))"
                       r".+\.(jsonl?|ndjson|parquet|arrow)(\.gz)?")  # fmt: skip
SHARD = re.compile(r"-\d{5}-of-\d{5}.*")
WORDS = {  # names of a split in a path, as the library `datasets` knows them
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
SHOWN = 20  # files in an error
LONGEST_PATTERN = 1000  # characters of a pattern in a card


def download(address: str) -> tuple[str, list[Path]]:
    """Return the commit and the files of a split, downloaded unless the hub's cache has them."""
    import huggingface_hub as hub

    match = HUB_DATASET.fullmatch(address)
    if not match:
        raise DataError(f"{address}: write hf://datasets/ORG/NAME[@revision][:split].")
    repo = match["repo"]
    revision = match["revision"] or "main"
    record = hub.cached_assets_path("rather", "datasets") / f"{text_sha(address)}.json"
    cached = _recorded(record)
    if cached and cached[0] == revision:  # a commit never changes
        return cached
    try:
        of: dict[str, Any] = {"repo_id": repo, "repo_type": "dataset"}
        description = ask_hub(
            lambda: hub.HfApi().dataset_info(repo, revision=revision, timeout=HUB_SECONDS)
        )
        of["revision"] = commit = str(description.sha)
        if cached and cached[0] == commit:
            return cached
        names = hub.HfApi().list_repo_files(**of)
        # `of` has the commit.
        file = hub.hf_hub_download(filename=CARD, **of) if CARD in names else None  # nosec B615
        card = _card(Path(file) if file else None)
        chosen = choose(names, card, match["split"] or "", f"{address} (commit {commit})")
        patterns = [*map(escape, chosen)]
        folder = Path(hub.snapshot_download(allow_patterns=patterns, **of))  # nosec B615
    except DataError:
        raise
    except Exception as error:  # of the hub, its HTTP library, or the network
        if cached and not hub_answered(error):
            log.warning("%s: the hub does not answer; using commit %s, cached", address, cached[0])
            return cached
        reason = why_not_from_hub(error)
        raise DataError(f"{address}: not downloaded from the hub: {reason}.") from error
    record.parent.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in chosen]
    replace_own(record, json.dumps({"commit": commit, "files": list(map(str, files))}))
    return commit, files


def refuse_unknown_model(name: str, revision: str | None = None) -> None:
    """Fail at once for a folder that is not here, or a name that the hub does not know."""
    folder = Path(name).expanduser()
    near = nearest_names(folder)
    if is_local(name):
        if folder.is_file():
            raise ConfigError(
                f"{name}: is a file; give the folder of a model or run, or a hub name"
            )
        if not folder.is_dir():
            raise ConfigError(f"{name}: no such folder{near}")
        return
    try:
        check_hub_model(name, revision)
    except ConfigError as error:
        raise ConfigError(f"{error}{near if 'near it' in near else ''}") from error


def choose(names: Iterable[str], card: Mapping[str, Any], wanted: str, where: str) -> list[str]:
    """Return the files of a split: by the `configs` of the dataset's card, then by their names.

    `wanted` is '', a split, config/split, or the path of a file.
    """
    data_files = sorted(filter(DATA_FILE.fullmatch, names))
    if wanted in data_files:
        return [wanted]
    config, _, split = wanted.rpartition("/")
    configs = [entry for entry in _list(card.get("configs")) if isinstance(entry, dict)]
    patterns: dict[str, list[str]] = {}
    if configs:
        entry = _config(configs, config, where)
        patterns = _patterns(entry.get("data_files"))
        if not patterns:
            config = str(entry.get("data_dir") or "").strip("/")
    if patterns:
        chosen = _by_pattern(data_files, patterns, split)
        reason = f"its splits are {', '.join(patterns)}"
    else:
        chosen = _in_folder(data_files, config, split)
        reason = "no name of a file says so"
    if not chosen:
        listed = "".join(f"\n  {name}" for name in data_files[:SHOWN]) or " none"
        if len(data_files) > SHOWN:
            listed += f"\n  and {len(data_files) - SHOWN} more"
        raise DataError(
            f"{where}: no files of split '{split or 'train'}' ({reason}). Add :SPLIT, or "
            f":PATH of one of its data files:{listed}"
        )
    return chosen


def _by_pattern(names: list[str], patterns: Mapping[str, list[str]], split: str) -> list[str]:
    """Return the files of a split that the card describes; by default train, or the only split."""
    if not split:
        is_only_split = len(patterns) == 1
        split = next(iter(patterns)) if is_only_split else "train"
    patterns_of_split = patterns.get(split, ())
    return [name for name in names if any(_fits(name, pattern) for pattern in patterns_of_split)]


def _in_folder(names: list[str], folder: str, split: str) -> list[str]:
    """Return the files of a folder that are named like the split; without a split, the only file."""
    inside = [name for name in names if not folder or name.startswith(f"{folder}/")]
    chosen = _by_name(inside, split or "train")
    if not chosen and not split and len(inside) == 1:
        return inside
    return chosen


def _config(configs: list[dict[str, Any]], wanted: str, where: str) -> dict[str, Any]:
    by_name = {str(entry.get("config_name", "default")): entry for entry in configs}
    marked = (entry for entry in configs if entry.get("default") or len(configs) == 1)
    entry = by_name.get(wanted) if wanted else next(marked, by_name.get("default"))
    if entry is None:
        raise DataError(
            f"{where}: choose one of its configs, such as :{next(iter(by_name))}/train; they are "
            f"{', '.join(by_name)}."
        )
    return entry


def _patterns(files: Any) -> dict[str, list[str]]:
    """Return the patterns of each split in any of the forms that `datasets` reads."""
    if isinstance(files, dict):
        files = [{"split": split, "path": paths} for split, paths in files.items()]
    splits: dict[str, list[str]] = {}
    for pattern in _list(files):
        entry = pattern if isinstance(pattern, dict) else {"path": pattern}
        paths = splits.setdefault(str(entry.get("split", "train")), [])
        paths.extend(map(str, _list(entry.get("path"))))
    return splits


def _fits(name: str, pattern: str) -> bool:
    """Return whether a path fits a pattern; ** crosses folders, * does not.

    The pattern is a stranger's, so it does not become a regular expression, which may take
    exponential time: `ends` are the places in the path at which the pattern so far can end.
    """
    if len(pattern) > LONGEST_PATTERN:
        raise DataError(
            f"a pattern of the dataset's card has {len(pattern)} characters "
            f"({pattern[:40]}...); at most {LONGEST_PATTERN} are read. Name a file instead."
        )
    ends = {0}
    for sign in re.findall(r"\*\*/|\*\*|\*|.", pattern.removeprefix("./"), re.DOTALL):
        first = min(ends)
        if sign == "**/":  # no folder, or any number of them
            ends |= {i + 1 for i in range(first, len(name)) if name[i] == "/"}
        elif sign == "**":
            ends = set(range(first, len(name) + 1))
        elif sign == "*":
            ends = _within_folders(name, ends)
        else:
            allowed = set(name) - {"/"} if sign == "?" else {sign}
            ends = {i + 1 for i in ends if name[i : i + 1] in allowed}
        if not ends:
            return False
    return len(name) in ends


def _within_folders(name: str, starts: set[int]) -> set[int]:
    """Return the places that can be reached from `starts` without crossing a slash."""
    reached = set(starts)
    for i, character in enumerate(name):
        if i in reached and character != "/":
            reached.add(i + 1)
    return reached


def _by_name(names: list[str], split: str) -> list[str]:
    """Return the files whose name or folder is the split, or else has a word for it."""
    paths = {name: PurePosixPath(name) for name in names}
    exact = [
        name
        for name, path in paths.items()
        if split in (SHARD.sub("", path.name.split(".")[0]), *path.parts[:-1])
    ]
    if exact or any(SHARD.search(name) for name in names):  # shards carry the name of their split
        return exact
    words = WORDS.get(split, {split})
    return [name for name in names if words & set(re.split(r"[^a-z]+", name.lower()))]


def front_matter(text: str) -> dict[str, Any]:
    """Return the YAML at the top of a card; raise ValueError if it cannot be read."""
    top = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    values = parse_yaml(top[1]) if top else {}
    return values if isinstance(values, dict) else {}


def _card(file: Path | None) -> dict[str, Any]:
    """Return the YAML at the top of a dataset's card."""
    try:
        text = read_bytes(file, MOST_CARD_BYTES).decode(errors="replace") if file else ""
        return front_matter(text)
    except ValueError as error:
        log.warning("%s: its YAML cannot be read (%s); splits are found by file names", file, error)
        return {}


def _recorded(record: Path) -> tuple[str, list[Path]] | None:
    """Return what was downloaded before, if all of it is still in the cache."""
    try:
        entry = read_json(record)
        files = [Path(name) for name in entry["files"]]
        return (str(entry["commit"]), files) if all(f.is_file() for f in files) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
