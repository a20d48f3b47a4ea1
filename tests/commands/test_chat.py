"""`rather chat`: greedy answers as transformers gives them, streamed, by the chat template, with commands between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from rather.commands.chat import Speaker
from rather.config.run_config import DPOConfig
from rather.config.schema import ModelArgs
from rather.errors import ConfigError
from rather.model.attention import IMPLEMENTATION
from rather.model.generate import Decoding, GeneratedAnswer, generate
from rather.parallel.load import load_policy
from tests.commands.conftest import plainly, rather, refusal, succeed


def test_one_answer_is_the_greedy_one_of_transformers(chat_model: Path) -> None:
    done = succeed("chat", chat_model, "--prompt", "w5 w6", "--max-new-tokens", 8)
    assert done.stdout.strip() == plainly(chat_model, "<s> w1 w5 w6 w2 ", 8).strip()
    assert done.stdout.strip()


def test_a_model_without_a_template_continues_the_text(run: DPOConfig, model: Path) -> None:
    done = rather("chat", run.run_dir, "--prompt", "w5 w6", "--max-new-tokens", 6)
    assert done.stdout.strip() == plainly(model, "<s> w5 w6", 6).strip()


def test_a_conversation(chat_model: Path) -> None:
    """The second question follows the first answer; /reset forgets both; /system goes before."""
    said = "w5\nw6\n/reset\nw6\n/system w9\nw6\n/rest\n/quit\nw7\n"
    done = succeed("chat", chat_model, "--max-new-tokens", 5, input=said)
    first = plainly(chat_model, "<s> w1 w5 w2 ", 5)
    expected = [
        first,
        plainly(chat_model, f"<s> w1 w5 w2 {first} </s>w1 w6 w2 ", 5),
        plainly(chat_model, "<s> w1 w6 w2 ", 5),
        plainly(chat_model, "<s> w0 w9 w1 w6 w2 ", 5),
    ]
    lines = [line.removeprefix("> ").strip() for line in done.stdout.splitlines()]
    assert [line for line in lines if line.startswith("w")] == [
        text.strip() for text in expected if text.strip()
    ]
    assert lines.count("(new conversation)") == 2
    assert "/rest: unknown command" in done.stdout


def test_the_end_of_the_input_ends_it(model: Path) -> None:
    succeed("chat", model, input="")


def test_two_models_answer_the_same(run: DPOConfig, folder: Path) -> None:
    done = succeed(
        "chat", run.run_dir, "--beside", folder / "base", "--prompt", "w5", "--max-new-tokens", 4
    )
    titles = [line for line in done.stdout.splitlines() if "──" in line]
    assert [title.strip("─ ") for title in titles] == [
        str(run.run_dir),
        str(folder / "base"),
    ]
    assert plainly(folder / "base", "<s> w5", 4) in done.stdout


def test_drawing_follows_the_seed(model: Path) -> None:
    words = ("chat", model, "--prompt", "w5", "--temperature", 3, "--top-p", 0.99)
    drawn = [rather(*words, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_terminal_input_that_is_not_text(model: Path) -> None:
    assert "half of a surrogate pair" in refusal(3, "chat", model, "--prompt", "w5 \udce9")


def test_text_is_streamed_as_it_is_generated(model: Path) -> None:
    speaker = Speaker.load(str(model))
    pieces: list[str] = []
    speaker.answer("w5", Decoding(6), pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces) == speaker.turns[-1]["content"]
    with pytest.raises(ConfigError, match="the model only 128 positions"):
        speaker.answer("w5 " * 130, Decoding(6), pieces.append)


def test_a_stopped_answer_is_remembered_up_to_there(model: Path) -> None:
    told: list[str] = []

    def stop(piece: str) -> None:
        told.append(piece)
        if len(told) == 3:
            raise KeyboardInterrupt

    speaker = Speaker.load(str(model))
    with pytest.raises(KeyboardInterrupt):
        speaker.answer("w5", Decoding(20), stop)
    assert speaker.turns[-1]["content"] == "".join(told[:2])


def test_a_question_that_is_too_long_is_not_remembered(model: Path) -> None:
    speaker = Speaker.load(str(model))
    speaker.answer("w5", Decoding(2), lambda _piece: None)
    before = list(speaker.turns)
    speaker.causal_lm.config.max_position_embeddings = 20
    with pytest.raises(ConfigError, match="the model only 20 positions"):
        speaker.answer("w6 " * 30, Decoding(2), lambda _piece: None)
    assert speaker.turns == before


def test_answers_of_many_are_those_of_each_and_leave_the_model_as_it_was(
    folder: Path, run: DPOConfig
) -> None:
    """Prompts of different lengths in one batch; sampling settings of the model are not taken; ends are."""
    policy = load_policy(str(folder / "base"), ModelArgs(), "cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    prompts = [tokenizer(text).input_ids for text in ("w5", "w7 w8 w9 w10", "w3 w4")]
    causal_lm = policy.causal_lm
    causal_lm.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=9.0)
    together = generate(causal_lm, tokenizer, prompts, Decoding(7))
    alone = [generate(causal_lm, tokenizer, [prompt], Decoding(7))[0] for prompt in prompts]
    assert together == alone
    assert causal_lm.config._attn_implementation == IMPLEMENTATION
    assert causal_lm.generation_config.temperature == 5.0
    first = together[0].ids
    causal_lm.generation_config.eos_token_id = [2, first[2]]
    place = first.index(first[2])
    assert generate(causal_lm, tokenizer, prompts[:1], Decoding(7)) == [
        GeneratedAnswer(first[:place], True)
    ]
    assert torch.is_grad_enabled()
