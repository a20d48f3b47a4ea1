"""`rather judge`: the right order by every judge, with judges that are found out and corrected."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rather.config.run_config import DPOConfig
from rather.judges.answer_stats import interval, is_refusal, repetition
from rather.judges.compare import win_rates
from rather.judges.judge import Comparison
from tests.commands.conftest import rather, refusal, rows_of, succeed, told, write
from tests.commands.fake_server import Reply, failing, kinder, longer, says, serving

pytestmark = pytest.mark.usefixtures("own_cache")
KIND = "def score(prompt, answer):\n    return answer.count('kind') - answer.count('rude')\n"


def answers(file: Path, texts: list[str]) -> Path:
    rows = (
        {"prompt": f"question {i}", "responses": [text], "ended": [True]}
        for i, text in enumerate(texts)
    )
    return write(file, *rows)


def two(folder: Path, *texts: list[str]) -> list[Path]:
    """Write the answers of two models to the same prompts, in a.jsonl and b.jsonl."""
    return [answers(folder / f"{name}.jsonl", each) for name, each in zip("ab", texts, strict=True)]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """B is kinder in 24 of 40 answers, equal in 12, and longer by chance."""
    draw = random.Random(0)
    words = [["rude"] * 24 + ["kind"] * 16, ["kind"] * 36 + ["rude"] * 4]
    (tmp_path / "rule.py").write_text(KIND)
    return two(
        tmp_path, *([f"{word} " + "x" * draw.randint(0, 60) for word in each] for each in words)
    )


def test_a_rule_and_a_server_find_the_right_order(files: list[Path], tmp_path: Path) -> None:
    a, b = files
    rule = f"{tmp_path / 'rule.py'}:score"
    by_rule = told("judge", a, b, "--with", rule)
    counts = ("n", "wins", "ties", "losses", "win_rate")
    assert [by_rule[name] for name in counts] == [40, 24, 12, 4, 0.75]
    assert 0.5 < by_rule["win_rate_low"] < 0.75 < by_rule["win_rate_high"] < 0.9
    assert by_rule["win_rate_length_controlled"] == pytest.approx(0.75, abs=0.08)
    assert (by_rule["flips"], by_rule["unreadable"], by_rule["tokens_spent"]) == (0, 0, 0)
    back = told("judge", b, a, "--with", rule)
    assert back["win_rate"] == 1 - by_rule["win_rate"]
    assert back["win_rate_low"] == pytest.approx(1 - by_rule["win_rate_high"])
    with serving(says(kinder)) as server:
        done = rather("judge", a, b, *server.judge, "--json")
        by_server = json.loads(done.stdout)
        assert "80 requests (0 of 80 verdicts are cached)" in done.stderr
        assert [by_server[name] for name in counts] == [by_rule[name] for name in counts]
        assert by_server["tokens_spent"] == 800
        assert len(server.requests) == 80
        assert told("judge", a, b, *server.judge)["tokens_spent"] == 0, "all verdicts are cached"
        assert len(server.requests) == 80
    printed = rather("judge", a, b, "--with", rule)
    assert "win rate of B: 75.0% (95 %:" in printed.stdout


@pytest.mark.defect("E7")
def test_four_answers_to_a_prompt_do_not_narrow_the_interval(
    files: list[Path],
) -> None:
    found = []
    with serving(says(kinder)) as server:
        for times in (1, 4):
            for file in files:
                rows = rows_of(file)
                write(file, *(row | {"responses": row["responses"] * times} for row in rows))
            found.append(told("judge", *files, *server.judge))
    assert found[1]["n"] == 4 * found[0]["n"]
    for name in ("win_rate", "win_rate_low", "win_rate_high"):
        assert found[1][name] == pytest.approx(found[0][name])


def test_answers_that_have_taken_up_habits(tmp_path: Path) -> None:
    good = [f"Answer {i} is a whole sentence." for i in range(20)]
    repeated = [f"{text} {text}" for text in good[:8]]
    worn = [*repeated, *(text.lower() for text in good[8:16]), *good[16:]]
    (tmp_path / "rule.py").write_text(KIND)
    a, b = two(tmp_path, good, worn)
    words = ("--with", f"{tmp_path / 'rule.py'}:score")
    result = told("judge", a, b, *words)
    assert result["repeats"] == result["starts_within"] == [0.0, 0.4]
    assert result["repeats_chance"] == result["starts_within_chance"] == 0.5**9
    printed = rather("judge", a, b, *words).stdout
    assert "repeat a sentence: A 0.0%, B 40.0%, more than by chance\n" in printed
    assert "begin within a sentence: A 0.0%, B 40.0%, more than by chance\n" in printed
    assert "more than by chance" not in rather("judge", b, a, *words).stdout


def test_a_judge_that_always_says_a_is_found_out(files: list[Path]) -> None:
    with serving(says(lambda first, second: "[[A]]")) as server:
        found = told("judge", *files, *server.judge)
    assert (found["flips"], found["ties"], found["win_rate"]) == (40, 40, 0.5)


def test_a_judge_that_prefers_length_is_corrected(tmp_path: Path) -> None:
    draw = random.Random(1)
    short = [draw.randint(20, 100) for _ in range(120)]
    long = ["y" * max(1, length + draw.randint(-20, 60)) for length in short]
    a, b = two(tmp_path, ["x" * length for length in short], long)
    with serving(says(longer)) as server:
        found = told("judge", a, b, *server.judge)
    assert found["win_rate"] > 0.65
    assert found["win_rate_length_controlled"] == pytest.approx(0.5, abs=0.15)


def test_unreadable_verdicts_and_faults_of_a_server(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rather.judges.openai_client.FIRST_WAIT", 0.01)
    seen: set[str] = set()

    def behaviour(path: str, body: dict[str, Any]) -> Reply:
        text = body["messages"][0]["content"]
        if text not in seen:  # every first try fails
            seen.add(text)
            return None if len(text) % 2 else (429, {"error": "slow down"})
        is_first = "question 0\n" in text
        reply: Any = "I cannot say." if is_first else "[[B]]"
        return 200, {"choices": [{"message": {"content": reply}}]}

    with serving(behaviour) as server:
        found = told("judge", *files, *server.judge)
    assert (found["unreadable"], found["n"], found["flips"]) == (2, 39, 39)
    assert found["tokens_spent"] > 0, "estimated, as the server does not say it"
    with serving(failing(500)) as server:
        done = refusal(5, "judge", *files, "--with", server.url, "--judge-model", "n")
    assert "HTTP 500" in done
    assert "after 6 tries" in done


def test_several_answers_and_another_template(tmp_path: Path) -> None:
    """By a rule the mean counts, on a server the i-th is compared with the i-th."""
    a = write(tmp_path / "a.jsonl", {"prompt": "p", "responses": ["kind", "rude rude"]})
    b = write(tmp_path / "b.jsonl", {"prompt": "p", "responses": ["rude", "kind"]})
    (tmp_path / "rule.py").write_text(KIND)
    by_rule = told("judge", a, b, "--with", f"{tmp_path / 'rule.py'}:score")
    assert (by_rule["n"], by_rule["wins"], by_rule["cut"]) == (1, 1, [None, None])
    (tmp_path / "short.jinja").write_text("{{ prompt }}<answer_a>\n{{ answer_a }}\n</answer_a>"
                                          "<answer_b>\n{{ answer_b }}\n</answer_b>")  # fmt: skip
    with serving(says(kinder)) as server:
        short = ("--judge-template", tmp_path / "short.jinja")
        found = told("judge", a, b, *server.judge, *short)
        assert len(server.requests[0][2]["messages"][0]["content"]) < 100
    assert (found["n"], found["wins"], found["losses"], found["win_rate"]) == (2, 1, 1, 0.5)


def test_a_server_scores_answers_by_comparing_them(tmp_path: Path) -> None:
    """An answer's score is its share of wins: of four all meet, of seven each meets four."""
    four = {"prompt": "p", "responses": ["x", "xx", "xxx", "xx"], "id": 7}
    seven = {"prompt": "q", "responses": ["y" * (1 + i) for i in range(7)]}
    file, out = write(tmp_path / "a.jsonl", four, seven), tmp_path / "scored.jsonl"
    with serving(says(longer)) as server:
        options = (*server.judge, "--out", out)
        forecast = succeed("judge", file, *options, "--dry-run")
        assert "34 requests (4 of 38 verdicts are cached), about" in forecast.output
        assert not server.requests
        assert not out.exists()
        found = told("judge", file, *options)
        # Of the six pairs of four answers one has equal texts, which tie without a request, and two
        # are asked already: 2 * (3 + 14) requests.
        assert (found["n"], found["comparisons"], found["tokens_spent"]) == (11, 19, 340)
        assert len(server.requests) == 34
        assert told("judge", file, *options)["tokens_spent"] == 0
    first, second = rows_of(out)
    assert first == {**four, "scores": pytest.approx([0.0, 0.5, 1.0, 0.5])}
    # In a circle: the shortest also meets the two longest.
    assert second["scores"] == [0.0, 0.25, 0.5, 0.5, 0.5, 0.75, 1.0]
    with serving(lambda path, body: (200, {"choices": [{"message": {"content": "?"}}]})) as server:
        refused = rather("judge", file, *server.judge)
    assert "no verdict could be read" in refused.output
    with serving(says(lambda first, second: "[[A]]")) as server:
        printed = rather("judge", file, *server.judge)
    assert "flip with the order: 19 of 19 (ties)" in printed.output


def test_a_reward_model_scores_as_transformers_does(
    trained: Callable[..., DPOConfig], tmp_path: Path
) -> None:
    run = trained("judging", task="reward", pref_loss="bradley_terry")
    model = run.run_dir / "model"
    rows = [
        {"prompt": f"w{i} w5", "responses": [f"w{i + 3} w9 w{i}", "w7", ""], "id": i}
        for i in range(4)
    ]
    file, out = write(tmp_path / "a.jsonl", *rows), tmp_path / "scored.jsonl"
    told("judge", file, "--with", model, "--out", out)
    scored = rows_of(out)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    reward: Any = AutoModelForSequenceClassification.from_pretrained(model).eval()
    for before, row in zip(rows, scored, strict=True):
        assert {name: row[name] for name in before} == before
        for text, score in zip(row["responses"], row["scores"], strict=True):
            ids = tokenizer(f"{row['prompt']}{text}", add_special_tokens=False).input_ids
            whole = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
            with torch.no_grad():
                expected = reward(torch.tensor([whole])).logits.item()
            assert score == pytest.approx(expected, abs=1e-4)
    best = [
        {**row, "responses": [row["responses"][int(np.argmax(row["scores"]))]]} for row in scored
    ]
    worst = [
        {**row, "responses": [row["responses"][int(np.argmin(row["scores"]))]]} for row in scored
    ]
    a, b = write(tmp_path / "worst.jsonl", *worst), write(tmp_path / "best.jsonl", *best)
    assert told("judge", a, b, "--with", model)["wins"] == 4


def test_the_interval_covers_and_the_numbers_of_answers_are_right() -> None:
    draw = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        low, high = interval(draw.choice([0.0, 0.5, 1.0], 40, p=[0.2, 0.2, 0.6]).tolist())
        covered += low <= 0.7 <= high
    assert covered >= 0.93 * 400
    assert interval([1.0] * 5) == (pytest.approx(0.5, abs=0.1), 1.0)
    assert repetition("it for in it for in it for in") == pytest.approx(1 - 3 / 6)
    assert repetition("om" * 60) == pytest.approx(1 - 1 / 7)
    assert repetition("An extraordinarily uncharacteristic counterexample.") == 0
    assert is_refusal("I\u2019m sorry, but no.")
    assert not is_refusal("The sugar costs two coins.")


@pytest.mark.defect("E9")
def test_a_win_rate_lies_in_its_interval() -> None:
    """One prompt with many answers counts as much as one with a single answer."""
    outcomes = [(0, 1.0)] * 12 + [(prompt, 0.0) for prompt in range(1, 9)]
    rates = win_rates([Comparison(*outcome, 0) for outcome in outcomes])
    assert rates["win_rate"] == pytest.approx(1 / 9)
    assert rates["win_rate_low"] <= rates["win_rate"] <= rates["win_rate_high"] < 0.5
    assert rates["win_rate_length_controlled"] == rates["win_rate"]


def controlled(outcomes: Any, differences: Any) -> float:
    """The rate at equal length; every outcome is of a prompt of its own."""
    pairs = enumerate(zip(outcomes, differences, strict=True))
    comparisons = [Comparison(number, *pair) for number, pair in pairs]
    return float(win_rates(comparisons)["win_rate_length_controlled"])


@pytest.mark.defect("E10", "H6")
def test_at_equal_lengths_the_rate_is_the_plain_one() -> None:
    for won in (0, 1, 15, 20):
        outcomes = [1.0] * won + [0.0] * (20 - won)
        for differences in ([0] * 20, [7] * 20):
            assert controlled(outcomes, differences) == pytest.approx(won / 20)
    assert controlled([1.0] * 40, range(-20, 20)) == 1.0, "nothing is lost at any length"
    assert controlled([1.0] * 20 + [0.0] * 20, range(20, -20, -1)) == pytest.approx(0.5, abs=0.05)


@pytest.mark.defect("E10", "H6")
@pytest.mark.parametrize("prompts", [10, 20, 50, 100])
def test_lengths_without_effect_do_not_move_the_rate(prompts: int) -> None:
    """Nine of ten answers are better, whatever their length; 100 files, within their error."""
    draw = np.random.default_rng(prompts)
    outcomes = (draw.random((100, prompts)) < 0.9).astype(float)
    rates = [controlled(row, draw.normal(size=prompts)) for row in outcomes]
    error = np.std(rates) / np.sqrt(len(rates))
    assert abs(np.mean(rates) - 0.9) < 1.96 * error
