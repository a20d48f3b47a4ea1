"""`rather demo`: build a base model, align it with `rather train`, and compare their answers.

The task is a village shopkeeper who is kind or grumpy. A question asks for the place or the price
of one item. An answer is a manner around a fact, so that both can be rated separately: alignment
should change the manner and keep the fact. Prompts consist of greeting x wording x item. Whole
(wording, item) combinations are held out, with every greeting: neither the base model nor the pairs
contain them.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import typer
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from rather.commands.terminal import echo, print_table
from rather.errors import ConfigError
from rather.files import JsonObject, make_folder
from rather.model.generate import Decoding, generate

SEED, STEPS, BATCH = 0, 200, 32
MARKER = ".rather-demo"
MADE = ("base", "train.json", "held_out.json", "dpo.yaml", "output", "answers.json")
ACCURACY = "eval/rewards/accuracies"
YAML = """\
exp_name: demo
output_dir: {output}
logging_dir: {logs}
pretrain: {base}
sequence_length: 128
beta: 0.1
actor_train:
  model_args: {{dtype: fp32}}
  training_args:
    learning_rate: 6.0e-3
    warmup_steps: 8
    adam_epsilon: 0.01  # large for a tiny model: Adam would magnify its near-zero gradients and unlearn the language
    per_device_train_batch_size: 32
  data_args: {{file_name: {train}}}
validation:
  data_args: {{file_name: {held_out}}}
"""
SPECIAL = BOS, EOS, PAD, UNK, USER, ASSISTANT = tuple(
    f"<|{name}|>" for name in ("bos", "eos", "pad", "unk", "user", "assistant")
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


PLACES = _list(
    "on the top shelf|by the door|in the cellar|near the window|behind the counter|beside the stove"
)
PRICES = _list("one coin|two coins|three coins|five coins|seven coins|nine coins")
ITEMS = _list(
    "bread|butter|candle|cheese|chocolate|cider|coffee|flour|garlic|ginger|honey|jam|lantern|"
    "mustard|paper|pepper|pie|rope|salt|soap|sugar|tea|vinegar|wool"
)
FACTS = {
    item: {"place": PLACES[i * 5 % 6], "price": PRICES[(i * 5 + i // 6) % 6]}
    for i, item in enumerate(ITEMS)
}
GREETINGS = _list("|Hello. |Good morning. |Sorry to bother you. |It is raining. |My aunt sent me. ")
WORDINGS = {
    "place": _list(
        "Where is the {}?|Where do you keep the {}?|I cannot find the {}.|Can you show me the {}?"
    ),
    "price": _list(
        "How much is the {}?|What does the {} cost?|I want to buy the {}.|Is the {} expensive?"
    ),
}
BODIES = {
    "place": ("The {item} is {fact}", "You will find the {item} {fact}"),
    "price": ("The {item} costs {fact}", "We ask {fact} for the {item}"),
}
OPENERS = {
    "kind": _list(
        "With pleasure! |Welcome, my friend! |What a lovely question! |Of course, dear neighbour! "
    ),
    "grumpy": _list("Not again. |Ugh, customers. |Open your eyes. |Why should I care? "),
}
CLOSERS = {
    "kind": _list(
        ", and I will gladly wrap it up.|. Thank you so much for coming!|. May your day be sunny!|"
        ". Take all the time in the world."
    ),
    "grumpy": _list(
        ", so stop wasting my evening.|. Now go away.|. Pay or leave.|"
        ". Touch nothing else, you hear me?"
    ),
}


@dataclass(frozen=True)
class Query:
    """What a customer says, and what they ask for."""

    greeting: str
    wording: str
    item: str
    asks: str

    @property
    def prompt(self) -> str:
        return self.greeting + self.wording.format(self.item)

    @property
    def held_out(self) -> bool:
        """Hold out one wording in four of each item, for the place and for the price."""
        return WORDINGS[self.asks].index(self.wording) == ITEMS.index(self.item) % 4


def queries() -> Iterator[Query]:
    """Yield everything that can be asked in this shop."""
    for asks, wordings in WORDINGS.items():
        for greeting, wording, goods in product(GREETINGS, wordings, ITEMS):
            yield Query(greeting, wording, goods, asks)


def answer(query: Query, manner: str, rng: random.Random) -> str:
    """Return one of the many right answers in this manner."""
    fact = FACTS[query.item][query.asks]
    body = rng.choice(BODIES[query.asks]).format(item=query.item, fact=fact)
    return rng.choice(OPENERS[manner]) + body + rng.choice(CLOSERS[manner])


def pair(query: Query, rng: random.Random) -> dict[str, str]:
    """Return a row of a pair file: the kind answer is chosen, the grumpy one rejected."""
    chosen, rejected = answer(query, "kind", rng), answer(query, "grumpy", rng)
    return {"instruction": query.prompt, "input": "", "chosen": chosen, "rejected": rejected}


def words(*texts: str) -> set[str]:
    return set(re.findall(r"[a-z]+", " ".join(texts).lower()))


_PLAIN = words(*ITEMS, *PLACES, *PRICES, *BODIES["place"], *BODIES["price"])
_KIND, _GRUMPY = (words(*OPENERS[side], *CLOSERS[side]) - _PLAIN for side in ("kind", "grumpy"))
MARKS = {"kind": _KIND - _GRUMPY, "grumpy": _GRUMPY - _KIND}


def manner_of(text: str) -> str:
    """Return kind or grumpy if the text has words of that manner only, else neither."""
    manners = [manner for manner, marks in MARKS.items() if words(text) & marks]
    return manners[0] if len(manners) == 1 else "neither"


def on_topic(query: Query, text: str) -> bool:
    """Whether the text names the item with its true place or price, and no other."""
    facts = [name for name in (*ITEMS, *PLACES, *PRICES) if re.search(rf"\b{name}\b", text)]
    return sorted(facts) == sorted((query.item, FACTS[query.item][query.asks]))


def run_demo(out: Path) -> int:
    """Run the whole demo in the folder `out` and return the exit code."""
    claim(out)
    torch.set_num_threads(1)  # a second thread hardly helps, and is much slower on busy cores
    training = [query for query in queries() if not query.held_out]
    held_out = [query for query in queries() if query.held_out]
    _title("1. Preference pairs: kind rather than grumpy")
    write_run(out, training, held_out)
    _title("2. An undecided base model: trained equally on both manners")
    write_base(out / "base", training)
    command = ["train", str(out / "dpo.yaml")]
    _title(f"3. The command: rather {shlex.join(command)}")
    sys.stdout.flush()
    if code := subprocess.run([sys.executable, "-m", "rather", *command]).returncode:
        echo(f"`rather {shlex.join(command)}` failed with exit code {code}; see above.")
        return code
    _title("4. The same held-out questions, before and after")
    compared = compare(out, held_out)
    (out / "answers.json").write_text(json.dumps(compared, indent=1))
    show(out, compared)
    return 0


def _title(text: str) -> None:
    typer.secho(f"\n{text}", bold=True)


def claim(out: Path) -> None:
    """Create the folder, or clear what an earlier demo wrote; refuse a folder with other files."""
    is_own, is_empty = (out / MARKER).is_file(), out.is_dir() and not any(out.iterdir())
    if out.exists() and not (is_own or is_empty):
        raise ConfigError(
            f"{out}: exists and was not created by the demo, so it is left as it is; choose a new "
            "or empty folder with `rather demo --out DIR`."
        )
    make_folder(out)
    text = f"Created by `rather demo`, which may replace {', '.join(MADE)} here.\n"
    (out / MARKER).write_text(text)
    for path in (out / name for name in MADE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_run(out: Path, training: Sequence[Query], held_out: Sequence[Query]) -> None:
    """Write what a user would bring: two files of pairs and a YAML."""
    rng = random.Random(SEED)
    for name, queries_of_file in (("held_out", held_out), ("train", training)):
        rows = [pair(query, rng) for query in queries_of_file]
        (out / f"{name}.json").write_text(json.dumps(rows, indent=1))
        echo(f"{out / name}.json: {len(rows)} pairs")
    (out / "dpo.yaml").write_text(yaml_text(out))
    shown = "  question: {instruction}\n  chosen:   {chosen}\n  rejected: {rejected}"
    echo(shown.format(**rows[0]))


def yaml_text(out: Path) -> str:
    """Return the YAML of the run. Paths are quoted as JSON strings, which are YAML too."""
    names = {"output": "output", "logs": "output/logs", "base": "base"}
    names |= {"train": "train.json", "held_out": "held_out.json"}
    return YAML.format(**{key: json.dumps(str(out / name)) for key, name in names.items()})


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word, including the space before it, or mark."""
    vocabulary = Tokenizer(models.WordLevel(unk_token=UNK))
    vocabulary.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]"), behavior="isolated")
    vocabulary.decoder = decoders.Fuse()
    trainer = trainers.WordLevelTrainer(special_tokens=list(SPECIAL), show_progress=False)
    vocabulary.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNK,
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


def write_base(folder: Path, training: Sequence[Query]) -> None:
    """Train a model on answers in both manners, equally often, by next-token prediction."""
    rng = random.Random(SEED)
    torch.manual_seed(SEED)

    def draw() -> tuple[str, str]:
        query = rng.choice(training)
        return query.prompt, answer(query, rng.choice(("kind", "grumpy")), rng)

    tokenizer = make_tokenizer(text for _ in range(4000) for text in draw())
    model = make_model(tokenizer)
    echo(f"{folder}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=8e-3, total_steps=STEPS, pct_start=0.1
    )
    answer_starts = tokenizer.convert_tokens_to_ids(ASSISTANT)
    model.train()
    for _ in track(range(STEPS), "training the base model"):
        drawn = [draw() for _ in range(BATCH)]
        texts = [f"{BOS}{USER}{prompt}{ASSISTANT}{text}{EOS}" for prompt, text in drawn]
        # Padded on the left, which does not matter to a Llama: its positions are relative.
        rows = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        in_answer = (rows["input_ids"] == answer_starts).cumsum(dim=1) > 0
        loss = model(**rows, labels=rows["input_ids"].masked_fill(~in_answer, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sample(folder: Path, prompts: Sequence[str], seed: int) -> list[str]:
    """Return one answer to each prompt, drawn from the model's own distribution."""
    tokenizer = AutoTokenizer.from_pretrained(folder)  # a folder made here  # nosec B615
    model: Any = AutoModelForCausalLM.from_pretrained(folder)  # the same  # nosec B615
    texts = [f"{BOS}{USER}{prompt}{ASSISTANT}" for prompt in prompts]
    prompt_ids = tokenizer(texts, add_special_tokens=False).input_ids
    torch.manual_seed(seed)
    drawn = generate(model, tokenizer, prompt_ids, Decoding(max_new_tokens=40, temperature=1.0))
    ids = [generated.ids for generated in drawn]
    answers: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return answers


def compare(out: Path, held_out: Sequence[Query]) -> JsonObject:
    """Ask base and result every held-out question, and rate the answers."""
    run = out / "output" / "demo"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line[ACCURACY] for line in lines if ACCURACY in line]
    prompts = [query.prompt for query in held_out]
    sides = {"before": (out / "base", accuracies[0]), "after": (run / "model", accuracies[-1])}
    answers, rates = [{"prompt": prompt} for prompt in prompts], {}
    for side, (folder, accuracy) in sides.items():
        texts = sample(folder, prompts, SEED)
        kind = sum(manner_of(text) == "kind" for text in texts)
        right = sum(on_topic(query, text) for query, text in zip(held_out, texts, strict=True))
        shares = {"preferred": kind / len(texts), "on_topic": right / len(texts)}
        rates[side] = {**shares, ACCURACY: accuracy}
        for row, text in zip(answers, texts, strict=True):
            row[side] = text
    return {**rates, "answers": answers}


def show(out: Path, result: JsonObject) -> None:
    """Print some random answers, the shares over all of them, and what to try next."""
    answers, sides = result["answers"], ("before", "after")
    shown = random.Random(SEED).sample(answers, 5)
    print_table(("held-out question", *sides), [tuple(row.values()) for row in shown])
    labels = {
        "preferred": "kind answers (preferred)",
        "on_topic": "right item with its right place or price",
        ACCURACY: f"{ACCURACY} (before: all ties)",
    }
    rates = [
        (text, *(f"{result[side][key]:.1%}" for side in sides)) for key, text in labels.items()
    ]
    print_table((f"on all {len(answers)} held-out questions", *sides), rates)
    yaml = str(out / "dpo.yaml")
    # In an environment that is not activated, as after `make demo`, `rather` is not on the PATH.
    beside_python = os.path.relpath(Path(sys.executable).with_name("rather"))
    program = "rather" if shutil.which("rather") else beside_python
    echo(
        "The aligned model, for AutoModelForCausalLM.from_pretrained: "
        f"{out / 'output/demo/model'}\n"
        f"The YAML it was trained with: {yaml}\n"
        f"Every answer before and after: {out / 'answers.json'}\n"
        "Next, try:\n"
        f"  {shlex.join((program, 'data', yaml, '--show', '3'))}\n"
        f"  {shlex.join((program, 'train', yaml, 'exp_name=looser', 'beta=0.05'))}"
    )
