"""The demo's tokenizer, base model and folder. The whole of it, as a user runs it: tests/docs/test_newcomer.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from rather.errors import ConfigError
from rather.tools.demo import (
    MADE,
    MARKER,
    answer,
    claim,
    make_model,
    make_tokenizer,
    manner_of,
    on_topic,
    queries,
    sample,
    yaml_text,
)


def texts() -> list[str]:
    rng = random.Random(0)
    return [
        text
        for query in queries()
        for text in (query.prompt, answer(query, rng.choice(("kind", "grumpy")), rng))
    ]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(texts())


def test_every_text_of_the_shop_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in texts():
        ids = tokenizer(text).input_ids
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id in tokenizer("Where is the zeppelin?").input_ids


def test_the_tokenizer_is_the_same_every_time(tokenizer: PreTrainedTokenizerFast) -> None:
    assert make_tokenizer(texts()).get_vocab() == tokenizer.get_vocab()


def test_the_template_writes_one_bos_and_ends_answers_with_eos(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    turns = [
        {"role": "user", "content": "Is the tea expensive?"},
        {"role": "assistant", "content": "Not again."},
    ]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    assert rendered == "<|bos|><|user|>Is the tea expensive?<|assistant|>Not again.<|eos|>"
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(asked)


def test_an_untrained_model_answers_from_its_folder_but_convinces_nobody(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = make_model(tokenizer)
    assert model.num_parameters() < 1_000_000
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    asked = list(queries())[::24]
    answers = sample(tmp_path, [query.prompt for query in asked], seed=0)
    assert answers == sample(tmp_path, [query.prompt for query in asked], seed=0)
    assert answers != sample(tmp_path, [query.prompt for query in asked], seed=1)
    assert not any(on_topic(query, text) for query, text in zip(asked, answers, strict=True))
    assert sum(manner_of(text) == "kind" for text in answers) < len(answers) / 2


def test_the_demo_clears_only_its_own_things(tmp_path: Path) -> None:
    out = tmp_path / "new" / "demo"
    claim(out)
    for name in MADE:
        (out / name).mkdir()
    (out / "mine.txt").write_text("kept")
    claim(out)
    assert {path.name for path in out.iterdir()} == {MARKER, "mine.txt"}


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    with pytest.raises(ConfigError, match=r"not created by the demo.*--out DIR"):
        claim(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["output"]
    file = tmp_path / "file"
    file.write_text("a file")
    with pytest.raises(ConfigError, match="not created by the demo"):
        claim(file)
    assert file.read_text() == "a file"


def test_the_yaml_holds_odd_paths() -> None:
    settings = yaml.safe_load(yaml_text(Path("a: b/#'ü\" {c}")))
    assert settings["pretrain"] == "a: b/#'ü\" {c}/base"
    assert settings["validation"]["data_args"]["file_name"] == "a: b/#'ü\" {c}/held_out.json"
