"""Rounds: every stage continues after a kill and is not repeated; the best round is exported."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from rather.commands import generate
from rather.commands.judge import read_answers
from rather.config.load import load
from rather.config.plugins import load_function
from rather.errors import ConfigError, ServerError
from rather.files import file_sha
from rather.judges.cache import VerdictCache
from rather.model.generate import Decoding
from rather.outcome import forgetting
from rather.pipeline.forgetting import Limits
from rather.pipeline.loop import TrainingLoop
from rather.tools.board.runs import RunList
from rather.tools.rounds import evaluation, run
from rather.tools.rounds.answers import AnswerSource, _port
from rather.tools.rounds.run import run_rounds
from rather.tools.rounds.settings import ServerKeys, load_plan
from rather.tools.rounds.status import best_round, status_of
from tests.commands.conftest import json_of, rows_of, succeed, write
from tests.commands.fake_server import honest, says, serving
from tests.commands.kills import Killed, killed_at
from tests.rounds.tiny_rounds import write_plan

FILES = (
    "round-1/answers.jsonl", "round-1/scored.jsonl", "round-1/train/model/model.safetensors",
    "round-1/eval.json", "round-2/answers.jsonl", "round-2/scored.jsonl",
    "round-2/train/model/model.safetensors", "round-2/eval.json", "round-0/eval.json",
    "rounds.json", "metrics.jsonl",
)  # fmt: skip


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rounds"


@contextmanager
def working_in(folder: Path) -> Iterator[Path]:
    before = Path.cwd()
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    try:
        yield Path("output/own")
    finally:
        os.chdir(before)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def digests(folder: Path) -> dict[str, str]:
    return {name: file_sha(folder / name) for name in FILES}


@contextmanager
def quick_forgetting() -> Iterator[None]:
    """Measure forgetting with one text and one question instead of twenty and fifty."""
    read = forgetting.read_rows

    def one_text(path: Path) -> Any:
        questions, texts = read(path)
        return questions[:1], texts[:1]

    forgetting.read_rows = one_text
    try:
        yield
    finally:
        forgetting.read_rows = read


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quick_forgetting():
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with working_in(folder):
        write_plan()
        run_rounds(load_plan(Path("rounds.yaml")))
    gc.freeze()  # what it has imported: every stage ends with a collection, of half a second each
    return folder


# In the order in which they come, with the number of the call that dies since the kill before.
KILLS = (
    (generate.Sampler, "answer", 1),
    (run, "score_file", 2),
    (TrainingLoop, "train_step", 2),
    (run, "evaluate", 1),
    (TrainingLoop, "train_step", 3),
    (run, "copy_model", 1),
)


def test_killed_in_every_stage_the_same_command_ends_in_the_same_files(
    uninterrupted: Path, tmp_path: Path
) -> None:
    with working_in(tmp_path / "killed") as folder:
        write_plan()
        for owner, name, number in KILLS:
            with dying_at(owner, name, number), pytest.raises(Killed):
                run_rounds(load_plan(Path("rounds.yaml")))
        run_rounds(load_plan(Path("rounds.yaml")))
        assert digests(folder) == digests(uninterrupted / "output/own")


@contextmanager
def dying_at(owner: Any, name: str, number: int) -> Iterator[None]:
    original, calls = getattr(owner, name), 0

    def dies(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Killed
        return original(*args, **kwargs)

    setattr(owner, name, dies)
    try:
        yield
    finally:
        setattr(owner, name, original)


def test_a_finished_plan_repeats_no_stage(uninterrupted: Path) -> None:
    with working_in(uninterrupted) as folder, ExitStack() as stack:
        before = digests(folder)
        for owner, name in {(owner, name) for owner, name, _ in KILLS if name != "copy_model"}:
            stack.enter_context(dying_at(owner, name, 1))
        result = run_rounds(load_plan(Path("rounds.yaml")))
        assert digests(folder) == before
    assert result["reason"] == "all 2 rounds are done"


def test_status_and_board_show_one_run(uninterrupted: Path) -> None:
    with working_in(uninterrupted) as folder:
        found = status_of(load_plan(Path("rounds.yaml")))
        assert found["reason"] == "all 2 rounds are done"
        assert len(found["rounds"]) == 3
        measured = {name for name, value in found["rounds"][2].items() if value is not None}
        names = {"score", "length", "drift", "diversity", "forgetting_loss", "pairs", "dropped"}
        assert names <= measured
        assert found["rounds"][found["best"]]["score"] == max(e["score"] for e in found["rounds"])
        printed = succeed("rounds", "status", "rounds.yaml")
        assert "win rate" in printed.stdout
        [row] = RunList(Path("output").absolute()).rows()
        assert (row["name"], row["step"], row["state"]) == ("own", 2, "ended")
        assert (folder / "model" / "config.json").is_file() == bool(found["best"])


def test_other_commands_name_rather_rounds(tmp_path: Path) -> None:
    file = write_plan(tmp_path)
    with pytest.raises(ConfigError, match=r"rounds \(rounds.yaml:\d+\): is for `rather rounds "):
        load(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": {"judge": None}}, "rounds.judge: name a rule, a reward model or a"),
        ({"rounds": {"judge": "http://127.0.0.1:1"}}, "rounds.judge.model: name the model of the"),
        (
            {"rounds": {"judge": {"with": "rule.py:score", "model": "m"}}},
            "rounds.judge.model: has no effect with a rule",
        ),
        ({"rounds": {"prompts": ["prompts.jsonl"] * 3}}, "rounds.prompts: 3 files for 2 rounds"),
        ({"rounds": {"prompts": "missing.jsonl"}}, "missing.jsonl is not a file with prompts"),
        ({"rounds": {"server": {}}}, "rounds.server: set either url or start"),
        ({"rounds": {"server": {"start": "vllm"}}}, "rounds.server.start: has no {port}"),
        ({"rounds": {"temperature": 0}}, "rounds.temperature"),
        ({"rounds": {"keep_pair": True}}, "rounds.keep_pair"),
        ({"pref_loss": "advantage"}, "rounds.reference: loss 'advantage' clips"),
        ({"task": "sft"}, "task: rounds make pairs or scored answers, and task is sft"),
        ({"overwrite": True}, "overwrite (rounds.yaml): every round sets it itself"),
        (
            {"actor_train": {"model_args": {"adapter_name_or_path": "adapter"}}},
            "adapter_name_or_path: every round begins with a new adapter",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: Any, message: str, place: Path) -> None:
    file = write_plan(**changes)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_plan(file)


def test_the_training_of_a_round(place: Path) -> None:
    plan = load_plan(write_plan())
    second = plan.training(2)
    assert second.actor_train.model_path == "output/own/round-1/train/model"
    assert second.reference.model_path == "base"
    assert second.actor_train.data_args.file_name == ["output/own/round-2/scored.jsonl"]
    assert second.run_dir == Path("output/own/round-2/train")
    other = {"reference": "previous", "start_from": "base", "keep_pairs": True}
    second = load_plan(write_plan(rounds=other)).training(2)
    assert second.actor_train.model_path == "base"
    assert second.reference.model_path == "output/own/round-1/train/model"
    assert len(second.actor_train.data_args.files) == 2


LORA = {
    "model_args": {"lora_rank": 4, "lora_target": "all-linear"},
    "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 4},
}


def test_a_round_with_an_adapter_begins_with_the_merged_weights(place: Path) -> None:
    """The stage of the training alone: round 1 is a folder that a training has exported."""
    plan = load_plan(write_plan(actor_train=LORA, max_steps=1))
    shutil.copytree("base", plan.model(1))
    weights = Path(plan.model(1)) / "model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, weights)
    rows = [{"prompt": "w1 w2", "responses": [" w3", " w4 w5"], "scores": [1, 0]}] * 4
    plan.round_folder(2).mkdir(parents=True)
    write(plan.round_folder(2) / "scored.jsonl", *rows)
    run.RoundsRun(plan)._train(2)
    result = plan.round_folder(2) / "train"
    adapter = json_of(result / "adapter" / "adapter_config.json")
    assert adapter["base_model_name_or_path"].endswith("round-1/train/model")
    before, after = load_file(weights), load_file(result / "model" / "model.safetensors")
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved
    assert all("proj" in name for name in moved)
    for name, tensor in before.items():
        assert torch.allclose(tensor, after[name], atol=0.05)


# --- a server judges ---


def as_the_rule(first: str, second: str) -> str:
    rule = load_function(Path("rule.py"), "score", "rounds.judge")
    a, b = (rule("", text) for text in (first, second))
    return "[[C]]" if a == b else "[[A]]" if a > b else "[[B]]"


def test_a_server_judges_rounds(uninterrupted: Path, tmp_path: Path) -> None:
    """The answers of two rounds were generated already: only what the judge does is run."""
    with working_in(tmp_path) as folder, serving(says(as_the_rule)) as server:
        judge = {"with": server.url, "model": "m"}
        plan = load_plan(write_plan(rounds={"judge": judge}))
        for number in (0, 1, 2):
            source = uninterrupted / f"output/own/round-{number}"
            shutil.copytree(source, plan.round_folder(number))
        rounds = run.RoundsRun(plan)
        with dying_at(VerdictCache, "add", 20), pytest.raises(Killed):
            rounds._judge(1)
        asked_before_kill = len(server.requests)
        rounds._judge(1)
        rows = rows_of(folder / "round-1/scored.jsonl")
        by_rule = rows_of(uninterrupted / "output/own/round-1/scored.jsonl")
        for row, rule_row in zip(rows, by_rule, strict=True):
            own, of_rule = row["scores"], rule_row["scores"]
            for i, j in combinations(range(4), 2):
                assert (own[i] > own[j]) == (of_rule[i] > of_rule[j])
            assert sum(own) == pytest.approx(2.0)  # half of 4 answers' shares
        texts = [body["messages"][0]["content"] for _, _, body in server.requests]
        # Requests in flight at the kill are repeated, no others.
        assert len(texts) - len(set(texts)) <= 16
        assert asked_before_kill < len(texts)
        assert len(set(texts)) <= 2 * 6 * len(rows)
        # A round is worth its wins against the first model's answers; that one ties with itself.
        held_out = {}
        first = plan.round_folder(0) / "held_out.jsonl"
        for number in (0, 2):
            asked = len(server.requests)
            file = plan.round_folder(number) / "held_out.jsonl"
            scored = rounds._score(number, "held_out_scored", [file], first)
            held_out[number] = [row["scores"] for row in rows_of(scored)]
            assert (len(server.requests) > asked) == bool(number)
        assert held_out[0] == [[0.5]] * 5
        before, after = (
            read_answers(plan.round_folder(number) / "held_out.jsonl") for number in (0, 2)
        )
        expected = {"[[A]]": 0.0, "[[B]]": 1.0, "[[C]]": 0.5}
        for old, new, scores in zip(before, after, held_out[2], strict=True):
            assert scores == [expected[as_the_rule(old.responses[0], new.responses[0])]]


@pytest.mark.wide
def test_killed_while_a_server_answers_the_same_command_ends_in_the_same_files(
    tmp_path: Path,
) -> None:
    """At most the requests in flight are repeated; test_servers.py kills the process as well."""
    names = ["base", "output/own/round-1/train/model"]
    results = {}
    with serving(honest, names) as server:
        keys = {"url": server.url, "concurrency": 4}
        for name, kills in (("whole", ()), ("killed", (3, 9, 20))):
            server.requests.clear()
            with working_in(tmp_path / name) as folder:
                rounds = {"count": 1, "server": keys, "max_new_tokens": 8}
                plan = load_plan(write_plan(rounds=rounds, max_steps=2))
                for line in kills:
                    killed_at(line, 0.5, run_rounds, plan)
                run_rounds(plan)
                rows = {file: rows_of(file) for file in sorted(folder.rglob("*answers.jsonl"))}
                weights = file_sha(folder / "round-1/train/model/model.safetensors")
                results[name] = (rows, weights, len(server.requests))
    assert results["whole"][:2] == results["killed"][:2]
    assert results["killed"][2] - results["whole"][2] <= 4 * 3


# --- stop and choose ---


class Pretended(run.RoundsRun):
    """Rounds whose scores are given."""

    scores: ClassVar[list[list[float]]] = []
    drifts: ClassVar[dict[int, float]] = {}

    def _generate(self, number: int, source: AnswerSource) -> None:
        """Do nothing."""

    def _train(self, number: int) -> None:
        model = Path(self.plan.model(number))
        model.mkdir(parents=True)
        (model / "config.json").write_text(str(number))

    def _judge(self, number: int) -> None:
        """Do nothing."""

    def _evaluate(self, number: int, source: AnswerSource) -> None:
        scores = self.scores[number]
        mean = sum(scores) / len(scores)
        figures = {"round": number, "score": mean, "scores": scores}
        self.evaluated.append({**figures, "drift": self.drifts.get(number)})


LOW, HALF, HIGH = [0.0] * 9, [0.5] * 9, [1.0] * 9


@pytest.mark.parametrize(
    ("scores", "drifts", "rounds", "best", "reason"),
    [
        # round 2 is worse: round 3 is not run
        ([LOW, HIGH, LOW, HIGH], {}, 3, 1, "is worse than round"),
        # not by more than its interval
        ([LOW, [0.5, 1.0] * 9, [1.0, 0.4] * 9, HIGH], {}, 4, 3, "all 3 rounds are done"),
        ([HIGH, HALF, HIGH, HIGH], {}, 2, 0, "is worse than round"),
        ([LOW, HALF, HIGH, HIGH], {2: 1.5}, 3, 1, "round 2 exceeds a limit: rounds/drift is 1.5"),
    ],
)
def test_the_best_round_is_exported_and_a_worse_one_ends_the_run(
    scores: Any, drifts: dict[int, float], rounds: int, best: int, reason: str, place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Pretended, "scores", scores)
    monkeypatch.setattr(Pretended, "drifts", drifts)
    folder = Path("output/own")
    plan = load_plan(write_plan(rounds={"count": 3}))
    folder.mkdir(parents=True)
    result = Pretended(plan).run()
    assert len(result["rounds"]) == rounds
    assert result["best"] == best
    assert (folder / "model").is_dir() == bool(best)
    if best:
        assert (folder / "model" / "config.json").read_text() == str(best)
    assert reason in result["reason"]


def test_without_a_judge_the_last_round_is_the_best() -> None:
    assert best_round([{"round": 0}, {"round": 1}], Limits()) == 1
    assert not evaluation.is_worse({}, {})


def test_a_round_beyond_a_limit_is_never_the_best() -> None:
    first = {"score": 0.1, "drift": 0.0}
    good = {"score": 0.4, "drift": 0.3, "forgetting_kept": 1.0, "forgetting_chance": 0.5}
    forgot = {**good, "score": 0.9, "forgetting_kept": 0.5, "forgetting_chance": 0.01}
    assert best_round([first, good, {**good, "score": 0.9, "drift": 1.2}], Limits()) == 1
    assert best_round([first, good, forgot], Limits()) == 1
    assert best_round([first, good, forgot], Limits(forgetting=math.inf)) == 2
    assert best_round([first, {**good, "drift": math.nan}], Limits()) == 0
    # What was not measured limits nothing.
    unknown = {"score": 0.9, "drift": None, "forgetting_kept": None, "forgetting_chance": 0.5}
    assert best_round([first, unknown], Limits()) == 1
    # Without a judge, the last of those within the limits.
    assert best_round([{"drift": 0.0}, {"drift": 0.5}, {"drift": 2.0}], Limits()) == 1


# --- the pool ---


def test_answers_of_other_models_are_added(tmp_path: Path) -> None:
    row = {"prompt": "q", "responses": ["a", "b"], "ended": [True, False], "tokens_digest": "x"}
    other = row | {"responses": ["c", "d"], "ended": [True, True], "response_ids": [[5], [6]]}
    own = write(tmp_path / "own.jsonl", row | {"response_ids": [[1], [2]]})
    files = [own, write(tmp_path / "weak.jsonl", other)]
    [line] = run.scored_by_source(files)
    found = json.loads(line)
    assert found["responses"] == ["a", "b", "c", "d"]
    assert found["ended"] == [True, False, True, True]
    assert found["scores"] == [1, 1, 0, 0]
    assert found["response_ids"] == [[1], [2], [5], [6]]
    write(files[1], other | {"tokens_digest": "y"})
    [line] = run.pooled(files)
    assert json.loads(line)["response_ids"] is None  # tokens of another tokenizer


# --- the example ---


def test_the_rule_of_the_example_checks_every_instruction() -> None:
    score = load_function(EXAMPLE / "rule.py", "score", "--with")
    lower, short = "Hi. Write only in lower case.", "Hi. Use at most 30 words."
    bullets = 'Hi. Give exactly two bullet points, each on a line that begins with "- ".'
    word = 'Hi. Use the word "time".'
    for prompt, good, bad in (
        (lower, "all small.", "Not small."),
        (short, "a " * 30, "a " * 31),
        (bullets, "- a\n- b", "- a\n- b\n- c"),
        (word, "In time.", "Sometimes."),
        (f'{lower} Use the word "time".', "in time", "small"),
    ):
        assert score(prompt, good) == 1, prompt
        assert score(prompt, bad) == 0, prompt
        assert score([{"role": "user", "content": prompt}], bad) == 0
    assert score("Hi.", " ") == 0


def test_the_yaml_of_the_example_is_a_plan(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "example")
    with working_in(tmp_path / "example"):
        for name in ("prompts", "held_out"):
            Path(f"{name}.jsonl").write_text('{"prompt": "Hi."}\n')
        assert load_plan(Path("rounds.yaml")).rounds.count == 3


# --- a server that is started here ---

SERVE = """
import sys, threading
from tests.commands.fake_server import honest, serving
def answer(path, body):
    return honest(path, body if isinstance(body["prompt"], list) else body | {"prompt": [1]})
with serving(answer, [sys.argv[1]], int(sys.argv[2])):
    threading.Event().wait()
"""


def test_a_server_is_started_asked_and_ended(place: Path) -> None:
    write_plan()
    Path("serve.py").write_text(SERVE)
    root = Path(__file__).resolve().parents[2]
    start = f"env PYTHONPATH={root} {sys.executable} serve.py {{model}} {{port}}"
    request = generate.AnswerRequest(2, Decoding(4, 1.0))
    with AnswerSource("base", ServerKeys(start=start), Path(), 1) as source:
        source.write(Path("prompts.jsonl"), Path("out.jsonl"), request)
        process, port = source.process, Path("port").read_text()
        assert process is not None
        assert process.poll() is None
    assert process.poll() is not None
    rows = rows_of(Path("out.jsonl"))
    assert [len(row["responses"]) for row in rows] == [2] * 8
    assert _port(Path("port")) == port  # the same after a kill


def test_a_server_that_ends_at_once_is_reported(tmp_path: Path) -> None:
    start = f"{sys.executable} -c 'print(\"no memory\"); exit(3)' {{port}}"
    with (
        AnswerSource("base", ServerKeys(start=start), tmp_path, 1) as source,
        pytest.raises(ConfigError, match=r"rounds.server.start: ended with exit code 3: no memory"),
    ):
        source.write(tmp_path, tmp_path, generate.AnswerRequest(1, Decoding(4)))


def test_a_server_with_the_model_of_another_round_is_refused(tmp_path: Path) -> None:
    with serving(lambda *_: None, ["base"]) as server:
        source = AnswerSource("round-1", ServerKeys(url=server.url), tmp_path, 1)
        with pytest.raises(ServerError, match=r"runs base. Start it with round-1 and run the same"):
            source.write(tmp_path, tmp_path, generate.AnswerRequest(1, Decoding(4)))
