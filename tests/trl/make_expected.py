"""Runs every case with real TRL and stores its log_history, and the arguments of its configs.

python -m tests.trl.make_expected # needs the `bench` extra (trl, accelerate, datasets)
"""

from __future__ import annotations

import importlib
import json
import tempfile
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import trl

from tests.golden.trl_run import make_model
from tests.trl.cases import CASES, PATHS, TRAINERS, make_trainer

OUT = Path(__file__).with_name("expected_1_16.json")


def arguments_of(trainer: str) -> dict[str, Any]:
    """Return name -> default of TRL's config."""
    module = importlib.import_module(".".join(["trl", *filter(None, [PATHS.get(trainer)])]))
    found = {}
    for argument in fields(getattr(module, f"{trainer}Config")):
        factory = argument.default_factory
        default = argument.default if factory is MISSING else factory()
        is_json = isinstance(default, str | int | float | bool | list | dict | None)
        found[argument.name] = default if is_json else str(default)
    return found


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model")
        for title, case in CASES.items():
            trainer = make_trainer("trl", case, str(model), folder / "out")
            trainer.train()
            found[title] = trainer.state.log_history
    arguments = {trainer: arguments_of(trainer) for trainer in TRAINERS}
    content = {"trl": trl.__version__, "arguments": arguments, "cases": found}
    OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
