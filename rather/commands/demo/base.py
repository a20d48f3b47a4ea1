"""Build the tokenizer and the base model of the demo, which needs no network, and sample answers."""

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


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word, including the space before it, or mark."""
    words = Tokenizer(models.WordLevel(unk_token=UNK))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    trainer = trainers.WordLevelTrainer(special_tokens=list(SPECIAL), show_progress=False)
    words.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNK,
        additional_special_tokens=[USER, ASSISTANT], padding_side="left",
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama with about two hundred thousand parameters."""
    # A wider initialisation than the default 0.02, which suits wide models, learns twice as fast.
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128, initializer_range=0.08,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train_base(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: Callable[[], tuple[str, str]],
    console: Console,
) -> None:
    """Train on the answers of randomly drawn (prompt, answer) rows: plain next-token prediction."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=8e-3, total_steps=STEPS, pct_start=0.1
    )
    answer_starts = tokenizer.convert_tokens_to_ids(ASSISTANT)
    model.train()
    for _ in track(range(STEPS), "training the base model", console=console):
        # Padded on the left, which does not matter to a Llama: its positions are relative.
        rows = tokenizer(
            _texts(tokenizer, [draw() for _ in range(BATCH)]), return_tensors="pt", padding=True,
            padding_side="left", add_special_tokens=False,
        )  # fmt: skip
        in_answer = (rows["input_ids"] == answer_starts).cumsum(dim=1) > 0
        loss = model(**rows, labels=rows["input_ids"].masked_fill(~in_answer, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def sample(folder: Path, prompts: Sequence[str], seed: int) -> list[str]:
    """Return one answer to each prompt, drawn from the model's own distribution."""
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)  # a folder made here  # nosec B615
    model: Any = AutoModelForCausalLM.from_pretrained(folder)  # the same  # nosec B615
    texts = _texts(tokenizer, [(prompt,) for prompt in prompts])
    asked = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    torch.manual_seed(seed)
    drawn = generate(model, tokenizer, asked, Decoding(max_new_tokens=40, temperature=1.0))
    ids = [answer.ids for answer in drawn]
    answers: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return answers


def _texts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[str]]) -> list[str]:
    """Apply the template to (prompt,) or (prompt, answer); after a prompt alone, an answer starts."""
    texts: list[Any] = [
        tokenizer.apply_chat_template(
            [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), row, strict=False)
            ],
            tokenize=False,
            add_generation_prompt=len(row) == 1,
        )
        for row in rows
    ]
    return texts
