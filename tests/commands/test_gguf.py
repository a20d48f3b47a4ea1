"""`rather export --format gguf`: transformers reads back the same tensors and tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from tests.commands.conftest import refusal, succeed

TEXTS = ["Where is the bread?", "It's 1234 coins,\n\nisn't it? ünï 日本", "a"]
SPECIAL = ["<unk>", "<s>", "</s>"]
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(split: str | None) -> Tokenizer:
    """A tokenizer over bytes that splits text as GPT-2 does, or by a regular expression."""
    tokenizer = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, plain]) if split else plain
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    return tokenizer


def with_spaces() -> Tokenizer:
    """A tokenizer as Llama 2 has it: pieces with a mark for spaces, and bytes for all else."""
    space = "\u2581"
    letters = sorted({space, *"Whereisthebradon"})
    pieces = [*SPECIAL, *(f"<0x{number:02X}>" for number in range(256))]
    merges = [
        ("t", "h"),
        ("th", "e"),
        (space, "the"),
        ("r", "e"),
        (space, "b"),
        (space + "b", "re"),
    ]
    vocabulary = [*pieces, *("".join(pair) for pair in merges), *letters]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(vocabulary)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(space), normalizers.Replace(" ", space)]
    )
    return tokenizer


def folder_of(family: str, tokenizer: Tokenizer, folder: Path, **more: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=320, **{**SIZES, **more})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.to(more.get("dtype", torch.float32)).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return folder


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("llama", partial(byte_level, LLAMA3), {"tie_word_embeddings": False}),
    "llama 2": ("llama", with_spaces, {}),
    "qwen2": (
        "qwen2",
        partial(byte_level, LLAMA3.replace("{1,3}", "")),
        {"tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", partial(byte_level, None), {"head_dim": 16, "dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("case", CASES)
def test_tensors_and_tokens_come_back(case: str, tmp_path: Path) -> None:
    family, make_tokenizer, more = CASES[case]
    source = folder_of(family, make_tokenizer(), tmp_path / "source", **more)
    succeed("export", source, tmp_path / "out/tiny.gguf", "--format", "gguf")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["tiny.gguf"]
    options: dict[str, Any] = {"dtype": torch.float32}
    before = AutoModelForCausalLM.from_pretrained(source, **options)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="tiny.gguf", **options)
    expected, weights = before.state_dict(), after.state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
    assert after.config.rope_parameters["rope_theta"] == 5e5
    ours = AutoTokenizer.from_pretrained(source)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="tiny.gguf")
    for text in TEXTS:
        ids = [t(text, add_special_tokens=False)["input_ids"] for t in (ours, theirs)]
        assert ids[0] == ids[1], text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    other = folder_of("llama", byte_level(r"\w+|\W+"), tmp_path / "other")
    gemma = folder_of("gemma", byte_level(None), tmp_path / "gemma", head_dim=8)
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    longer = folder_of("llama", byte_level(None), tmp_path / "longer", rope_parameters=scaled)
    refusals = [
        (other, "splits text by a rule without a name"),
        (gemma, "model family 'gemma' is not one of"),
        (longer, "positions are scaled (linear)"),
    ]
    for source, message in refusals:
        done = refusal(2, "export", source, tmp_path / "a.gguf", "--format", "gguf")
        assert message in done
        assert not (tmp_path / "a.gguf").exists()
        assert not [file for file in tmp_path.iterdir() if file.name.startswith(".tmp")]
