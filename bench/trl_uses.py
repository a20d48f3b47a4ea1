"""Ways to use TRL 1.16 that its documentation shows, in TRL and in rather.trl.

    python bench/trl_uses.py TRL [--match PATTERN]

TRL is a folder with the package `trl` of version 1.16. Each function below is such a use: data with
tools, streams, truncation, adapters, other references, callbacks, resumed runs. It trains a tiny
model in float32. The outcome is "same" if log_history, what evaluations return, the sum of each
weight and the names of all files are those of TRL; "refused" with the error of rather.trl; "only TRL
fails"; or "DIFFERENT", and then the exit code is 1.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
Rows = list[dict[str, Any]]
TIMES = ("runtime", "per_second", "total_flos")  # of the machine, or of padding
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 3e-3,
    "num_train_epochs": 2,
    "max_length": 20,
    "logging_steps": 1,
    "bf16": False,
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
EVERY_EPOCH = {"eval_strategy": "epoch"}
TOOL = {"name": "w5", "description": "w6", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|> {% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|> "
    "newline {% endif %}{% if flag %}w9 w9 {% endif %}{% for m in messages %}<|im_start|> "
    "{{ m.role }} {{ m.content }} {% for c in m.tool_calls or [] %}{{ c.function.name }} "
    "{% endfor %}<|im_end|> newline {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
USES: dict[str, Callable[[Package], Any]] = {}


def use(function: Callable[[Package], Any]) -> Callable[[Package], Any]:
    """Add a use: a function that returns a trainer after its training."""
    USES[function.__name__] = function
    return function


class Package:
    """Trainers of TRL or of rather.trl, a model, a folder, and what a script noted besides."""

    def __init__(self, name: str, model: Path, folder: Path) -> None:
        self.name, self.model, self.folder = name, model, folder
        self.noted: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        from tests.trl.cases import PATHS

        path = PATHS.get(re.sub("Config$|Trainer$", "", name))
        return getattr(importlib.import_module(".".join(filter(None, [self.name, path]))), name)

    def tokenizer(self, template: str = "") -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model)
        tokenizer.chat_template = template or tokenizer.chat_template
        return tokenizer

    def load(self, **options: Any) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.model, **options)

    def trainer(self, kind: str = "DPO", rows: Any = None, **named: Any) -> Any:
        """Make a trainer; names of its config go there, the others to the trainer."""
        from dataclasses import fields

        config = getattr(self, f"{kind}Config")
        names = {field.name for field in fields(config)} & set(named)
        settings = {name: named.pop(name) for name in names}
        named.setdefault("processing_class", self.tokenizer())
        made = named.pop("trainer_class", None) or getattr(self, f"{kind}Trainer")
        return made(
            named.pop("model", str(self.model)),
            args=config(output_dir=str(self.folder), **{**SETTINGS, **settings}),
            train_dataset=dataset(chat()) if rows is None else rows,
            **named,
        )

    def train(self, *given: Any, resume: Any = None, **named: Any) -> Any:
        """Make a trainer and train."""
        return trained(self.trainer(*given, **named), resume)

    def resumed(self, *given: Any, **named: Any) -> Any:
        """Train, then train once more from a checkpoint in the middle."""
        named |= {"save_strategy": "steps", "save_steps": 3}
        self.noted.append(self.train(*given, **named).state.log_history)
        return self.train(*given, resume=str(self.folder / "checkpoint-3"), **named)


def trained(trainer: Any, resume: Any = None) -> Any:
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


# --- rows ---


def chat() -> Rows:
    from tests.golden.trl_run import make_rows

    return copy.deepcopy([*make_rows("chat"), make_rows("turns")[0]])


def plain() -> Rows:
    from tests.golden.trl_run import make_rows

    return copy.deepcopy(make_rows("plain"))


def messages() -> Rows:
    return [{"messages": row["prompt"] + row["chosen"]} for row in chat()]


def thumbs() -> Rows:
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in chat()
        for side in ("chosen", "rejected")
    ]


def dataset(rows: Rows) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def stream(rows: Rows) -> Any:
    return dataset(rows).to_iterable_dataset()


def halves(rows: Rows) -> dict[str, Any]:
    return {"a": dataset(rows[:3]), "b": dataset(rows[3:7])}


def lora(**options: Any) -> Any:
    from peft import LoraConfig

    defaults = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**defaults, **options})


def adapted(package: Package, **options: Any) -> Any:
    import torch
    from peft import get_peft_model

    torch.manual_seed(0)
    return get_peft_model(package.load(), lora(**options))


def other_reference(package: Package) -> Any:
    import torch

    reference = package.load()
    with torch.no_grad():
        reference.lm_head.weight.mul_(1.3)
    return reference


# --- columns, streams, truncation ---


@use
def dpo_tools(package: Package) -> Any:
    rows = dataset([{**row, "tools": json.dumps(TOOLS)} for row in chat()])
    tokenizer = package.tokenizer(TOOL_TEMPLATE)
    return package.train("DPO", rows, processing_class=tokenizer, max_length=40)


@use
def dpo_calls_of_tools(package: Package) -> Any:
    rows = [{**row, "tools": TOOLS} for row in chat()]
    for number, row in enumerate(rows):
        for turn in row["chosen"] + row["rejected"]:
            turn["tool_calls"] = None
        if number % 2:
            call = {"type": "function", "function": {"name": "w5", "arguments": {}}}
            row["chosen"][0] |= {"content": "", "tool_calls": [call]}
    tokenizer = package.tokenizer(TOOL_TEMPLATE)
    return package.train("DPO", dataset(rows), processing_class=tokenizer, max_length=40)


@use
def dpo_chat_template_kwargs(package: Package) -> Any:
    rows = [{**row, "chat_template_kwargs": {"flag": i % 2 == 0}} for i, row in enumerate(chat())]
    tokenizer = package.tokenizer(TOOL_TEMPLATE)
    return package.train("DPO", dataset(rows), processing_class=tokenizer, max_length=40)


@use
def dpo_margins_and_other_columns(package: Package) -> Any:
    rows = [{**row, "margin": float(i), "note": "x" * i or None} for i, row in enumerate(chat())]
    return package.train("DPO", dataset(rows), eval_dataset=dataset(rows[:3]), **EVERY_EPOCH)


@use
def dpo_implicit_prompts(package: Package) -> Any:
    sides = ("chosen", "rejected")
    rows = [{side: row["prompt"] + row[side] for side in sides} for row in chat()]
    return package.train("DPO", dataset(rows))


@use
def dpo_without_processing_class(package: Package) -> Any:
    return package.train(processing_class=None)


@use
def dpo_stream(package: Package) -> Any:
    return package.train("DPO", stream(chat()), max_steps=7)


@use
def dpo_stream_of_shards_and_lora(package: Package) -> Any:
    rows = dataset(chat()).to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=4)
    return package.train("DPO", rows, max_steps=6, peft_config=lora())


@use
def dpo_streams_to_evaluate(package: Package) -> Any:
    sets = {"a": stream(chat()[:3]), "b": stream(chat()[3:])}
    return package.train(eval_dataset=sets, **EVERY_EPOCH)


@use
def dpo_stream_precomputed(package: Package) -> Any:
    return package.train("DPO", stream(chat()), max_steps=3, precompute_ref_log_probs=True)


@use
def dpo_keep_end(package: Package) -> Any:
    return package.train(truncation_mode="keep_end", max_length=7)


@use
def dpo_keep_start(package: Package) -> Any:
    return package.train(max_length=12)


# --- adapters, references, models ---


@use
def dpo_lora_checkpointed(package: Package) -> Any:
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    return package.train(peft_config=lora(), gradient_checkpointing=True, **options)


@use
def dpo_lora_with_modules_to_save(package: Package) -> Any:
    return package.train(
        peft_config=lora(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    )


@use
def dpo_dora(package: Package) -> Any:
    return package.train(peft_config=lora(use_dora=True, use_rslora=True))


@use
def dpo_trained_adapter(package: Package) -> Any:
    return package.train(model=adapted(package, init_lora_weights=False))


@use
def dpo_trained_adapter_precomputed(package: Package) -> Any:
    model = adapted(package, init_lora_weights=False)
    rows = dataset(chat()[:4])
    options = {"precompute_ref_log_probs": True, **EVERY_EPOCH}
    return package.train(model=model, eval_dataset=rows, **options)


@use
def dpo_other_reference(package: Package) -> Any:
    return package.train(ref_model=other_reference(package))


@use
def dpo_other_reference_and_lora(package: Package) -> Any:
    return package.train(ref_model=other_reference(package), peft_config=lora())


@use
def dpo_other_reference_precomputed(package: Package) -> Any:
    options = {"precompute_ref_log_probs": True, **EVERY_EPOCH}
    reference = other_reference(package)
    return package.train(ref_model=reference, eval_dataset=halves(chat()), **options)


@use
def dpo_model_and_init_kwargs(package: Package) -> Any:
    return package.train(model=package.load(), model_init_kwargs={"dtype": "float32"})


@use
def dpo_frozen_layers(package: Package) -> Any:
    model = package.load()
    for name, weight in model.named_parameters():
        weight.requires_grad_("layers.1" in name)
    return package.train(model=model)


@use
def dpo_own_optimizer(package: Package) -> Any:
    import torch

    model = package.load()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return package.train(model=model, optimizers=(optimizer, schedule))


# --- evaluation, callbacks, checkpoints ---


@use
def dpo_best_of_a_dict(package: Package) -> Any:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_a_loss"}
    options = {"save_strategy": "epoch", **EVERY_EPOCH, **best}
    return package.train(eval_dataset=halves(chat()), **options)


@use
def dpo_early_stopping(package: Package) -> Any:
    from transformers import EarlyStoppingCallback

    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_rewards/margins"}
    callbacks = [EarlyStoppingCallback(early_stopping_patience=2)]
    options = {**steps, **best, "greater_is_better": False}
    return package.train(eval_dataset=dataset(chat()[:4]), callbacks=callbacks, **options)


@use
def dpo_own_callback(package: Package) -> Any:
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            package.noted.append(sorted(logs))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_evaluate = control.should_save = state.global_step == 2
            control.should_training_stop = state.global_step == 5

    return package.train(eval_dataset=dataset(chat()[:4]), callbacks=[Watcher()])


@use
def dpo_moved_reference(package: Package) -> Any:
    from trl.trainer.callbacks import SyncRefModelCallback

    trainer = package.trainer()
    trainer.args.ref_model_sync_steps, trainer.args.ref_model_mixup_alpha = 1, 0.5
    trainer.add_callback(SyncRefModelCallback(trainer.ref_model, trainer.accelerator))
    return trained(trainer)


@use
def dpo_evaluated(package: Package) -> Any:
    trainer = package.trainer(eval_dataset=dataset(chat()[:5]))
    package.noted.append(trainer.evaluate())
    trained(trainer)
    package.noted.append(trainer.evaluate(dataset(chat()[4:]), metric_key_prefix="test"))
    package.noted.append(trainer.evaluate(halves(chat())))
    package.noted.append(trainer.predict(trainer.eval_dataset).metrics)
    return trainer


@use
def dpo_trained_twice(package: Package) -> Any:
    trainer = package.train()
    package.noted.append(trainer.state.log_history)
    return trained(trainer)


@use
def dpo_resumed(package: Package) -> Any:
    return package.resumed()


@use
def dpo_resumed_precomputed(package: Package) -> Any:
    return package.resumed(precompute_ref_log_probs=True)


@use
def dpo_resumed_lora(package: Package) -> Any:
    return package.resumed(peft_config=lora(), precompute_ref_log_probs=True)


@use
def dpo_resumed_with_a_moving_reference(package: Package) -> Any:
    return package.resumed(sync_ref_model=True, ref_model_sync_steps=2)


@use
def dpo_resumed_stream(package: Package) -> Any:
    return package.resumed("DPO", stream(chat()), max_steps=7)


@use
def dpo_own_trainer(package: Package) -> Any:
    import torch

    class Own(package.DPOTrainer):  # type: ignore[misc, name-defined]
        def create_optimizer(self, *_: Any, **__: Any) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
            return self.optimizer

        def log(self, logs: Any, *given: Any, **named: Any) -> None:
            super().log({**logs, "own": 2.0}, *given, **named)

    return package.train(trainer_class=Own, gradient_accumulation_steps=3, logging_steps=2)


# --- the other trainers ---


@use
def kto_stream(package: Package) -> Any:
    return package.train("KTO", stream(thumbs()), max_steps=6)


@use
def kto_pairs_precomputed(package: Package) -> Any:
    options = {"precompute_ref_log_probs": True, "per_device_train_batch_size": 4, **EVERY_EPOCH}
    rows = dataset(chat())
    return package.train(
        "KTO", rows, peft_config=lora(), eval_dataset=dataset(chat()[:4]), **options
    )


@use
def kto_unbalanced(package: Package) -> Any:
    rows = [row for i, row in enumerate(thumbs()) if not row["label"] or i < 6]
    options = {"desirable_weight": 2.0, "undesirable_weight": 0.5, **EVERY_EPOCH}
    return package.train("KTO", dataset(rows), eval_dataset=halves(rows), **options)


@use
def reward_margins(package: Package) -> Any:
    rows = [{**row, "margin": 0.1 * i} for i, row in enumerate(chat())]
    return package.train("Reward", dataset(rows), eval_dataset=dataset(rows[:4]), **EVERY_EPOCH)


@use
def reward_stream(package: Package) -> Any:
    return package.train("Reward", stream(chat()), max_steps=5)


@use
def reward_lora(package: Package) -> Any:
    adapter = lora(task_type="SEQ_CLS", modules_to_save=["score"])
    return package.train("Reward", peft_config=adapter)


@use
def reward_resumed(package: Package) -> Any:
    return package.resumed("Reward")


@use
def sft_stream(package: Package) -> Any:
    return package.train("SFT", stream(messages()), max_steps=5, gradient_accumulation_steps=2)


@use
def sft_resumed_lora(package: Package) -> Any:
    options = {"gradient_accumulation_steps": 2}
    return package.resumed("SFT", dataset(messages()), peft_config=lora(), **options)


@use
def sft_text_in_a_dict(package: Package) -> Any:
    rows = [{"text": row["prompt"] + row["chosen"]} for row in plain()]
    return package.train("SFT", dataset(rows), eval_dataset=halves(rows), **EVERY_EPOCH)


@use
def sft_formatting_function(package: Package) -> Any:
    rows = [{"question": row["prompt"], "answer": row["chosen"]} for row in plain()]
    return package.train(
        "SFT", dataset(rows), formatting_func=lambda row: f"w1 {row['question']} {row['answer']}"
    )


@use
def sft_completions_keep_end(package: Package) -> Any:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in chat()]
    return package.train("SFT", dataset(rows), truncation_mode="keep_end", max_length=8)


@use
def sft_padding_free(package: Package) -> Any:
    return package.train("SFT", dataset(messages()), padding_free=True)


@use
def sft_packing(package: Package) -> Any:
    return package.train("SFT", dataset(messages()), packing=True)


@use
def sft_then_dpo(package: Package) -> Any:
    first = package.train("SFT", dataset(messages()))
    package.noted.append(first.state.log_history)
    first.save_model(str(package.folder / "first"))
    package.tokenizer().save_pretrained(package.folder / "first")
    package.model = package.folder / "first"
    return package.train()


@use
def orpo_lora(package: Package) -> Any:
    rows = dataset(chat()[:4])
    return package.train("ORPO", peft_config=lora(), eval_dataset=rows, **EVERY_EPOCH)


@use
def cpo_stream(package: Package) -> Any:
    return package.train("CPO", stream(chat()), max_steps=4)


# --- comparison ---


def result_of(name: str, package_name: str, model: Path) -> SimpleNamespace:
    """Return what a use gave, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        package = Package(package_name, model, Path(folder))
        try:
            trainer = USES[name](package)
        except Exception as error:  # what the script would end with
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            return SimpleNamespace(error=text.replace(folder, "OUT"))
        weights = trainer.model.state_dict().items()
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        numbers = {
            "history": trainer.state.log_history,
            "noted": package.noted,
            "weights": {key: float(weight.double().sum()) for key, weight in weights},
            "files": sorted(str(file.relative_to(folder)) for file in files),
        }
        return SimpleNamespace(error="", numbers=numbers)


def differences(theirs: Any, ours: Any, place: str, skipped: tuple[str, ...]) -> list[str]:
    """Return what is not the same in two nested results."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found = [f"{place}: keys {sorted(set(theirs) ^ set(ours))}"] * (set(theirs) != set(ours))
        for key in theirs.keys() & ours.keys():
            if not any(word in key for word in skipped):
                found += differences(theirs[key], ours[key], f"{place}.{key}", skipped)
        return found
    if isinstance(theirs, list) and isinstance(ours, list):
        found = [f"{place}: {len(theirs)} and {len(ours)}"] * (len(theirs) != len(ours))
        for number, (a, b) in enumerate(zip(theirs, ours, strict=False)):
            found += differences(a, b, f"{place}[{number}]", skipped)
        return found
    if isinstance(theirs, float | int) and isinstance(ours, float | int):
        # Adam makes steps of the learning rate's size out of rounding: sums of weights are coarser.
        slack = 2e-3 if place.startswith(".weights") else 2e-4 if "grad_norm" in place else 5e-5
        is_near = abs(theirs - ours) <= slack * max(1.0, abs(theirs))
        return [] if is_near else [f"{place}: {theirs} and {ours}"]
    return [] if theirs == ours else [f"{place}: {theirs!r} and {ours!r}"]


def outcome(name: str, model: Path) -> tuple[str, Any]:
    ours, theirs = result_of(name, "rather.trl", model), result_of(name, "trl", model)
    if ours.error.startswith(("ConfigError", "DataError")):
        return "refused" if not theirs.error else "both refuse", ours.error
    if ours.error:
        return "DIFFERENT", f"TRL: {theirs.error or 'trains'}; rather.trl: {ours.error}"
    if theirs.error:
        return "only TRL fails", theirs.error
    skipped = (*TIMES, "logits/") if name.startswith(("orpo", "cpo")) else TIMES
    found = differences(theirs.numbers, ours.numbers, "", skipped)
    return ("DIFFERENT", found[:6]) if found else ("same", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trl", type=Path)
    parser.add_argument("--match", default="", help="a pattern of uses")
    args = parser.parse_args()
    sys.path.insert(0, str(args.trl))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TQDM_DISABLE": "1"}
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from datasets.utils.logging import disable_progress_bar

    from tests.golden.trl_run import make_model

    disable_progress_bar()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name))
        for title in USES:
            if re.search(args.match, title):
                kind, why = outcome(title, model)
                counts[kind] += 1
                print(f"{title}: {kind} {why}", flush=True)
    print(json.dumps(counts))
    return int(bool(counts["DIFFERENT"]))


if __name__ == "__main__":
    sys.exit(main())
