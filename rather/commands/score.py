"""`rather score`: any pairs under any model: rewards against a reference, or log-probs alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from rather.commands.terminal import settings
from rather.config.schema import LOSS_MODIFIERS, LOSS_NUMBERS, DPOConfig
from rather.data.batch import Columns, PairFacts, PairLogps, TokenPair
from rather.data.pairs import PairDataset
from rather.data.prepare import prepare
from rather.data.read import chunks, find_sources, parsed_rows
from rather.data.show import print_report
from rather.errors import ConfigError, DataError, MemoryShortage
from rather.losses.losses import gap
from rather.losses.metrics import Scored, Window, weighted_sums
from rather.losses.objective import PairLoss, from_config
from rather.model.check import check_length
from rather.pipeline.guard import SMALLEST_BUDGET
from rather.pipeline.sanity_checks import refuse_missing_columns
from rather.pipeline.steps import EVALUATION_CHUNK, Packing
from rather.run_folder.model_source import Weights, here
from rather.train.rank_trainer import RankTrainer

DATA_KEYS = (
    "template", "format", "columns", "score", "overlong", "separator", "special_tokens", "encoding",
    "preprocessing_num_workers", "cache_dir",
)  # fmt: skip
LOSS_KEYS = ("pref_loss", "loss_weights", *LOSS_NUMBERS, *LOSS_MODIFIERS)
ALLOWED = (  # keys that influence tokens, rewards or speed here
    *LOSS_KEYS, "sequence_length", "global_template", "chosen_key", "rejected_key", "ranked_pairs",
    "on_bad", "max_bad_fraction", "output_dir", "actor_train.model_args.dtype",
    "actor_train.infer_batch_size", "actor_train.max_tokens_per_microbatch_in_infer",
    *(f"actor_train.data_args.{key}" for key in DATA_KEYS),
)  # fmt: skip
Z = 1.959964  # 95 % of a normal distribution lie within this many standard deviations
NONE = "(none)"  # the slice of rows without a value


class LogProbs(NamedTuple):
    """What forward passes of policy and reference yield for some pairs."""

    facts: PairFacts
    policy: Columns
    reference: Columns | None

    @property
    def margins(self) -> Tensor:
        """[P]: log-ratio of the chosen answer minus that of the rejected one, in nats."""
        assert self.reference is not None
        return gap(self.policy["sum"] - self.reference["sum"])

    def for_loss(self, policy: Columns | None = None) -> PairLogps:
        """Return what a training step would pass to the loss, for these policy log-probs."""
        lengths = self.facts.mean_chosen_length
        return self.facts.with_logps(policy or self.policy, self.reference, lengths)

    def rows(self, rows: Tensor) -> LogProbs:
        def pick(columns: Columns) -> Columns:
            return {name: column[rows] for name, column in columns.items()}

        reference = pick(self.reference) if self.reference else None
        return LogProbs(self.facts.at(rows), pick(self.policy), reference)


@dataclass(frozen=True)
class Scores:
    """Log-probs of all pairs. Without an objective there are no rewards."""

    dataset: PairDataset
    log_probs: LogProbs
    objective: PairLoss | None
    slices: Mapping[str, Sequence[str]]  # column -> its value for each pair
    files: Sequence[str]

    @property
    def everything(self) -> dict[str, Any]:
        """Return the numbers of all pairs and of each slice."""
        by = {
            column: {value: self.numbers(self.log_probs.rows(rows)) for value, rows in _rows_by(v)}
            for column, v in self.slices.items()
        }
        return {**self.numbers(self.log_probs), "by": by}

    def numbers(self, x: LogProbs) -> dict[str, Any]:
        sums, weight = x.policy["sum"], x.facts.weight
        numbers: dict[str, Any] = {"pairs": len(sums)}
        if self.objective:
            pairs = x.for_loss()
            scored = Scored(pairs, self.objective(pairs), self.objective.rewards(pairs))
            window, totals = Window(), weighted_sums(scored, weight, self.objective).items()
            window.add({name: float(n) for name, n in totals}, pairs=len(sums), tokens=0)
            numbers |= window.means() | _preference("rewards", scored.rewards, weight)
        numbers |= _preference("logps", sums, weight)
        return numbers | _preference("logps_per_token", sums / x.facts.length, weight)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield one object for each pair, in the order of the files."""
        x = self.log_probs
        columns: dict[str, Tensor] = {"logps": x.policy["sum"], "tokens": x.facts.length}
        if x.reference:
            columns["reference_logps"] = x.reference["sum"]
        if self.objective:
            columns["rewards"] = self.objective.rewards(x.for_loss())
        values = {name: column.tolist() for name, column in columns.items()}
        for i, (source, number) in enumerate(_places(self.dataset)):
            (pair,) = self.dataset.take([i])
            line: dict[str, Any] = {"file": self.files[source], "number": number, "id": pair.id}
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
    """Score all pairs with one model after the other: never two of them in memory."""
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
    # The reference gets the same dtype: rewards are differences.
    dtype = config.actor_train.model_args.dtype or model.args.dtype
    found = log_probs(model, reference, dtype, config, data.train)
    files = [entry["path"] for entry in data.report["train"]["files"]]
    return Scores(data.train, found, objective, slices, files)


def settings_for(model: Weights, pairs: Path, overrides: Sequence[str]) -> DPOConfig:
    """Return the config that tokenises and rewards these pairs as a run with it would."""
    names = [text.partition("=")[0].lstrip("+") for text in overrides]
    if dead := [name for name in names if name not in ALLOWED]:
        raise ConfigError([f"{name}: has no effect on a score; leave it out." for name in dead])
    data: dict[str, Any] = {"file_name": str(pairs.expanduser().absolute())}
    if model.run and model.run.actor_train.data_args.template:
        data["template"] = model.run.actor_train.data_args.template
    args = {name: getattr(model.args, name) for name in ("revision", "trust_remote_code")}
    args["tokenizer_name_or_path"] = model.tokenizer_path
    actor = {"model_args": args, "data_args": data}
    values = {"exp_name": "score", "pretrain": model.model, "actor_train": actor}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "score.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        return settings(file, list(overrides))


def _objective(config: DPOConfig, reference: Weights | None) -> PairLoss | None:
    objective, names = from_config(config), " + ".join(config.loss_names)
    if reference and not objective.needs_reference:
        raise ConfigError(f"--reference: loss '{names}' does not use a reference; leave it out.")
    if reference or not objective.needs_reference:
        return objective
    if given := [key for key in LOSS_KEYS if key in config.model_fields_set]:
        raise ConfigError(
            f"{', '.join(given)}: rewards of loss '{names}' need a reference; pass --reference."
        )
    return None


def _refuse_other_tokens(model: Weights, reference: Weights) -> None:
    folder = Path(reference.tokenizer_path)
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        return  # a model without tokenizer: its embeddings are compared with the ids
    if model.tokenizer().get_vocab() != reference.tokenizer().get_vocab():
        raise ConfigError(
            f"--reference {reference.name}: its tokenizer differs from that of {model.name}; "
            "choose a model of the same family."
        )


# --- log-probs ---


def log_probs(
    policy: Weights,
    reference: Weights | None,
    dtype: str | None,
    config: DPOConfig,
    pairs: PairDataset | Sequence[TokenPair],
) -> LogProbs:
    """Return the log-probs of the pairs under both models, of which one is loaded at a time."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        facts, columns = _forward(policy, dtype, config, pairs, bar)
        other = _forward(reference, dtype, config, pairs, bar)[1] if reference else None
    return LogProbs(facts, columns, other)


def _forward(
    weights: Weights,
    dtype: str | None,
    config: DPOConfig,
    pairs: PairDataset | Sequence[TokenPair],
    bar: Progress,
) -> tuple[PairFacts, Columns]:
    device = here()
    policy = weights.load(device, dtype)
    check_length(policy.causal_lm.config, config.sequence_length)
    if isinstance(pairs, PairDataset) and pairs.largest_id >= policy.vocabulary_size:
        raise ConfigError(
            f"{weights.name}: the pairs have token ids up to {pairs.largest_id}, but the model has "
            f"{policy.vocabulary_size} embeddings; the tokenizer belongs to another model."
        )
    trainer = RankTrainer(policy, from_config(config))
    packing = Packing(config, device.partition(":")[0], here=True)
    parts: list[tuple[PairFacts, Columns]] = []
    for first in bar.track(range(0, len(pairs), EVALUATION_CHUNK), description=weights.name):
        rows = range(first, min(first + EVALUATION_CHUNK, len(pairs)))
        taken = pairs.take(rows) if isinstance(pairs, PairDataset) else [pairs[i] for i in rows]
        parts.append(_forward_chunk(trainer, packing, taken))
    facts, columns = zip(*parts, strict=True)
    joined = {name: torch.cat([part[name].cpu() for part in columns]) for name in columns[0]}
    return PairFacts.concat(facts), joined


def _forward_chunk(
    trainer: RankTrainer, packing: Packing, pairs: Sequence[TokenPair]
) -> tuple[PairFacts, Columns]:
    """Use smaller micro-batches if memory is short; log-probs then differ by rounding only."""
    role = packing.config.actor_train
    while True:
        budget = packing.most_tokens(role)
        batches = packing.without_gradients(pairs, role, budget)
        try:
            return PairFacts.of_step(batches), trainer.log_probs(batches)
        except torch.OutOfMemoryError as error:
            if budget <= SMALLEST_BUDGET:
                raise MemoryShortage(
                    f"{error} Use a smaller sequence_length or a smaller model."
                ) from None
        torch.cuda.empty_cache()
        packing.without_gradients_tokens["actor_train"] = max(SMALLEST_BUDGET, budget // 2)


# --- slices ---


def _places(dataset: PairDataset) -> Iterator[tuple[int, int]]:
    """Yield (file, row) of each pair."""
    columns = (dataset.column(name).tolist() for name in ("source", "number"))
    return zip(*columns, strict=True)


def _values(config: DPOConfig, dataset: PairDataset, column: str) -> list[str]:
    """Return the value of each pair in a column that training does not read."""
    data = config.actor_train.data_args
    sources = [source for file in data.files for source in find_sources(file)]
    found: dict[tuple[int, int], str] = {}
    names: set[str] = set()
    for index, source in enumerate(sources):
        for chunk in chunks(source, index, data.encoding):
            for number, row in parsed_rows(chunk):
                names.update(row if isinstance(row, dict) else ())
                value = row.get(column) if isinstance(row, dict) else None
                if value is not None:
                    found[index, number] = value if isinstance(value, str) else json.dumps(value)
    if not found:
        raise DataError(
            f"--by {column}: no row has this column; columns: {', '.join(sorted(names)[:20])}."
        )
    return [found.get(place, NONE) for place in _places(dataset)]


def _rows_by(values: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield each value with the pairs that have it, the most frequent first."""
    kinds, inverse, counts = np.unique(
        np.array(values, object).astype(str), return_inverse=True, return_counts=True
    )
    rows = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    for kind in np.argsort(-counts, kind="stable").tolist():
        yield str(kinds[kind]), torch.from_numpy(rows[kind])


# --- numbers ---


def _preference(name: str, column: Tensor, weight: Tensor) -> dict[str, Any]:
    """Return weighted means of a number of both answers, and how often the chosen one is larger."""

    def mean(values: Tensor) -> float:
        return float(values @ weight / weight.sum())

    margin = gap(column)
    effective = float(weight.sum() ** 2 / weight.square().sum())  # as many equally weighted pairs
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
    """Return the 95 % interval of a share of independent pairs (Wilson, 1927): sound near 0 and 1."""
    if not count:
        return 0.0, 1.0
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


@contextmanager
def open_output(file: Path | None) -> Iterator[IO[str] | None]:
    """Open a file before the work begins; it gets its name when it is complete."""
    if file is None:
        yield None
        return
    if file.is_dir():
        raise ConfigError(f"--out {file}: is a folder; name a file in it.")
    temporary = file.with_name(f".tmp-{file.name}")
    try:
        out = temporary.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file}: cannot be written ({error.strerror}).") from error
    try:
        with out:
            yield out
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
