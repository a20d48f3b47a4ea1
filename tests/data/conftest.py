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
from rather.data.pairs import PairDataset
from rather.data.prepare import Prepared, prepare
from rather.data.template import TEMPLATES, ChatTemplate, load_tokenizer
from rather.data.tokens import Encoder, TokenRecipe
from tests.tiny import write_rows

Config = Callable[..., DPOConfig]
Make = Callable[..., Encoder]
Prepare = Callable[..., Prepared]
Write = Callable[..., Path]
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
def tokenizer(folders: dict[str, Path]) -> Any:
    """The tokenizer of `chat`, as transformers opens it; `plain` has the same tokens."""
    return load_tokenizer(str(folders["chat"]))


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
def encoder(recipe: Callable[..., TokenRecipe]) -> Make:
    return lambda *args, **kwargs: Encoder(recipe(*args, **kwargs))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Rows (or raw text) into a file of the test's folder."""

    def make(rows: Any, name: str = "pairs.jsonl") -> Path:
        path = tmp_path / name
        if not isinstance(rows, str):
            return write_rows(path, rows)
        path.write_text(rows, encoding="utf-8", errors="surrogatepass")
        return path

    return make


def data_config(folder: Path, model: Path, files: Any, **settings: Any) -> DPOConfig:
    """A config for files of pairs; data settings as `data`, evaluation as `validation`, the rest top level."""
    values = {
        "output_dir": folder / "out",
        "pretrain": model,
        "actor_train": {"data_args": {"file_name": files, **settings.pop("data", {})}},
        "validation": {"data_args": settings.pop("validation", {})},
        **settings,
    }
    return DPOConfig.model_validate(json.loads(json.dumps(values, default=str)))


@pytest.fixture
def config(tmp_path: Path, folders: dict[str, Path]) -> Config:
    """The config of `data_config` with a small tokenizer and short sequences."""

    def make(files: Any, tokenizer: str = "chat", **settings: Any) -> DPOConfig:
        return data_config(
            tmp_path, folders[tokenizer], files, **{"sequence_length": 128, **settings}
        )

    return make


def counts(entry: dict[str, Any], group: str) -> dict[str, int]:
    """Return how many rows of a report are dropped or warned of, by kind."""
    return {kind: each["count"] for kind, each in entry[group].items()}


def everything(pairs: PairDataset) -> list[tuple[Any, ...]]:
    """Return the tokens and numbers of all pairs, in their order."""
    return [
        (
            *(ids.tolist() for ids in (pair.prompt, pair.chosen, pair.rejected)),
            *(pair.chosen_scored, pair.rejected_scored),
            *(pair.weight, str(pair.margin), pair.id),
        )
        for pair in pairs.take(range(len(pairs)))
    ]


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def prepare_pairs(config: Config, write: Write, console: Console) -> Prepare:
    """Prepare rows or text, which are written to a file, or the files of paths."""

    def make(pairs: Any, tokenizer: str = "chat", **settings: Any) -> Prepared:
        is_content = isinstance(pairs, str) or (
            isinstance(pairs, list) and isinstance(pairs[0], dict)
        )
        files = write(pairs) if is_content else pairs
        return prepare(config(files, tokenizer, **settings), console=console)

    return make
