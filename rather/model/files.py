"""The files of a model or adapter folder, which comes from others: names and links that lead out of it are refused."""

from __future__ import annotations

import json
from pathlib import Path

from rather.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path | None) -> list[Path]:
    """One file, or those that the index names, in the order in which transformers looks for them."""
    if folder is None:
        raise FileNotFoundError("neither a folder nor a hub model that can be had")
    whole, index = folder / WEIGHTS, folder / INDEX
    names = [WEIGHTS] if whole.exists() or not index.exists() else sorted(set(_listed(index)))
    for name in names:
        refuse_outside(folder, name)
    return [folder / name for name in names]


def _listed(index: Path) -> list[str]:
    try:
        names = list(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index}: does not name the files of the weights ({error!r})") from error
    for name in names:
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise ConfigError(f"{index}: names {name!r}; weights are .safetensors files beside it")
    return names


def refuse_outside(folder: Path, name: str) -> None:
    """A hub's cache is made of links from snapshots/<commit> to blobs beside it; no other link leads out."""
    target, homes = (folder / name).resolve(), [folder.resolve()]
    if homes[0].parent.name == "snapshots":
        homes.append(homes[0].parent.parent / "blobs")
    if target.parent not in homes:
        raise ConfigError(
            f"{folder / name}: is a link to {target}, out of its folder; copy the file into it"
        )
