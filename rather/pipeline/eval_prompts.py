"""eval_prompts: the same prompts answered by policy and reference at each evaluation, the likeliest
token each time.

Of one device only: there both models lie whole in this process. No random number is drawn and no
weight touched.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rather.cluster.launch import Roles
from rather.cluster.role import Role, as_local
from rather.cluster.worker import ActorWorker
from rather.config.schema import DPOConfig, EvalPrompts
from rather.data.formats import TextPair
from rather.data.json_rows import DropReason
from rather.data.pool import LimitedEncoder, encoder_of
from rather.data.prepare import recipe_of
from rather.data.tokens import Encoder, Ids
from rather.errors import ConfigError, DataError, MemoryShortage
from rather.model.generate import GeneratedAnswer
from rather.pipeline.evaluation import Interrupted
from rather.tracking.json_lines import strict_json

log = logging.getLogger(__name__)

ANSWERS = "answers.jsonl"
METRICS = "eval/answers/"
AT_ONCE = 16  # prompts; fewer where memory falls short
RUN = 4  # tokens: repetition is the share of such runs that came before in the same answer


class Answers:
    """Of a run whose config has `eval_prompts`."""

    def __init__(self, config: DPOConfig, roles: Roles) -> None:
        assert config.eval_prompts is not None
        as_local(roles.actor_train, "eval_prompts")
        self.config, self.roles, self.asked = config, roles, config.eval_prompts
        self.file = config.run_dir / ANSWERS
        self.prompts = read_prompts(self.asked, config)
        self._reference: list[GeneratedAnswer] | None = None

    def begin(self, tokenizer: Any, *, resumes: bool) -> None:
        """Makes tokens of the prompts, as training does.

        Called before the weights of a checkpoint come: without a reference, the policy is compared
        with its beginning.
        """
        self.tokenizer = tokenizer
        encoder = encoder_of(
            recipe_of(tokenizer, self.config, self.config.actor_train.data_args), "eval_prompts"
        )
        self.end_of_turn = encoder.end_of_turn
        self.ids = [
            self._ids_of(encoder, number, text) for number, text in enumerate(self.prompts, 1)
        ]
        if resumes and self.roles.reference is None:
            self._reference = self._answers(self.roles.actor_train)

    def forget_reference(self) -> None:
        """Discard the answers of the reference: it has moved."""
        self._reference = None

    def forget_unlogged(self) -> None:
        """Remove the answers of evaluations that metrics.jsonl lacks: they will be repeated."""
        if not self.file.exists():
            return
        logged = {
            line["step"]
            for line in _lines(self.config.run_dir / "metrics.jsonl")
            if f"{METRICS}prompts" in line
        }
        lines = _lines(self.file)
        kept = [line for line in lines if line["step"] in logged]
        if len(kept) < len(lines) or not self.file.read_bytes().endswith(b"\n"):
            whole = self.file.with_name(f".tmp-{self.file.name}")
            whole.unlink(missing_ok=True)
            if self._write(whole, kept):
                os.replace(whole, self.file)

    def record(self, step: int, stopped: Callable[[], bool]) -> dict[str, float | int]:
        """Return the metrics of an evaluation and write the texts to answers.jsonl.

        `stopped` is called between prompts.
        """
        policy = self._answers(self.roles.actor_train, stopped)
        if self._reference is None:  # without one it is step 0, and the policy its own beginning
            self._reference = (
                self._answers(self.roles.reference, stopped) if self.roles.reference else policy
            )
        found = {"reference": self._reference, "policy": policy}
        stats = {name: [_stats(answer) for answer in answers] for name, answers in found.items()}
        texts = {
            name: [self._text(answer) for answer in answers] for name, answers in found.items()
        }
        rows = [
            {"step": step, "prompt": prompt, **{name: each[place] for name, each in texts.items()}}
            | {f"{name}_stats": each[place] for name, each in stats.items()}
            for place, prompt in enumerate(self.prompts)
        ]
        self._write(self.file, rows)
        means = {
            f"{METRICS}{name}/{key}": _mean(each, key)
            for name, each in stats.items()
            for key in each[0]
        }
        return {**means, f"{METRICS}prompts": len(self.prompts)}

    def _ids_of(self, encoder: Encoder | LimitedEncoder, number: int, text: str) -> Ids:
        try:
            ids = encoder.prompt_ids(TextPair(text, "", ""), as_trained=True)
        except DropReason as reason:
            raise DataError(f"eval_prompts: prompt {number}: {reason.detail}") from None
        length, limit = len(ids) + self.asked.max_new_tokens, self.config.sequence_length
        if length > limit:
            raise ConfigError(
                f"eval_prompts: prompt {number} has {len(ids)} tokens, and with max_new_tokens "
                f"({self.asked.max_new_tokens}) more than sequence_length ({limit}); lower max_new_tokens, shorten the "
                "prompt or raise sequence_length."
            )
        return ids

    def _answers(
        self, role: Role, stopped: Callable[[], bool] = lambda: False
    ) -> list[GeneratedAnswer]:
        worker = as_local(role, "eval_prompts")
        found: list[GeneratedAnswer] = []
        for first in range(0, len(self.ids), AT_ONCE):
            if stopped():
                raise Interrupted
            found += self._answer(worker, self.ids[first : first + AT_ONCE])
        worker.release()
        return [self._cut(answer) for answer in found]

    def _answer(self, role: ActorWorker, prompts: Sequence[list[int]]) -> list[GeneratedAnswer]:
        """Answer all prompts at once, or one half after the other if memory runs out."""
        try:
            return role.answer(prompts, self.tokenizer, self.asked.max_new_tokens)
        except torch.OutOfMemoryError as error:
            if len(prompts) == 1:
                raise MemoryShortage(
                    "eval_prompts: an answer does not fit in memory next to the models "
                    f"({error}); lower max_new_tokens."
                ) from error
        role.release()  # here, where the exception no longer holds what filled the memory
        half = len(prompts) // 2
        return [*self._answer(role, prompts[:half]), *self._answer(role, prompts[half:])]

    def _cut(self, answer: GeneratedAnswer) -> GeneratedAnswer:
        """At the token with which the template ends a turn: a base model's own settings need not
        know it.
        """
        if self.end_of_turn not in answer.ids:
            return answer
        return GeneratedAnswer(answer.ids[: answer.ids.index(self.end_of_turn)], ended=True)

    def _text(self, answer: GeneratedAnswer) -> str:
        text: str = self.tokenizer.decode(answer.ids, skip_special_tokens=True)
        return text

    def _write(self, path: Path, rows: Sequence[dict[str, Any]]) -> bool:
        """Write lines; if the disk is full the texts are lost and the run continues."""
        try:
            with path.open("a", encoding="utf-8") as file:
                file.writelines(strict_json(row) + "\n" for row in rows)
        except OSError as error:
            log.warning("%s: cannot be written (%s)", path, error.strerror)
            return False
        return True


def read_prompts(asked: EvalPrompts, config: DPOConfig) -> list[str]:
    """Those of the config, or of its file: a line of text each, or a row with `prompt`."""
    if asked.file is None:
        return list(asked.prompts or [])
    path = config.actor_train.data_args.locate(asked.file)
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"eval_prompts.file: {path} cannot be read ({error}).") from error
    if not lines:
        raise DataError(f"eval_prompts.file: {path} has no prompt in it.")
    if path.suffix != ".jsonl":
        return lines
    return [_prompt_of(line, f"{path}, prompt {number}") for number, line in enumerate(lines, 1)]


def _prompt_of(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"eval_prompts.file: {place}: not valid JSON ({error}).") from error
    text = row.get("prompt") if isinstance(row, dict) else row
    if not isinstance(text, str) or not text.strip():
        raise DataError(
            f"eval_prompts.file: {place}: neither a text nor a row with a text under 'prompt'."
        )
    return text


def _stats(answer: GeneratedAnswer) -> dict[str, Any]:
    return {"tokens": len(answer.ids), "repetition": repetition(answer.ids), "ended": answer.ended}


def repetition(ids: Sequence[int]) -> float:
    """The share of runs of four tokens that came before in the same answer; 0 of one too short to
    have two.
    """
    runs = [tuple(ids[first : first + RUN]) for first in range(len(ids) - RUN + 1)]
    return round(1 - len(set(runs)) / len(runs), 4) if runs else 0.0


def _mean(stats: Sequence[dict[str, Any]], key: str) -> float:
    return sum(float(one[key]) for one in stats) / len(stats)


def _lines(file: Path) -> list[dict[str, Any]]:
    """Of a line that a kill has torn nothing; it may have torn a letter, too."""
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
