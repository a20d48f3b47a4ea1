"""eval_prompts: which model answers, the metrics, and that training is not affected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.config.run_config import DPOConfig
from rather.data.formats import TextPair
from rather.data.prepare import recipe_of
from rather.data.tokens import Encoder
from rather.errors import ConfigError, DataError, MemoryShortage
from rather.model.generate import GeneratedAnswer
from rather.pipeline.evaluation import Answers, read_prompts, repetition
from rather.pipeline.pipeline import DPOPipeline
from rather.run_folder.names import ANSWERS
from rather.tools.demo import make_tokenizer
from tests.health.tiny_runs import RATE, Case, TinyRuns, kind
from tests.tiny import make_config, metrics, rows_of, untimed

# Of float32 on every device, for answers are compared with those of a float32 model.
CHANGES = {"save_steps": 2, "max_ckpt_to_keep": 0, "actor_train__model_args__dtype": "fp32"}
CASE = Case(kind, kind, count=64, steps=4, rate=10 * RATE, changes=CHANGES)
STATS = ("tokens", "repetition", "ended")


def lines(config: DPOConfig, step: int | None = None) -> list[dict[str, Any]]:
    rows = rows_of(config.run_dir / ANSWERS)
    return [row for row in rows if step is None or row["step"] == step]


def texts(config: DPOConfig, step: int, who: str) -> list[str]:
    return [row[who] for row in lines(config, step)]


def by_hand(folder: Path, prompts: Sequence[str]) -> list[str]:
    """The likeliest token each time, one prompt after another, without any cache."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in prompts:
        ids: list[int] = tokenizer(prompt).input_ids
        start = len(ids)
        while len(ids) < start + 16 and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(tokenizer.decode(ids[start:], skip_special_tokens=True))
    return found


def state(config: DPOConfig, step: int) -> dict[str, bytes]:
    """Weights, moments and random numbers of a checkpoint."""
    files = (config.run_dir / f"checkpoint-{step}").glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}


# --- a run ---


@pytest.fixture(scope="module")
def run(tiny_runs: TinyRuns) -> DPOConfig:
    return tiny_runs.trained("answered", CASE)


def test_policy_and_reference_answer_the_same_prompts_at_each_evaluation(
    tiny_runs: TinyRuns, run: DPOConfig
) -> None:
    assert run.eval_prompts is not None
    prompts = run.eval_prompts.prompts or []
    evaluated = [line["step"] for line in metrics(run) if "eval/loss" in line]
    assert [row["step"] for row in lines(run)] == [step for step in evaluated for _ in prompts]
    assert [row["prompt"] for row in lines(run, 4)] == prompts
    base = by_hand(tiny_runs.folder / "base", prompts)
    assert (
        texts(run, 0, "policy") == texts(run, 0, "reference") == texts(run, 4, "reference") == base
    )
    assert texts(run, 4, "policy") == by_hand(run.run_dir / "model", prompts) != base


def test_metrics_are_means_over_the_logged_answers(run: DPOConfig) -> None:
    for record in (line for line in metrics(run) if "eval/loss" in line):
        rows = lines(run, record["step"])
        assert record["eval/answers/prompts"] == len(rows)
        for who in ("policy", "reference"):
            for name in STATS:
                mean = sum(row[f"{who}_stats"][name] for row in rows) / len(rows)
                assert record[f"eval/answers/{who}/{name}"] == pytest.approx(mean)
    first = lines(run, 0)[0]
    assert first["policy_stats"] == {"tokens": 5, "repetition": 0.0, "ended": True}
    assert len(first["policy"].split()) == 5


def test_answers_do_not_change_training(tiny_runs: TinyRuns, run: DPOConfig) -> None:
    plain = tiny_runs.trained("unanswered", CASE, eval_prompts=None)
    assert not (plain.run_dir / ANSWERS).exists()
    for step in (2, 4):
        assert len(state(plain, step)) >= 3, "weights, moments, random numbers"
        assert state(plain, step) == state(run, step)
    told = [{k: v for k, v in line.items() if "answers" not in k} for line in untimed(metrics(run))]
    assert told == untimed(metrics(plain))


def test_a_resumed_run_has_the_same_bits_and_no_duplicate_line(
    tiny_runs: TinyRuns, run: DPOConfig
) -> None:
    config = tiny_runs.killed("answered", CASE, 2)
    with (config.run_dir / ANSWERS).open("ab") as file:
        file.write(b'{"step": 4, "prompt": "\xc3')  # a kill tears letters, too
    DPOPipeline(config).run()
    assert state(config, 4) == state(run, 4)
    assert lines(config) == lines(run)


def test_without_a_reference_the_policy_is_compared_with_its_beginning(tiny_runs: TinyRuns) -> None:
    """Also where the run goes on, and without held-out pairs."""
    case = replace(
        CASE,
        changes={**CASE.changes, "pref_loss": "simpo", "validation__data_args__file_name": None},
    )
    whole = lines(tiny_runs.trained("no-reference", case))
    config = tiny_runs.killed("no-reference", case, 2)
    DPOPipeline(config).run()
    assert lines(config) == whole
    assert sorted({row["step"] for row in whole}) == [0, 1, 2, 3, 4]
    asked = [row["prompt"] for row in lines(config, 0)]
    assert texts(config, 4, "reference") == by_hand(tiny_runs.folder / "base", asked)
    assert texts(config, 4, "policy") != texts(config, 4, "reference")


def test_a_moving_reference_answers_again(tiny_runs: TinyRuns) -> None:
    changes = {"ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 2, "eval_steps": 2}
    config = tiny_runs.trained("moving", CASE, sync_ref_model=True, **changes)
    just_moved = texts(config, 4, "reference")
    assert just_moved == texts(config, 4, "policy")
    assert just_moved != texts(config, 0, "reference")


def test_with_an_adapter_the_reference_is_the_model_without_it(tiny_runs: TinyRuns) -> None:
    config = tiny_runs.trained("adapter", CASE, actor_train__model_args__lora_rank=4)
    asked = [row["prompt"] for row in lines(config, 4)]
    assert texts(config, 4, "reference") == by_hand(tiny_runs.folder / "base", asked)
    assert texts(config, 4, "policy") == by_hand(config.run_dir / "model", asked)
    assert texts(config, 4, "policy") != texts(config, 4, "reference")


# --- prompts ---


def asking(tmp_path: Path, **asked: Any) -> DPOConfig:
    return make_config(tmp_path, eval_prompts=asked)


def read_from(folder: Path, name: str, text: str) -> list[str]:
    (folder / name).write_text(text, encoding="utf-8")
    config = asking(folder, file=str(folder / name))
    assert config.eval_prompts
    return read_prompts(config.eval_prompts, config.actor_train.data_args)


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.txt", "first one\n\n  second\n", ["first one", "  second"]),
        ("a.jsonl", '{"prompt": "first\\nline", "id": 3}\n"second"\n', ["first\nline", "second"]),
        # These only look like the end of a line.
        ("a.txt", "one\u2028prompt\nand\x85another\r\n", ["one\u2028prompt", "and\x85another"]),
    ],
)
def test_prompts_of_a_file(tmp_path: Path, name: str, text: str, prompts: list[str]) -> None:
    assert read_from(tmp_path, name, text) == prompts


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "\n", "has no prompt"),
        ("a.jsonl", '{"prompt": 3}\n', "neither a JSON text nor a row"),
        ("a.jsonl", "{\n", "prompt 1: neither a JSON text"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_from(tmp_path, name, text)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, r"eval_prompts: needs eval_prompts\.prompts or"),
        ({"prompts": ["a"], "file": "a.txt"}, r"cannot be combined with eval_prompts\.file"),
        ({"prompts": []}, r"eval_prompts\.prompts: \[\] is not"),
        ({"prompts": ["w1"], "judge": {}}, r"needs eval_prompts\.judge\.with"),
    ],
)
def test_impossible_settings_are_config_errors(
    tmp_path: Path, asked: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        asking(tmp_path, **asked)


def test_a_missing_file_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    from rather.config.paths import check_paths

    with pytest.raises(DataError, match=r"eval_prompts\.file: the prompts file"):
        check_paths(asking(tmp_path, file=str(tmp_path / "none.txt")))


def test_a_prompt_that_fills_the_sequence_is_refused(tmp_path: Path) -> None:
    config = asking(tmp_path, prompts=["w1", " ".join(["w1"] * 40)], max_new_tokens=32)
    with pytest.raises(ConfigError, match=r"prompt 2 has 41 tokens.*sequence_length \(64\)"):
        DPOPipeline(config).run()


def test_prompts_are_written_as_in_training(tmp_path: Path) -> None:
    config = make_config(tmp_path, actor_train__data_args__separator=" ")
    plain = AutoTokenizer.from_pretrained(tmp_path / "base")
    encoder = Encoder(recipe_of(plain, config.actor_train.data_args, config.sequence_length))
    assert encoder.prompt_ids(TextPair("w1 w2", "", ""), as_trained=True) == [1, 4, 5]
    chat = make_tokenizer(["How are you?"])
    encoder = Encoder(
        recipe_of(chat, config.validation.data_args.model_copy(), config.sequence_length)
    )
    ids = encoder.prompt_ids(TextPair("How are you?", "", ""), as_trained=True)
    assert isinstance(ids, list)
    assert chat.decode(ids) == "<|bos|><|user|>How are you?<|assistant|>"


# --- pieces ---


def test_repetition_is_the_share_of_runs_that_came_before() -> None:
    assert repetition([1, 2, 3]) == 0
    assert repetition([1, 2, 3, 4, 5]) == 0
    assert repetition([7] * 16) == pytest.approx(12 / 13, abs=1e-4)
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)


class Small:
    """A worker whose memory holds so many prompts at once."""

    def __init__(self, most: int) -> None:
        self.most, self.calls = most, list[int]()

    def answer(
        self, prompts: Sequence[list[int]], _tokenizer: Any, _most: int
    ) -> list[GeneratedAnswer]:
        self.calls.append(len(prompts))
        if len(prompts) > self.most:
            raise torch.OutOfMemoryError("none left")
        return [GeneratedAnswer(prompt, ended=True) for prompt in prompts]

    def release(self) -> None:
        pass


def test_batches_of_prompts_shrink_when_memory_runs_out(
    run: DPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rather.pipeline.evaluation.is_local", lambda _: True)
    answers = Answers.__new__(Answers)
    answers.asked, answers.tokenizer, answers.end_of_turn = run.eval_prompts, None, -1  # type: ignore[assignment]
    answers.ids = [[number] for number in range(8)]
    small: Any = Small(2)
    assert [answer.ids for answer in answers._answers(small)] == answers.ids
    assert small.calls == [8, 4, 2, 2, 2, 2]
    nothing: Any = Small(0)
    with pytest.raises(MemoryShortage, match="lower max_new_tokens"):
        answers._answers(nothing)


def test_an_answer_ends_with_the_turn_of_its_template() -> None:
    answers = Answers.__new__(Answers)
    answers.end_of_turn = 9
    assert answers._cut(GeneratedAnswer([4, 5, 9, 6], ended=False)) == GeneratedAnswer(
        [4, 5], ended=True
    )
    assert answers._cut(GeneratedAnswer([4, 5], ended=False)) == GeneratedAnswer(
        [4, 5], ended=False
    )
