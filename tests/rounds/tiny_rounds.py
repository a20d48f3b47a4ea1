"""A plan of two short rounds with a tiny model, in a folder that is the working directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.commands.conftest import write
from tests.tiny import make_model

RULE = """
def score(prompt, answer):
    words = answer.split()
    return sum(1 - int(word[1:]) % 2 for word in words if word[0] == "w") / max(1, len(words))
"""


def write_plan(folder: Path = Path(), **changes: Any) -> Path:
    """Write model, prompts, rule and YAML; all paths are relative."""
    make_model(folder / "base")
    (folder / "rule.py").write_text(RULE)
    for name, first, count in (("prompts", 0, 8), ("held_out", 10, 5)):
        rows = ({"prompt": f"w{i} w{i + 1}"} for i in range(first, first + count))
        write(folder / f"{name}.jsonl", *rows)
    rounds = {
        "count": 2, "prompts": "prompts.jsonl", "held_out_prompts": "held_out.jsonl",
        "answers": 4, "max_new_tokens": 16, "judge": "rule.py:score",
    }  # fmt: skip
    rounds |= changes.pop("rounds", {})
    values = {
        "exp_name": "own",
        "pretrain": "base",
        "sequence_length": 64,
        "report_html": False,
        "rounds": rounds,
        "actor_train": {
            "training_args": {
                "learning_rate": 1e-2,
                "per_device_train_batch_size": 4,
                "num_train_epochs": 3,
            },
        },
    }
    file = folder / "rounds.yaml"
    file.write_text(yaml.safe_dump(values | changes))
    return file
