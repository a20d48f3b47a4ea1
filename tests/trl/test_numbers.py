"""rather.trl trains as real TRL 1.16 did: losses, gradient norms and metrics of log_history.

See make_expected.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trl.cases import CASES, make_trainer

EXPECTED: dict[str, Any] = json.loads(
    Path(__file__).with_name("expected_1_16.json").read_text(encoding="utf-8")
)["cases"]
# Of the machine; and of padded batches, whose padding TRL counts.
TIMES = ("runtime", "per_second", "total_flos")
OVER_PADDING = {"ORPO": ("logits/",), "CPO": ("logits/",)}


# The others run in `make test-all`: each changes one setting of these.
QUICK = ("dpo chat", "dpo lora", "kto", "reward", "reward plain", "sft completions", "orpo")
MOVING = "dpo moving reference"
MARKS: dict[str, list[pytest.MarkDecorator]] = {title: [] for title in QUICK}
MARKS[MOVING] = [pytest.mark.defect("E7")]


@pytest.mark.parametrize(
    "title",
    [pytest.param(title, marks=MARKS.get(title, [pytest.mark.wide])) for title in CASES],
)
def test_log_history_is_trls(title: str, model: str, tmp_path: Path) -> None:
    case = CASES[title]
    trainer = make_trainer("rather.trl", case, model, tmp_path)
    trainer.train()
    rough = case.settings.get("bf16")
    skipped = (*TIMES, *OVER_PADDING.get(case.trainer, ()))
    for ours, theirs in zip(trainer.state.log_history, EXPECTED[title], strict=True):
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            if not any(word in name for word in skipped):
                near = pytest.approx(value, rel=2e-2, abs=2e-2) if rough else _near(name, value)
                assert ours[name] == near, name


def _near(name: str, value: float) -> Any:
    """Losses to 1e-5; sums of log-probs and norms have more digits before the point."""
    is_loss = name.endswith("loss")
    return pytest.approx(value, abs=1e-5) if is_loss else pytest.approx(value, rel=1e-4, abs=2e-5)
