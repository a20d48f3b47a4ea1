"""`rather generate`: the answers of transformers, in a file that a kill anywhere does not change."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.commands.generate import AnswerRequest, generate_answers
from rather.errors import ConfigError
from rather.model import generate as sampler
from rather.model.generate import Decoding
from tests.commands.conftest import plainly, rows_of, succeed, told, write
from tests.commands.kills import killed_at, killed_in_fork
from tests.tiny import make_model


def test_greedy_answers_are_those_of_transformers(chat_model: Path, tmp_path: Path) -> None:
    """In every shape of a prompt, rendered by the chat template, with other columns copied."""
    system, user = (
        {"role": role, "content": text} for role, text in (("system", "w9"), ("user", "w5 w6"))
    )
    answer = {"role": "assistant", "content": "w7"}
    rows: list[dict[str, Any]] = [
        {"prompt": "w5 w6", "id": 7, "images": []},
        {"prompt": "w5 w6", "chosen": "w1", "rejected": "w2", "system": "w9"},
        {"messages": [system, user]},
        {"conversations": [{"from": "human", "value": "w5 w6"}]},
        {"instruction": "w5 w6", "output": "w3"},
        {"chosen": [user, answer], "rejected": [user, {**answer, "content": "w8"}]},
        {"prompt": "w5", "responses": ["w1", "w2"], "scores": [1, 0]},
        {"question": "w5 w6", "chosen": "w1"},
    ]
    out = tmp_path / "out.jsonl"
    given = write(tmp_path / "in.jsonl", *rows)
    meta = told("generate", chat_model, given, "--out", out, "--max-new-tokens", 6)
    plain, with_system, short = (
        plainly(chat_model, f"<s> {text} w2 ", 6)
        for text in ("w1 w5 w6", "w0 w9 w1 w5 w6", "w1 w5")
    )
    expected = [plain, with_system, with_system, plain, plain, plain, short, plain]
    answers = rows_of(out)
    assert [row["responses"] for row in answers] == [[text] for text in expected]
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    for row, before in zip(answers, rows, strict=True):
        assert list(row)[:5] == ["prompt", "responses", "ended", "response_ids", "prompt_ids"]
        assert tokenizer.decode(row["response_ids"][0]) == row["responses"][0]
        changed = {"prompt", "responses"}
        assert {name: row[name] for name in before if name not in changed} == {
            name: value for name, value in before.items() if name not in changed
        }
    assert answers[1]["prompt"] == "w5 w6", "the system message stays in its column"
    assert answers[2]["prompt"] == [system, user]
    assert answers[0]["ended"] == [len(answers[0]["response_ids"][0]) < 6]
    assert meta == json.loads(Path(f"{out}.meta.json").read_text())
    assert meta["tokens"]["prompts"] == sum(len(row["prompt_ids"]) for row in answers)
    assert meta["decoding"]["temperature"] == 0
    assert meta["server"] is None
    assert meta["batch"] > 0
    again = write(tmp_path / "again.jsonl", {"prompt": "w5 w6"})
    words = ("--out", out, "--max-new-tokens", 6, "--system", "w9", "--force")
    told("generate", chat_model, again, *words)
    [row] = rows_of(out)
    assert row["responses"] == [with_system]
    assert row["system"] == "w9", "the answers were given with it"


def test_samples_share_a_prefill_and_follow_the_distribution(model: Path) -> None:
    """Many first tokens of one prompt: as often as softmax says; and equal to a prefill of each."""
    causal_lm: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(text).input_ids for text in ("w5 w6", "w7 w8 w9 w4")]
    with torch.no_grad():
        share = causal_lm(torch.tensor([prompts[0]])).logits[0, -1].div(0.7).softmax(0)
    torch.manual_seed(3)
    many = sampler.generate(causal_lm, tokenizer, prompts[:1], Decoding(1, 0.7), answers=4000)
    ends = sampler.end_tokens(causal_lm, tokenizer)
    counts = torch.zeros_like(share)
    for answer in many:
        counts[answer.ids[0] if answer.ids else ends[0]] += 1
    error = (4000 * share * (1 - share)).sqrt()
    assert ((counts - 4000 * share).abs() < 5 * error + 1).all()
    torch.manual_seed(4)
    shared = sampler.generate(causal_lm, tokenizer, prompts, Decoding(8, 1.0, 0.9), answers=3)
    torch.manual_seed(4)
    each = [prompt for prompt in prompts for _ in range(3)]
    assert shared == sampler.generate(causal_lm, tokenizer, each, Decoding(8, 1.0, 0.9))
    assert len({tuple(answer.ids) for answer in shared}) > 2


@pytest.mark.defect("E7")
@pytest.mark.parametrize("answers", [1, 2])
def test_answers_are_those_of_a_loop_in_float64(tmp_path: Path, answers: int) -> None:
    """Which has no batch, no padding and no cache, with a model that depends on positions."""
    folder = make_model(tmp_path, dtype=torch.float64, initializer_range=0.5)
    causal_lm: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = [[1, *range(5, 5 + length)] for length in (9, 1, 4, 2, 6)]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + 10:
            with torch.no_grad():
                token = int(causal_lm(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            if token == causal_lm.config.eos_token_id:
                break
            ids.append(token)
        expected += [ids[len(prompt) :]] * answers
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shapes: list[tuple[int, int]] = []
    causal_lm.register_forward_pre_hook(
        lambda *given: shapes.append(given[2]["input_ids"].shape), with_kwargs=True
    )
    found = sampler.generate(causal_lm, tokenizer, prompts, Decoding(10), answers=answers)
    assert all(rows == len(prompts) for rows, tokens in shapes if tokens > 1), "once per prompt"
    assert [answer.ids for answer in found] == expected
    assert len({tuple(ids) for ids in expected}) == len(prompts)


@pytest.mark.defect("E7")
def test_equal_prompts_get_different_samples_in_each_chunk(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "equal.jsonl", *[{"prompt": "w5 w6 w7"}] * 4)
    asked(model, file, tmp_path / "out.jsonl")  # 2 prompts in a chunk
    answers = [answer for row in rows_of(tmp_path / "out.jsonl") for answer in row["responses"]]
    assert len(set(answers)) == len(answers) == 12


def test_a_stop_text_ends_an_answer(model: Path, tmp_path: Path, prompts: Path) -> None:
    options = ("--max-new-tokens", 12, "--answers", 4, "--stop", " w", "--stop", "?")
    told("generate", model, prompts, "--out", tmp_path / "cut.jsonl", *options)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row in rows_of(tmp_path / "cut.jsonl"):
        assert row["ended"] == [True] * 4
        for text, ids in zip(row["responses"], row["response_ids"], strict=True):
            assert " w" not in text
            assert tokenizer.decode(ids, skip_special_tokens=True) == text


def asked(model: Path, prompts: Path, out: Path) -> dict[str, Any]:
    request = AnswerRequest(3, Decoding(10, 1.0), seed=2)
    return generate_answers(str(model), prompts, out, request, batch=6)


def test_killed_anywhere_it_ends_in_the_same_file(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    meta = asked(model, prompts, tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    out = tmp_path / "killed.jsonl"
    work = (asked, model, prompts, out)
    assert killed_in_fork(1, 0.5, *work) == signal.SIGKILL
    for line, share in ((0, 0.5), (1, 0.0), (1, 0.5), (0, 0.1)):  # 7 prompts in chunks of 2
        killed_at(line, share, *work)
        assert not out.exists()
    assert asked(model, prompts, out) == meta
    assert out.read_bytes() == whole
    assert not list(tmp_path.glob("*.part"))
    other = AnswerRequest(3, Decoding(10, 1.0), seed=3)
    with pytest.raises(ConfigError, match=r"already exists and differs in decoding.seed"):
        generate_answers(str(model), prompts, out, other, batch=6)
    generate_answers(str(model), prompts, out, other, batch=6, force=True)
    assert out.read_bytes() != whole


def test_answers_do_not_depend_on_where_the_model_is(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "moved")
    for number, folder in enumerate((model, tmp_path / "moved")):
        asked(folder, prompts, tmp_path / f"{number}.jsonl")
    assert (tmp_path / "0.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()


def test_a_dry_run_counts_and_writes_nothing(model: Path, prompts: Path, tmp_path: Path) -> None:
    words = ("--out", tmp_path / "a.jsonl", "--answers", 2, "--dry-run")
    done = succeed("generate", model, prompts, *words)
    assert "answers: 14" in done.output
    assert "at most 7168 in answers" in done.output
    assert list(tmp_path.iterdir()) == [prompts]
