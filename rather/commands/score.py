"""`rather score`: any pairs under any model: rewards against a reference, or log-probs alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import yaml
from rich.console import Console
from rich.progress import track
from torch import Tensor

from rather.arithmetic import ceil_div
from rather.commands.terminal import echo, print_table, settings
from rather.config.found import NO_TRUST, Trust
from rather.config.run_config import DPOConfig
from rather.config.schema import LOSS_MODIFIERS, LOSS_NUMBERS
from rather.data.batch import Columns, PairFacts, PairLogps
from rather.data.pairs import PairDataset
from rather.data.prepare import prepare
from rather.data.read import find_sources, rows_of
from rather.data.show import print_report
from rather.errors import ConfigError, DataError, MemoryShortage
from rather.files import JsonObject, own
from rather.losses.losses import gap
from rather.losses.metrics import Scored, Window, Z, weighted_sums, wilson
from rather.losses.objective import PairLoss, from_config
from rather.model.check import check_length
from rather.pipeline.checks import refuse_missing_columns
from rather.pipeline.steps import EVALUATION_CHUNK, Packing, chunks
from rather.run_folder.model_source import Weights, here, weights_of
from rather.tracking.json_lines import strict_json
from rather.train.rank_trainer import RankTrainer

DATA_KEYS = (
    "template", "format", "columns", "score", "overlong", "separator", "special_tokens", "encoding",
    "preprocessing_num_workers", "cache_dir",
)  # fmt: skip
NOTHING = "-"  # in a cell without a number
LOSS_KEYS = ("pref_loss", "loss_weights", *LOSS_NUMBERS, *LOSS_MODIFIERS)
ALLOWED = (  # keys that influence tokens, rewards or speed here
    *LOSS_KEYS, "sequence_length", "global_template", "chosen_key", "rejected_key", "ranked_pairs",
    "min_gap", "max_length_gap",
    "on_bad", "max_bad_fraction", "output_dir", "actor_train.model_args.dtype",
    "actor_train.infer_batch_size", "actor_train.max_tokens_per_microbatch_in_infer",
    *(f"actor_train.data_args.{key}" for key in DATA_KEYS),
)  # fmt: skip
MOST_SLICES = 40  # printed; --json has all


class LogProbs(NamedTuple):
    """What forward passes of policy and reference yield for some pairs."""

    facts: PairFacts
    policy: Columns
    reference: Columns | None

    def for_loss(self) -> PairLogps:
        """Return what a training step would pass to the loss."""
        lengths = self.facts.mean_chosen_length
        return self.facts.with_logps(self.policy, self.reference, lengths)

    def at(self, rows: Tensor) -> LogProbs:
        policy, reference = (
            {name: column[rows] for name, column in (columns or {}).items()}
            for columns in (self.policy, self.reference)
        )
        return LogProbs(self.facts.at(rows), policy, reference or None)


def score(
    model: str,
    pairs: Path,
    overrides: Sequence[str],
    reference: str | None,
    by: Sequence[str],
    out: Path | None,
    *,
    trust: Trust = NO_TRUST,
) -> JsonObject:
    """Return the numbers of all pairs and of each slice; write those of each pair to `out`."""
    policy = weights_of(model, trust)
    reference_weights = weights_of(reference, trust) if reference else None
    config = settings_for(policy, pairs, overrides)
    objective = _objective(config, policy, reference_weights)
    console = Console(stderr=True)
    prepared = prepare(config, console=console)
    print_report(prepared.report, console)
    if objective:
        refuse_missing_columns(objective, prepared)
    pair_set = prepared.train
    if not pair_set.column("weight").any():
        raise DataError(f"{pairs}: all pairs have weight 0; there is nothing to score.")
    columns = (pair_set.column(name).tolist() for name in ("source", "number"))
    row_numbers = list(zip(*columns, strict=True))
    slices = {column: _values(config, row_numbers, column) for column in by}
    # The reference gets the same dtype: rewards are differences.
    dtype = config.actor_train.model_args.dtype or policy.args.dtype
    facts, own_columns = _forward(policy, dtype, config, pair_set)
    # One model at a time is in memory.
    other_columns = (
        _forward(reference_weights, dtype, config, pair_set)[1] if reference_weights else None
    )
    x = LogProbs(facts, own_columns, other_columns)
    if out:
        files = [entry["path"] for entry in prepared.report["train"]["files"]]
        temporary = out.with_name(f".tmp-{out.name}")
        with open(temporary, "w", encoding="utf-8", opener=own) as file:
            for i, numbers in enumerate(_lines(objective, x)):
                line = {"file": files[row_numbers[i][0]], "number": row_numbers[i][1]}
                line |= {"id": pair_set.take([i])[0].id, **numbers}
                line |= {column: groups[i] for column, groups in slices.items()}
                file.write(strict_json(line) + "\n")
        os.replace(temporary, out)
    scores: JsonObject = {"model": model, "reference": reference, "file": str(pairs)}
    scores |= {**_numbers(objective, x), "by": {column: {} for column in by}}
    for column, values in slices.items():
        rows: dict[str, list[int]] = {}
        for i, group in enumerate(values):
            rows.setdefault(group, []).append(i)
        for group in sorted(rows, key=lambda group: (-len(rows[group]), group)):
            scores["by"][column][group] = _numbers(objective, x.at(torch.tensor(rows[group])))
    return scores


def settings_for(model: Weights, pairs: Path, overrides: Sequence[str]) -> DPOConfig:
    """Return the config that tokenises and rewards these pairs as a run with it would."""
    names = [text.partition("=")[0].lstrip("+") for text in overrides]
    if dead := [name for name in names if name not in ALLOWED]:
        raise ConfigError([f"{name}: has no effect on a score; leave it out." for name in dead])
    data_args: JsonObject = {"file_name": str(pairs.expanduser().absolute())}
    if model.actor and model.actor.data_args.template:
        data_args["template"] = model.actor.data_args.template
    args = {name: getattr(model.args, name) for name in ("revision", "trust_remote_code")}
    args["tokenizer_name_or_path"] = model.tokenizer_path
    actor = {"model_args": args, "data_args": data_args}
    values = {"exp_name": "score", "pretrain": model.model, "actor_train": actor}
    if model.is_reward:
        values["task"] = "reward"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "score.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        return settings(file, overrides)


def _objective(config: DPOConfig, model: Weights, reference: Weights | None) -> PairLoss | None:
    """Return the loss whose rewards are reported; None for log-probs alone."""
    objective, names = from_config(config), " + ".join(config.loss_names)
    if reference is None:
        loss_keys = [key for key in LOSS_KEYS if key in config.model_fields_set]
        if loss_keys and objective.needs_reference:
            raise ConfigError(
                f"{', '.join(loss_keys)}: rewards of loss '{names}' need a reference; pass "
                "--reference."
            )
        return None if objective.needs_reference else objective
    if not objective.needs_reference:
        raise ConfigError(f"--reference: loss '{names}' does not use a reference; leave it out.")
    folder = Path(reference.tokenizer_path)
    # The embeddings of a model without tokenizer are compared with the ids.
    has_tokenizer = not folder.is_dir() or (folder / "tokenizer.json").is_file()
    if has_tokenizer and model.tokenizer().get_vocab() != reference.tokenizer().get_vocab():
        raise ConfigError(
            f"--reference {reference.name}: its tokenizer differs from that of {model.name}; "
            "choose a model of the same family."
        )
    return objective


def _values(config: DPOConfig, places: Sequence[tuple[int, int]], column: str) -> list[str]:
    """Return the value of each pair in a column that training does not read."""
    data_args = config.actor_train.data_args
    sources = [source for file in data_args.files for source in find_sources(file)]
    cells: dict[tuple[int, int], str] = {}
    names: set[str] = set()
    for index, source in enumerate(sources):
        for number, row in rows_of(source, data_args.encoding):
            row = row if isinstance(row, dict) else {}
            names.update(row)
            if (cell := row.get(column)) is not None:
                cells[index, number] = cell if isinstance(cell, str) else json.dumps(cell)
    if not cells:
        raise DataError(
            f"--by {column}: no row has this column; columns: {', '.join(sorted(names)[:20])}."
        )
    return [cells.get(row_number, "(none)") for row_number in places]


# --- log-probs ---


def _forward(
    weights: Weights, dtype: str | None, config: DPOConfig, pairs: PairDataset
) -> tuple[PairFacts, Columns]:
    policy = weights.load(here(), dtype)
    check_length(policy.causal_lm.config, config.sequence_length)
    if pairs.largest_id >= policy.vocabulary_size:
        raise ConfigError(
            f"{weights.name}: the pairs have token ids up to {pairs.largest_id}, but the model has "
            f"{policy.vocabulary_size} embeddings; the tokenizer belongs to another model."
        )
    trainer = RankTrainer(policy, from_config(config))
    kind = here().partition(":")[0]
    packing = Packing(config.actor_train, config.reference, kind, at_end=config.task == "reward")
    facts, columns = [], []
    console, total = Console(stderr=True), ceil_div(len(pairs), EVALUATION_CHUNK)
    for scored_pairs in track(chunks(pairs), weights.name, total, console=console, transient=True):
        batches = packing.pack(scored_pairs, "actor_train")
        try:
            columns.append(trainer.log_probs(batches))
        except torch.OutOfMemoryError as error:
            raise MemoryShortage(
                f"{error} The answers are too long for this device; `rather score` takes lower "
                "values of actor_train.max_tokens_per_microbatch_in_infer and sequence_length."
            ) from None
        facts.append(PairFacts.of_step(batches))
    joined = {name: torch.cat([chunk[name].cpu() for chunk in columns]) for name in columns[0]}
    return PairFacts.concat(facts), joined


# --- numbers ---


def _lines(objective: PairLoss | None, x: LogProbs) -> Iterator[dict[str, float]]:
    """Yield the numbers of each pair."""
    columns: dict[str, Tensor] = {"logps": x.policy["sum"], "tokens": x.facts.length}
    if objective and objective.task == "reward":
        del columns["logps"]
    if x.reference:
        columns["reference_logps"] = x.reference["sum"]
    if objective:
        columns["rewards"] = objective.rewards(x.for_loss())
    names = [f"{name}/{side}" for name in columns for side in ("chosen", "rejected")]
    for numbers in torch.cat([column.double() for column in columns.values()], dim=1).tolist():
        yield dict(zip(names, numbers, strict=True))


def _numbers(objective: PairLoss | None, x: LogProbs) -> JsonObject:
    sums, weight = x.policy["sum"], x.facts.weight
    numbers: JsonObject = {"pairs": len(sums)}
    if objective:
        pairs = x.for_loss()
        scored = Scored(pairs, objective(pairs), objective.rewards(pairs))
        totals = weighted_sums(scored, weight, objective).items()
        numbers |= Window({name: float(total) for name, total in totals}).means()
        numbers |= _preference("rewards", scored.rewards, weight, scored.ties)
    if objective and objective.task == "reward":
        return numbers
    numbers |= _preference("logps", sums, weight)
    return numbers | _preference("logps_per_token", sums / x.facts.length, weight)


def _preference(
    name: str, column: Tensor, weight: Tensor, ties: Tensor | None = None
) -> JsonObject:
    """Return weighted means of a number of both answers, and how often the chosen one is larger."""

    def mean(values: Tensor) -> float:
        return float(values @ weight / weight.sum())

    margin = gap(column) if ties is None else gap(column).masked_fill(ties, 0.0)
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


def print_scores(scores: JsonObject) -> None:
    slices: JsonObject = {"all": scores}
    for column, values in scores["by"].items():
        slices |= {f"{column}: {group}": numbers for group, numbers in values.items()}
    headings = ("slice", "pairs", "accuracy (95 %)", "ties", "margin (95 %)", "chosen", "rejected")
    kinds = ["rewards"] if "rewards/margins" in scores else ["logps", "logps_per_token"]
    for kind in kinds:
        rows = []
        for name, numbers in list(slices.items())[:MOST_SLICES]:
            of_kind = {key.removeprefix(f"{kind}/"): number for key, number in numbers.items()}
            accuracy = _with_interval(of_kind, "accuracies", ".1%")
            margin = _with_interval(of_kind, "margins", ".4g")
            ties = _cell(of_kind["ties"], ".1%")
            means = [_cell(of_kind[side], ".4g") for side in ("chosen", "rejected")]
            rows.append((name, of_kind["pairs"], accuracy, ties, margin, *means))
        print_table(headings, rows, f"{scores['model']}: {kind}")
    shown = list(slices.values())[:MOST_SLICES]
    if any(math.isnan(numbers[f"{kinds[0]}/margins"]) for numbers in shown):
        echo("-: all pairs of this slice have weight 0.")
    if any(math.isnan(numbers[f"{kinds[0]}/margins_interval"][0]) for numbers in shown):
        echo("(-): an interval of margins needs two pairs with a weight.")


def _cell(value: float, form: str) -> str:
    return NOTHING if math.isnan(value) else f"{value:{form}}"


def _with_interval(numbers: JsonObject, name: str, form: str) -> str:
    number, (low, high) = numbers[name], numbers[f"{name}_interval"]
    if math.isnan(number):
        return NOTHING
    interval = NOTHING if math.isnan(low) else f"{low:{form}} to {high:{form}}"
    return f"{number:{form}} ({interval})"
