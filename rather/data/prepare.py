"""Turn files into tokenised pairs and a report: built once, in bounded memory.

The address of a set in the cache is a hash of everything that decides its tokens: the bytes of
the files, the tokenizer, the template and the settings. What was built under an address is never
built again, and its report is kept with it, so that a second start reports the same as the first.
Whether there are too many bad rows is checked afterwards, so that the limit can be changed
without tokenising again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from rather.config.compat import check_even
from rather.config.run_config import DPOConfig
from rather.config.schema import DataArgs, as_list
from rather.config.strategies import data_parallel
from rather.data import hub
from rather.data.cache import Cache, batch_writer
from rather.data.findings import examine, mix
from rather.data.formats import FORMATS, RowLayout
from rather.data.messages import common_length
from rather.data.pairs import PairDataset, corrected
from rather.data.pool import ChunkResult, encode_chunks
from rather.data.read import DataFile, chunks_of, find_sources
from rather.data.report import TOO_LONG, Json, RowCounts, add_paths, as_lines, share_dropped
from rather.data.show import bar
from rather.data.template import (
    ALIASES,
    TEMPLATES,
    choose_template,
    load_tokenizer,
    own_template,
    read_template,
)
from rather.data.tokens import Ids, TokenRecipe
from rather.errors import DataError, counted
from rather.files import file_sha, text_sha

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 4  # raise it whenever the same input would give other tokens
SMALL_BYTES = 1 << 20  # below this a second process costs more than it saves
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "additional_chat_templates/*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "config.json",
)  # fmt: skip
RECIPE = ("score", "overlong", "separator", "special_tokens")  # settings of data_args
AROUND, SHOWN, EXAMPLES = 6, 40, 3  # tokens around and in a difference; examples kept


class BadRows(DataError):
    """Too many rows cannot be used. It carries the report, so that it can still be written."""

    def __init__(self, message: str, report: Json) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class Prepared:
    """The pairs of a run. The name of an unnamed evaluation set is empty."""

    train: PairDataset
    evals: dict[str, PairDataset]
    report: Json

    def with_partners(self, seed: int, limit: int) -> Prepared:
        """Return single answers, each with an answer to another prompt of its set."""
        evals = {name: pairs.with_partners(seed, limit) for name, pairs in self.evals.items()}
        return Prepared(self.train.with_partners(seed, limit), evals, self.report)


def prepare(config: DPOConfig, *, console: Console | None = None) -> Prepared:
    """Return all pairs of a run, from the cache if they were made before."""
    data, validation = config.actor_train.data_args, config.validation.data_args
    builder = _Builder(config, console or Console(stderr=True))
    weights = data.weights or [1.0] * len(data.files)
    train, train_report = builder.dataset(data.files, data, weights)
    report: Json = {
        "tokenizer": config.actor_train.tokenizer_path,
        "tokenizer_sha256": builder.tokenizer_digest,
        "sequence_length": config.sequence_length,
        "rows": config.rows,
        "train": train_report,
        "evals": {},
        "warnings": [],
    }
    evals: dict[str, PairDataset] = {}
    for name, files in validation.sets.items():
        evals[name], report["evals"][name] = builder.dataset(files, validation, [1.0] * len(files))
    _check(config, report)
    if validation.split is not None:
        train, evals[""] = held_out(train, validation.split, config.data_seed)
        report["evals"][""] = {"pairs": len(evals[""]), "held_out_of": "train"}
    if names := as_list(data.corrections):
        train, report["corrections"] = corrected(train, [data.locate(name) for name in names])
    check_even(config, len(train), data_parallel(config.actor_train))
    train_report["used"] = len(train)
    report["warnings"] += _warnings(config, train, train_report)
    report["look"] = examine(train, evals, report)
    return Prepared(train, evals, report)


def held_out(pairs: PairDataset, split: float | int, seed: int) -> tuple[PairDataset, PairDataset]:
    """Return training and held-out pairs. Whole prompts are drawn, so none is on both sides."""
    prompts, prompt_of, sizes = np.unique(
        pairs.column("prompt_hash"), return_inverse=True, return_counts=True
    )
    wanted = split if isinstance(split, int) else max(1, round(split * len(pairs)))
    with np.errstate(over="ignore"):  # each seed gives another order of the same hashes
        hashes = mix(prompts + np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15))
    order = np.argsort(hashes, kind="stable")
    taken = order[: int(np.searchsorted(np.cumsum(sizes[order]), wanted, side="left")) + 1]
    if len(taken) >= len(prompts):
        raise DataError(
            f"validation.data_args.split: {split} of {len(pairs)} pairs with {len(prompts)} "
            "different prompts leaves nothing to train on; hold out less."
        )
    held = np.isin(prompt_of, taken)
    name = f"{pairs.fingerprint}:split={split!r}:seed={seed}"
    return (
        pairs.subset(np.flatnonzero(~held), text_sha(f"{name}:train")),
        pairs.subset(np.flatnonzero(held), text_sha(f"{name}:held")),
    )


def _warnings(config: DPOConfig, train: PairDataset, report: Json) -> Iterator[str]:
    dropped = report["dropped"]
    too_long = sum(dropped[kind]["count"] for kind in TOO_LONG if kind in dropped)
    total = too_long + report["pairs"]
    if too_long > 0.05 * total:
        yield (
            f"{too_long} of {total} {config.unit} are longer than sequence_length "
            f"({config.sequence_length}) and dropped: raise it, or set data_args.overlong to "
            "truncate_prompt or truncate_response."
        )
    if config.rows == "labelled":
        yield from _balance(config, train.column("soft_label"))
    if 0 < len(train) < config.global_batch():
        yield (
            f"the training set has {counted(len(train), config.unit)}, fewer than the "
            f"{config.global_batch()} of one optimizer step: each epoch is one smaller step."
        )


def _balance(config: DPOConfig, labels: NDArray[np.float64]) -> Iterator[str]:
    """Warn if weighted counts are not between 1:1 and 4:3, the range of KTO's authors."""
    good, bad = (labels > 0.5).sum(), (labels <= 0.5).sum()
    weights = (config.desirable_weight, config.undesirable_weight)
    first, second = (1.0 if weight is None else weight for weight in weights)
    if not 0.99 * second * bad <= first * good <= 1.35 * second * bad:
        advice = f"set undesirable_weight: {first * good / bad:.3g}" if bad else ""
        if not good or not bad:
            advice = "add answers of the other kind, or check the labels"
        yield (
            f"{good} answers are desirable and {bad} undesirable. With their weights, the sum of "
            f"desirable ones should be 1 to 4/3 of the others: {advice}."
        )


def _check(config: DPOConfig, report: Json) -> None:
    """Raise if there is nothing to train on, or too much is dropped."""
    sets = {
        f"evaluation set {name or '(unnamed)'}": found for name, found in report["evals"].items()
    }
    for name, found in {"training data": report["train"], **sets}.items():
        for problem, advice in _problems(config, found):
            lines = "\n".join([f"{name}: {problem}", *as_lines(found), advice])
            raise BadRows(lines, report)


def _problems(config: DPOConfig, report: Json) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a set, and what to do about it."""
    (bad, total), dropped = share_dropped(report), report["dropped"]
    is_long = not dropped.keys().isdisjoint(TOO_LONG)
    if report["overlong"] == "error" and is_long:
        yield (
            f"{config.unit} longer than sequence_length ({config.sequence_length}), and "
            "data_args.overlong is error.",
            "Raise sequence_length, or set overlong to drop, truncate_prompt or truncate_response.",
        )
    if not report["pairs"]:
        files = ", ".join(entry["path"] for entry in report["files"])
        advice = "The file has no rows. Is it the right file, and was it written completely?"
        if report["rows"]:
            advice = f"No usable {config.unit}: fix the rows listed above"
            if is_long:
                advice += ", or raise sequence_length"
            elif "missing_key" in dropped:
                advice += ", or name their columns in data_args.columns"
            advice += "."
        yield f"0 {config.unit} in {files} ({report['rows']} rows read).", advice
    if bad and config.on_bad == "error":
        yield f"{bad} bad rows, and on_bad is error.", "Repair them or set on_bad: drop."
    if bad / total > config.max_bad_fraction:
        yield (
            f"{bad} of {total} ({bad / total:.1%}) cannot be used; max_bad_fraction is "
            f"{config.max_bad_fraction:g}.",
            "Repair the rows, or raise max_bad_fraction.",
        )


def layout_of(config: DPOConfig, data: DataArgs) -> RowLayout:
    """Return how the rows of data files are read."""
    keys = {"chosen": config.chosen_key, "rejected": config.rejected_key}
    columns = {name: key for name, key in keys.items() if name != key} | data.columns
    threshold = data.label_threshold
    return RowLayout(data.format, columns, config.ranked_pairs, config.rows, threshold)


def recipe_of(tokenizer: PreTrainedTokenizerBase, config: DPOConfig, data: DataArgs) -> TokenRecipe:
    """Return the recipe by which a tokenizer and a config turn text into tokens."""
    bos: int | None = tokenizer.bos_token_id
    # A saved tokenizer may still have truncation and padding switched on.
    bare = {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}
    return TokenRecipe(
        tokenizer=json.dumps(bare, ensure_ascii=False),
        template=choose_template(data.template, tokenizer, data.chat_template_kwargs),
        bos=bos,
        eos=tokenizer.eos_token_id,
        adds_bos=bos is not None and tokenizer("a").input_ids[:1] == [bos],
        sequence_length=config.sequence_length,
        max_prompt_length=data.max_prompt_length,
        default_system=data.default_system,
        as_trl=config.parity,
        **{name: getattr(data, name) for name in RECIPE},
    )


def _local(file: Path, cache: Cache, commits: dict[str, str]) -> list[Path]:
    """Return a file, or the copies of what an address s3:// or hf:// names; note its commit."""
    scheme, *parts = file.parts
    if scheme == "hf:":
        address = f"hf://{'/'.join(parts)}"
        commits[address], files = hub.download(address)
        return files
    if scheme != "s3:":
        return [file]
    from rather.checkpoint.store import download  # imports torch

    return [download(file, cache.folder)]


@dataclass
class _Builder:
    """Makes datasets from files, or finds them in the cache."""

    config: DPOConfig
    console: Console

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the run, loaded only if something must be tokenised."""
        actor = self.config.actor_train
        args = actor.model_args
        return load_tokenizer(actor.tokenizer_path, args.revision, args.trust_remote_code)

    @cached_property
    def tokenizer_digest(self) -> str:
        """The hash of a folder's files, which needs no transformers; else of what was loaded."""
        folder = Path(self.config.actor_train.tokenizer_path).expanduser()
        if not folder.is_dir():
            own = [self.tokenizer.chat_template, self.tokenizer.special_tokens_map]
            text = json.dumps(own, default=str, sort_keys=True)
            return text_sha(self.tokenizer.backend_tokenizer.to_str() + text)
        found = {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)}
        files = sorted(file for file in found if file.is_file())
        if not files:
            raise DataError(
                f"{folder.absolute()}: no tokenizer in this folder (it has no tokenizer.json)."
            )
        return text_sha("".join(f"{file.name}:{file_sha(file)}\n" for file in files))

    def dataset(
        self, files: list[Path], data: DataArgs, weights: list[float]
    ) -> tuple[PairDataset, Json]:
        """Return the pairs of files, and the report about them."""
        cache = Cache(self.config.data_cache_dir(data))
        commits: dict[str, str] = {}
        groups = [
            [source for each in _local(file, cache, commits) for source in find_sources(each)]
            for file in files
        ]
        sources = [source for group in groups for source in group]
        layout = layout_of(self.config, data)
        address = self._address(
            [[cache.sha(source.path) for source in group] for group in groups], data, layout
        )
        file, report = cache.find_or_build(
            address, lambda target: self._build(target, groups, data, layout)
        )
        counts = iter([entry["pairs"] for entry in report["files"]])
        ends = list(accumulate(sum(islice(counts, len(group))) for group in groups))
        parts = tuple(zip([0, *ends], ends, weights, strict=False))
        add_paths(report, sources)
        report |= {"overlong": data.overlong, "cache": str(file.path), "commits": commits}
        if data.max_samples:
            report["max_samples"] = data.max_samples
        return PairDataset(file, address, parts), report

    def _address(self, groups: list[list[str]], data: DataArgs, layout: RowLayout) -> str:
        template = ALIASES.get(data.template or "", data.template or "")
        path = Path(template).expanduser()
        if template in TEMPLATES:
            template = TEMPLATES[template]
        elif template and path.is_file():
            text, end = read_template(path)
            template = file_sha(path) if end is None else text_sha(text) + end
        # The text of users' files that decide how rows are read; `auto` may use any.
        formats = FORMATS if layout.format == "auto" else [layout.format]
        imported = sorted({source for name in formats if (source := FORMATS.source_of(name))})
        settings = {
            "version": VERSION,
            "files": [sha for group in groups for sha in group],
            "tokenizer": self.tokenizer_digest,
            "template": template,
            "layout": {
                name: getattr(layout, name) for name in ("format", "columns", "ranked_pairs")
            },
            "sequence_length": self.config.sequence_length,
            **{name: getattr(data, name) for name in (*RECIPE, "encoding")},
        }
        # Added after the first caches were written, so they are hashed only if they are set.
        later = {
            "max_prompt_length": data.max_prompt_length,
            "default_system": data.default_system,
            "chat_template_kwargs": data.chat_template_kwargs,
            "parity": self.config.parity,
            "imports": imported,
            "rows": layout.rows if layout.rows != "pairs" else None,
            "label_threshold": layout.label_threshold,
            "max_samples": data.max_samples,
            # The rows that are used then depend on which files are one entry of file_name.
            "entries": [len(group) for group in groups] if data.max_samples else None,
        }
        settings |= {name: value for name, value in later.items() if value or value == 0}
        return text_sha(json.dumps(settings, sort_keys=True))

    def _build(
        self, target: Path, groups: list[list[DataFile]], data: DataArgs, layout: RowLayout
    ) -> Json:
        sources = [source for group in groups for source in group]
        recipe = recipe_of(self.tokenizer, self.config, data)
        template = recipe.template
        by = f"chat template {template.name}" if template else "the tokenizer"
        counts, prompts, first = RowCounts(sources), PromptCheck(by), None
        sizes = [source.path.stat().st_size * (5 if source.gzipped else 1) for source in sources]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        processes = data.preprocessing_num_workers or (sum(sizes) > SMALL_BYTES and cores) or 1
        rows = chunks_of(groups, data.encoding, data.max_samples)
        with bar(self.console, "tokenising", sum(sizes)) as advance, batch_writer(target) as add:
            for result in encode_chunks(rows, recipe, layout, sources, processes):
                first = first or result
                add(result.batch)
                source = result.chunk.source
                counts.add(source, result.head, result.batch.num_rows)
                prompts.add(self.tokenizer, result, result.head["prompts"])
                done = sum(sizes[:source]) + result.chunk.done * sizes[source]
                advance(done, f"{counts.rows} rows")
        if template is None and first:
            prompts = self._check_own_template(recipe, layout, sources, first) or prompts
        name, sha = (template.name, text_sha(template.text)) if template else ("none", "")
        used = {"name": name, "sha256": sha}
        return {**counts.to_json(), "template": used, "inference": asdict(prompts)}

    def _check_own_template(
        self, recipe: TokenRecipe, layout: RowLayout, sources: list[DataFile], first: ChunkResult
    ) -> PromptCheck | None:
        """Compare pairs trained as plain text with what the tokenizer's template would give.

        The template is rendered in a child process: only there are its time and memory limited.
        """
        found = PromptCheck("the tokenizer's own chat template")
        try:
            own = replace(recipe, template=own_template(self.tokenizer))
            if own.template is None:
                return None
            [result] = encode_chunks([first.chunk], own, layout, sources, 1)
        except DataError:  # a template that cannot be used makes no prompt
            return None
        found.add(self.tokenizer, first, result.head["prompts"])
        return found


@dataclass
class PromptCheck:
    """Compares the prompt that training sees with the prompt that generation starts from."""

    by: str  # what makes the prompt at inference
    compared: int = 0
    different: int = 0
    examples: list[Json] = field(default_factory=list)

    def add(
        self,
        tokenizer: PreTrainedTokenizerBase,
        result: ChunkResult,
        prompts: Iterable[tuple[int, Ids]],
    ) -> None:
        """Compare some prompts; keep the first example of each kind of difference."""
        batch, numbers = result.batch, result.batch.column("number").to_pylist()
        for number, inference in prompts:
            if number not in numbers:  # the row gave no pair
                continue
            training: Ids = batch.column("prompt")[numbers.index(number)].as_py()
            self.compared += 1
            self.different += training != inference
            if training == inference or len(self.examples) == EXAMPLES:
                continue
            start = common_length(training, inference)
            left, right = training[start:], inference[start:]
            end = common_length(left[::-1], right[::-1])
            found = {
                "before": training[max(0, start - AROUND) : start],
                "training": left[: len(left) - end],
                "inference": right[: len(right) - end],
                "after": left[len(left) - end :][:AROUND],
            }
            texts = {name: _texts(tokenizer, ids) for name, ids in found.items()}
            kinds = [(one["training"], one["inference"]) for one in self.examples]
            if (texts["training"], texts["inference"]) not in kinds:
                self.examples.append({"source": result.chunk.source, "number": number, **texts})


def _texts(tokenizer: PreTrainedTokenizerBase, ids: Ids) -> list[str]:
    """Return the text of each token; of many, only the first and the last ones."""
    if len(ids) > SHOWN:
        first, last = ids[: SHOWN // 2], ids[-SHOWN // 2 :]
        return [*_texts(tokenizer, first), " ... ", *_texts(tokenizer, last)]
    return [str(tokenizer.decode([token], skip_special_tokens=False)) for token in ids]
