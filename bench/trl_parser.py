"""What TRL's own parsers read from command lines; runs with a checkout of TRL on the path.

Reads a JSON list of [words of a command, folder] and prints a list of the settings. Runs nothing.
"""

from __future__ import annotations

import importlib
import importlib.resources
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import transformers.training_args
import yaml
from transformers import HfArgumentParser

# The machine that parses has no GPU.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True


OWN = ("dpo", "kto", "sft", "reward")  # programs of `trl`


def parser_of(program: str) -> Any:
    from trl import ModelConfig, ScriptArguments

    if program in OWN:
        return importlib.import_module(f"trl.scripts.{program}").make_parser()
    if program == "orpo":
        from trl.experimental.orpo import ORPOConfig as config
    else:
        from trl.experimental.cpo import CPOConfig as config
    return HfArgumentParser((ScriptArguments, config, ModelConfig))


def parsed(words: list[str], folder: str) -> dict[str, Any]:
    """Return the settings of `trl dpo ...`, or of a launcher with dpo.py, orpo.py or cpo.py."""
    os.chdir(folder)
    is_script = [word.endswith(".py") for word in words]
    at = is_script.index(True) if any(is_script) else words.index("trl") + 1
    program = Path(words[at]).stem
    parser, arguments = parser_of(program), ["--output_dir", "out", *words[at + 1 :]]
    if program in OWN:
        *found, rest = parser.parse_args_and_config(arguments, return_remaining_strings=True)
    else:
        *found, rest = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    training, model = found[1], found[2]
    fixed = {"orpo": "orpo", "sft": "sft", "reward": "bradley_terry"}
    losses = fixed.get(program) or training.loss_type
    loss = losses if isinstance(losses, list) else [losses]
    if program == "cpo":
        loss = [{"sigmoid": "cpo"}.get(name, name) for name in loss]
    size = training.per_device_train_batch_size * training.gradient_accumulation_steps
    return {
        "loss": " + ".join(loss),
        "beta": getattr(training, "beta", None),
        "nll": training.cpo_alpha if program == "cpo" else 0,
        "learning_rate": training.learning_rate,
        "pairs": size * processes([*words[:at], *rest]),
        "adapter": f"lora {model.lora_r}" if model.use_peft else "none",
        "weights": "4bit" if model.load_in_4bit else "8bit" if model.load_in_8bit else "none",
        "alpha": float(model.lora_alpha) if model.use_peft else None,
        "steps": training.max_steps if training.max_steps > 0 else training.num_train_epochs,
        "schedule": str(training.lr_scheduler_type.value),
        "warmup": training.warmup_steps,
        "decay": training.weight_decay,
        "beta2": training.adam_beta2,
        "clip": training.max_grad_norm,
        # A name of older versions, which the parser of this one does not know.
        "length": None if "--max_seq_length" in rest else training.max_length,
        "precision": "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32",
    }


def processes(words: list[str]) -> int:
    """Return how many processes accelerate starts, from its flags or from a file."""
    flags = dict(itertools.pairwise(words))
    if "--num_processes" in flags:
        return int(flags["--num_processes"])
    name = flags.get("--accelerate_config") or flags.get("--config_file")
    if not name:
        return 1
    own = importlib.resources.files("trl.accelerate_configs") / f"{name}.yaml"
    file = Path(name) if Path(name).is_file() else Path(str(own))
    return int(yaml.safe_load(file.read_text())["num_processes"])


if __name__ == "__main__":
    print(json.dumps([parsed(*each) for each in json.load(sys.stdin)]))
