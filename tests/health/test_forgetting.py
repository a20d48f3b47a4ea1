"""Forgetting: the figures of a model, and what counts as lost."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.config.paths import check_paths
from rather.config.run_config import DPOConfig
from rather.config.values import FORGETTING
from rather.errors import ConfigError, DataError
from rather.outcome.forgetting import (
    PHRASINGS,
    SHIPPED,
    Figures,
    ForgettingSet,
    Forgotten,
    Question,
    forgetting_of,
    read_rows,
)
from rather.pipeline.forgetting import LONG_ENOUGH, ForgettingCheck, Limits, why_left_out
from rather.pipeline.pipeline import DPOPipeline
from tests.health.tiny_runs import EASY, RATE, TinyRuns, asked_as_trained
from tests.tiny import make_config, metrics


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
    base, file = tiny_runs.folder / "base", asked_as_trained(tmp_path)
    figures = forgetting_of(str(base), file)
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    questions, texts = read_rows(file)
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([tokenizer(text).input_ids])
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert figures.loss == pytest.approx(total / count, rel=1e-5)
    assert len(figures.replies) == 12 * len(PHRASINGS)
    # Without a template a question is asked as `Question: ... Answer:`, of unknown words here.
    asked = [question for question in questions for _ in PHRASINGS]
    right = [i for i, q in enumerate(asked) if q.is_right(figures.replies[i])]
    assert figures.right == right


def answered(*times_right: int) -> dict[str, Any]:
    """Figures of a model that answers each question right in so many phrasings."""
    right = [
        question * len(PHRASINGS) + phrasing
        for question, times in enumerate(times_right)
        for phrasing in range(times)
    ]
    return {"loss": 2.0, "right": right, "replies": len(PHRASINGS) * len(times_right)}


def test_what_counts_as_forgotten() -> None:
    base = answered(*[3] * 20, *[2] * 10, *[0] * 20)
    nothing = Forgotten.between(base, base)
    assert (nothing.known, nothing.kept_share, nothing.chance) == (20, 1.0, 0.5)
    # One other answer of three changes nothing, for a question that was known or that was not.
    flipped = Forgotten.between(base, answered(*[2] * 20, *[3] * 10, *[1] * 20))
    assert (flipped.kept, flipped.new) == (20, 0)
    # A question that is known for the first time does not make up for a lost one.
    other = Forgotten.between(base, answered(1, *[3] * 19, *[2] * 10, 3, *[0] * 19))
    assert (other.kept, other.new, other.kept_share) == (19, 1, 0.95)
    assert other.text().endswith("19 of 20 known answers are kept, 1 are new")
    # A base that knows fewer than ten answers is not judged by questions.
    weak = Forgotten.between(answered(*[3] * 9, *[2] * 41), answered(*[0] * 50))
    assert weak.kept_share is None
    # Nor are two models that were asked other questions, or one that was not asked.
    assert Forgotten.between(base, answered(*[3] * 40)).kept_share is None
    assert Forgotten.between(base, Figures(2.0).as_json()).kept_share is None


@pytest.mark.parametrize(
    ("lost", "new", "chance"),
    [
        (1, 0, 0.25),  # 97 % are kept
        (3, 0, 0.0625),  # one answer decides nothing, nor do three
        (4, 0, 0.03125),
        (4, 5, 0.623),  # as many right as before: other answers, not fewer
        (11, 4, 0.0384),
        (30, 0, 0.5**31),
    ],
)
def test_answers_count_as_lost_if_chance_would_hardly_lose_so_many(
    lost: int, new: int, chance: float
) -> None:
    """30 known answers of 50 questions; the chances are McNemar's, with mid-p."""
    forgotten = Forgotten(3.0, 3.0, 30, 30 - lost, new)
    assert forgotten.chance == pytest.approx(chance, rel=1e-3)
    metrics = {"loss": 3.0, "kept": forgotten.kept_share, "chance": forgotten.chance}
    problem = Limits().problem(
        {FORGETTING + name: value for name, value in metrics.items()}, {"forgetting": {"loss": 3.0}}
    )
    assert ("still right" in problem) == (chance < 0.05)


@pytest.mark.defect("E8")
@pytest.mark.parametrize(("lost", "new"), [(540, 484), (1200, 0), (10_100, 10_000)])
def test_any_number_of_answers_has_a_chance(lost: int, new: int) -> None:
    """With many changed answers McNemar's chance is that of a normal distribution."""
    deviations = (lost - new) / math.sqrt(2 * (lost + new))
    expected = math.erfc(deviations) / 2
    assert Forgotten(1, 1, lost + 300, 300, new).chance == pytest.approx(
        expected, rel=2e-3, abs=1e-99
    )


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


# --- a run ---


def forgetting_lines(config: DPOConfig) -> list[dict[str, float]]:
    return [line for line in metrics(config) if f"{FORGETTING}loss" in line]


def test_a_run_measures_it_before_the_first_step_and_at_the_end(
    tiny_runs: TinyRuns, measured_run: DPOConfig
) -> None:
    lines = forgetting_lines(measured_run)
    assert [line["step"] for line in lines] == [0, 4]
    folders = (tiny_runs.folder / "base", measured_run.run_dir / "model")
    for line, folder in zip(lines, folders, strict=True):
        figures = forgetting_of(str(folder), Path(measured_run.forgetting))
        assert line[f"{FORGETTING}loss"] == pytest.approx(figures.loss, rel=1e-4)
        assert line[f"{FORGETTING}right"] == len(figures.right) / 36
    assert lines[0][f"{FORGETTING}kept"] == 1.0


@pytest.mark.parametrize(("right", "is_asked_again"), [(9, False), (10, True)])
def test_a_model_that_knows_too_little_is_not_asked_again(
    right: int, is_asked_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rather.pipeline.forgetting.is_local", lambda _: True)
    asked = []

    class Stub:
        is_readable, digest = True, "d"

        def measure(self, log_probs: object, answer: object) -> Figures:
            asked.append(answer is not None)
            replies = [""] * 50 * len(PHRASINGS)
            known = [*range(right * len(PHRASINGS))]
            return Figures(2.0, replies, known) if answer else Figures(2.0)

    roles = SimpleNamespace(actor_train=None)
    state = SimpleNamespace(progress=SimpleNamespace(base={}))
    parts: list[Any] = [roles, None, state, 4, False, None, 0, None]
    check = ForgettingCheck(*parts)
    check.measured = Stub()  # type: ignore[assignment]
    check.chosen = ["Yes."]
    lines = [check.record(step, lambda: False) for step in (0, 4)]
    assert asked == [True, is_asked_again]
    for line in lines:
        assert line[f"{FORGETTING}loss"] == 2.0
        assert (f"{FORGETTING}kept" in line) == is_asked_again
    # A file that was changed since then gives no comparison, but its questions are asked.
    state.progress.base["forgetting"]["digest"] = "other"
    assert check.record(4, lambda: False) == {f"{FORGETTING}loss": 2.0}


def test_a_short_run_is_not_slowed_down(tiny_runs: TinyRuns) -> None:
    config = tiny_runs.config("short", EASY)
    pipeline = DPOPipeline(config)
    with closing(pipeline):
        assert pipeline.forgetting is None  # auto, and 64 pairs
        reason = why_left_out(config, "cpu", pipeline.source)
        assert reason == "`auto` leaves out runs below 500,000 training tokens"
        tokens = LONG_ENOUGH["cpu"] / 4 / 16  # of each pair of four steps
        pipeline.source.data.train.tokens[:] = math.ceil(tokens)
        parts = pipeline.parts
        found = ForgettingCheck.of(
            config,
            config.actor_train.data_args,
            config.sequence_length,
            pipeline.roles,
            parts.retry,
            pipeline.state,
            pipeline.source,
        )
        assert found
        assert not found.is_always_due


def test_save_best_never_keeps_a_model_beyond_the_limits(tiny_runs: TinyRuns) -> None:
    """Trained at 100 times the rate, the model is refused and the base is the best."""
    file = asked_as_trained(tiny_runs.folder)
    broken = replace(EASY, rate=100 * RATE)
    config = tiny_runs.config(
        "broken", broken, forgetting=str(file), save_best=True, eval_prompts=None,
        metric_for_best_model="eval/rewards/accuracies",
    )  # fmt: skip
    pipeline = DPOPipeline(config)
    pipeline.run()
    right = {line["step"]: line["eval/rewards/accuracies"] for line in forgetting_lines(config)}
    assert max(right, key=right.__getitem__) > 0  # without limits another step would be the best
    assert pipeline.progress.best_step == 0
    base, best = (AutoModelForCausalLM.from_pretrained(folder).state_dict()
                  for folder in (tiny_runs.folder / "base", config.run_dir / "best_model"))  # fmt: skip
    assert all(torch.equal(best[name], weight) for name, weight in base.items())


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ({"eval/drift": 1.2}, "drift_limit"),
        ({"eval/drift": math.nan}, "drift_limit"),
        ({"eval/drift": 1.05}, ""),  # the reference was another model: 0.1 at the start
        ({"eval/forgetting/loss": 2.2}, "above forgetting_limit"),
        ({"eval/forgetting/loss": math.nan}, "above forgetting_limit"),
        ({"eval/forgetting/loss": 2.0, "eval/forgetting/kept": 0.9}, "still right"),
        ({"eval/forgetting/loss": 2.0, "eval/forgetting/kept": 0.95}, ""),
        ({"eval/forgetting/kept": 0.9, "eval/forgetting/chance": 0.2}, ""),
        # As many new answers do not make up for a third of the old ones.
        ({"eval/forgetting/kept": 0.67, "eval/forgetting/chance": 0.2}, "still right"),
        (
            {"eval/forgetting/kept": 0.67, "eval/forgetting/right": 0.46}
            | {"eval/forgetting/right_before": 0.6},
            "67% of the answers that the base knew are still right (right: 60% before, 46% now)",
        ),
        ({}, ""),
    ],
)
def test_which_limit_is_exceeded(metrics: dict[str, float], problem: str) -> None:
    base = {"eval/drift": 0.1, "forgetting": {"loss": 2.0}}
    found = Limits(1.0, 0.05).problem(metrics, base)
    assert problem in found
    assert bool(problem) == bool(found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"forgetting": "off", "metric_for_best_model": "eval/forgetting/loss"},
            "needs forgetting",
        ),
        ({"metric_for_best_model": "eval/forgetting/best"}, "is not measured"),
        ({"metric_for_best_model": "eval/win_rate"}, r"needs eval_prompts\.judge"),
        (
            {
                "metric_for_best_model": "eval/forgetting/right",
                "actor_train__device_mapping": [0, 1],
            },
            "'eval/forgetting/right' needs answers",
        ),
        ({"forgetting": "missing.jsonl"}, "forgetting: "),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        check_paths(make_config(tmp_path, save_best=True, **changes))


def test_yaml_reads_off_as_false(tmp_path: Path) -> None:
    assert make_config(tmp_path, forgetting=False).forgetting == "off"


def test_texts_of_another_language_are_not_measured(tiny_runs: TinyRuns) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_runs.folder / "base")
    assert not ForgettingSet(tokenizer, 64).is_readable
    assert ForgettingSet(tokenizer, 64, file=asked_as_trained(tiny_runs.folder)).is_readable
