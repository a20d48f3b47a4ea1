"""PolicyModel: packed pairs -> log-probs of their scored tokens. Base model and head in one module.

It is the one thing that is trained, frozen as the reference, sharded or compiled: what lies outside it is arithmetic
on two numbers per pair.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from rather.batch import PairBatch
from rather.model.head import token_logps


class PolicyModel(nn.Module):
    """A Hugging Face causal language model whose forward takes a PairBatch."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.exact: dict[str, Tensor] = {}  # source weights in float32, where this model holds them rounded
        self.vocabulary_size = int(causal_lm.get_input_embeddings().weight.shape[0])
        config = causal_lm.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies its logits, Granite divides them.
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def forward(self, batch: PairBatch, *, squares: bool = False) -> tuple[Tensor, Tensor]:
        """Log-prob of each scored token of the micro-batch, in float32; with `squares` also log sum p^2 of each."""
        hidden = self.causal_lm.base_model(
            input_ids=batch.ids_N[None],
            # Segments say what each token sees. A mask of four dimensions is taken as it is; without one, transformers
            # would look for packed sequences in the positions, and wait for the device to do so.
            attention_mask=batch.ids_N.new_ones((1, 1, 1, 1), dtype=torch.bool),
            position_ids=batch.positions_N[None],
            segments=batch.segments,
            use_cache=False,
        ).last_hidden_state[0]
        head = self.causal_lm.get_output_embeddings()
        return token_logps(
            hidden.index_select(0, batch.rows_U),
            head.weight,
            head.bias,
            batch.targets_U,
            scale=self.scale,
            softcap=self.softcap,
            squares=squares,
        )


def pair_columns(policy: PolicyModel, batch: PairBatch, wanted: Collection[str] = ()) -> dict[str, Tensor]:
    """The columns of a micro-batch: "sum" always, "shared" (within the shorter length) and "squares" when wanted."""
    logps, squared = policy(batch, squares="squares" in wanted)
    counted = logps.double().index_select(0, batch.token_T)
    columns = {"sum": _per_pair(counted, batch)}
    if "shared" in wanted:
        columns["shared"] = _per_pair(counted * batch.shared_T, batch)
    if "squares" in wanted:
        columns["squares"] = _per_pair(squared.double().index_select(0, batch.token_T), batch)
    return columns


def _per_pair(values_T: Tensor, batch: PairBatch) -> Tensor:
    """[P, 2] sums over each response, in float64: a float32 sum of 600 tokens moves by 7e-4 with its order."""
    sums = torch.zeros(batch.length_P2.numel(), dtype=torch.float64, device=values_T.device)
    return sums.index_add(0, batch.cell_T, values_T).view(-1, 2)
