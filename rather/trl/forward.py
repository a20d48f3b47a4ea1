"""Packed pairs through a Hugging Face model: TRL's padded forward as sums per answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rather.api.in_memory import packed_attention
from rather.data.batch import PairBatch
from rather.model.check import check_model, refuse_tower
from rather.model.head import token_logps
from rather.model.policy import PolicyModel, head_of

STATISTICS = ("entropy", "logits", "top1")  # sums over the scored tokens of an answer


class PackedForward:
    """Lets a model, bare or inside PEFT and DistributedDataParallel, take `pairs=` in its forward.

    Without that argument the model's own forward runs, so it still generates and is saved as usual.
    `statistics=False` leaves out the columns that only log_history needs.
    """

    def __init__(self, model: Any, wanted: Collection[str] = ()) -> None:
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.wanted = wanted
        refuse_tower(self.base.config)
        self.policy = PolicyModel(self.base)
        was_training = self.base.training
        self.base.eval()
        with torch.no_grad(), packed_attention(self.base):
            check_model(self.policy)
        self.base.train(was_training)
        self.base.forward = partial(self._forward, self.base.forward)

    def attention(self) -> Any:
        """Return a context in which the model attends within the segments of packed pairs."""
        return packed_attention(self.base)

    def _forward(self, own: Callable[..., Any], *args: Any, **named: Any) -> Any:
        batch, with_statistics = named.pop("pairs", None), named.pop("statistics", True)
        if batch is None:
            return own(*args, **named)
        hidden_ND = self.policy.hidden(batch)[0]
        # The head has its own backward, so it casts by itself.
        kind = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.autocast(kind, enabled=False):
            return self._columns(hidden_ND, batch, dtype, with_statistics)

    def _columns(
        self,
        hidden_ND: Tensor,
        batch: PairBatch,
        dtype: torch.dtype | None,
        with_statistics: bool,
    ) -> dict[str, Tensor]:
        policy, nothing = self.policy, hidden_ND.new_empty(0)
        if policy.is_reward:
            return policy.pair_sums(policy.score(hidden_ND, batch)[0], nothing, batch)
        head = head_of(self.base)
        rows_UD, weight, bias = hidden_ND.index_select(0, batch.rows_U), head.weight, head.bias
        if dtype is not None:
            rows_UD, weight = rows_UD.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        statistics = None
        if with_statistics:
            statistics = torch.empty(len(STATISTICS), len(rows_UD), device=rows_UD.device)
        logps_U, squared_U = token_logps(
            rows_UD,
            weight,
            bias,
            batch.targets_U,
            scale=policy.scale,
            softcap=policy.softcap,
            squares="squares" in self.wanted,
            statistics=statistics,
        )
        columns = policy.pair_sums(logps_U, squared_U, batch, self.wanted)
        if statistics is None:
            return columns
        for name, values_U in zip(STATISTICS, statistics, strict=True):
            columns[name] = policy.pair_sums(values_U, nothing, batch)["sum"]
        return columns


@contextmanager
def as_reference(model: Any) -> Iterator[None]:
    """Compute as the reference: with the adapter "ref" if the model has one, else without any."""
    adapters = getattr(model, "peft_config", {})
    if "ref" not in adapters:
        with model.disable_adapter() if adapters else nullcontext():
            yield
        return
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    model.set_adapter("ref")
    try:
        yield
    finally:
        model.set_adapter("default")
        for name, weight in model.named_parameters():
            weight.requires_grad_(name in trained)
