"""`rather score`: the pairs of any file under any model: rewards against a reference, or log-probs alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from rather.commands.terminal import settings
from rather.config.schema import LOSS_MODIFIERS, LOSS_NUMBERS, DPOConfig
from rather.data.batch import Columns, PairFacts, TokenPair
from rather.data.pairs import PairDataset
from rather.data.prepare import Prepared, prepare
from rather.data.read import chunks, find_sources, parsed_rows
from rather.data.show import print_report
from rather.errors import ConfigError, DataError, MemoryShortage
from rather.losses.losses import gap
from rather.losses.metrics import Scored, Window, weighted_sums
from rather.losses.objective import PairLoss, from_config
from rather.model.check import check_length
from rather.pipeline.oom import SMALLEST_BUDGET
from rather.pipeline.sanity_checks import refuse_missing_columns
from rather.pipeline.steps import EVALUATION_CHUNK, Packing
from rather.run_folder.model_source import Weights, here
from rather.train.rank_trainer import RankTrainer

DATA_KEYS = (
    "template", "format", "columns", "score", "overlong", "separator", "special_tokens", "encoding",
    "preprocessing_num_workers", "cache_dir",
)  # fmt: skip
LOSS_KEYS = ("pref_loss", "loss_weights", *LOSS_NUMBERS, *LOSS_MODIFIERS)
TAKEN = (  # what decides tokens, rewards or speed here
    *LOSS_KEYS, "sequence_length", "global_template", "chosen_key", "rejected_key", "ranked_pairs", "on_bad",
    "max_bad_fraction", "output_dir", "actor_train.model_args.dtype", "actor_train.infer_batch_size",
    "actor_train.max_tokens_per_microbatch_in_infer", *(f"actor_train.data_args.{key}" for key in DATA_KEYS),
)  # fmt: skip
Z = 1.959964  # of a 95 % interval
NONE = "(none)"  # the slice of rows without a value


@dataclass(frozen=True)
class Scores:
    """Log-probs of all pairs. Without an objective there is nothing to reward by."""

    dataset: PairDataset
    ids: Sequence[str]
    facts: PairFacts
    policy: Columns
    reference: Columns | None
    objective: PairLoss | None
    slices: Mapping[str, Sequence[str]]  # column -> its value for each pair
    report: Mapping[str, Any]

    @cached_property
    def rewards(self) -> Tensor | None:
        """[P, 2]"""
        if self.objective is None:
            return None
        return self.objective.rewards(
            self.facts.with_logps(self.policy, self.reference, self.facts.mean_chosen_length)
        )

    @property
    def everything(self) -> dict[str, Any]:
        """The numbers of all pairs, and of each slice."""
        by = {
            column: {value: self.numbers(rows) for value, rows in _places(v)}
            for column, v in self.slices.items()
        }
        return {**self.numbers(torch.arange(len(self.dataset))), "by": by}

    def numbers(self, rows: Tensor) -> dict[str, Any]:
        facts, policy = (
            self.facts.at(rows),
            {name: column[rows] for name, column in self.policy.items()},
        )
        reference = (
            {name: column[rows] for name, column in self.reference.items()}
            if self.reference
            else None
        )
        told: dict[str, Any] = {"pairs": len(rows)}
        if self.objective:
            x = facts.with_logps(policy, reference, facts.mean_chosen_length)
            scored = Scored(x, self.objective(x), self.objective.rewards(x))
            window = Window()
            sums = weighted_sums(scored, facts.weight, self.objective)
            window.add(
                {name: float(value) for name, value in sums.items()}, pairs=len(rows), tokens=0
            )
            told |= window.means() | _preference("rewards", scored.rewards, facts.weight)
        told |= _preference("logps", policy["sum"], facts.weight)
        return told | _preference("logps_per_token", policy["sum"] / facts.length, facts.weight)

    def lines(self) -> Iterator[dict[str, Any]]:
        """One object for each pair, in the order of the files."""
        columns: dict[str, Tensor] = {"logps": self.policy["sum"], "tokens": self.facts.length}
        if self.reference:
            columns["reference_logps"] = self.reference["sum"]
        if self.rewards is not None:
            columns["rewards"] = self.rewards
        values = {name: column.tolist() for name, column in columns.items()}
        files = [entry["path"] for entry in self.report["files"]]
        places = zip(
            self.dataset.column("source").tolist(),
            self.dataset.column("number").tolist(),
            strict=True,
        )
        for i, (source, number) in enumerate(places):
            line: dict[str, Any] = {"file": files[source], "number": number, "id": self.ids[i]}
            for name, column in values.items():
                line |= {f"{name}/chosen": column[i][0], f"{name}/rejected": column[i][1]}
            yield line | {column: v[i] for column, v in self.slices.items()}


def score(
    model: Weights,
    reference: Weights | None,
    pairs: Path,
    overrides: Sequence[str],
    by: Sequence[str] = (),
) -> Scores:
    """Both models one after the other over all pairs: never two of them in memory."""
    config = settings_for(model, pairs, overrides)
    objective = _objective(config, reference)
    if reference:
        _refuse_other_tokens(model, reference)
    console = Console(stderr=True)
    data = prepare(config, console=console)
    print_report(data.report, console)
    if objective:
        refuse_missing_columns(config, objective, data)
    slices = {column: _values(config, data.train, column) for column in by}
    dtype = (
        config.actor_train.model_args.dtype or model.args.dtype
    )  # the reference's as well: rewards are differences
    with _progress(console) as bar:
        ids, facts, policy = _asked(model, dtype, config, data, bar)
        other = _asked(reference, dtype, config, data, bar)[2] if reference else None
    return Scores(data.train, ids, facts, policy, other, objective, slices, data.report["train"])


def settings_for(model: Weights, pairs: Path, overrides: Sequence[str]) -> DPOConfig:
    """The config that tokenises and rewards these pairs as a run with these settings would."""
    names = [text.partition("=")[0].lstrip("+") for text in overrides]
    if dead := [name for name in names if name not in TAKEN]:
        raise ConfigError([f"{name}: has no effect on a score; leave it out" for name in dead])
    data: dict[str, Any] = {"file_name": str(pairs.expanduser().absolute())}
    if model.run and model.run.actor_train.data_args.template:
        data["template"] = model.run.actor_train.data_args.template
    args = {name: getattr(model.args, name) for name in ("revision", "trust_remote_code")}
    args |= {"tokenizer_name_or_path": model.tokenizer_path}
    values = {
        "exp_name": "score",
        "pretrain": model.model,
        "actor_train": {"model_args": args, "data_args": data},
    }
    with TemporaryDirectory() as folder:
        file = Path(folder) / "score.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        return settings(file, list(overrides))


def _objective(config: DPOConfig, reference: Weights | None) -> PairLoss | None:
    objective, named = from_config(config), " + ".join(config.loss_names)
    if reference and not objective.needs_reference:
        raise ConfigError(f"--reference: loss '{named}' compares with no reference; leave it out")
    if reference or not objective.needs_reference:
        return objective
    if said := [key for key in LOSS_KEYS if key in config.model_fields_set]:
        raise ConfigError(
            f"{', '.join(said)}: rewards of loss '{named}' need a reference; name one with --reference"
        )
    return None


def _refuse_other_tokens(model: Weights, reference: Weights) -> None:
    folder = Path(reference.tokenizer_path)
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        return  # a bare model: its embeddings are compared with the ids
    if model.tokenizer().get_vocab() != reference.tokenizer().get_vocab():
        raise ConfigError(
            f"--reference {reference.name}: its tokenizer is not that of {model.name}, so that the same ids are other "
            "words to it; name a model of the same family"
        )


# --- log-probs ---


def _asked(
    weights: Weights, dtype: str | None, config: DPOConfig, data: Prepared, bar: Progress
) -> tuple[list[str], PairFacts, Columns]:
    device, dataset = here(), data.train
    policy = weights.load(device, dtype)
    check_length(policy.causal_lm.config, config.sequence_length)
    if dataset.largest_id >= policy.vocabulary_size:
        raise ConfigError(
            f"{weights.name}: the pairs have token ids up to {dataset.largest_id}, the model {policy.vocabulary_size} "
            "embeddings; they are of another model's tokenizer"
        )
    trainer = RankTrainer(policy, from_config(config))
    packing = Packing(config, device.partition(":")[0], here=True)
    task = bar.add_task(weights.name, total=len(dataset))
    ids: list[str] = []
    facts: list[PairFacts] = []
    columns: list[Columns] = []
    for first in range(0, len(dataset), EVALUATION_CHUNK):
        pairs = dataset.take(range(first, min(first + EVALUATION_CHUNK, len(dataset))))
        ids += [pair.id for pair in pairs]
        known, found = _fitting(trainer, packing, pairs)
        facts.append(known)
        columns.append({name: column.cpu() for name, column in found.items()})
        bar.advance(task, len(pairs))
    return (
        ids,
        PairFacts.concat(facts),
        {name: torch.cat([part[name] for part in columns]) for name in columns[0]},
    )


def _fitting(
    trainer: RankTrainer, packing: Packing, pairs: Sequence[TokenPair]
) -> tuple[PairFacts, Columns]:
    """In smaller micro-batches where memory falls short, which never changes a log-prob but for rounding."""
    role, tokens = packing.config.actor_train, packing.without_gradients_tokens
    while True:
        budget = packing.most_tokens(role)
        batches = packing.without_gradients(pairs, role, budget)
        try:
            return PairFacts.of_step(batches), trainer.log_probs(batches)
        except torch.OutOfMemoryError as error:
            if budget <= SMALLEST_BUDGET:
                raise MemoryShortage(
                    f"{error} Shorter pairs (sequence_length) or a smaller model would fit."
                ) from None
        torch.cuda.empty_cache()
        tokens["actor_train"] = max(SMALLEST_BUDGET, budget // 2)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield bar


# --- slices ---


def _values(config: DPOConfig, dataset: PairDataset, column: str) -> list[str]:
    """What the rows of the pairs say in a column that training does not read."""
    data = config.actor_train.data_args
    sources = [source for file in data.files for source in find_sources(file)]
    found: dict[tuple[int, int], str] = {}
    names: set[str] = set()
    for index, source in enumerate(sources):
        for number, row in (
            pair for chunk in chunks(source, index, data.encoding) for pair in parsed_rows(chunk)
        ):
            if isinstance(row, dict):
                names.update(row)
                if row.get(column) is not None:
                    value = row[column]
                    found[index, number] = value if isinstance(value, str) else json.dumps(value)
    if not found:
        raise DataError(
            f"--by {column}: no row has it; columns of the file are {', '.join(sorted(names)[:20])}."
        )
    places = zip(dataset.column("source").tolist(), dataset.column("number").tolist(), strict=True)
    return [found.get(place, NONE) for place in places]


def _places(values: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Each value with the pairs that have it, the most frequent first."""
    kinds, inverse, counts = np.unique(
        np.array(values, object).astype(str), return_inverse=True, return_counts=True
    )
    places = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    for kind in np.argsort(-counts, kind="stable").tolist():
        yield str(kinds[kind]), torch.from_numpy(places[kind])


# --- numbers ---


def _preference(name: str, column: Tensor, weight: Tensor) -> dict[str, Any]:
    """Means over pairs of a number that both answers have, and how often the chosen one's is larger."""

    def mean(values: Tensor) -> float:
        return float(values @ weight / weight.sum())

    margin, effective = (
        gap(column),
        float(weight.sum() ** 2 / weight.square().sum()),
    )  # pairs, were all weights equal
    middle, accuracy = mean(margin), mean((margin > 0).double())
    variance = mean((margin - middle).square())
    half = Z * math.sqrt(variance / (effective - 1)) if effective > 1 else math.nan
    return {
        f"{name}/chosen": mean(column[:, 0]),
        f"{name}/rejected": mean(column[:, 1]),
        f"{name}/margins": middle,
        f"{name}/margins_interval": [middle - half, middle + half],
        f"{name}/accuracies": accuracy,
        f"{name}/accuracies_interval": list(wilson(accuracy, effective)),
        f"{name}/ties": mean((margin == 0).double()),
    }


def wilson(share: float, count: float) -> tuple[float, float]:
    """The 95 % interval of a share of so many independent pairs (Wilson, 1927): sound near 0 and 1, too."""
    if not count:
        return 0.0, 1.0
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


# --- a file of pairs ---


@contextmanager
def written(file: Path | None) -> Iterator[IO[str] | None]:
    """A file that is opened before the work begins, and gets its name when it is complete."""
    if file is None:
        yield None
        return
    if file.is_dir():
        raise ConfigError(f"--out {file}: is a folder; name a file in it")
    temporary = file.with_name(f".tmp-{file.name}")
    try:
        out = temporary.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file}: cannot be written ({error.strerror})") from error
    try:
        with out:
            yield out
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
