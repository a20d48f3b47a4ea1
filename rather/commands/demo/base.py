"""A tokenizer and a base model made on the spot, since the demo needs no network; and sampling from a model folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from rather.model.generate import Decoding, generate

STEPS, BATCH = 200, 32
SPECIAL = BOS, EOS, PAD, UNK, USER, ASSISTANT = tuple(
    f"<|{name}|>" for name in ("bos", "eos", "pad", "unk", "user", "assistant")
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def hide_progress_bars() -> None:
    """A bar for loading a file of one megabyte would only hide the story."""
    transformers_logging.disable_progress_bar()


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token per word (with the space before it) or mark of the given texts; any other word is unknown."""
    words = Tokenizer(models.WordLevel(unk_token=UNK))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    words.train_from_iterator(
        texts, trainers.WordLevelTrainer(special_tokens=list(SPECIAL), show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        additional_special_tokens=[USER, ASSISTANT],
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of some two hundred thousand parameters with fresh weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            initializer_range=0.08,  # wider than the default 0.02, which is meant for wide models: learns twice as fast
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def train_base(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: Callable[[], tuple[str, str]],
    console: Console,
) -> None:
    """Plain next-token training on the answers of freshly drawn (prompt, answer) rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=8e-3, total_steps=STEPS, pct_start=0.1
    )
    answer_starts = tokenizer.convert_tokens_to_ids(ASSISTANT)
    model.train()
    for _ in track(range(STEPS), "training the base model", console=console):
        rows = _encode(tokenizer, [draw() for _ in range(BATCH)])
        in_answer = (rows["input_ids"] == answer_starts).cumsum(dim=1) > 0
        loss = model(**rows, labels=rows["input_ids"].masked_fill(~in_answer, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def sample(folder: Path, prompts: Sequence[str], seed: int) -> list[str]:
    """One answer to each prompt, drawn from the model's own distribution (temperature 1, nothing cut off)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)  # a folder made here  # nosec B615
    model: Any = AutoModelForCausalLM.from_pretrained(folder)  # the same  # nosec B615
    asked = [
        tokenizer(text, add_special_tokens=False).input_ids
        for text in _texts(tokenizer, [(p,) for p in prompts])
    ]
    torch.manual_seed(seed)
    drawn = generate(model, tokenizer, asked, Decoding(max_new_tokens=40, temperature=1.0))
    answers: list[str] = tokenizer.batch_decode(
        [answer.ids for answer in drawn], skip_special_tokens=True
    )
    return answers


def _encode(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Sequence[str]]) -> BatchEncoding:
    """Rows of (prompt,) or (prompt, answer) as one batch, padded on the left: a Llama's positions are relative."""
    rows: BatchEncoding = tokenizer(
        _texts(tokenizer, turns),
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=False,
    )
    return rows


def _texts(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Sequence[str]]) -> list[str]:
    """As the template writes them; behind a prompt alone an answer begins."""
    roles = ("user", "assistant")
    texts: list[Any] = [
        tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in zip(roles, row, strict=False)],
            tokenize=False,
            add_generation_prompt=len(row) == 1,
        )
        for row in turns
    ]
    return texts
