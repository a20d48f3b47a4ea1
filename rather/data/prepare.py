"""Files -> tokenised pairs and a report. Built once, addressed by content, memory flat for millions of rows.

The address is a hash of everything that decides the tokens: the bytes of the files, the tokenizer, the template and
the settings. What was built under an address is never rebuilt, and the report lies beside it, so that a second start
says the same as the first. Whether the bad rows are too many is asked afterwards, so that the answer to the question
can be changed without tokenising again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.console import Console

from rather.config.parity import check_even
from rather.config.schema import DataArgs, DPOConfig
from rather.config.strategies import data_parallel
from rather.data.cache import BatchWriter, Cache, file_sha, text_sha
from rather.data.findings import examine, mix
from rather.data.formats import Layout
from rather.data.pairs import PairDataset, PairFile
from rather.data.pool import Limits, tokenised
from rather.data.progress import bar
from rather.data.prompt_check import PromptCheck, check_own_template
from rather.data.read import Chunk, Source, chunks, find_sources
from rather.data.report import (
    TOO_LONG,
    Counts,
    as_lines,
    figures,
    leakage,
    share_dropped,
    with_paths,
)
from rather.data.template import ALIASES, TEMPLATES, choose_template, load_tokenizer
from rather.data.tokens import Recipe
from rather.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 4  # raise it whenever the same input would give other tokens
SMALL_BYTES = 1 << 20  # below this a second process costs more than it brings
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*",
    "vocab.*", "merges.txt", "*.model", "*.tiktoken", "config.json",
)  # fmt: skip


class BadRows(DataError):
    """Too many rows cannot be used. Carries the report, so that it can still be written."""

    def __init__(self, message: str, report: dict[str, Any]) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class Prepared:
    """The pairs of a run. The name of an unnamed evaluation set is empty."""

    train: PairDataset
    evals: dict[str, PairDataset]
    report: dict[str, Any]


def prepare(
    config: DPOConfig, *, console: Console | None = None, limits: Limits | None = None
) -> Prepared:
    """All pairs of a run, from the cache where they were made before."""
    console = console or Console(stderr=True)
    actor = config.actor_train
    tokenizer = _Tokenizer(
        actor.tokenizer_path, actor.model_args.revision, actor.model_args.trust_remote_code
    )
    builder = _Builder(config, tokenizer, console, limits or Limits())
    weights = actor.data_args.weights or [1.0] * len(actor.data_args.files)
    train, told = builder.dataset(actor.data_args.files, actor.data_args, weights)
    report: dict[str, Any] = {
        "tokenizer": actor.tokenizer_path,
        "tokenizer_sha256": tokenizer.digest,
        "sequence_length": config.sequence_length,
        "train": told,
        "evals": {},
        "warnings": [],
    }
    evals: dict[str, PairDataset] = {}
    for name, files in config.validation.data_args.sets.items():
        evals[name], told = builder.dataset(files, config.validation.data_args, [1.0] * len(files))
        report["evals"][name] = leakage(train, evals[name], {**told, **figures(evals[name])})
    _check(config, report)
    if config.validation.data_args.split is not None:
        train, evals[""] = held_out(train, config.validation.data_args.split, config.data_seed)
        report["evals"][""] = {
            "pairs": len(evals[""]),
            "held_out_of": "train",
            **figures(evals[""]),
        }
    check_even(config, len(train), data_parallel(config.actor_train))
    report["train"] |= {**figures(train), "used": len(train)}
    report["warnings"] += _warnings(config, train, report["train"])
    report["look"] = examine(train, evals, report)
    return Prepared(train, evals, report)


def held_out(pairs: PairDataset, split: float | int, seed: int) -> tuple[PairDataset, PairDataset]:
    """Training and held-out pairs. Prompts are drawn, not pairs: no prompt lies on both sides."""
    prompts, prompt_of, sizes = np.unique(
        pairs.column("prompt_hash"), return_inverse=True, return_counts=True
    )
    wanted = split if isinstance(split, int) else max(1, round(split * len(pairs)))
    order = np.argsort(_mixed(prompts, seed), kind="stable")
    taken = order[: int(np.searchsorted(np.cumsum(sizes[order]), wanted, side="left")) + 1]
    if len(taken) >= len(prompts):
        raise DataError(
            f"validation.data_args.split: {split} of {len(pairs)} pairs with {len(prompts)} different prompts leaves "
            "nothing to train on; hold out less."
        )
    held = np.isin(prompt_of, taken)
    name = f"{pairs.fingerprint}:split={split!r}:seed={seed}"
    return (
        pairs.subset(np.flatnonzero(~held), text_sha(name + ":train")),
        pairs.subset(np.flatnonzero(held), text_sha(name + ":held")),
    )


def _mixed(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """A different order of the same hashes for every seed."""
    with np.errstate(over="ignore"):
        return mix(values + np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15))


def _warnings(config: DPOConfig, train: PairDataset, told: dict[str, Any]) -> Iterator[str]:
    too_long = sum(told["dropped"][kind]["count"] for kind in TOO_LONG if kind in told["dropped"])
    if too_long > 0.05 * (too_long + told["pairs"]):
        yield (
            f"{too_long} of {too_long + told['pairs']} pairs are longer than sequence_length "
            f"({config.sequence_length}) and dropped: raise it, "
            "or set data_args.overlong to truncate_prompt or truncate_response."
        )
    if 0 < len(train) < config.global_batch():
        yield (
            f"the training set has {len(train)} pairs, fewer than the {config.global_batch()} of one optimizer step: "
            "each epoch is one smaller step."
        )


def _check(config: DPOConfig, report: dict[str, Any]) -> None:
    """Nothing to train on, or too much dropped: the place where a run ends because of its data."""
    evals = {
        f"evaluation set {name or '(unnamed)'}": told for name, told in report["evals"].items()
    }
    for name, told in {"training data": report["train"], **evals}.items():
        problem = _problem(config, told)
        if problem:
            table = "".join(f"\n{line}" for line in as_lines(told))
            raise BadRows(f"{name}: {problem[0]}{table}\n{problem[1]}", report)


def _problem(config: DPOConfig, told: dict[str, Any]) -> tuple[str, str] | None:
    """What is wrong with a set, and what to do about it."""
    bad, total = share_dropped(told)
    if told["overlong"] == "error" and any(kind in told["dropped"] for kind in TOO_LONG):
        return (
            f"pairs longer than sequence_length ({config.sequence_length}), and data_args.overlong is error.",
            "Raise sequence_length, or set overlong to drop, truncate_prompt or truncate_response.",
        )
    if not told["pairs"]:
        files = ", ".join(entry["path"] for entry in told["files"])
        return f"0 pairs in {files} ({told['rows']} rows read).", "Give it rows that hold pairs."
    if bad and config.on_bad == "error":
        return f"{bad} bad rows, and on_bad is error.", "Repair them or set on_bad: drop."
    if bad / total > config.max_bad_fraction:
        return (
            f"{bad} of {total} ({bad / total:.1%}) cannot be used; max_bad_fraction is {config.max_bad_fraction:g}.",
            "Repair the rows, or raise max_bad_fraction.",
        )
    return None


class _Tokenizer:
    """The tokenizer of a run, loaded only when something must be tokenised."""

    def __init__(self, path: str, revision: str | None, trust_remote_code: bool) -> None:
        self.path, self.revision, self.trust_remote_code = path, revision, trust_remote_code

    @cached_property
    def loaded(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.path, self.revision, self.trust_remote_code)

    @cached_property
    def digest(self) -> str:
        """Of the files of a folder, which needs no transformers; of the loaded tokenizer for a hub name."""
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            own = json.dumps(
                [self.loaded.chat_template, self.loaded.special_tokens_map],
                default=str,
                sort_keys=True,
            )
            return text_sha(self.loaded.backend_tokenizer.to_str() + own)
        files = sorted(
            {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}
        )
        if not files:
            raise DataError(
                f"{folder.absolute()}: no tokenizer in this folder (it has no tokenizer.json)."
            )
        return text_sha("".join(f"{file.name}:{file_sha(file)}\n" for file in files))

    def recipe(self, config: DPOConfig, data: DataArgs) -> Recipe:
        return recipe_of(self.loaded, config, data)


def recipe_of(tokenizer: PreTrainedTokenizerBase, config: DPOConfig, data: DataArgs) -> Recipe:
    """How a tokenizer makes tokens of text under a config."""
    bos: int | None = tokenizer.bos_token_id
    return Recipe(
        tokenizer=_bare(tokenizer.backend_tokenizer.to_str()),
        template=choose_template(data.template, tokenizer),
        bos=bos,
        eos=tokenizer.eos_token_id,
        adds_bos=bos is not None and tokenizer("a").input_ids[:1] == [bos],
        sequence_length=config.sequence_length,
        score=data.score,
        overlong=data.overlong,
        separator=data.separator,
        special_tokens=data.special_tokens,
        max_prompt_length=data.max_prompt_length,
        as_trl=config.parity,
    )


def _bare(tokenizer: str) -> str:
    """Without truncation and padding, which a saved tokenizer may still have switched on."""
    return json.dumps(
        {**json.loads(tokenizer), "truncation": None, "padding": None}, ensure_ascii=False
    )


@dataclass
class _Builder:
    """Makes datasets from files, or finds them made."""

    config: DPOConfig
    tokenizer: _Tokenizer
    console: Console
    limits: Limits

    def dataset(
        self, files: list[Path], data: DataArgs, weights: list[float]
    ) -> tuple[PairDataset, dict[str, Any]]:
        groups = [find_sources(file) for file in files]
        sources = [source for group in groups for source in group]
        cache = Cache(self.config.data_cache_dir(data))
        layout = Layout(data.format, self._columns(data), self.config.ranked_pairs)
        address = self._address(cache, sources, data, layout)
        found = cache.find(address)
        if found is None:
            with cache.writing(address) as (folder_file, finish):
                finish(self._build(folder_file, sources, data, layout))
            found = cache.find(address)
            assert found is not None
        file, report = found
        counts = np.cumsum([0] + [entry["pairs"] for entry in report["files"]])
        ends = np.cumsum([0] + [len(group) for group in groups])
        parts = [
            (int(counts[a]), int(counts[b]), weight)
            for a, b, weight in zip(ends, ends[1:], weights, strict=False)
        ]
        told = {**with_paths(report, sources), "overlong": data.overlong, "cache": str(file.path)}
        return PairDataset(file, address, parts), told

    def _columns(self, data: DataArgs) -> dict[str, str]:
        keys = {"chosen": self.config.chosen_key, "rejected": self.config.rejected_key}
        named = {ours: theirs for ours, theirs in keys.items() if ours != theirs}
        for ours, theirs in named.items():
            if data.columns.get(ours, theirs) != theirs:
                raise DataError(
                    f"data_args.columns.{ours} and {ours}_key name different columns; keep one of them."
                )
        return {**named, **data.columns}

    def _address(self, cache: Cache, sources: list[Source], data: DataArgs, layout: Layout) -> str:
        template = ALIASES.get(data.template or "", data.template or "")
        if template in TEMPLATES:
            template = TEMPLATES[template]
        elif template and Path(template).expanduser().is_file():
            template = file_sha(Path(template).expanduser())
        settings = {
            "version": VERSION,
            "files": [cache.sha(source.path) for source in sources],
            "tokenizer": self.tokenizer.digest,
            "template": template,
            "layout": asdict(layout),
            "sequence_length": self.config.sequence_length,
            **{
                name: getattr(data, name)
                for name in ("score", "overlong", "separator", "special_tokens", "encoding")
            },
            **({"max_prompt_length": data.max_prompt_length} if data.max_prompt_length else {}),
            **({"parity": self.config.parity} if self.config.parity else {}),
        }
        return text_sha(json.dumps(settings, sort_keys=True))

    def _build(
        self, target: Path, sources: list[Source], data: DataArgs, layout: Layout
    ) -> dict[str, Any]:
        recipe = self.tokenizer.recipe(self.config, data)
        setup = {
            "recipe": recipe.to_json(),
            "layout": {**asdict(layout), "columns": dict(layout.columns)},
        }
        counts = Counts(sources)
        sizes = [source.path.stat().st_size * (5 if source.gzipped else 1) for source in sources]
        processes = data.preprocessing_num_workers or (_cores() if sum(sizes) > SMALL_BYTES else 1)
        rows: Iterator[Chunk] = (
            c for i, source in enumerate(sources) for c in chunks(source, i, data.encoding)
        )
        before, first = np.cumsum([0, *sizes]).tolist(), None
        template = recipe.template
        prompts = PromptCheck(
            self.tokenizer.loaded, f"chat template {template.name}" if template else "the tokenizer"
        )
        with bar(self.console, "tokenising", before[-1]) as advance, BatchWriter(target) as writer:
            for result in tokenised(rows, setup, sources, processes, self.limits):
                first = first or result
                source, head = result.chunk.source, result.head
                batch = pa.ipc.open_stream(result.table).read_next_batch()
                writer.add(batch)
                counts.add(source, head, batch.num_rows)
                prompts.add(result, head["prompts"])
                advance(
                    before[source] + result.chunk.done * sizes[source], f"{sum(counts.rows)} rows"
                )
        counts.note_repeats(PairFile(target))
        if template is None and first:
            prompts = (
                check_own_template(self.tokenizer.loaded, setup, first, sources, self.limits) or prompts
            )
        told = (
            {"name": template.name, "sha256": text_sha(template.text)}
            if template
            else {"name": "none", "sha256": ""}
        )
        return {**counts.to_json(), "template": told, "inference": prompts.to_json()}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
