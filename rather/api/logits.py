"""Training with a loss of whole logits, for subclasses that override `_post_compute_loss`.

It is slower and takes more memory than the head of the model, which never keeps all logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from rather.data.batch import Columns, PairBatch, PairFacts
from rather.errors import DataError
from rather.losses.metrics import Scored, weighted_sums
from rather.losses.objective import PairLoss
from rather.model.policy import PolicyModel
from rather.parallel.stages import Objective
from rather.train.rank_trainer import RankTrainer, WholeModelRunner

# labels, loss_mask, reference of the chosen and of the rejected answers, logits -> loss, metrics
LossOfLogits = Callable[..., tuple[Tensor, Mapping[str, Any]]]


class LogitsRunner(WholeModelRunner):
    """Runs micro-batches with their logits among the columns."""

    def backward(
        self, batches: Sequence[PairBatch], wanted: Collection[str], objective: Objective
    ) -> None:
        for batch in (each.to(self.device) for each in batches):
            objective(batch, with_logits(self.policy, batch)).backward()  # type: ignore[no-untyped-call]


class LogitsTrainer(RankTrainer):
    """A whole model on one process, trained with a function of its logits."""

    def __init__(
        self, policy: PolicyModel, loss: PairLoss, function: LossOfLogits, **options: Any
    ) -> None:
        super().__init__(policy, loss, runner=LogitsRunner(policy), **options)
        self.whole, self.function = policy, function

    def _score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None, step: PairFacts
    ) -> Scored:
        sums = {"sum": policy["sum"]}
        scored = super()._score(facts, sums, reference, step)
        if "logits" not in policy:  # only the log-probs of the pairs are wanted
            return scored
        if (facts.weight != 1).any():
            raise DataError("weight: _post_compute_loss gets no weights of pairs; leave them out.")
        known = scored.x.reference
        chosen, rejected = (None, None) if known is None else known.unbind(1)
        labels, mask, logits = (policy[name] for name in ("labels", "loss_mask", "logits"))
        loss, metrics = self.function(labels, mask, chosen, rejected, logits)
        each = torch.zeros_like(scored.losses)
        extra = {
            name: each + torch.as_tensor(value).detach().to(each.device)
            for name, value in metrics.items()
            if name != "loss"
        }
        return replace(scored, losses=each + loss, extra=extra)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PairBatch], reference: Columns | None) -> dict[str, float]:
        """Return metrics.weighted_sums of one step's micro-batches, with the function's loss."""
        facts, total = PairFacts.of_step(batches).to(self.device), dict[str, float]()
        for batch in (each.to(self.device) for each in batches):
            known = reference and {name: each[batch.pair_P] for name, each in reference.items()}
            columns = with_logits(self.whole, batch)
            scored = self._score(facts.at(batch.pair_P), columns, known, facts)
            for name, value in weighted_sums(scored, batch.weight_P, self.loss).items():
                total[name] = total.get(name, 0.0) + float(value)
        return total


def with_logits(policy: PolicyModel, batch: PairBatch) -> dict[str, Tensor]:
    """Return "sum", and the scored tokens of all chosen answers, then of the rejected ones.

    They are `labels` and `loss_mask` of [2 P, L], and the `logits` of [2 P, L, V] that predict
    them; L is the most scored tokens of an answer.
    """
    head = policy.causal_lm.get_output_embeddings()
    rows_UD = policy.hidden(batch)[0].index_select(0, batch.rows_U)
    logits_UV = linear(rows_UD, head.weight, head.bias) * policy.scale
    if cap := policy.softcap:
        logits_UV = cap * torch.tanh(logits_UV / cap)
    # The tokens of each answer, in the order of their cells.
    tokens = batch.token_T[batch.cell_T.argsort(stable=True)]
    counts = batch.length_P2.long().flatten().tolist()

    def by_answer(values_U: Tensor) -> Tensor:
        answers = torch.split(values_U[tokens], counts)
        return pad_sequence([*answers[::2], *answers[1::2]], batch_first=True)

    columns = {"labels": by_answer(batch.targets_U), "logits": by_answer(logits_UV)}
    columns["loss_mask"] = by_answer(torch.ones_like(batch.targets_U, dtype=torch.float32))
    with torch.no_grad():
        sums = answer_sums(**columns)
    return {"sum": torch.stack(sums.chunk(2), 1), **columns}


def answer_sums(labels: Tensor, loss_mask: Tensor, logits: Tensor) -> Tensor:
    """Return the summed log-prob of each answer in float64."""
    logps = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return (logps.double() * loss_mask).sum(-1)
