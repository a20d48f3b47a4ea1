"""Forgetting: what a model can no longer do after training.

Two figures on texts and questions that have nothing to do with the training data: the loss per
token on the texts, and how many answers of the base are still right. forgetting.jsonl next to this
file has both (CC0); `forgetting: FILE` names another file of the same form.

A greedy answer of a small model often hangs on a token that is hardly more likely than the next:
noise of 1 % on the weights of SmolLM2-135M changes 2 of 28 right answers. So each question is asked
in three phrasings. The base knows an answer if it is right in all of them, and the answer is lost
if it is wrong in most of them afterwards.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rather.config.found import NO_TRUST, Trust
from rather.config.run_config import DPOConfig
from rather.config.schema import DataArgs, TrainDataArgs
from rather.data.batch import Columns, PairBatch, TokenPair
from rather.data.formats import TextPair
from rather.data.json_rows import DropReason
from rather.data.pool import encoder_of
from rather.data.prepare import recipe_of
from rather.data.shares import Batches
from rather.data.tokens import Ids
from rather.errors import ConfigError, DataError
from rather.files import JsonObject, parse_json, read_bytes, text_sha
from rather.losses.objective import from_config
from rather.model.budget import LADDER, TOKENS
from rather.model.generate import Decoding, GeneratedAnswer, generate
from rather.model.policy import PolicyModel
from rather.outcome.habits import chance_of
from rather.run_folder.model_source import here, weights_of
from rather.train.rank_trainer import RankTrainer

SHIPPED = Path(__file__).with_name("forgetting.jsonl")
ANSWER_TOKENS = 40  # of a greedy answer, in which an accepted answer must occur
PHRASINGS = ("{}", "Please answer this question. {}", "{} Answer in one short sentence.")
MOST = len(PHRASINGS) // 2 + 1  # of them
LEAST_KNOWN = 10  # a model that knows fewer answers is not judged by questions
PROMPTS_AT_ONCE = 192
MOST_UNKNOWN = 0.5  # of the tokens of the texts

LogProbs = Callable[[Sequence[TokenPair]], Columns]
Answer = Callable[[Sequence[Ids], int], Sequence[GeneratedAnswer]]


@dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]  # of which one must occur, as a word

    def is_right(self, reply: str) -> bool:
        words = "|".join(map(re.escape, self.answers))
        return re.search(rf"(?<!\w)({words})(?!\w)", reply, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Figures:
    """What a model can do: `replies` are its answers to the questions, empty if none were asked."""

    loss: float  # per token of the texts
    replies: list[str] = field(default_factory=list)  # to each question, in each of PHRASINGS
    right: list[int] = field(default_factory=list)  # the numbers of right replies

    def as_json(self) -> JsonObject:
        counts = {"right": self.right, "replies": len(self.replies)}
        return {"loss": self.loss, **counts, "texts": self.replies}


def answered_right(right: Iterable[int], least: int) -> set[int]:
    """Return the questions that are answered right in at least so many phrasings."""
    times = Counter(reply // len(PHRASINGS) for reply in right)
    return {question for question, count in times.items() if count >= least}


def known_answers(right: Iterable[int]) -> set[int]:
    """Return the questions that are answered right in every phrasing."""
    return answered_right(right, len(PHRASINGS))


@dataclass(frozen=True)
class Forgotten:
    """The difference between two models, of which the second was trained from the first."""

    loss_before: float
    loss: float
    known: int  # answers of the first model; 0: no questions were asked, or it knows too few
    kept: int  # of these
    new: int = 0  # answers that the second model knows, and that were wrong in most phrasings

    @staticmethod
    def between(before: JsonObject, after: JsonObject) -> Forgotten:
        """Compare two `Figures.as_json()`."""
        known = known_answers(before["right"])
        same_questions = before.get("replies") == after.get("replies", 0) > 0
        if len(known) < LEAST_KNOWN or not same_questions:
            return Forgotten(before["loss"], after["loss"], 0, 0)
        kept = known & answered_right(after["right"], MOST)
        new = known_answers(after["right"]) - answered_right(before["right"], MOST)
        return Forgotten(before["loss"], after["loss"], len(known), len(kept), len(new))

    @property
    def kept_share(self) -> float | None:
        """Return the share of the known answers that are kept; None if not judged."""
        return self.kept / self.known if self.known else None

    @property
    def chance(self) -> float:
        """Return how likely chance alone loses so many more known answers than it gains.

        A model that moves a little answers some borderline questions in another way: without
        forgetting, as many become right as wrong. So of the changed answers, half should be lost.
        """
        return chance_of(self.known - self.kept, self.new)

    def text(self) -> str:
        """Return `the loss on neutral text rose by 0.021 to 2.412, ...`."""
        change = self.loss - self.loss_before
        verb = "rose" if change > 0 else "fell"
        said = f"the loss on neutral text {verb} by {abs(change):.3f} to {self.loss:.3f}"
        if not math.isfinite(change):
            said = f"the loss on neutral text is {self.loss}"
        if self.known:
            said += f", {self.kept} of {self.known} known answers are kept, {self.new} are new"
        return said


def read_rows(path: Path) -> tuple[list[Question], list[str]]:
    """Return the questions and the texts of a file."""
    questions, texts = list[Question](), list[str]()
    try:
        lines = read_bytes(path).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"forgetting: {path} cannot be read ({error}).") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        row = row if isinstance(row, dict) else {}
        text, question, answers = (row.get(name) for name in ("text", "question", "answers"))
        has_answers = isinstance(answers, list) and all(isinstance(a, str) and a for a in answers)
        if isinstance(question, str) and question.strip() and answers and has_answers:
            questions.append(Question(question, tuple(answers)))
        elif isinstance(text, str) and text.strip():
            texts.append(text)
        else:
            raise DataError(
                f"forgetting: {path}, line {number}: must be {{'text': TEXT}} or "
                "{'question': TEXT, 'answers': [TEXT, ...]}."
            )
    if not texts:
        raise DataError(f"forgetting: {path} has no row with a text.")
    return questions, texts


class ForgettingSet:
    """The texts and questions of a file as token ids of one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        sequence_length: int,
        data: DataArgs | None = None,
        file: Path | None = None,
    ) -> None:
        path = file or SHIPPED
        self.tokenizer = tokenizer
        self.questions, texts = read_rows(path)
        recipe = recipe_of(tokenizer, data or TrainDataArgs(), sequence_length)
        encoder = encoder_of(recipe, f"forgetting: {path}")
        self.end_of_turn: int | None = encoder.end_of_turn
        self.prompts: list[Ids] = []
        for question in self.questions:
            for phrasing in PHRASINGS:
                asked = phrasing.format(question.text)
                if recipe.template is None:
                    asked = f"Question: {asked}\nAnswer:"
                try:
                    ids = encoder.prompt_ids(TextPair(asked, "", ""))
                except DropReason as reason:
                    text = f"forgetting: {path}: {question.text}: {reason.detail}"
                    raise DataError(text) from None
                self.prompts.append(ids)
        # Answers must fit, too; a model of very short texts is not asked.
        longest = max(map(len, self.prompts), default=0)
        if longest + ANSWER_TOKENS > sequence_length:
            self.questions, self.prompts = [], []
        encoded = tokenizer(texts, add_special_tokens=True).input_ids
        self.pairs = [_as_pair(ids[:sequence_length]) for ids in encoded if len(ids) > 1]
        self.tokens = sum(len(pair.chosen) for pair in self.pairs)
        unknown = sum(ids.count(tokenizer.unk_token_id) for ids in encoded)
        # A tokenizer of another language: nothing could be told from such texts.
        self.is_readable = unknown < MOST_UNKNOWN * sum(map(len, encoded))
        self.digest = text_sha(str([self.questions, texts, PHRASINGS]))

    def measure(self, log_probs: LogProbs, answer: Answer | None) -> Figures:
        """Return the figures of a model; without `answer` only the loss on the texts."""
        sums = log_probs(self.pairs)["sum"][:, 0]
        loss = -float(sums.double().sum()) / self.tokens
        if answer is None or not self.prompts:
            return Figures(loss)
        replies = []
        for first in range(0, len(self.prompts), PROMPTS_AT_ONCE):
            for reply in answer(self.prompts[first : first + PROMPTS_AT_ONCE], ANSWER_TOKENS):
                replies.append(self._text(reply.ids))
        right = [
            number
            for number, reply in enumerate(replies)
            if self.questions[number // len(PHRASINGS)].is_right(reply)
        ]
        return Figures(loss, replies, right)

    def _text(self, ids: Sequence[int]) -> str:
        """Return an answer as text, up to the template's end of a turn."""
        if self.end_of_turn in ids:
            ids = ids[: ids.index(self.end_of_turn)]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()


def _as_pair(ids: Iterable[int]) -> TokenPair:
    """Return a text as a single answer to its first token, which has no probability."""
    tokens = np.array(list(ids), np.int32)
    empty = np.empty(0, np.int32)
    return TokenPair(tokens[:1], tokens[1:], empty, ((1, len(tokens)),), ())


def forgetting_of(model: str, file: Path | None = None, *, trust: Trust = NO_TRUST) -> Figures:
    """Return the figures of a model folder, hub name, adapter, run or checkpoint.

    `Forgotten.between(before.as_json(), after.as_json())` compares two of them.
    """
    weights = weights_of(model, trust)
    if weights.is_reward:
        raise ConfigError(f"{model}: is a reward model, which writes no text.")
    policy = weights.load(here())
    config = policy.causal_lm.config.get_text_config()
    settings = DPOConfig()
    longest = getattr(config, "max_position_embeddings", None) or settings.sequence_length
    measured = ForgettingSet(weights.tokenizer(), min(longest, settings.sequence_length), file=file)
    return figures_of(policy, measured)


def figures_of(policy: PolicyModel, measured: ForgettingSet) -> Figures:
    """Return the figures of a model that is whole in this process, and not in training."""
    trainer = RankTrainer(policy, from_config(DPOConfig()))
    kind = here().partition(":")[0]

    def log_probs(pairs: Sequence[TokenPair]) -> Columns:
        batches: Sequence[PairBatch] = Batches(pairs, TOKENS[kind], None, LADDER[kind], 1)
        return trainer.log_probs(batches)

    def answer(prompts: Sequence[Ids], tokens: int) -> list[GeneratedAnswer]:
        decoding = Decoding(tokens)
        return generate(
            policy.causal_lm,
            measured.tokenizer,
            prompts,
            decoding,
            end_of_turn=measured.end_of_turn,
        )

    with torch.no_grad():
        return measured.measure(log_probs, answer)
