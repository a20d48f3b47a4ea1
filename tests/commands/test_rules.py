"""Rules of `rather judge`: the columns of the row, and rules that hang, crash, exit or lie."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rather.config.schema import AnswerJudge
from rather.errors import DataError
from rather.judges import rule_process
from rather.judges.compare import answer_judge
from tests.commands.conftest import rather, refusal, rows_of, told, write
from tests.commands.fake_server import longer, says, serving
from tests.commands.test_judge import answers, two
from tests.tiny import until

# What a rule does with the answers of these names; the score of any other is its length.
HOSTILE = """
import os, re, signal, subprocess

def score(prompt, answer):
    if answer == "regex": re.match(r"(a+)+$", "a" * 40 + "b")
    if answer == "sleep": subprocess.run(["sleep", "61"])
    if answer == "behind": subprocess.Popen(["sleep", "62"])
    if answer == "fork" and os.fork(): os.wait()
    if answer == "exit": exit()
    if answer == "_exit": os._exit(3)
    if answer == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if answer == "close": os.closerange(0, 256)
    if answer == "raise": raise KeyboardInterrupt("a\\x1b\\ud800")
    if answer == "deep": return score(prompt, answer)
    if answer in ("prints", "forges"):
        for handle in range(1, 3 if answer == "prints" else 1024):
            try: os.write(handle, b"[[[\\n[5.0, null]\\n\\xff")
            except OSError: pass
    if answer == "memory": return len(bytearray(100 << 20)) / (100 << 20)
    if answer == "too much": return len(bytearray(1 << 45))
    return VALUES.get(answer, len(answer))

VALUES = {"1e308": 1e308, "nan": float("nan"), "inf": float("-inf"), "huge": 10 ** 400,
          "text": "1.0", "none": None, "list": [1.0], "million": -10 ** 6, "true": True}
"""
FINE = {
    "good": 4.0, "behind": 6.0, "fork": 4.0, "prints": 6.0, "memory": 1.0, "true": 1.0,
    "million": -1e6,
}  # fmt: skip
ERRORS = {
    "regex": "took longer than 2 s", "sleep": "took longer than 2 s", "exit": "SystemExit",
    "_exit": "process ended (exit code 3)", "crash": "process ended (signal 11)",
    "close": "damaged the connection", "forges": "damaged the connection",
    "raise": "line 13: KeyboardInterrupt: a", "deep": "RecursionError", "too much": "MemoryError",
    "1e308": "the score is 1e+308", "nan": "the score is nan", "inf": "the score is -inf",
    "huge": "OverflowError", "text": "returned str, not a number", "none": "returned NoneType",
    "list": "returned list",
}  # fmt: skip
WITH = ("--with", "rule.py:score")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rule.py").write_text(HOSTILE)
    return tmp_path


def rule(text: str) -> None:
    Path("rule.py").write_text(text)


def processes() -> set[bytes]:
    """Return the command lines of rules and of what they start, in the folder of this test."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if (process / "cwd").samefile(Path()):
                found.add((process / "cmdline").read_bytes())
    return {
        words
        for words in found
        if b"rather.judges.rule_process" in words or words.startswith(b"sleep")
    }


@pytest.mark.defect("A3")
def test_hostile_rules_cost_single_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each error is counted and names row and rule; the answers after it have their scores."""
    monkeypatch.setattr("rather.judges.judge.SHOWN", 99)
    file = answers(Path("a.jsonl"), [*ERRORS, *FINE])
    result = told("judge", file, *WITH, "--rule-timeout", 2, "--out", "out.jsonl")
    until(lambda: not processes())  # killed ones end in their own time
    scores = [row["scores"][0] for row in rows_of(Path("out.jsonl"))]
    assert dict(zip(FINE, scores[len(ERRORS) :], strict=True)) == FINE
    assert scores[: len(ERRORS)] == [None] * len(ERRORS)
    assert (result["n"], result["errors"]) == (len(FINE), len(ERRORS))
    for number, (problem, reason) in enumerate(
        zip(ERRORS.values(), result["first_errors"], strict=True), 1
    ):
        assert reason.startswith("--with rule.py:score")
        assert problem in reason
        assert reason.endswith(f"a.jsonl:{number})")


@pytest.mark.defect("A3")
def test_a_pair_with_an_error_is_left_out_and_counted() -> None:
    first = ["good", "exit", "good", "x", "_exit"]
    a, b = two(Path(), first, ["better", "better", "nan", "xx", "raise"])
    result = told("judge", a, b, *WITH)
    counts = ("n", "wins", "prompts", "errors", "left_out", "mean_score")
    assert [result[name] for name in counts] == [2, 2, 5, 4, 3, [2.5, 4.0]]
    printed = rather("judge", a, b, *WITH).stdout
    assert "2 answers without a score:\n  --with" in rather("judge", a, *WITH).stdout
    assert "4 answers without a score, 3 prompts left out:\n  --with rule.py:score, line" in printed


@pytest.mark.defect("A3")
def test_a_rule_that_scores_nothing_ends_with_exit_code_3() -> None:
    rule("def score(p, a): exec('exit()')")
    a = answers(Path("a.jsonl"), ["x", "y"])
    for words in ((a,), (a, a)):
        assert "rule.py:score, line 1: SystemExit: None (at " in refusal(3, "judge", *words, *WITH)


@pytest.mark.defect("A3")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_stays_when_the_command_is_ended(number: signal.Signals) -> None:
    """Also one that the rule has started: the pipe of their output ends with the last of them."""
    command = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from rather.judges.rule_process import Rule; Rule('rule.py', 'score', {}).score('', 'x', {}, '')"
    )
    start = "    os.write(2, b'!'); subprocess.Popen(['sleep', '61'])\n    if"
    rule(HOSTILE.replace("    if", start, 1).replace('"regex"', '"x"'))
    with subprocess.Popen([sys.executable, "-c", command], stderr=subprocess.PIPE) as process:
        assert process.stderr
        assert process.stderr.read(1) == b"!"
        assert len(processes()) > 1  # the command, and the rule that `processes` has to find
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == -number
    assert (b"KeyboardInterrupt" in rest) == (number == signal.SIGINT)


def test_the_child_gets_no_secrets_and_a_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1234567890abcdef")
    monkeypatch.setenv("PLAIN", "yes")
    rule("import os, resource\n"
         "def score(prompt, answer):\n"
         "    assert 'OPENAI_API_KEY' not in os.environ and os.environ['PLAIN'] == 'yes'\n"
         "    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')\n"
         "    return resource.getrlimit(resource.RLIMIT_DATA)[0] <= memory / 2\n")  # fmt: skip
    assert told("judge", answers(Path("a.jsonl"), ["x"]), *WITH)["mean_score"] == 1.0


# --- the row ---

GOLD = Path(__file__).parents[2] / "examples" / "rules" / "gsm8k.py"
# As the rows of GSM8K, after `rather generate`: its column `answer` is the solution.
SUMS = [
    {"prompt": "2 + 3?", "question": "2 + 3?", "answer": "It is 2 + 3 = 5.\n#### 5"},
    {"prompt": "999 + 1?", "question": "999 + 1?", "answer": "999 + 1 = 1,000\n#### 1,000"},
]


@pytest.mark.defect("F1")
def test_a_rule_gets_the_columns_that_it_names() -> None:
    options = ("--with", f"{GOLD}:score")
    right = [{**SUMS[0], "responses": ["so #### 5"]}, {**SUMS[1], "responses": ["#### 1000"]}]
    wrong = [{**SUMS[0], "responses": ["so #### 6"]}, {**SUMS[1], "responses": ["none"]}]
    a, b = write(Path("a.jsonl"), *wrong), write(Path("b.jsonl"), *right)
    result = told("judge", a, b, *options, "--column", "gold=answer")
    assert (result["wins"], result["n"], result["mean_score"]) == (2, 2, [0.0, 1.0])
    done = refusal(3, "judge", a, b, *options)
    assert re.search(
        r"a.jsonl:1: has no column `gold`, which --with .*gsm8k.py:score needs; its columns are "
        r"prompt, question, answer, responses. Name one of them: --column gold=COLUMN.", done
    )  # fmt: skip


@pytest.mark.defect("F1")
@pytest.mark.parametrize(
    ("parameters", "condition"),
    [
        ("prompt, answer", "prompt == '2 + 3?' and answer == '5'"),
        ("p, a", "p == '2 + 3?' and a == '5'"),
        ("p, a", "__import__('numpy').float32(1)"),  # what a score may be
        ("p, a, question", "(p, a, question) == ('2 + 3?', '5', p)"),
        ("answer, row", "answer == '5' and row['answer'].endswith('#### 5')"),
        ("question, *, answer, level=3", "(question, answer, level) == ('2 + 3?', '5', 3)"),
        ("prompt, answer, **columns", "{*columns} == {'question', 'responses', 'ids', 'gold'}"),
        ("answer, ids, none=None", "ids == [1, {'a': None}] and none is None"),
    ],
)
def test_what_a_parameter_means(parameters: str, condition: str) -> None:
    rule(f"def score({parameters}):\n    return {condition}\n")
    row = {**SUMS[0], "responses": ["5"], "ids": [1, {"a": None}]}
    options = ("--column", "gold=answer") if "columns" in parameters else ()
    assert told("judge", write(Path("a.jsonl"), row), *WITH, *options)["mean_score"] == 1.0


@pytest.mark.defect("F1")
@pytest.mark.parametrize(
    ("parameters", "options", "code", "message"),
    [
        ("question, text", (), 2, "a.jsonl:1). Write score(prompt, answer"),
        ("answer, gold=1", ("--column", "gold=solution"), 3, "has no column `solution`, which"),
        ("answer", ("--column", "gold=answer"), 2, "rule.py:score has no parameter for it"),
        ("answer", ("--column", "gold"), 2, "write NAME=COLUMN, as in --column gold=answer"),
        ("answer", ("--column", "answer=gold"), 2, "NAME is none of prompt, answer"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    parameters: str, options: Any, code: int, message: str
) -> None:
    """Also in the second row, before the first answer is scored."""
    rule(f"def score({parameters}):\n    print('scored')\n    return 1\n")
    rows = [{**SUMS[0], "responses": ["5"]}, {"prompt": "p", "responses": ["6"]}]
    done = rather("judge", write(Path("a.jsonl"), *rows), *WITH, *options)
    assert (done.exit_code, message in done.output) == (code, True), done.output
    if not options:
        done = rather("judge", write(Path("b.jsonl"), *reversed(rows)), *WITH)
        assert "b.jsonl:2)" in done.output


@pytest.mark.defect("A3", "F1")
def test_the_rule_of_eval_prompts(caplog: pytest.LogCaptureFixture) -> None:
    """It is refused before training if it needs a column; errors of answers are logged."""
    asked = AnswerJudge.model_validate({"with": "rule.py:score"})
    rates = answer_judge(asked)([("p", "good", "better"), ("q", "exit", "x")])
    assert (rates["n"], rates["wins"], rates["left_out"]) == (1, 1, 1)
    assert "SystemExit: None (at eval_prompts: prompt 2)" in caplog.text
    rule("def score(prompt, answer, gold): return len(gold) if answer else exec('while 1: pass')")
    more = {"columns": {"gold": "prompt"}, "rule_timeout": 0.5}
    asked = AnswerJudge.model_validate({"with": "rule.py:score", **more})
    rates = answer_judge(asked)([("pp", "x", "y"), ("p", "", "y")])
    assert (rates["mean_score"], rates["left_out"]) == ([2.0, 2.0], 1)
    assert "took longer than 0.5 s" in caplog.text
    asked = AnswerJudge.model_validate({"with": "rule.py:score"})
    with pytest.raises(DataError, match="eval_prompts: has no column `gold`"):
        answer_judge(asked)


TEMPLATE = (
    "{{ gold }}|{{ row.answer }}|{{ prompt }}<answer_a>\n{{ answer_a }}\n</answer_a>"
    "<answer_b>\n{{ answer_b }}\n</answer_b>"
)


@pytest.mark.defect("F1")
def test_a_template_gets_the_row() -> None:
    Path("t.jinja").write_text(TEMPLATE)
    row = {**SUMS[0], "answer_a": "column", "responses": ["x", "{{ row }}"]}
    a = write(Path("a.jsonl"), {**row, "gold": "g"}, row)
    b = write(Path("b.jsonl"), row)
    with serving(says(longer)) as server:
        options = (*server.judge, "--judge-template", "t.jinja")
        refused = refusal(2, "judge", a, *options)
        assert "t.jinja: UndefinedError: 'gold' is undefined (at " in refused
        assert "a.jsonl:2, whose columns are prompt, question" in refused
        unused = rather("judge", b, *options, "--column", "golden=answer")
        assert "--judge-template t.jinja: must show golden" in unused.output
        missing = rather("judge", b, *options, "--column", "gold=solution")
        assert "KeyError: 'solution' (at " in missing.output
        assert not server.requests
        told("judge", b, *options, "--column", "gold=answer")
        texts = [body["messages"][0]["content"] for _, _, body in server.requests]
    solution = SUMS[0]["answer"]
    assert all(text.startswith(f"{solution}|{solution}|2 + 3?<answer_a>") for text in texts)
    assert {text.split("\n")[-4] for text in texts} == {"x", "{{ row }}"}


# --- files without a rule. The last test by name, too: without a child, one file ends pytest ---


@pytest.mark.defect("A3")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exit()", "--with rule.py, line 1: SystemExit"),
        ("import os; os._exit(0)", "--with rule.py: its process ended (exit code 0)"),
        ("while True: pass", "--with rule.py: took longer than 1 s"),
        ("import nothing_like_it", "--with rule.py:1: ModuleNotFoundError"),
        ("def score(", "--with rule.py:1: '(' was never closed"),
        ("def other(p, a): pass", "--with rule.py:score: the file has no function"),
        ("def score(*, answers): pass", "Write score(prompt, answer, ...)"),
        ("def score(a, prompt): pass", "Write score(prompt, answer, ...)"),
    ],
)
def test_without_a_rule_a_file_is_refused(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "while" in text:
        monkeypatch.setattr(rule_process, "IMPORT_SECONDS", 1.0)
    rule(text)
    done = rather("judge", answers(Path("a.jsonl"), ["x"]), *WITH)
    assert (done.exit_code, message in done.output) == (2, True), done.output
