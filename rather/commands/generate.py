"""`rather generate`: answers to the prompts of a file, by a model or by a server that runs it.

The prompts are sorted by length and cut into chunks. A chunk is generated with a seed of its own, a
digest of weights, prompts, decoding and its number, and written to a journal whole or not at all.
So a command that was killed anywhere and repeated ends in the same file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rather.commands.journal import (
    Journal,
    different_keys,
    first_entry,
    refuse_inputs,
    write_atomic,
)
from rather.commands.terminal import echo
from rather.config.found import NO_TRUST, Trust
from rather.config.run_config import DPOConfig
from rather.config.schema import TrainDataArgs
from rather.data.batch import PromptImage, prompt_images
from rather.data.formats import TextPair
from rather.data.image_tokens import ImageRecipe
from rather.data.json_rows import DropReason
from rather.data.pixels import PixelMaker
from rather.data.pool import encoder_of
from rather.data.prepare import images_of, recipe_of
from rather.data.prompts import PromptRow, read_prompts
from rather.data.read import find_sources
from rather.data.template import use_processor_template
from rather.errors import ConfigError, DataError, MemoryShortage
from rather.files import JsonObject, read_json, text_sha
from rather.model.generate import Decoding, batch_that_fits, generate
from rather.run_folder.model_source import Weights, here, weights_of
from rather.tracking.json_lines import strict_json

COLUMNS = ("prompt", "responses", "ended", "response_ids", "prompt_ids", "tokens_digest")


@dataclass(frozen=True)
class AnswerRequest:
    """What is asked for: how many answers to each prompt, and how they are decoded."""

    answers: int
    decoding: Decoding
    seed: int = 0
    system: str | None = None

    def as_json(self) -> JsonObject:
        """Return it as meta.json has it."""
        decoding = asdict(self.decoding) | {"stop": list(self.decoding.stop)}
        return {"answers": self.answers, **decoding, "seed": self.seed, "system": self.system}


class WrittenAnswer(NamedTuple):
    """A finished answer; the ids are None if a server does not say them."""

    text: str
    ended: bool
    ids: list[int] | None


def written_answer(text: Any, ended: Any, ids: Any) -> WrittenAnswer:
    """Return an answer of a journal; raise TypeError if it is not one."""
    if isinstance(text, str) and isinstance(ended, bool) and isinstance(ids, list | None):
        return WrittenAnswer(text, ended, ids)
    raise TypeError


class Prompts:
    """The prompts of a file, rendered and tokenised as `rather chat` does."""

    def __init__(self, weights: Weights, file: Path, request: AnswerRequest) -> None:
        self.rows = read_prompts(file, refuse_images="")
        self.has_images = any(row.images for row in self.rows)
        self.tokenizer = weights.tokenizer()
        self.image_recipe: ImageRecipe | None = None
        if self.has_images:
            data_args = weights.actor.data_args if weights.actor else TrainDataArgs()
            self.image_recipe, refusal = images_of(weights.model, weights.args.revision, data_args)
            if refusal:
                raise DataError(f"{file}: a prompt has images, but {refusal}.")
            use_processor_template(self.tokenizer, Path(weights.tokenizer_path).expanduser())
        length = DPOConfig().sequence_length
        recipe = recipe_of(self.tokenizer, TrainDataArgs(), length, images=self.image_recipe)
        if request.system and recipe.template is None:
            raise ConfigError(f"--system: {weights.name} has no chat template to put it into.")
        self.has_template = recipe.template is not None
        self.template_sha = text_sha(recipe.template.text) if recipe.template else None
        self.tokenizer_sha = text_sha(recipe.tokenizer)
        self.tokens_digest = recipe.digest
        self.system = request.system
        self.encoder: Any = encoder_of(replace(recipe, default_system=request.system), str(file))
        self.end_of_turn: int | None = self.encoder.end_of_turn
        self.images: list[tuple[PromptImage, ...]] = []  # of each prompt
        self.ids = [self._ids(file, number, row) for number, row in enumerate(self.rows, 1)]

    def _ids(self, file: Path, number: int, row: PromptRow) -> list[int]:
        if not self.has_template and not isinstance(row.prompt, str):
            raise DataError(
                f"{file}: prompt {number} holds messages or a system message, but the model has no "
                "chat template; use a model that has one, or prompts of plain text."
            )
        folder = str(file.absolute().parent)
        pair = TextPair(
            row.prompt, "", "", row.tools, row.template_kwargs, images=row.images, image_dir=folder
        )
        try:
            ids: list[int] = self.encoder.prompt_ids(pair)
            self.images.append(prompt_images(pair.images, self.encoder.image_facts(pair)))
        except DropReason as reason:
            raise DataError(f"{file}: prompt {number}: {reason.detail}") from None
        if not ids:
            raise DataError(f"{file}: prompt {number} has no tokens.")
        return ids

    def digest(self) -> str:
        """Return the identity of the prompts and of the content of their images."""
        digests = [image.digest for images in self.images for image in images]
        text = strict_json([row.row for row in self.rows])
        return text_sha(text + "".join(digests))

    def written_row(self, index: int, answers: Sequence[WrittenAnswer]) -> JsonObject:
        """Return the row of the output file for one prompt."""
        row = self.rows[index]
        written = row.written
        if self.system and not row.has_system:
            written["system"] = self.system  # the answers were given with it
        ids = [answer.ids for answer in answers]
        own_columns: JsonObject = {
            "prompt": written.pop("prompt"),
            "responses": [answer.text for answer in answers],
            "ended": [answer.ended for answer in answers],
            "response_ids": None if any(ids_of_answer is None for ids_of_answer in ids) else ids,
            "prompt_ids": self.ids[index],
            "tokens_digest": self.tokens_digest,
        }
        return own_columns | {
            name: column for name, column in written.items() if name not in COLUMNS
        }

    def cut_at_stop(self, answer: WrittenAnswer, texts: Sequence[str]) -> WrittenAnswer:
        """Return the answer up to a stop text, which ends it."""
        stops = [answer.text.find(text) for text in texts if text in answer.text]
        if not stops:
            return answer
        text = answer.text[: min(stops)]
        if answer.ids is None:
            return WrittenAnswer(text, True, None)
        length = len(answer.ids)
        while length and not text.startswith(self.decode(answer.ids[:length])):
            length -= 1
        ids = answer.ids[:length]
        if self.decode(ids) != text:  # the stop text begins inside a token
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return WrittenAnswer(text, True, ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class Output:
    """The answers file, its meta.json and the journal that they are made from."""

    def __init__(self, path: Path, *, force: bool) -> None:
        self.path, self.force = path, force
        self.meta = path.with_name(f"{path.name}.meta.json")
        self.part = path.with_name(f"{path.name}.part")
        self._journal: Journal | None = None

    def is_finished(self, work: JsonObject) -> bool:
        """Return whether the file is the result of this work; refuse to replace another one."""
        if not self.path.exists():
            return False
        try:
            earlier = read_json(self.meta)
            names = different_keys(work, {name: earlier.get(name) for name in work})
        except (OSError, ValueError, AttributeError):
            names = ["its meta.json, which is missing"]
        if names and not self.force:
            raise ConfigError(
                f"{self.path}: already exists and differs in {', '.join(names)}; name another "
                "--out, or replace it with --force."
            )
        if names and first_entry(self.part) is None:
            self.path.unlink()
        return not names

    def open_journal(self, work: JsonObject) -> Journal:
        """Open the journal, which is locked until `close`: no other command opens it before it is
        removed."""
        self._journal = Journal(self.part, work)
        return self._journal

    def finish(self, rows: Iterator[JsonObject], meta: JsonObject) -> None:
        """Write both files; the answers last, as they say that the work is done."""
        write_atomic(self.meta, [strict_json(meta, indent=1), "\n"])
        write_atomic(self.path, (f"{strict_json(row)}\n" for row in rows))
        self.part.unlink(missing_ok=True)  # a second command that finds the work done removes it

    def close(self) -> None:
        if self._journal:
            self._journal.close()


def progress_bar(total: int, done: int) -> Progress:
    """Return a bar on stderr that counts answers."""
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task("answers", total=total, completed=done)
    return bar


Answered = tuple[dict[int, list[WrittenAnswer]], JsonObject]  # the last: more for meta.json


def write_answers(
    answer: Callable[[Weights, Prompts, JsonObject, Output], Answered],
    source: JsonObject,
    model: str,
    file: Path,
    out: Path,
    request: AnswerRequest,
    *,
    trust: Trust = NO_TRUST,
    force: bool = False,
    dry_run: bool = False,
) -> JsonObject:
    """Write the answers that `answer` gives, and return meta.json.

    `answer` gets the weights, the prompts, what the work is, and the output with its journal;
    `source` says where answers come from.
    """
    weights = weights_of(model, trust)
    if weights.is_reward:
        raise ConfigError(f"{model}: is a reward model, which writes no text; use `rather judge`.")
    prompts = Prompts(weights, file, request)
    images = [image.source for images in prompts.images for image in images]
    refuse_inputs(out, [*(source.path for source in find_sources(file)), *images])
    if dry_run:
        print_forecast(prompts, request)
        return {}
    work: JsonObject = {
        "model": model,
        "weights": weights.digest(),
        "rows": len(prompts.rows),
        "prompts": prompts.digest(),
        "tokenizer": prompts.tokenizer_sha,
        "template": prompts.template_sha,
        "decoding": request.as_json(),
        **source,
    }
    output = Output(out, force=force)
    if output.is_finished(work):
        output.part.unlink(missing_ok=True)
        echo(f"{out}: is already complete.", err=True)
        return dict(read_json(output.meta))
    with closing(output):
        answers, facts = answer(weights, prompts, work, output)
        tokens = token_counts(prompts, answers) | facts.pop("tokens", {})
        meta = work | facts | {"tokens": tokens}
        rows = (prompts.written_row(index, answers[index]) for index in range(len(prompts.ids)))
        output.finish(rows, meta)
    return meta


def generate_answers(
    model: str,
    file: Path,
    out: Path,
    request: AnswerRequest,
    *,
    batch: int | None = None,
    **options: Any,
) -> JsonObject:
    """Write the answers of a model in this process, and return meta.json."""

    def answer(weights: Weights, prompts: Prompts, work: JsonObject, output: Output) -> Answered:
        causal_lm = weights.load(here(), sees_images=prompts.has_images).causal_lm
        decides = {name: fact for name, fact in work.items() if name != "model"}  # not its path
        sampler = Sampler(causal_lm, prompts, request, text_sha(strict_json(decides)))
        earlier_batch = (first_entry(output.part) or {}).get("batch")
        sampler.set_batch(batch or (earlier_batch if isinstance(earlier_batch, int) else None))
        answers: dict[int, list[WrittenAnswer]] = {}
        count = request.answers
        journal = output.open_journal(work | {"batch": sampler.batch})
        with journal.reading():
            for entry in journal.entries:
                for index, answers_of_prompt in entry["answers"]:
                    answers[index] = [written_answer(*fields) for fields in answers_of_prompt]
        with progress_bar(len(prompts.ids) * count, len(answers) * count) as bar:
            for number, chunk in enumerate(sampler.chunks):
                if all(index in answers for index in chunk):
                    continue
                answers_of_chunk = sampler.answer(number)
                journal.append({"chunk": number, "answers": list(answers_of_chunk.items())})
                answers |= answers_of_chunk
                bar.advance(bar.task_ids[0], len(answers_of_chunk) * count)
        return answers, {"batch": sampler.batch}

    source = {"server": None, "device": here().partition(":")[0]}
    return write_answers(answer, source, model, file, out, request, **options)


def token_counts(prompts: Prompts, answers: dict[int, list[WrittenAnswer]]) -> JsonObject:
    """Return how many tokens prompts and answers have; null if a server does not say ids."""
    ids = [answer.ids for answers_of_prompt in answers.values() for answer in answers_of_prompt]
    lengths = [len(ids_of_answer) for ids_of_answer in ids if ids_of_answer is not None]
    total = sum(lengths) if len(lengths) == len(ids) else None
    return {"prompts": sum(map(len, prompts.ids)), "answers": total}


def print_forecast(prompts: Prompts, request: AnswerRequest) -> None:
    """Print what would be generated, and the first prompt as the model gets it."""
    count = len(prompts.ids) * request.answers
    prompt_tokens = sum(map(len, prompts.ids)) * request.answers
    answer_tokens = count * request.decoding.max_new_tokens
    echo(f"prompts: {len(prompts.ids)}, answers: {count}")
    echo(f"tokens: {prompt_tokens} in prompts, at most {answer_tokens} in answers")
    echo(f"the first prompt, {len(prompts.ids[0])} tokens:")
    echo(prompts.tokenizer.decode(prompts.ids[0], skip_special_tokens=False))


class Sampler:
    """Generates answers chunk by chunk; the batch size is part of the result."""

    def __init__(self, causal_lm: Any, prompts: Prompts, request: AnswerRequest, work: str) -> None:
        self.causal_lm, self.prompts, self.request, self.work = causal_lm, prompts, request, work
        self.maker = PixelMaker(prompts.image_recipe) if prompts.image_recipe else None
        longest, largest = max(map(len, prompts.ids)), max(map(max, prompts.ids))
        embeddings = causal_lm.get_input_embeddings().num_embeddings
        if largest >= embeddings:
            raise ConfigError(
                f"the prompts have token ids up to {largest}, but the model has {embeddings} "
                "embeddings; the tokenizer belongs to another model."
            )
        config = causal_lm.config.get_text_config()
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        if self.positions and longest >= self.positions:
            raise DataError(
                f"a prompt has {longest} tokens, the model only {self.positions} positions; "
                "remove or shorten it."
            )

    def set_batch(self, batch: int | None) -> None:
        """Use the batch size of the first start, or choose one that fits into memory."""
        longest = max(map(len, self.prompts.ids))
        tokens = longest + self.request.decoding.max_new_tokens
        self.batch = batch or batch_that_fits(self.causal_lm, tokens)
        # The longest come first: if they fit into memory, all others do.
        order = sorted(range(len(self.prompts.ids)), key=lambda i: (-len(self.prompts.ids[i]), i))
        size = max(1, self.batch // self.request.answers)
        self.chunks = [order[first : first + size] for first in range(0, len(order), size)]

    def answer(self, number: int) -> dict[int, list[WrittenAnswer]]:
        """Return the answers of one chunk, by the index of their prompt."""
        chunk = self.chunks[number]
        ids = [self.prompts.ids[index] for index in chunk]
        images = [self.prompts.images[index] for index in chunk]
        decoding, count = self.request.decoding, self.request.answers
        if self.positions:
            room = self.positions - max(map(len, ids))
            decoding = replace(decoding, max_new_tokens=min(decoding.max_new_tokens, room))
        text = strict_json([self.work, number, ids])
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
        device = self.causal_lm.device
        end = self.prompts.end_of_turn
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            try:
                found = generate(
                    self.causal_lm, self.prompts.tokenizer, ids, decoding, answers=count,
                    end_of_turn=end, images=images, maker=self.maker,
                )  # fmt: skip
            except torch.OutOfMemoryError as error:
                raise MemoryShortage(
                    f"{self.batch} answers at a time do not fit in memory ({error}); lower "
                    "--max-new-tokens or --batch."
                ) from None
        answers = [WrittenAnswer(self.prompts.decode(one.ids), one.ended, one.ids) for one in found]
        cut = [self.prompts.cut_at_stop(answer, decoding.stop) for answer in answers]
        return {index: cut[i * count : (i + 1) * count] for i, index in enumerate(chunk)}
