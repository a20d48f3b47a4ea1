"""Turn files into tokenised pairs and a report: built once, in memory that does not grow.

The address of a set in the cache is a hash of everything that decides its tokens: the bytes of
the files, the tokenizer, the template and the settings. What was built under an address is never
built again, and its report is kept with it, so that a second start reports the same as the first.
Whether there are too many bad rows is checked afterwards, so that the limit can be changed
without tokenising again.
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
from rich.console import Console

from rather.config.compat import check_even
from rather.config.schema import DataArgs, DPOConfig
from rather.config.strategies import data_parallel
from rather.data.cache import Cache, batch_writer, file_sha, text_sha
from rather.data.findings import examine, mix
from rather.data.formats import RowLayout
from rather.data.pairs import PairDataset
from rather.data.pool import ChildLimits, setup_of, tokenised
from rather.data.prompt_check import PromptCheck, check_own_template
from rather.data.read import DataFile, chunks, find_sources
from rather.data.report import TOO_LONG, RowCounts, add_paths, as_lines, share_dropped
from rather.data.show import bar
from rather.data.template import ALIASES, TEMPLATES, choose_template, load_tokenizer
from rather.data.tokens import TokenRecipe
from rather.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 4  # raise it whenever the same input would give other tokens
SMALL_BYTES = 1 << 20  # below this a second process costs more than it brings
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "additional_chat_templates/*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "config.json",
)  # fmt: skip
HASHED = ("score", "overlong", "separator", "special_tokens", "encoding")


class BadRows(DataError):
    """Too many rows cannot be used. It carries the report, so that it can still be written."""

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
    config: DPOConfig, *, console: Console | None = None, limits: ChildLimits | None = None
) -> Prepared:
    """Return all pairs of a run, from the cache if they were made before."""
    console = console or Console(stderr=True)
    data, validation = config.actor_train.data_args, config.validation.data_args
    builder = _Builder(config, console, limits or ChildLimits())
    weights = data.weights or [1.0] * len(data.files)
    train, train_report = builder.dataset(data.files, data, weights)
    report: dict[str, Any] = {
        "tokenizer": config.actor_train.tokenizer_path,
        "tokenizer_sha256": builder.tokenizer_digest,
        "sequence_length": config.sequence_length,
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
    check_even(config, len(train), data_parallel(config.actor_train))
    train_report["used"] = len(train)
    report["warnings"] += _warnings(config, train, train_report)
    report["look"] = examine(train, evals, report)
    return Prepared(train, evals, report)


def held_out(pairs: PairDataset, split: float | int, seed: int) -> tuple[PairDataset, PairDataset]:
    """Return training and held-out pairs. Prompts are drawn, so that none is on both sides."""
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


def _warnings(config: DPOConfig, train: PairDataset, report: dict[str, Any]) -> Iterator[str]:
    dropped = report["dropped"]
    too_long = sum(dropped[kind]["count"] for kind in TOO_LONG if kind in dropped)
    total = too_long + report["pairs"]
    if too_long > 0.05 * total:
        yield (
            f"{too_long} of {total} pairs are longer than sequence_length "
            f"({config.sequence_length}) and dropped: raise it, or set data_args.overlong to "
            "truncate_prompt or truncate_response."
        )
    if 0 < len(train) < config.global_batch():
        yield (
            f"the training set has {len(train)} pairs, fewer than the {config.global_batch()} of "
            "one optimizer step: each epoch is one smaller step."
        )


def _check(config: DPOConfig, report: dict[str, Any]) -> None:
    """Raise if there is nothing to train on, or too much is dropped."""
    sets = {"training data": report["train"]}
    for name, found in report["evals"].items():
        sets[f"evaluation set {name or '(unnamed)'}"] = found
    for name, found in sets.items():
        for problem, advice in _problems(config, found):
            table = "".join(f"\n{line}" for line in as_lines(found))
            raise BadRows(f"{name}: {problem}{table}\n{advice}", report)


def _problems(config: DPOConfig, report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a set, and what to do about it."""
    bad, total = share_dropped(report)
    if report["overlong"] == "error" and any(kind in report["dropped"] for kind in TOO_LONG):
        yield (
            f"pairs longer than sequence_length ({config.sequence_length}), and "
            "data_args.overlong is error.",
            "Raise sequence_length, or set overlong to drop, truncate_prompt or truncate_response.",
        )
    if not report["pairs"]:
        files = ", ".join(entry["path"] for entry in report["files"])
        yield (
            f"0 pairs in {files} ({report['rows']} rows read).",
            "No usable pairs: fix the rows listed above, or raise sequence_length.",
        )
    if bad and config.on_bad == "error":
        yield f"{bad} bad rows, and on_bad is error.", "Repair them or set on_bad: drop."
    if bad / total > config.max_bad_fraction:
        yield (
            f"{bad} of {total} ({bad / total:.1%}) cannot be used; max_bad_fraction is "
            f"{config.max_bad_fraction:g}.",
            "Repair the rows, or raise max_bad_fraction.",
        )


def recipe_of(tokenizer: PreTrainedTokenizerBase, config: DPOConfig, data: DataArgs) -> TokenRecipe:
    """Return how a tokenizer makes tokens of text under a config."""
    bos: int | None = tokenizer.bos_token_id
    # A saved tokenizer may still have truncation and padding switched on.
    bare = {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}
    return TokenRecipe(
        tokenizer=json.dumps(bare, ensure_ascii=False),
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


@dataclass
class _Builder:
    """Makes datasets from files, or finds them in the cache."""

    config: DPOConfig
    console: Console
    limits: ChildLimits

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
    ) -> tuple[PairDataset, dict[str, Any]]:
        """Return the pairs of files, and the report about them."""
        groups = [find_sources(file) for file in files]
        sources = [source for group in groups for source in group]
        cache = Cache(self.config.data_cache_dir(data))
        layout = RowLayout(data.format, self._columns(data), self.config.ranked_pairs)
        address = self._address(cache, sources, data, layout)
        found = cache.find(address)
        if found is None:
            cache.build(address, lambda target: self._build(target, sources, data, layout))
            found = cache.find(address)
            assert found is not None
        file, report = found
        counts = np.cumsum([0] + [entry["pairs"] for entry in report["files"]]).tolist()
        parts, first = [], 0
        for group, weight in zip(groups, weights, strict=True):
            parts.append((counts[first], counts[first + len(group)], weight))
            first += len(group)
        add_paths(report, sources)
        report |= {"overlong": data.overlong, "cache": str(file.path)}
        return PairDataset(file, address, parts), report

    def _columns(self, data: DataArgs) -> dict[str, str]:
        columns = dict(data.columns)
        for ours in ("chosen", "rejected"):
            theirs = getattr(self.config, f"{ours}_key")
            if theirs != ours and columns.setdefault(ours, theirs) != theirs:
                raise DataError(
                    f"data_args.columns.{ours} and {ours}_key name different columns; keep one."
                )
        return columns

    def _address(
        self, cache: Cache, sources: list[DataFile], data: DataArgs, layout: RowLayout
    ) -> str:
        template = ALIASES.get(data.template or "", data.template or "")
        path = Path(template).expanduser()
        if template in TEMPLATES:
            template = TEMPLATES[template]
        elif template and path.is_file():
            template = file_sha(path)
        settings = {
            "version": VERSION,
            "files": [cache.sha(source.path) for source in sources],
            "tokenizer": self.tokenizer_digest,
            "template": template,
            "layout": asdict(layout),
            "sequence_length": self.config.sequence_length,
            **{name: getattr(data, name) for name in HASHED},
        }
        # Added after the first caches were written, so they are hashed only if they are set.
        later = {
            "max_prompt_length": data.max_prompt_length,
            "parity": self.config.parity,
            "imports": layout.imported_sources(),
        }
        settings |= {name: value for name, value in later.items() if value}
        return text_sha(json.dumps(settings, sort_keys=True))

    def _build(
        self, target: Path, sources: list[DataFile], data: DataArgs, layout: RowLayout
    ) -> dict[str, Any]:
        recipe = recipe_of(self.tokenizer, self.config, data)
        setup, template = setup_of(recipe, layout), recipe.template
        by = f"chat template {template.name}" if template else "the tokenizer"
        counts, prompts, first = RowCounts(sources), PromptCheck(self.tokenizer, by), None
        sizes = [source.path.stat().st_size * (5 if source.gzipped else 1) for source in sources]
        processes = data.preprocessing_num_workers or (_cores() if sum(sizes) > SMALL_BYTES else 1)
        rows = (c for i, source in enumerate(sources) for c in chunks(source, i, data.encoding))
        with bar(self.console, "tokenising", sum(sizes)) as advance, batch_writer(target) as add:
            for result in tokenised(rows, setup, sources, processes, self.limits):
                first = first or result
                batch = pa.ipc.open_stream(result.table).read_next_batch()
                add(batch)
                source = result.chunk.source
                counts.add(source, result.head, batch.num_rows)
                prompts.add(result, result.head["prompts"])
                done = sum(sizes[:source]) + result.chunk.done * sizes[source]
                advance(done, f"{counts.rows} rows")
        if template is None and first:
            own = check_own_template(self.tokenizer, setup, first, sources, self.limits)
            prompts = own or prompts
        name, sha = (template.name, text_sha(template.text)) if template else ("none", "")
        used = {"name": name, "sha256": sha}
        return {**counts.to_json(), "template": used, "inference": prompts.to_json()}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
