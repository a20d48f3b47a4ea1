"""Forgetting: the figures of a model, and what counts as lost."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.errors import ConfigError, DataError
from rather.outcome.forgetting import SHIPPED, Forgotten, Question, forgetting_of, read_rows
from tests.health.tiny_runs import TinyRuns

TEXTS = ["w40 w41 w42 w43 w44 w45 w0 w1 w2", "w50 w51 w0 w11 w2 w13"]


def own_file(folder: Path, questions: int = 12) -> Path:
    """Texts of the small language, and questions whose answer begins with w0, w10, w20 or w30."""
    rows: list[dict[str, object]] = [{"text": text} for text in TEXTS]
    for number in range(questions):
        asked = " ".join(f"w{40 + (number * k) % 20}" for k in range(1, 7))
        rows.append({"question": asked, "answers": ["w0", "w10", "w20", "w30"]})
    file = folder / "forgetting.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_fifty_questions_and_twenty_texts_ship_with_the_package() -> None:
    questions, texts = read_rows(SHIPPED)
    assert len({question.text for question in questions}) == 50
    assert len(set(texts)) == 20
    assert all(question.answers for question in questions)


def test_an_accepted_answer_must_occur_as_a_word() -> None:
    question = Question("How many?", ("8", "eight"))
    assert question.is_right("It has Eight legs.")
    assert question.is_right("(8)")
    assert not question.is_right("It has 80 legs.")
    assert not question.is_right("It weighs a lot: freight.")
    assert not question.is_right("")


def test_the_figures_of_a_model_folder_are_those_of_the_plain_model(
    tiny_runs: TinyRuns, tmp_path: Path
) -> None:
    base, file = tiny_runs.folder / "base", own_file(tmp_path)
    figures = forgetting_of(str(base), file)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(base),
        AutoTokenizer.from_pretrained(base),
    )
    total, count = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text).input_ids])
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert figures.loss == pytest.approx(total / count, rel=1e-5)
    assert len(figures.replies) == 12
    # Without a template a question is asked as `Question: ... Answer:`, of unknown words here.
    questions, _ = read_rows(file)
    right = [i for i, q in enumerate(questions) if q.is_right(figures.replies[i])]
    assert figures.right == right


def test_what_counts_as_forgotten() -> None:
    base = {"loss": 2.0, "right": [*range(20)], "questions": 50}
    nothing = Forgotten.between(base, base)
    assert not nothing.exceeds(0.0)
    assert nothing.kept_share == 1.0
    # A question that is answered right for the first time does not make up for a lost one.
    other = Forgotten.between(base, {**base, "right": [*range(1, 21)]})
    assert other.still_right == 19
    assert not other.exceeds(0.05)
    assert other.exceeds(0.04)
    assert Forgotten.between(base, {**base, "loss": 2.11}).exceeds(0.05)
    assert not Forgotten.between(base, {**base, "loss": 2.09}).exceeds(0.05)
    assert Forgotten.between(base, {**base, "loss": math.nan}).exceeds(0.05)
    # A base that answers fewer than ten right is not judged by questions.
    weak = Forgotten.between({**base, "right": [*range(9)]}, {**base, "right": []})
    assert weak.kept_share is None
    assert not weak.exceeds(0.05)
    assert "19 of 20 right answers" in other.text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a"}', "line 2: must be"),
        ('{"question": "a", "answers": [3]}', "line 2: must be"),
        ("[1", "line 2: must be"),
    ],
)
def test_a_row_that_is_neither_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(f'{{"text": "w1 w2"}}\n{line}\n')
    with pytest.raises(DataError, match=message):
        read_rows(file)
    file.write_text('{"question": "a", "answers": ["b"]}\n')
    with pytest.raises(DataError, match="no row with a text"):
        read_rows(file)
    with pytest.raises((DataError, ConfigError)):
        read_rows(tmp_path / "missing.jsonl")
