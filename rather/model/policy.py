"""PolicyModel: packed pairs -> log-probs of their scored tokens. Base model and head in one module.

It is the one thing that is trained, frozen as the reference, sharded or compiled: what lies outside it is arithmetic
on two numbers per pair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from rather.data.batch import PairBatch
from rather.model.collectives import Group, enter, gather, leave
from rather.model.head import Words, token_logps

START = "reference"  # in the names of the parameters of an adapter's frozen beginning


class PolicyModel(nn.Module):
    """A Hugging Face causal language model whose forward takes a PairBatch."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.exact: dict[
            str, Tensor
        ] = {}  # source weights in float32, where this model holds them rounded
        # What of the whole model lies here. Parameters cut over tp: by name the dimension, and its size in the whole;
        # those that are not cut, but whose gradient is a part of a sum over tp; those that another pipeline stage holds
        # as well, and counts.
        self.tp_dims: dict[str, int] = {}
        self.tp_sizes: dict[str, int] = {}
        self.tp_partial: set[str] = set()
        self.extra_copies: set[str] = set()
        self.vocabulary_size = int(causal_lm.get_input_embeddings().weight.shape[0])
        self.words: Words | None = None  # of the head, where ranks divide the vocabulary
        self.token_parts = (
            1  # sequence parallel: into how many the ranks of tp divide the tokens between products
        )
        self.context: Group | None = None  # ranks that divide the tokens of a micro-batch ...
        self.divide: Callable[[PairBatch], PairBatch] = _all_of_it  # ... and how
        config = causal_lm.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies its logits, Granite divides them.
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def hidden(self, batch: PairBatch) -> Tensor:
        """What the base model gives: [1, N, D]."""
        states: Tensor = self.causal_lm.base_model(
            input_ids=batch.ids_N[None],
            # Segments say what each token sees. A mask of four dimensions is taken as it is; without one, transformers
            # would look for packed sequences in the positions, and wait for the device to do so.
            attention_mask=batch.ids_N.new_ones((1, 1, 1, 1), dtype=torch.bool),
            position_ids=batch.positions_N[None],
            segments=batch.segments,
            use_cache=False,
        ).last_hidden_state
        return states

    def forward(self, batch: PairBatch, *, squares: bool = False) -> tuple[Tensor, Tensor]:
        """Log-prob of each scored token of the micro-batch, in float32; with `squares` also log sum p^2 of each."""
        return self.score(self.hidden(batch)[0], batch, squares=squares)

    def score(
        self, hidden_ND: Tensor, batch: PairBatch, *, squares: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The head alone, on what the base model gave."""
        if self.words and self.token_parts > 1:
            rows_UD = gather(hidden_ND, 0, self.words.group).index_select(0, batch.rows_U)
        elif self.words:
            rows_UD = enter(hidden_ND.index_select(0, batch.rows_U), self.words.group)
        else:
            rows_UD = hidden_ND.index_select(0, batch.rows_U)
        head = self.causal_lm.get_output_embeddings()
        return token_logps(
            rows_UD,
            head.weight,
            head.bias,
            batch.targets_U,
            scale=self.scale,
            softcap=self.softcap,
            squares=squares,
            words=self.words,
        )

    def share(self, batch: PairBatch) -> PairBatch:
        """What this rank computes of a micro-batch; of a share the share itself. On the CPU: nothing waits there."""
        return self.divide(batch)

    def hidden_tokens(self, batch: PairBatch) -> int:
        """How many rows the hidden states of a micro-batch have here, between layers."""
        return len(self.share(batch).ids_N) // self.token_parts

    def pair_sums(
        self, logps_U: Tensor, squared_U: Tensor, batch: PairBatch, wanted: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """The columns of a micro-batch from its scored tokens, or from this rank's share of them."""
        counted = logps_U.double().index_select(0, batch.token_T)
        columns = {"sum": _per_pair(counted, batch)}
        if "shared" in wanted:
            columns["shared"] = _per_pair(counted * batch.shared_T, batch)
        if "squares" in wanted:
            columns["squares"] = _per_pair(squared_U.double().index_select(0, batch.token_T), batch)
        if self.context is None:
            return columns
        # Each rank then has the loss of whole responses, and takes from it the gradient of its own tokens.
        whole = leave(torch.stack(list(columns.values())), self.context)
        return dict(zip(columns, whole.unbind(), strict=True))


def pair_columns(
    policy: PolicyModel, batch: PairBatch, wanted: Collection[str] = ()
) -> dict[str, Tensor]:
    """The columns of a micro-batch: "sum" always, "shared" (within the shorter length) and "squares" when wanted."""
    own = policy.share(batch)
    if own is not batch:
        own = own.to(str(next(policy.parameters()).device))
    logps_U, squared_U = policy(own, squares="squares" in wanted)
    return policy.pair_sums(logps_U, squared_U, own, wanted)


def _all_of_it(batch: PairBatch) -> PairBatch:
    return batch


def _per_pair(values_T: Tensor, batch: PairBatch) -> Tensor:
    """[P, 2] sums over each response, in float64: a float32 sum of 600 tokens moves by 7e-4 with its order."""
    sums = torch.zeros(batch.length_P2.numel(), dtype=torch.float64, device=values_T.device)
    return sums.index_add(0, batch.cell_T, values_T).view(-1, 2)
