"""Imports go down only, and each heavy dependency has one door."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rather.registry import TOOLS, tool
from tests.house.source import ROOT, imports, module_name, python_files, where
from tests.tiny import in_child

# From the roof to the ground. Rooms on one floor may import each other as long as no circle closes.
FLOORS = [
    {"tools", "trl"},
    {"rather", "__main__"},
    {"cli"},
    {"commands"},
    {"coati"},
    {"api"},
    {"pipeline"},
    {"judges"},
    {"outcome"},
    {"cluster"},
    {"plan"},
    {"train", "run_folder", "reference"},
    {"parallel"},
    {"model"},
    {"losses", "optim"},
    {"data", "tracking"},
    {"checkpoint"},
    {"child"},
    {"config", "faults", "recipes"},
    {"files"},
    {"errors", "registry", "arithmetic"},
]

DOORS = {
    "hydra": ("rather/config/load.py",),
    "omegaconf": ("rather/config/load.py",),
    # demo.py plays the user who brings a model: it makes one and asks it for answers.
    "transformers": (
        "rather/model/",
        "rather/parallel/load.py",
        "rather/data/template.py",
        "rather/data/pixels.py",
        "rather/tools/demo.py",
        "rather/tools/megatron_file.py",  # the config of the folder that it converts
        "rather/trl/",
    ),
    "tensorboard": ("rather/tracking/",),
    "torch.utils.tensorboard": ("rather/tracking/",),
    "wandb": ("rather/tracking/",),
    "trackio": ("rather/tracking/",),
    "mlflow": ("rather/tracking/",),
    "swanlab": ("rather/tracking/",),
    "ray": ("rather/cluster/",),
    "boto3": ("rather/checkpoint/store.py",),
    "botocore": ("rather/checkpoint/store.py",),
    "peft": ("rather/model/adapters.py", "rather/model/adapted_experts.py", "rather/trl/"),
}


def room(module: str) -> str:
    """`rather.data.pack` lies in the room `data`; the package itself is a room of its own, the roof."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def floor(module: str) -> int:
    for number, rooms in enumerate(FLOORS):
        if room(module) in rooms:
            return number
    raise AssertionError(
        f"{module}: room '{room(module)}' is on no floor; give it a place in FLOORS"
    )


def ours(file: Path, *, for_types: bool = True) -> list[tuple[str, ast.stmt]]:
    found = imports(file, for_types=for_types)
    return [(name, node) for name, node in found if name.split(".")[0] == "rather"]


def test_every_subpackage_has_a_layer() -> None:
    for file in python_files("rather"):
        floor(module_name(file))


def test_imports_go_down() -> None:
    rising = [
        f"{where(file, node)}: {module_name(file)} -> {name} runs up"
        for file in python_files("rather")
        for name, node in ours(file)
        if floor(name) < floor(module_name(file))
    ]
    assert not rising, "\n".join(rising)


def test_the_core_never_imports_tools() -> None:
    """`rather.registry` names them in strings and imports them when they are called."""
    core = [file for file in python_files("rather") if room(module_name(file)) != "tools"]
    importers = [
        f"{where(file, node)}: imports {name}"
        for file in core
        for name, node in ours(file)
        if room(name) == "tools"
    ]
    assert not importers, "\n".join(importers)
    named = [
        where(file)
        for file in core
        if "rather.tools." in file.read_text(encoding="utf-8") and file.name != "registry.py"
    ]
    assert not named, f"name tools in rather/registry.py only: {named}"


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_of_the_registry_exists(name: str) -> None:
    assert callable(tool(name))


@pytest.mark.parametrize("library", DOORS)
def test_heavy_dependency_is_imported_in_one_place(library: str) -> None:
    strangers = [
        f"{where(file, node)}: imports {name}, allowed only in {', '.join(DOORS[library]) or 'no file'}"
        for file in python_files("rather")
        for name, node in imports(file, for_types=False)
        if (name == library or name.startswith(library + "."))
        and not where(file).startswith(DOORS[library] or ("-",))
    ]
    assert not strangers, "\n".join(strangers)


def test_the_rules_can_fail() -> None:
    assert (
        floor("rather.cli")
        < floor("rather.train.rank_trainer")
        < floor("rather.data.pack")
        < floor("rather.errors")
    )
    with pytest.raises(AssertionError, match="on no floor"):
        floor("rather.attic")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("rather", "torch transformers hydra pyarrow tensorboard"),
        ("rather.config", "torch transformers pyarrow tensorboard ray"),
        ("rather.losses.losses", "transformers hydra pyarrow tensorboard ray"),
        ("rather.cli", "torch transformers tensorboard ray"),
        ("rather.judges.rule_process", "torch jinja2 httpx pydantic"),
        ("rather.judges.compare", "torch transformers"),
    ],
)
def test_light_modules_stay_light(module: str, absent: str) -> None:
    """In a fresh process: what this one has imported already must not count."""
    probe = (
        f"import sys, {module}; print(*[name for name in {absent.split()} if name in sys.modules])"
    )
    command = [sys.executable, "-c", probe]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split(), f"import {module} also imports {done.stdout.strip()}"


def test_the_pipeline_does_not_import_ray() -> None:
    """In a child of the server that has imported it: a process of its own takes eight seconds."""
    assert in_child(_has_imported, "rather.pipeline.pipeline") == 1
    assert in_child(_has_imported, "ray") == 0


def _has_imported(module: str) -> int:
    return int(module in sys.modules)
