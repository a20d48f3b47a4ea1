"""Ready configs with the settings of papers and their authors: YAML files beside this one, to look at and to copy."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rather.errors import ConfigError

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """One YAML file; its first line says what it is."""

    name: str
    title: str
    path: Path


def list_recipes() -> list[Recipe]:
    """All recipes by name."""
    return [
        Recipe(path.stem, _title(path), path)
        for path in sorted(FOLDER.glob("*.yaml"), key=lambda path: path.stem)
    ]


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; an unknown one is an error that names the nearest."""
    recipes = {recipe.name: recipe for recipe in list_recipes()}
    if name not in recipes:
        near = (
            get_close_matches(name, recipes, n=1)
            or [known for known in recipes if known.startswith(name)][:1]
        )
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(recipes)}."
        raise ConfigError(f"unknown recipe '{name}'; {hint}")
    return recipes[name]


def show_recipe(name: str) -> str:
    """The YAML text of a recipe."""
    return find_recipe(name).path.read_text(encoding="utf-8")


def copy_recipe(name: str, target: Path | None = None, *, force: bool = False) -> Path:
    """Copies a recipe to a file (<name>.yaml here, unless told) or into a folder; never over a file, unless forced."""
    text = show_recipe(name)
    target = target or Path(f"{name}.yaml")
    if target.is_dir():
        target = target / f"{name}.yaml"
    if not target.parent.is_dir():
        raise ConfigError(
            f"{target}: there is no folder {target.parent}; make it, or name another file."
        )
    try:
        with open(target, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{target}: exists already; name another file, or replace it with --force."
        ) from None
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror}).") from error
    return target


def _title(path: Path) -> str:
    with open(path, encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()
