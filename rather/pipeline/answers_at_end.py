"""Answers on several devices, where no process has the whole model while it trains.

They are asked once, at the end: the main process loads the base and the exported model, one after
the other.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rather.cluster.memory import free_memory
from rather.config.found import Trust
from rather.errors import RatherError
from rather.model.generate import GeneratedAnswer
from rather.outcome.forgetting import Figures
from rather.pipeline.evaluation import Answers
from rather.pipeline.forgetting import ForgettingCheck, answer_metrics
from rather.run_folder.model_source import here, weights_of

log = logging.getLogger(__name__)

ROOM = 1.5  # times the size of the weights, to load them and to answer


@dataclass
class AnswersAtEnd:
    """Asks the base and the exported model: eval_prompts, and the questions of `forgetting`."""

    base: str
    trust: Trust
    answers: Answers | None
    forgetting: ForgettingCheck | None

    def record(self, step: int, folder: Path) -> dict[str, Any]:
        """Return the metrics; empty, with the reason in the log, if a model cannot be loaded."""
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else free_memory()
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if free < ROOM * size:
            log.warning(
                "answers were not compared: the exported model has %.1f GiB of weights, and %.1f "
                "GiB are free on the first device; use `rather generate` and `rather judge`",
                size / 2**30,
                free / 2**30,
            )
            return {}
        try:
            known, before = self._ask(self.base)
            policy, after = self._ask(str(folder))
            metrics: dict[str, Any] = {}
            if self.answers:
                metrics |= self.answers.compare(step, known, policy)
            if self.forgetting and before and after:
                chosen = self.forgetting.chosen
                metrics |= answer_metrics(before.as_json(), after, chosen)
            return metrics
        except (RatherError, OSError, torch.OutOfMemoryError) as error:
            log.warning("answers were not compared: %s", error)
            return {}

    def _ask(self, model: str) -> tuple[list[GeneratedAnswer], Figures | None]:
        policy = weights_of(model, self.trust).load(here())
        try:
            answers = self.answers.answers_of(policy) if self.answers else []
            return answers, self.forgetting.figures_of(policy) if self.forgetting else None
        finally:
            del policy
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
