"""Ready-made configs, the YAML files of this folder: settings of papers and their authors."""

from __future__ import annotations

from pathlib import Path

from rather.config.plugins import did_you_mean
from rather.errors import ConfigError
from rather.files import write_new


def list_recipes() -> dict[str, Path]:
    """Return the files by name; the first line of each says what it is."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Return the file of a recipe; for an unknown name, raise an error with the nearest one."""
    recipes = list_recipes()
    if name not in recipes:
        raise ConfigError(f"unknown recipe '{name}'{did_you_mean(name, recipes)}.")
    return recipes[name]


def copy_recipe(name: str, target: Path | None = None, *, force: bool = False) -> Path:
    """Copy a recipe to a file or folder, by default NAME.yaml; replace a file only if forced."""
    text = find_recipe(name).read_text(encoding="utf-8")
    target = target or Path(f"{name}.yaml")
    target = target / f"{name}.yaml" if target.is_dir() else target
    write_new(target, text, force=force)
    return target
