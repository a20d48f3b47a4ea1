"""`rather init`: write the YAML of a run for a file of rows, a model and this machine."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import typer

from rather.commands.terminal import Force, command, echo, heavy_imports
from rather.errors import ConfigError, DataError
from rather.files import JsonObject, parse_yaml, write_new

if TYPE_CHECKING:
    from rather.data.formats import Row
    from rather.plan.forecast import Forecast

SAMPLE_ROWS = 2000  # that are tokenised to choose lengths
TASK_ROWS = 100  # that decide what is trained
LONGEST = 32_768  # tokens of a prompt with one answer
ROUND_TO = 128  # tokens
SHORTEST = 512  # tokens, below which a length is not reduced to fit
FITTING = 0.99  # share of the rows that sequence_length should hold
LORA_RATE = 10  # times the learning rate of training all weights
GIB = 1 << 30

TaskName = Literal["preference", "unpaired", "reward", "regression", "sft"]


class Task(NamedTuple):
    """What can be trained on rows of a kind, and the settings it starts with."""

    title: str
    settings: JsonObject
    comments: dict[str, str]
    rate: float  # learning rate if all weights are trained


BETA = {"beta": "larger: stay closer to the model it starts from"}
TASKS: dict[TaskName, Task] = {
    "preference": Task(
        "Preference training (DPO)",
        {"pref_loss": "sigmoid", "beta": 0.1},
        {"pref_loss": "others: `rather recipes list`", **BETA},
        1e-6,
    ),
    "unpaired": Task(
        "Training on labelled answers (KTO)",
        {"task": "unpaired", "pref_loss": "kto", "beta": 0.1},
        BETA,
        1e-6,
    ),
    "reward": Task(
        "A reward model on pairs",
        {"task": "reward", "center_rewards_coefficient": 0.01},
        {"center_rewards_coefficient": "keeps the scores around 0"},
        9e-6,
    ),
    "regression": Task(
        "A reward model on scores", {"task": "reward", "pref_loss": "regression"}, {}, 9e-6
    ),
    "sft": Task("Supervised fine-tuning", {"task": "sft"}, {}, 1e-5),
}


@command
def init_command(
    data: str,
    model: str | None = None,
    out: Path = Path("dpo.yaml"),
    task: TaskName | None = None,
    force: Force = False,
) -> None:
    """Write a YAML for your file, your model and this machine's GPU or CPU.

    The columns of the rows decide what is trained. The planner decides what fits: all weights, a
    LoRA adapter, or an adapter on 4-bit weights. Asks questions only in a terminal.

    data: File of pairs, labelled answers, scored answers or conversations, or hf://datasets/...
    model: Model folder or hub name.
    out: The YAML to write.
    task: What to train; default: decided by the columns.
    """
    can_ask = _is_terminal()
    if out.exists() and not force:
        if not can_ask or not typer.confirm(f"{out} exists. Replace it?"):
            raise ConfigError(f"{out}: already exists; choose another --out, or add --force.")
        force = True
    if model is None:
        if not can_ask:
            raise ConfigError("--model: name the model to train: a folder or a hub name.")
        model = str(typer.prompt("Model to train (folder or hub name)"))
    with heavy_imports():
        from rather.data.hub import refuse_unknown_model

        refuse_unknown_model(model)
    chosen_task = task or task_of(data)
    if task is None and chosen_task == "preference" and can_ask:
        is_reward = typer.confirm("These are pairs. Train a reward model instead of a policy?")
        chosen_task = "reward" if is_reward else "preference"
    start = choose_start(data, model, chosen_task)
    text = start.yaml(out)
    _check(text)
    write_new(out, text, force=force)
    echo(text)
    if start.needs_quantization:
        echo("4-bit weights need a package: pip install 'rather[quantization]'")
    name = shlex.quote(str(out))
    echo(f"Written: {out}. Look at the rows with `rather data {name} --show 3`, then run "
         f"`rather train {name}`.")  # fmt: skip


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def task_of(data: str) -> TaskName:
    """Return what the first rows of a file can train; a file with no readable row is an error."""
    from rather.data.formats import RowLayout, matching_format, read_row
    from rather.data.tokens import is_tokenised

    pairs, answers = RowLayout(), RowLayout(rows="answers")
    reason = "it has no rows"
    for line, row in _rows(data):
        if isinstance(row, str):
            reason = f"{line}: {row}"
        elif is_tokenised(row, pairs) or matching_format(row, pairs):
            return "preference"
        elif matching_format(row, answers):
            if any(row.get(name) is not None for name in ("label", "kto_tag")):
                return "unpaired"
            return "regression" if row.get("score") is not None else "sft"
        else:
            reason = f"{line}: {read_row(row, pairs).dropped[0].detail}"
    raise DataError(
        f"{data}: no row can be trained on; {reason}. docs/data.md shows the columns that are read."
    )


def _rows(data: str) -> Iterator[tuple[str, Row | str]]:
    """Yield the first rows with their places; a row that cannot be parsed is the reason why."""
    from rather.data.cache import Cache
    from rather.data.json_rows import DropReason
    from rather.data.prepare import local_files
    from rather.data.read import chunks_of, find_sources, parsed_rows

    with TemporaryDirectory(prefix="rather-init-") as folder:
        files = local_files(Path(data).expanduser(), Cache(Path(folder)), {})
        sources = list(chain.from_iterable(map(find_sources, files)))
        for chunk in islice(chunks_of([sources], max_rows=TASK_ROWS), TASK_ROWS):
            unit = sources[chunk.source].unit
            for number, row in parsed_rows(chunk):
                yield f"{unit} {number}", row.detail if isinstance(row, DropReason) else row


@dataclass(frozen=True)
class ChosenSettings:
    """The settings that were chosen, and why."""

    values: JsonObject  # as in the YAML, without the name of the run
    task: Task
    forecast: Forecast
    device: str
    share: float  # of the sampled rows that sequence_length holds
    too_large: str = ""  # what all weights would have needed

    @property
    def needs_quantization(self) -> bool:
        return "quantization" in self.values["actor_train"].get("model_args", {})

    @property
    def trained(self) -> str:
        adapter = self.values["actor_train"].get("model_args")
        if not adapter:
            return "all weights are trained"
        return "a LoRA adapter on 4-bit weights" if self.needs_quantization else "a LoRA adapter"

    def yaml(self, out: Path) -> str:
        """Return the commented YAML."""
        memory = f"{_size(self.forecast.parts.total)} of {_size(self.forecast.device.memory)}"
        unit = self.forecast.config.unit
        comments = {
            "sequence_length": f"tokens; holds {100 * self.share:.3g} % of the sampled rows",
            "train_batch_size": f"{unit} per optimizer step",
            "model_args": f"an adapter, because all weights would need {self.too_large}",
            "split": f"share of the {unit} that is held out",
            **self.task.comments,
        }
        lines = [
            f"# {self.task.title}. `rather init` chose these settings for {self.device}:",
            f"# {self.trained}, {memory} of memory. More: `rather plan {out}`.",
            *_yaml_lines({"exp_name": re.sub(r"[^\w.-]+", "-", out.stem), **self.values}, comments),
        ]
        return "\n".join(lines) + "\n"


def choose_start(data: str, model: str, name: TaskName) -> ChosenSettings:
    """Return settings that fit: the first of full training, LoRA, 4-bit LoRA, shorter lengths."""
    with heavy_imports():
        import numpy as np

        from rather.cluster.group import device_kind
        from rather.config.load import config_from_dict
        from rather.data.prepare import prepare
        from rather.model.sizes import sizes_of
        from rather.pipeline.run_summary import device_here, gpu_here, pairs_of
        from rather.pipeline.steps import PreparedSteps
        from rather.plan.forecast import Forecast

    task = TASKS[name]
    kind = device_kind("auto")
    device_name = (gpu_here(kind) or "this GPU").upper() if kind == "cuda" else "this CPU"
    tried: list[Forecast] = []
    with TemporaryDirectory(prefix="rather-init-") as cache:
        data_args = {"file_name": data, "max_samples": SAMPLE_ROWS, "cache_dir": cache}
        sample: JsonObject = {
            "pretrain": model, **task.settings, "sequence_length": LONGEST, "max_bad_fraction": 1,
            "actor_train": {"data_args": data_args},
        }  # fmt: skip
        config = config_from_dict(sample)
        sizes = sizes_of(config.actor_train.model_path, config.actor_train.model_args)
        prepared = prepare(config)
        for finding in prepared.report["look"]["findings"]:
            if finding["severity"] == "serious":
                echo(f"serious: {finding['text']} {finding['advice']}", err=True)
        rows = len(prepared.train)
        lengths = _row_lengths(prepared.train)
        device = device_here(kind)
        for length in _lengths(_longest(lengths, _positions(model))):
            config = config_from_dict(
                sample | {"sequence_length": length, "train_batch_size": _batch(rows)}
            )
            fitting = prepared.train.subset(np.flatnonzero(lengths <= length), str(length))
            pairs = pairs_of(PreparedSteps.of(config, replace(prepared, train=fitting)))
            for adapter in _adapters(kind):
                values = _values(data, model, task, adapter, length, rows)
                forecast = Forecast(config_from_dict(values), sizes, device, pairs, None)
                tried.append(forecast)
                if forecast.fits:
                    full = _size(tried[0].parts.total)
                    return ChosenSettings(
                        values, task, forecast, device_name, len(fitting) / rows, full
                    )
    least = min(forecast.parts.total for forecast in tried)
    raise ConfigError(
        f"{model}: does not fit on {device_name}: needs {_size(least)} of {_size(device.memory)} "
        "with an adapter and short sequences; choose a smaller model, or several devices "
        "(docs/clusters.md)."
    )


def _values(
    data: str, model: str, task: Task, adapter: JsonObject, length: int, rows: int
) -> JsonObject:
    """Return the values of the YAML, in its order."""
    batch = _batch(rows)
    rate = task.rate * (LORA_RATE if adapter else 1)
    training = {
        "learning_rate": rate,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "num_train_epochs": 1 if rows >= SAMPLE_ROWS else 3,
    }
    values: JsonObject = {
        "pretrain": model, **task.settings, "sequence_length": length, "train_batch_size": batch,
    }  # fmt: skip
    values["actor_train"] = {
        **({"model_args": adapter} if adapter else {}),
        "training_args": training,
        "data_args": {"file_name": data},
    }
    if rows >= 2 * batch:
        values["validation"] = {"data_args": {"split": 0.05}}
    return values


def _adapters(kind: str) -> list[JsonObject]:
    """Return what can be trained, by how much memory it needs."""
    quantized = [{"lora_rank": 16, "quantization": "4bit"}] if kind == "cuda" else []
    return [{}, {"lora_rank": 16}, *quantized]


def _batch(rows: int) -> int:
    """Return the rows of a step: 32, and fewer of a small file, so that it has about 20 steps."""
    batch = 32
    while batch > 4 and rows < 20 * batch:
        batch //= 2
    return batch


def _row_lengths(train: Any) -> Any:
    """Return the tokens of each row's prompt with its longer answer."""
    import numpy as np

    answers = np.maximum(train.lengths("chosen"), train.lengths("rejected"))
    return train.lengths("prompt") + answers


def _longest(lengths: Any, positions: int) -> int:
    """Return a length for nearly all rows; for all of them if that costs little more."""
    import numpy as np

    nearly_all = int(np.quantile(lengths, FITTING, method="inverted_cdf"))
    length = int(lengths.max()) if lengths.max() <= 1.25 * nearly_all else nearly_all
    return min(-(-length // ROUND_TO) * ROUND_TO, positions)


def _lengths(longest: int) -> Iterator[int]:
    """Yield the length of the rows, then shorter ones, which drop rows."""
    yield longest
    while longest // 2 >= SHORTEST:
        longest //= 2
        yield longest


def _positions(model: str) -> int:
    """Return how many positions the model's config.json allows."""
    from rather.model.files import model_folder
    from rather.tracking.json_lines import read_object

    folder = model_folder(str(Path(model).expanduser()), None)
    config = read_object(folder / "config.json") if folder else {}
    positions = config.get("text_config", config).get("max_position_embeddings")
    return min(positions, LONGEST) if isinstance(positions, int) else LONGEST


def _check(text: str) -> None:
    """Load the YAML as `rather train` will, before it is written."""
    from rather.config.load import load_config

    with TemporaryDirectory(prefix="rather-init-") as folder:
        file = Path(folder) / "init.yaml"
        file.write_text(text, encoding="utf-8")
        load_config(file)


# --- YAML with comments ---


def _yaml_lines(values: JsonObject, comments: dict[str, str], indent: str = "") -> list[str]:
    lines: list[str] = []
    for key, setting in values.items():
        is_group = isinstance(setting, dict) and any(isinstance(v, dict) for v in setting.values())
        line = f"{indent}{key}:" if is_group else f"{indent}{key}: {_flow(setting)}"
        names = [key, *setting] if isinstance(setting, dict) and not is_group else [key]
        comment = next((comments[name] for name in names if name in comments), "")
        lines.append(f"{line:<34} # {comment}" if comment else line)
        if is_group:
            lines += _yaml_lines(setting, comments, f"{indent}  ")
    return lines


def _flow(value: Any) -> str:
    """Return a value on one line; texts that YAML could read as something else are quoted."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, float):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}" if value < 1e-3 else str(value)
    is_simple = isinstance(value, str) and re.fullmatch(r"[\w~./][\w./@-]*", value)
    return value if is_simple and parse_yaml(value) == value else json.dumps(value)


def _size(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB else f"{size / (1 << 20):.3g} MiB"
