"""Ready-made configs with the settings of papers and their authors: the YAML files in this folder."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from rather.errors import ConfigError


def list_recipes() -> dict[str, Path]:
    """Return the files by name; the first line of each says what it is."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Return the file of a recipe; for an unknown name, raise an error with the nearest one."""
    recipes = list_recipes()
    if name not in recipes:
        near = get_close_matches(name, recipes, n=1)
        near = near or [known for known in recipes if known.startswith(name)]
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(recipes)}."
        raise ConfigError(f"unknown recipe '{name}'; {hint}")
    return recipes[name]


def copy_recipe(name: str, target: Path | None = None, *, force: bool = False) -> Path:
    """Copy a recipe to a file or folder, by default NAME.yaml; replace a file only if forced."""
    text = find_recipe(name).read_text(encoding="utf-8")
    target = target or Path(f"{name}.yaml")
    target = target / f"{name}.yaml" if target.is_dir() else target
    try:
        with open(target, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{target}: already exists; choose another file, or replace it with --force."
        ) from None
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror}).") from error
    return target
