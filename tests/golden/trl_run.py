"""A tiny model with a chat template, pairs of two shapes, and TRL settings for both: what
make_trl_run.py and its test share. Weights are waves instead of random numbers, so that every
version of torch makes the same ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(60)]
TURNS = ("<|im_start|>", "<|im_end|>")
# A word stands for the line end that templates write behind a turn, which is a token of its own.
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> newline {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
PAIRS = 8
STEPS = 10
SHAPES = ("plain", "chat", "turns")
# Fields of TRL's DPOConfig, model and data aside. Pairs longer than max_length are cut at their
# end.
SETTINGS: dict[str, Any] = {
    "beta": 0.3,
    "loss_type": "sigmoid",
    "label_smoothing": 0.2,  # which TRL ignores
    "max_length": 20,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "per_device_train_batch_size": PAIRS // 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": STEPS,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
}


def make_model(folder: Path) -> Path:
    vocabulary = {
        word: i
        for i, word in enumerate(["<unk>", "<s>", "</s>", "user", "assistant", "newline", *WORDS])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in (*TURNS, "<s>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary) + len(TURNS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for i, weights in enumerate(weights for weights in model.parameters() if weights.ndim > 1):
            wave = torch.arange(weights.numel(), dtype=torch.float64) * (1.37 + i)
            weights.copy_((0.2 * torch.sin(wave + i)).view_as(weights))
    model.save_pretrained(folder)
    return folder


def make_rows(shape: str) -> list[dict[str, Any]]:
    """Ragged pairs, some longer than max_length. One answer of plain text already ends with EOS;
    in `turns` an answer goes on for two more turns, of which TRL scores the user's too."""
    draw = random.Random(7)

    def words(low: int, high: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))

    texts = [(words(2, 6), words(1, 9), words(1, 9)) for _ in range(PAIRS)]
    if shape == "plain":
        rows = [
            {"prompt": prompt, "chosen": f" {yes}", "rejected": f" {no}"}
            for prompt, yes, no in texts
        ]
        rows[0]["chosen"] += "</s>"
        return rows
    more = (
        [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
        if shape == "turns"
        else []
    )
    return [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "chosen": [{"role": "assistant", "content": yes}, *more],
            "rejected": [{"role": "assistant", "content": no}, *more],
        }
        for prompt, yes, no in texts
    ]


def make_data(file: Path, shape: str) -> Path:
    file.write_text("\n".join(map(json.dumps, make_rows(shape))) + "\n", encoding="utf-8")
    return file
