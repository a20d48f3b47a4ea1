"""`rather migrate` over the published examples of eight tools, and over files of their users.

    python bench/migrate_examples.py FOLDER [--train] [--write]

FOLDER has a git checkout of each tool (trl, LLaMA-Factory, axolotl, OpenRLHF, ms-swift, RL
(NeMo-RL), ColossalAI, ROLL) or a git directory FOLDER/owner+name/repo, and such a directory for
each repository of migrate_user_files*.txt (owner/name@commit:path).
An example is a file, or a command line in a docstring or in Markdown, that trains on pairs, on
single answers with labels (KTO), a reward model, or on answers alone (SFT). Each is converted as a
user would do it: in the folder of the checkout, with nothing filled in. It is converted,
incomplete ("not determined") or refused, and the settings that decide a training are compared with
the expected ones: those of TRL's examples come from its own parser in the checkout, all others from
migrate_expected.json, which was written by hand from the tools' sources and documentation.
`--train` also loads each converted YAML with `rather config show` and trains two steps of a tiny
model with it; `--write` writes bench/results/migrate_examples.json and the table of
docs/coming_from/index.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from rather.cli import app
from rather.config.run_config import DPOConfig
from rather.config.schema import as_list
from rather.errors import ConfigError
from rather.tools.migrate.engine import Migrated, migrate, with_program
from rather.tools.migrate.peers import PEERS
from rather.tools.migrate.rules import INCOMPLETE
from rather.tools.migrate.source import SourceSettings, read_file, read_line

HERE = Path(__file__).parent
RESULTS, EXPECTED = HERE / "results" / "migrate_examples.json", HERE / "migrate_expected.json"
MARK = "<!-- made by bench/migrate_examples.py -->"
PAGE = HERE.parent / "docs" / "coming_from" / "index.md"
FIELDS = ("loss", "beta", "nll", "gamma", "learning_rate", "pairs", "adapter", "alpha", "weights",
          "precision", "steps", "schedule", "warmup", "decay", "beta2", "clip", "length",
          "data", "samples", "held_out", "reference")  # fmt: skip
USERS = ("migrate_user_files.txt", "migrate_user_files_trl.txt")
TEXTS = (
    "*.yaml",
    "*.yml",
    "*.json",
    "*.sh",
    "*.md",
    "*.py",
    "*hostfile",
)  # read of a git directory
STATES = ("converted", "incomplete", "refused")
MOST_SFT = 3  # of a tool are trained
ROUNDED = ("8bit", "none")  # base weights in 8 bits stay as they are, which the conversion says


@dataclass(frozen=True)
class Tool:
    """Where the examples of a tool are: files whose text matches, and command lines in texts."""

    name: str
    folder: str
    files: tuple[str, ...] = ()
    text: str = "."
    lines: tuple[str, ...] = ()
    command: str = "$^"
    owner: str = ""


TOOLS = (
    Tool("trl", "trl", owner="huggingface",
         lines=("README.md", "docs/source/*.md", "examples/scripts/*.py", "trl/scripts/*.py"),
         command=r"\btrl (dpo|kto|sft|reward)\b|(?<!ain_)\b((online_|s)?dpo|orpo|cpo|kto|sft|reward)(_vlm)?\.py"),
    Tool("llama-factory", "LLaMA-Factory", ("examples/**/*.yaml",),
         r"(?m)^stage: (dpo|kto|sft|rm)|dpo_demo", owner="hiyouga"),
    Tool("axolotl", "axolotl", ("examples/**/*.y*ml",), r"(?m)^rl: (dpo|ipo|orpo|simpo|kto|gdpo)",
         owner="axolotl-ai-cloud"),
    Tool("openrlhf", "OpenRLHF", ("examples/**/*.sh",), r"cli.train_(dpo|kto|sft|rm)|train_dpo",
         owner="OpenRLHF"),
    Tool("swift", "ms-swift", ("examples/**/*.sh",),
         r"(?m)rlhf_type (dpo|orpo|simpo|cpo|kto|rm)|^\s*(swift|megatron) sft",
         ("README.md",), r"swift (rlhf|sft)", owner="modelscope"),
    Tool("nemo-rl", "RL", ("examples/configs/**/*dpo*.yaml",), ".",
         ("README.md", "docs/guides/dpo.md"), r"run_dpo\.py", owner="NVIDIA-NeMo"),
    Tool("colossalchat", "ColossalAI",
         ("applications/ColossalChat/examples/training_scripts/*.sh",
          "applications/ColossalChat/benchmarks/*.sh"), r"train_(dpo|orpo|kto)\.py",
         owner="hpcaitech"),
    Tool("roll", "ROLL", ("examples/dpo_examples/*",), owner="alibaba"),
)  # fmt: skip
SKIPPED = re.compile(r"<[A-Z ]+>|COMMAND=|\.\.\.$")  # command lines that are patterns


@dataclass
class Example:
    """One example, what became of it, and what it should have become."""

    name: str
    peer: str
    root: Path  # where a user would run `rather migrate`
    file: Path | None = None  # relative to it
    line: str = ""
    folder: Path = Path()
    trainer: str = ""  # what the repository's own instructions say besides: --trainer, --devices
    devices: int | None = None
    family: str = "pairs"
    state: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    yaml: str = ""
    trained: str = ""

    @property
    def wrong(self) -> list[str]:
        """Return the settings that differ from the expected ones; None is not determined."""
        if self.state == "refused" or self.expected is None:
            return []
        if self.expected.get("state", self.state) != self.state:
            return [f"is {self.state} instead of {self.expected['state']}"]
        return [
            f"{name}: {self.found.get(name)} instead of {self.expected[name]}"
            for name in FIELDS
            if None not in (self.expected.get(name), self.found.get(name))
            and not same(self.expected[name], self.found[name])
            and (self.expected[name], self.found[name]) != ROUNDED
        ]


def same(left: Any, right: Any) -> bool:
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    return left == right or (numbers and abs(left - right) < 1e-12)


# ---- examples


def discover(tool: Tool, root: Path, scratch: Path) -> Iterator[Example]:
    """Yield the examples of a tool."""
    pattern = re.compile(tool.text)
    for glob in tool.files:
        for file in sorted(root.glob(glob)):
            if file.suffix in (".sh", ".yaml", ".yml") and pattern.search(file.read_text()):
                own = file.relative_to(root)
                yield Example(str(own), tool.name, root, own)
    for glob in tool.lines:
        for file in sorted(root.glob(glob)):
            yield from commands(tool, root, file, scratch)


def commands(tool: Tool, root: Path, file: Path, scratch: Path) -> Iterator[Example]:
    """Yield the command lines of a text; a YAML block that begins with its name is its config."""
    lines = file.read_text().splitlines()
    place = 0
    folder = scratch / file.stem
    while place < len(lines):
        start, line = place, lines[place].strip()
        place += 1
        block = re.fullmatch(r"# (\w+\.yaml)", line)
        if block and lines[start - 1] == "```yaml":
            ends = [i for i in range(place, len(lines)) if lines[i].startswith("```")]
            folder = scratch / f"{file.stem}-{start}"
            folder.mkdir(parents=True)
            (folder / block[1]).write_text("\n".join(lines[place : ends[0]]))
        while line.endswith("\\") and place < len(lines):
            line = f"{line[:-1]} {lines[place].strip()}"
            place += 1
        line = line.partition("  #")[0]
        starts = re.match(r"(\w+=\S+ )*(python|accelerate|trl|uv|swift|deepspeed) ", line)
        if starts and re.search(tool.command, line) and not SKIPPED.search(line):
            own = folder if "--config " in line and tool.name == "trl" else root
            name = f"{file.relative_to(root)}:{start + 1}"
            yield Example(name, tool.name, root, None, line, own)


# ---- what becomes of them


def source_of(example: Example) -> SourceSettings:
    if example.file is None:
        return read_line(example.line, example.name, example.folder)
    return read_file(example.file)


def convert(example: Example) -> None:
    os.chdir(example.root)
    peer = PEERS[example.peer]
    try:
        source = source_of(example)
        if example.trainer:
            source = with_program(source, peer, example.trainer)
        result = migrate(source, peer, example.devices)
    except ConfigError as why:
        example.state, example.problems = "refused", [str(why)]
        return
    example.state = "converted" if result.is_complete else "incomplete"
    example.problems = [row.line for row in result.rows if row.status in INCOMPLETE]
    example.found, example.yaml = settings(result), result.yaml()


def settings(result: Migrated) -> dict[str, Any]:
    """Return the settings that decide a training; None where a problem names them."""
    config = result.config
    model, training = config.actor_train.model_args, config.actor_train.training_args
    nll = config.cpo_alpha if config.loss_names == ["cpo"] else config.rpo_alpha or config.pref_ftx
    rank = model.lora_rank
    data = config.actor_train.data_args
    held_out = config.validation.data_args
    missing = {row.key.strip("()") for row in result.rows if row.status in INCOMPLETE}
    if any("device_mapping" in path for row in result.rows for path in row.rejected):
        missing.add("batch")
    values = {
        "loss": " + ".join(config.loss_names),
        "beta": config.beta if config.task not in ("sft", "reward") else None,
        "nll": nll or 0,
        "learning_rate": training.learning_rate,
        "pairs": config.global_batch(),
        "adapter": f"lora {rank}" if rank else "none",
        "weights": model.quantization or "none",
        "precision": model.dtype,
        "steps": config.max_steps or training.num_train_epochs,
        "schedule": training.lr_scheduler_type.removesuffix("_with_warmup"),
        "warmup": training.warmup_steps or training.warmup_ratio or 0,
        "decay": training.weight_decay,
        "beta2": training.adam_beta2,
        "clip": config.max_grad_norm or 0,
        "length": config.sequence_length,
        "alpha": model.lora_alpha if rank else None,
        "gamma": config.gamma if config.loss_names == ["simpo"] else None,
        "data": as_list(data.file_name),
        "samples": getattr(data, "max_samples", None) or 0,
        "held_out": as_list(held_out.file_name) or held_out.split or 0,
        "reference": reference_of(config),
    }
    names = {name: name for name in values} | {"learning rate": "learning_rate", "batch": "pairs",
                                               "packing": "pairs", "dpo.sft_loss_weight": "nll"}  # fmt: skip
    return values | {names[name]: None for name in missing if name in names}


def reference_of(config: DPOConfig) -> str:
    """Return what the policy is compared with: nothing, a model, or a model with an adapter."""
    from rather.losses.objective import from_config

    if not from_config(config).needs_reference:
        return "none"
    own = config.reference.model_args
    model = own.model_name_or_path
    name = "base" if model in (None, config.pretrain) else str(model)
    return f"{name} + {own.adapter_name_or_path}" if own.adapter_name_or_path else name


def expect(tool: str, examples: list[Example], checkout: Path) -> None:
    """Fill in what each example of one tool should become."""
    if tool != "trl":
        table = json.loads(EXPECTED.read_text()).get(tool, {"common": {}, "examples": {}})
        for example in examples:
            known = table["examples"].get(example.name)
            if isinstance(known, dict) and set(known) != {"tool"}:
                own = table.get(f"common of {example.peer}", table["common"])
                example.expected = own | known
                example.family = example.expected.pop("family", "pairs")
            else:
                text = (example.root / example.file).read_text() if example.file else example.line
                others = {"kto": r"kto", "reward": r"type rm|stage: rm|train_rm", "sft": ""}
                example.family = known or next(
                    k for k, mark in others.items() if re.search(mark, text)
                )
        return
    for example in examples:
        found = re.search(r"\b(\w*(?:po|kto|sft|reward)(?:_vlm)?)\b(\.py| )", example.line)
        program = found[1] if found else "?"
        example.family = "pairs" if program in ("dpo", "orpo", "cpo") else program
    pairs = [each for each in examples if each.family in ("pairs", "kto", "reward", "sft")]
    lines = [(shlex.split(each.line), str(each.folder)) for each in pairs]
    done = subprocess.run(
        [sys.executable, str(HERE / "trl_parser.py")],
        input=json.dumps(lines),
        env=os.environ | {"PYTHONPATH": str(checkout), "CUDA_VISIBLE_DEVICES": ""},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    for example, values in zip(pairs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        example.expected = values


# ---- does it run?


def train(example: Example, folder: Path) -> str:
    """Load the YAML with `rather config show`, and train two steps of a tiny model with it."""
    from tests.tiny import make_model, make_pairs

    file, base, pairs = folder / "migrated.yaml", folder / "base", folder / "pairs.jsonl"
    if not base.exists():
        make_model(base)
        make_pairs(pairs, 16)
    file.write_text(example.yaml)
    if problem := run("config", "show", str(file)):
        return f"does not load: {problem}"
    values = yaml.safe_load(example.yaml)
    values = {key: value for key, value in values.items() if key not in ("reference", "num_nodes")}
    actor = values["actor_train"]
    for name in ("strategy_args", "device_mapping", "infer_batch_size"):
        actor.pop(name, None)
    for name in ("tokenizer_name_or_path", "revision"):
        actor.get("model_args", {}).pop(name, None)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "warmup_steps"):
        actor["training_args"].pop(name, None)
    values |= {
        "pretrain": str(base), "output_dir": str(folder / "out"), "exp_name": "run",
        "logging_dir": str(folder / "logs"), "max_steps": 2, "track_with": None, "overwrite": True,
        "platform": "cpu", "global_template": "none", "sequence_length": 64,
        "num_gpus_per_node": 1, "system_envs": {}, "tracker_kwargs": {}, "validation": {},
        "save_steps": None, "eval_steps": None, "save_best": False, "train_batch_size": 4,
        "early_stopping_patience": None, "resume_from_checkpoint": False, "checkpoint_config": {},
        "chosen_key": "chosen", "rejected_key": "rejected",
    }  # fmt: skip
    actor["data_args"] = {"file_name": str(pairs), "preprocessing_num_workers": 1}
    file.write_text(yaml.safe_dump(values))
    if problem := run("train", str(file)):
        return problem
    lines = (folder / "out" / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row["step"] for row in map(json.loads, lines) if "loss" in row]
    return f"{steps[-1]} steps"


def run(*words: str) -> str:
    """Run a command of Rather in this process; return the end of its output if it fails."""
    done = CliRunner().invoke(app, list(words))
    return "" if done.exit_code == 0 else f"{done.output.strip()[-300:]} {done.exception!r}"


# ---- the tables


def commit_of(folder: Path, owner: str, name: str) -> str:
    place = folder / name if (folder / name).is_dir() else folder / f"{owner}+{name}" / "repo"
    return subprocess.run(
        ["git", "-C", str(place), "log", "-1", "--format=%h %cs"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def of_family(examples: list[Example], family: str) -> Iterator[tuple[str, int]]:
    states = [each.state for each in examples if each.family == family]
    yield family, len(states)
    yield f"{family}_converted", states.count("converted")


def counts(examples: list[Example]) -> dict[str, int]:
    pairs = [each for each in examples if each.family == "pairs"]
    return {
        "examples": len(examples),
        **{state: sum(each.state == state for each in examples) for state in STATES},
        "wrong": sum(bool(each.wrong) for each in examples),
        "unchecked": sum(each.expected is None and each.state == "converted" for each in examples),
        "pairs": len(pairs),
        "pairs_converted": sum(each.state == "converted" for each in pairs),
        **{
            key: count
            for family in ("kto", "reward", "sft")
            for key, count in of_family(examples, family)
        },
        "trained": sum(each.trained == "2 steps" for each in examples),
    }


def table(report: dict[str, Any]) -> Iterator[str]:
    columns = ["examples", "converted", "incomplete", "refused", "wrong"]
    if any(facts["counts"]["trained"] for facts in report.values()):
        columns.append("trained")
    titles = [{"incomplete": "not determined"}.get(column, column) for column in columns]
    yield f"| tool | checkout | {' | '.join(titles)} | pairs | KTO | reward | SFT |"
    yield "|---" * (len(columns) + 6) + "|"
    for name, facts in report.items():
        count = facts["counts"]
        cells = [name, facts["checkout"], *(str(count[column]) for column in columns)]
        kinds = ("pairs", "kto", "reward", "sft")
        cells += [f"{count[f'{kind}_converted']} of {count[kind]}" for kind in kinds]
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", help="one tool")
    args = parser.parse_args()
    report = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = args.folder.resolve()
        for tool in TOOLS:
            if args.only in (None, tool.name):
                root = checkout_of(folder, tool.owner, tool.folder, scratch)
                examples = list(discover(tool, root, scratch / "lines" / tool.name))
                report[tool.name] = {
                    "checkout": commit_of(folder, tool.owner, tool.folder),
                    "version": PEERS[tool.name].version,
                    **examine(tool.name, examples, root, args.train),
                }
        if args.only in (None, "users"):
            examples = list(user_files(folder, scratch))
            for peer in sorted({each.peer for each in examples}):
                own = [each for each in examples if each.peer == peer]
                report[f"users of {peer}"] = {
                    "checkout": "see the list",
                    "version": PEERS[peer].version,
                    **examine("users", own, scratch, args.train),
                }
    for name, facts in report.items():
        for row in facts["examples"]:
            print(f"{name} {row['state']:10} {row['name']} {row['found'] or ''}")
            for text in (*row["wrong"], *row["problems"][:6]):
                print(f"      {text}")
            if row["trained"] not in ("", "2 steps"):
                print("      TRAIN", row["trained"])
        print(name, facts["checkout"], facts["counts"])
    if args.write:
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")
        before, mark, _ = PAGE.read_text().partition(MARK)
        PAGE.write_text(before + mark + "\n\n" + "\n".join(table(report)) + "\n")
    return int(any(facts["counts"]["wrong"] for facts in report.values()))


def checkout_of(folder: Path, owner: str, name: str, scratch: Path, commit: str = "HEAD") -> Path:
    """Return a checkout of a repository, or the texts of its git directory in a new folder."""
    if (folder / name).is_dir() and commit == "HEAD":
        return folder / name
    git = folder / f"{owner}+{name}" / "repo"
    target = scratch / f"{owner}+{name}@{commit}"
    if not target.exists():
        target.mkdir(parents=True)
        settings = os.environ | {"GIT_INDEX_FILE": str(scratch / "index"), "GIT_DIR": str(git)}
        words = ["git", "-c", "core.hooksPath=/dev/null", "--work-tree", str(target), "checkout"]
        # A mirror may lack its largest files: those that exist are written, and no other matters.
        for pattern in TEXTS:
            subprocess.run(
                [*words, "-q", commit, "--", pattern],
                env=settings, check=False, capture_output=True,
            )  # fmt: skip
        (scratch / "index").unlink(missing_ok=True)
    return target


def user_files(folder: Path, scratch: Path) -> Iterator[Example]:
    """Yield the files that the lists name, each in a checkout of its commit."""
    known = json.loads(EXPECTED.read_text())["users"]["examples"]
    for name in USERS:
        for line in (HERE / name).read_text().splitlines():
            if found := re.fullmatch(r"([\w.-]+)/([\w.-]+)@(\w+):(.+)", line):
                owner, repository, commit, path = found.groups()
                root = checkout_of(folder, owner, repository, scratch, commit)
                label = f"{owner}/{repository}:{path}"
                peer = known.get(label, {}).get("tool") or ("trl" if "_trl" in name else "?")
                own = known.get(label, {})
                start = root / own.get("started in", "")
                file = (root / path).relative_to(start)
                trainer, devices = own.get("trainer", ""), own.get("devices")
                yield Example(label, peer, start, file, trainer=trainer, devices=devices)


def examine(tool: str, examples: list[Example], checkout: Path, trains: bool) -> dict[str, Any]:
    os.chdir(checkout)
    expect(tool, examples, checkout)
    with tempfile.TemporaryDirectory() as scratch:
        for example in examples:
            convert(example)
            tried = sum(bool(each.trained) for each in examples if each.family == "sft")
            if example.state == "converted" and (example.family != "sft" or tried < MOST_SFT):
                example.trained = train(example, Path(scratch)) if trains else ""
    names = ("name", "family", "state", "found", "expected", "wrong", "problems", "trained")
    return {
        "counts": counts(examples),
        "examples": [{name: getattr(each, name) for name in names} for each in examples],
    }


if __name__ == "__main__":
    sys.exit(main())
