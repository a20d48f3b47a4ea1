"""Small tokenizers made on the spot, and short ways to configs, files and encoders."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from rather.config.run_config import DPOConfig
from rather.data.template import TEMPLATES, ChatTemplate
from rather.data.tokens import Encoder, TokenRecipe

SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
]
CORPUS = [
    "Where is the bread? The bread is on the top shelf, my friend.",
    "user assistant system You are a helpful assistant. How much is the salt? Two coins.",
    "Once upon a time there was a little shop in a little village, and the shop was warm.",
] * 20


def _tokenizer(adds_bos: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet),
    )
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer


def _save(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`chat`: ChatML, no BOS; `plain`: adds BOS, no template, no pad token."""
    base = tmp_path_factory.mktemp("tokenizers")
    chatml = TEMPLATES["chatml"]
    return {
        "chat": _save(
            base / "chat", _tokenizer(False), eos_token="<|im_end|>", chat_template=chatml
        ),
        "plain": _save(base / "plain", _tokenizer(True), bos_token="<s>", eos_token="</s>"),
    }


@pytest.fixture(scope="session")
def recipe(folders: dict[str, Path]) -> Callable[..., TokenRecipe]:
    """A recipe for one of the small tokenizers; `template` is a name, a Jinja text or None."""

    def make(
        template: str | None = "chatml",
        *,
        bos: bool = False,
        eos: str | None = None,
        **settings: Any,
    ) -> TokenRecipe:
        tokenizer = Tokenizer.from_file(str(folders["plain" if bos else "chat"] / "tokenizer.json"))
        eos = eos or ("<|im_end|>" if template == "chatml" else "</s>")
        variables = {"eos_token": eos} | ({"bos_token": "<s>"} if bos else {})
        text = TEMPLATES.get(template or "", template or "")
        return TokenRecipe(
            tokenizer.to_str(),
            ChatTemplate(template, text, variables) if template else None,
            bos=tokenizer.token_to_id("<s>") if bos else None,
            eos=tokenizer.token_to_id(eos),
            adds_bos=bos,
            **{"sequence_length": 512, **settings},
        )

    return make


@pytest.fixture
def encoder(recipe: Callable[..., TokenRecipe]) -> Callable[..., Encoder]:
    return lambda *args, **kwargs: Encoder(recipe(*args, **kwargs))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Rows (or raw text) into a file of the test's folder."""

    def make(rows: Any, name: str = "pairs.jsonl") -> Path:
        path = tmp_path / name
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        return path

    return make


@pytest.fixture
def config(tmp_path: Path, folders: dict[str, Path]) -> Callable[..., DPOConfig]:
    """A config for files of pairs; data settings as `data`, evaluation as `validation`, the rest top level."""

    def make(files: Any, tokenizer: str = "chat", **settings: Any) -> DPOConfig:
        data = {
            "file_name": files if isinstance(files, list) else str(files),
            **settings.pop("data", {}),
        }
        return DPOConfig.model_validate(
            {
                "output_dir": str(tmp_path / "out"),
                "pretrain": str(folders[tokenizer]),
                "actor_train": {"data_args": data},
                "validation": {"data_args": settings.pop("validation", {})},
                "sequence_length": 128,
                **settings,
            }
        )

    return make


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)
