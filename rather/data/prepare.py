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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from rather.config.run_config import DPOConfig
from rather.config.schema import ActorConfig, DataArgs, PairKeys, as_list
from rather.data import hub
from rather.data.cache import Cache, batch_writer
from rather.data.findings import examine, mix
from rather.data.formats import FORMATS, IMAGES, IMAGES_REFUSED, RowLayout, has_images
from rather.data.image_tokens import FAMILIES, ImageRecipe, family_of, image_recipe
from rather.data.pairs import IMAGE_SCHEMA, IMAGE_TOKEN, SCHEMA, PairDataset, PairFile, corrected
from rather.data.pool import encode_chunks
from rather.data.read import CHUNK_ROWS, DataFile, chunks_of, find_sources, rows_of
from rather.data.report import TOO_LONG, Json, RowCounts, add_paths, as_lines, share_dropped
from rather.data.show import bar
from rather.data.template import (
    ALIASES,
    TEMPLATES,
    choose_template,
    load_tokenizer,
    read_template,
    use_processor_template,
)
from rather.data.tokens import SIDES, TokenRecipe
from rather.errors import LIMITS, DataError, counted
from rather.files import file_sha, inspect_folder, refuse_outside, text_sha

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 4  # raise it whenever the same input would give other tokens
SMALL_BYTES = 1 << 20  # below this a second process costs more than it saves
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "additional_chat_templates/*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "config.json",
)  # fmt: skip
RECIPE = ("score", "overlong", "separator", "special_tokens")  # settings of data_args


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
    training = config.actor_train.data_args
    validation = config.validation.data_args
    builder = _Builder(config.actor_train, config, config.rows, console or Console(stderr=True))
    weights = training.weights or [1.0] * len(training.files)
    cache = Cache(config.data_cache_dir(training))
    train, train_report = builder.dataset(training.files, training, cache, weights)
    report: Json = {
        "tokenizer": config.actor_train.tokenizer_path,
        "tokenizer_sha256": builder.tokenizer_digest,
        "sequence_length": config.sequence_length,
        "rows": config.rows,
        "beta": config.loss_numbers.get("beta"),
        "train": train_report,
        "evals": {},
        "warnings": [],
    }
    evals: dict[str, PairDataset] = {}
    for name, files in validation.sets.items():
        cache = Cache(config.data_cache_dir(validation))
        equal_weights = [1.0] * len(files)
        pairs, set_report = builder.dataset(files, validation, cache, equal_weights)
        evals[name] = pairs
        report["evals"][name] = set_report
    _check(config, config.unit, report)
    if validation.split is not None:
        train, evals[""] = held_out(train, validation.split, config.data_seed)
        report["evals"][""] = {"pairs": len(evals[""]), "held_out_of": "train"}
    corrections = [training.locate(name) for name in as_list(training.corrections)]
    if corrections:
        train, report["corrections"] = corrected(train, corrections)
    train_report["used"] = len(train)
    report["warnings"] += _length_warnings(config.sequence_length, config.unit, train_report)
    if config.rows == "labelled":
        labels = train.column("label")
        report["warnings"] += _balance(labels, config.desirable_weight, config.undesirable_weight)
    if 0 < len(train) < config.global_batch():
        report["warnings"].append(
            f"the training set has {counted(len(train), config.unit)}, fewer than the "
            f"{config.global_batch()} of one optimizer step: each epoch is one smaller step."
        )
    report["look"] = examine(train, evals, report)
    return Prepared(train, evals, report)


def held_out(pairs: PairDataset, split: float | int, seed: int) -> tuple[PairDataset, PairDataset]:
    """Return training and held-out pairs. Whole prompts are drawn, so none is on both sides."""
    prompts, prompt_of, sizes = np.unique(
        pairs.column("prompt_hash"), return_inverse=True, return_counts=True
    )
    held_pairs = split if isinstance(split, int) else max(1, round(split * len(pairs)))
    with np.errstate(over="ignore"):  # each seed gives another order of the same hashes
        hashes = mix(prompts + np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15))
    order = np.argsort(hashes, kind="stable")
    pairs_up_to = np.cumsum(sizes[order])
    held_prompts = order[: int(np.searchsorted(pairs_up_to, held_pairs, side="left")) + 1]
    if len(held_prompts) >= len(prompts):
        raise DataError(
            f"validation.data_args.split: {split} of {len(pairs)} pairs with {len(prompts)} "
            "different prompts leaves nothing to train on; hold out less."
        )
    held = np.isin(prompt_of, held_prompts)
    name = f"{pairs.fingerprint}:split={split!r}:seed={seed}"
    return (
        pairs.subset(np.flatnonzero(~held), text_sha(f"{name}:train")),
        pairs.subset(np.flatnonzero(held), text_sha(f"{name}:held")),
    )


def _length_warnings(sequence_length: int, unit: str, report: Json) -> Iterator[str]:
    dropped = report["dropped"]
    too_long = sum(dropped[kind]["count"] for kind in TOO_LONG if kind in dropped)
    total = too_long + report["pairs"]
    if too_long > 0.05 * total:
        yield (
            f"{too_long} of {total} {unit} are longer than sequence_length "
            f"({sequence_length}) and dropped: raise it, or set data_args.overlong to "
            "truncate_prompt or truncate_response."
        )


def _balance(
    labels: NDArray[np.float64], desirable_weight: float | None, undesirable_weight: float | None
) -> Iterator[str]:
    """Warn if weighted counts are not between 1:1 and 4:3, the range of KTO's authors."""
    good = (labels > 0.5).sum()
    bad = (labels <= 0.5).sum()
    weighted_good = good * (1.0 if desirable_weight is None else desirable_weight)
    weighted_bad = bad * (1.0 if undesirable_weight is None else undesirable_weight)
    if not 0.99 * weighted_bad <= weighted_good <= 1.35 * weighted_bad:
        advice = f"set undesirable_weight: {weighted_good / bad:.3g}" if bad else ""
        if not good or not bad:
            advice = "add answers of the other kind, or check the labels"
        yield (
            f"{good} answers are desirable and {bad} undesirable. With their weights, the sum of "
            f"desirable ones should be 1 to 4/3 of the others: {advice}."
        )


def _check(keys: PairKeys, unit: str, report: Json) -> None:
    """Raise if there is nothing to train on, or too much is dropped."""
    report_of_set = {"training data": report["train"]}
    for name, set_report in report["evals"].items():
        report_of_set[f"evaluation set {name or '(unnamed)'}"] = set_report
    for name, set_report in report_of_set.items():
        for problem, advice in _problems(keys, unit, set_report):
            lines = "\n".join([f"{name}: {problem}", *as_lines(set_report), advice])
            raise BadRows(lines, report)


def _problems(keys: PairKeys, unit: str, report: Json) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a set, and what to do about it."""
    bad, total = share_dropped(report)
    dropped = report["dropped"]
    is_long = not dropped.keys().isdisjoint(TOO_LONG)
    if report["overlong"] == "error" and is_long:
        yield (
            f"{unit} longer than sequence_length ({keys.sequence_length}), and "
            "data_args.overlong is error.",
            "Raise sequence_length, or set overlong to drop, truncate_prompt or truncate_response.",
        )
    if not report["pairs"]:
        files = ", ".join(entry["path"] for entry in report["files"])
        advice = "The file has no rows. Is it the right file, and was it written completely?"
        if report["rows"]:
            advice = f"No usable {unit}: fix the rows listed above"
            if is_long:
                advice += ", or raise sequence_length"
            elif "missing_key" in dropped:
                advice += ", or name their columns in data_args.columns"
            advice += "."
        yield f"0 {unit} in {files} ({report['rows']} rows read).", advice
    if bad and keys.on_bad == "error":
        yield f"{bad} bad rows, and on_bad is error.", "Repair them or set on_bad: drop."
    if bad / total > keys.max_bad_fraction:
        yield (
            f"{bad} of {total} ({bad / total:.1%}) cannot be used; max_bad_fraction is "
            f"{keys.max_bad_fraction:g}.",
            "Repair the rows, or raise max_bad_fraction.",
        )


def layout_of(keys: PairKeys, rows: str, data: DataArgs) -> RowLayout:
    """Return how the rows of data files are read; `rows` is what each must give."""
    answers = {"chosen": keys.chosen_key, "rejected": keys.rejected_key}
    columns = {name: key for name, key in answers.items() if name != key} | data.columns
    return RowLayout(
        data.format,
        columns,
        keys.ranked_pairs,
        rows,
        data.label_threshold,
        keys.min_gap,
        keys.max_length_gap,
    )


def _first_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the first token of a text, which may be a special one."""
    try:
        ids: list[int] = tokenizer("a").input_ids
    except Exception as error:  # of the Rust library; a damaged file may hold anything
        raise DataError(
            f"{tokenizer.name_or_path}: the tokenizer cannot encode: {error}"
        ) from error
    return next(iter(ids), None)


def recipe_of(
    tokenizer: PreTrainedTokenizerBase,
    data: DataArgs,
    sequence_length: int,
    images: ImageRecipe | None = None,
) -> TokenRecipe:
    """Return the recipe by which a tokenizer and these settings turn text into tokens."""
    bos: int | None = tokenizer.bos_token_id
    # A saved tokenizer may still have truncation and padding switched on.
    bare = {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}
    template = choose_template(data.template, tokenizer, data.chat_template_kwargs)
    return TokenRecipe(
        tokenizer=json.dumps(bare, ensure_ascii=False),
        template=template,
        bos=bos,
        eos=tokenizer.eos_token_id,
        adds_bos=bos is not None and _first_id(tokenizer) == bos,
        sequence_length=sequence_length,
        max_prompt_length=data.max_prompt_length,
        default_system=data.default_system,
        images=images,
        has_unused_template=template is None and bool(tokenizer.chat_template),
        **{name: getattr(data, name) for name in RECIPE},
    )


NO_EARLY_IMAGES = f"this model's images are not read; {LIMITS}"


def images_of(model: str, revision: str | None, data: DataArgs) -> tuple[ImageRecipe | None, str]:
    """Return how the images of a model are read; or None, and why they are not."""
    folder = inspect_folder(model, revision)
    family = family_of(folder)
    if folder is None or family is None:
        return None, f"{model} is a language model that reads text only; {LIMITS}"
    if family not in FAMILIES:
        names = ", ".join(FAMILIES)
        return None, f"images are not trained with '{family}', only with {names}; {LIMITS}"
    return image_recipe(folder, data.image_max_pixels, data.image_min_pixels), ""


def _begins_with_images(source: DataFile, encoding: str) -> bool:
    """Return whether one of the first rows of a file has images.

    Text of a vision model is prepared as it always was; only the start of a file is read for that.
    """
    first_rows = islice(rows_of(source, encoding), CHUNK_ROWS)
    return any(isinstance(row, dict) and has_images(row) for _, row in first_rows)


def local_files(file: Path, cache: Cache, commits: dict[str, str]) -> list[Path]:
    """Return a file, or the copies of what an address s3:// or hf:// names; note its commit."""
    scheme, *names = file.parts
    if scheme == "hf:":
        address = f"hf://{'/'.join(names)}"
        commits[address], files = hub.download(address)
        return files
    if scheme != "s3:":
        return [file]
    from rather.checkpoint.store import download  # imports torch

    return [download(file, cache.folder)]


@dataclass
class _Builder:
    """Makes datasets from files, or finds them in the cache."""

    actor: ActorConfig
    keys: PairKeys
    rows: str  # what each row of the data must give
    console: Console

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the run, loaded only if something must be tokenised."""
        args = self.actor.model_args
        return load_tokenizer(self.actor.tokenizer_path, args.revision, args.trust_remote_code)

    @cached_property
    def tokenizer_digest(self) -> str:
        """The hash of a folder's files, which needs no transformers; else of what was loaded."""
        folder = Path(self.actor.tokenizer_path).expanduser()
        if not folder.is_dir():
            settings = [self.tokenizer.chat_template, self.tokenizer.special_tokens_map]
            text = json.dumps(settings, default=str, sort_keys=True)
            return text_sha(self.tokenizer.backend_tokenizer.to_str() + text)
        matches = {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)}
        files = sorted(file for file in matches if file.is_file())
        for file in files:
            refuse_outside(folder, file)
        if not files:
            raise DataError(
                f"{folder.absolute()}: no tokenizer in this folder (it has no tokenizer.json)."
            )
        return text_sha("".join(f"{file.name}:{file_sha(file)}\n" for file in files))

    def dataset(
        self, files: list[Path], data: DataArgs, cache: Cache, weights: list[float]
    ) -> tuple[PairDataset, Json]:
        """Return the pairs of files, and the report about them."""
        commits: dict[str, str] = {}
        groups: list[list[DataFile]] = []  # the sources of each entry of file_name
        for file in files:
            copies = local_files(file, cache, commits)
            groups.append(list(chain.from_iterable(map(find_sources, copies))))
        sources = list(chain.from_iterable(groups))
        layout = layout_of(self.keys, self.rows, data)
        images, layout = self._image_layout(sources, data, layout)
        shas = [[cache.sha(source.path) for source in group] for group in groups]

        def find_or_build() -> tuple[str, PairFile, Json]:
            address = self._address(shas, data, layout, images)
            return address, *cache.find_or_build(
                address, lambda target: self._build(target, groups, data, layout, images)
            )

        address, pair_file, report = find_or_build()
        if layout.refuse_images == NO_EARLY_IMAGES and IMAGES_REFUSED in report["dropped"]:
            images, layout = self._image_layout(sources, data, layout, has_images=True)
            if images:  # the first rows were text: all are read again, with images
                address, pair_file, report = find_or_build()
        counts = iter([entry["pairs"] for entry in report["files"]])
        ends = list(accumulate(sum(islice(counts, len(group))) for group in groups))
        rows_of_files = tuple(zip([0, *ends], ends, weights, strict=False))
        add_paths(report, sources)
        report |= {"overlong": data.overlong, "cache": str(pair_file.path), "commits": commits}
        if data.max_samples:
            report["max_samples"] = data.max_samples
        return PairDataset(pair_file, address, rows_of_files), report

    def _image_layout(
        self,
        sources: list[DataFile],
        data: DataArgs,
        layout: RowLayout,
        *,
        has_images: bool = False,
    ) -> tuple[ImageRecipe | None, RowLayout]:
        """Return how images of these files are read, and the layout that says so."""
        if data.image_dir and not Path(data.image_dir).expanduser().is_dir():
            raise DataError(f"data_args.image_dir: {data.image_dir} is not a folder.")
        are_named = bool(data.image_dir) or not layout.columns.keys().isdisjoint(IMAGES)
        has_images = has_images or are_named
        if not has_images and not any(_begins_with_images(file, data.encoding) for file in sources):
            return None, replace(layout, refuse_images=NO_EARLY_IMAGES)
        revision = self.actor.model_args.revision
        recipe, refusal = images_of(self.actor.model_path, revision, data)
        if recipe is None and data.image_dir:
            raise DataError(f"data_args.image_dir: {refusal}; remove the key.")
        folders = []
        for source in sources:
            folder = Path(data.image_dir).expanduser() if data.image_dir else source.path.parent
            folders.append(str(folder.absolute()))
        return recipe, replace(layout, refuse_images=refusal, image_dirs=folders)

    def _address(
        self,
        shas: list[list[str]],
        data: DataArgs,
        layout: RowLayout,
        images: ImageRecipe | None,
    ) -> str:
        """Return the hash of everything that decides the tokens; `shas` are those of the files."""
        settings = {
            "version": VERSION,
            "files": list(chain.from_iterable(shas)),
            "tokenizer": self.tokenizer_digest,
            "template": _template_identity(data.template or ""),
            "layout": {
                name: getattr(layout, name) for name in ("format", "columns", "ranked_pairs")
            },
            "sequence_length": self.keys.sequence_length,
            **{name: getattr(data, name) for name in (*RECIPE, "encoding")},
        }
        # Added after the first caches were written, so they are hashed only if they are set.
        later = {
            "max_prompt_length": data.max_prompt_length,
            "default_system": data.default_system,
            "chat_template_kwargs": data.chat_template_kwargs,
            "imports": _imported_sources(layout.format),
            "rows": layout.rows if layout.rows != "pairs" else None,
            "label_threshold": layout.label_threshold,
            "min_gap": layout.min_gap,
            "max_length_gap": layout.max_length_gap,
            "max_samples": data.max_samples,
            # The rows that are used then depend on which files are one entry of file_name.
            "entries": [len(group) for group in shas] if data.max_samples else None,
            "images": [images.digest, images.token, *layout.image_dirs] if images else None,
        }
        for name, setting in later.items():
            if setting or setting == 0:
                settings[name] = setting
        return text_sha(json.dumps(settings, sort_keys=True))

    def _build(
        self,
        target: Path,
        groups: list[list[DataFile]],
        data: DataArgs,
        layout: RowLayout,
        images: ImageRecipe | None,
    ) -> Json:
        sources = list(chain.from_iterable(groups))
        if images:
            use_processor_template(self.tokenizer, Path(self.actor.tokenizer_path).expanduser())
        recipe = recipe_of(self.tokenizer, data, self.keys.sequence_length, images)
        counts = RowCounts(sources)
        # A packed file is about a fifth of its text.
        sizes = [file.path.stat().st_size * (5 if file.gzipped else 1) for file in sources]
        processes = data.preprocessing_num_workers or _automatic_processes(sum(sizes))
        rows = chunks_of(groups, data.encoding, data.max_samples)
        schema = SCHEMA
        if images:
            schema = IMAGE_SCHEMA.with_metadata({IMAGE_TOKEN: str(images.token)})
        writer = batch_writer(target, schema)
        # What two letters that no vocabulary has become; a tokenizer with bytes tells them apart.
        one, other = self.tokenizer(
            ["\U00012000", "\U00010a00"], add_special_tokens=False
        ).input_ids
        unknown = one[-1] if one and one == other else -1
        tokens = np.zeros(2, np.int64)  # of answers: unknown ones, all
        with bar(self.console, "tokenising", sum(sizes)) as advance, writer as add:
            for encoded in encode_chunks(rows, recipe, layout, sources, processes):
                add(encoded.batch)
                source = encoded.chunk.source
                counts.add(source, encoded.head, encoded.batch.num_rows)
                for side in SIDES:
                    ids = encoded.batch.column(side).values.to_numpy()
                    tokens += (ids == unknown).sum(), len(ids)
                done = sum(sizes[:source]) + encoded.chunk.done * sizes[source]
                advance(done, f"{counts.rows} rows")
        used = {"name": "none", "sha256": ""}
        if recipe.template:
            used = {"name": recipe.template.name, "sha256": text_sha(recipe.template.text)}
        return {**counts.to_json(), "template": used, "unknown_tokens": tokens.tolist()}


def _template_identity(name: str) -> str:
    """Return the text of a template of Rather, the hash of a file, or else the name."""
    name = ALIASES.get(name, name)
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name).expanduser()
    if not name or not path.is_file():
        return name
    text, end = read_template(path)
    return file_sha(path) if end is None else text_sha(text) + end


def _imported_sources(format_name: str) -> list[str]:
    """Return the text of users' files that decide how rows are read; `auto` may use any."""
    names = FORMATS if format_name == "auto" else [format_name]
    sources = {FORMATS.source_of(name) or "" for name in names}
    return sorted(sources - {""})


def _automatic_processes(total_bytes: int) -> int:
    if total_bytes <= SMALL_BYTES:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
