"""The folder in which the commands of the docs run: tiny models, pairs, configs and runs."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from rather.cli import app
from tests.house.source import ROOT
from tests.tiny import write_rows

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Names that the docs use, and what stands for them here.
NAMES = {
    "Qwen/Qwen2.5-0.5B-Instruct": "base",
    "Qwen/Qwen2.5-7B-Instruct": "base",
    "Qwen/Qwen2.5-7B": "base",
    "/path/to/model": "base",
    "checkpoint-300": "checkpoint-2",
    "rather-demo/base": "base",
    "rather-demo/train.json": "pairs.json",
    "/ckpt/sft": "megatron",
}
CONFIG = """\
exp_name: first
pretrain: base
sequence_length: 1024
max_steps: 2
save_steps: 1
track_with: null
actor_train:
  training_args: {learning_rate: 1.0e-4, per_device_train_batch_size: 4}
  data_args: {file_name: pairs.jsonl}
validation:
  data_args: {file_name: held_out.jsonl}
"""
LORA = [
    "exp_name=lora",
    "actor_train.model_args.lora_rank=2",
    "actor_train.model_args.lora_target=all-linear",
]
TRL = """\
model_name_or_path: base
dataset_name: pairs.jsonl
loss_type: sigmoid
truncation_mode: keep_start
output_dir: output/trl
max_steps: 2
max_length: 512
report_to: none
"""
RUNS = ("dpo", "my-first-run")


def make_base(folder: Path) -> None:
    """A random Llama over bytes: it reads any text, and has a chat template."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            vocab_size=len(fast),
            eos_token_id=fast.eos_token_id,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {
            "prompt": f"What is {i} plus {draw.randint(1, 9)}?",
            "chosen": f"It is {draw.randint(10, 99)}.",
            "rejected": "I would rather not say" + "." * draw.randint(1, 9),
            "source": ("school", "street")[i % 2],
        }
        for i in range(count)
    ]


def write_files(workspace: Path) -> None:
    for name, count, seed in (("pairs", 24, 0), ("held_out", 6, 1)):
        made = rows(count, seed)
        (workspace / f"{name}.json").write_text(json.dumps(made))
        write_rows(workspace / f"{name}.jsonl", made)
    shutil.copy(workspace / "pairs.json", workspace / "my_pairs.json")
    (workspace / "dpo.yaml").write_text(CONFIG)
    (workspace / "my_run.yaml").write_text(CONFIG.replace("first", "my-first-run"))
    (workspace / "dpo_config.yaml").write_text(TRL)
    axolotl = ROOT / "tests" / "migrate" / "sources" / "axolotl.yaml"
    shutil.copy(axolotl, workspace / "config.yml")
    shutil.copytree(ROOT / "examples", workspace / "examples")
    for file in (workspace / "examples").rglob("*.yaml"):
        file.write_text(named(file.read_text()))


def named(text: str) -> str:
    """Return the text with the names of files in this workspace."""
    for theirs, ours in NAMES.items():
        text = text.replace(theirs, ours)
    return text


def run(*words: str, stdin: str | None = None) -> tuple[int, str]:
    """`rather ...` in this process: its exit code and all it printed."""
    result = CliRunner().invoke(app, list(words), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def make_runs(workspace: Path) -> None:
    """Make two finished runs of one config, and one that trained an adapter, in the workspace."""
    assert run("train", "my_run.yaml")[0] == 0
    shutil.copytree(workspace / "output" / "my-first-run", workspace / "output" / "dpo")
    assert run("train", "dpo.yaml", *LORA)[0] == 0
    for place in ("run/adapter", "tuned"):
        shutil.copytree(workspace / "output" / "lora" / "adapter", workspace / place)
