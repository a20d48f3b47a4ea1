"""PolicyModel: packed pairs -> log-probs of their scored tokens. Base model and head in one module.

It is the one thing that is trained, frozen as the reference, sharded or compiled: what lies outside it is arithmetic
on two numbers per pair.
"""

from __future__ import annotations

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
        config = causal_lm.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies its logits, Granite divides them.
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def forward(self, batch: PairBatch) -> Tensor:
        """Log-prob of each scored token of the micro-batch, in float32."""
        hidden = self.causal_lm.base_model(
            input_ids=batch.ids_N[None],
            position_ids=batch.positions_N[None],
            segments=batch.segments,
            use_cache=False,
        ).last_hidden_state[0]
        head = self.causal_lm.get_output_embeddings()
        return token_logps(
            hidden.index_select(0, batch.rows_T),
            head.weight,
            head.bias,
            batch.targets_T,
            scale=self.scale,
            softcap=self.softcap,
        )


def response_logps(token_logps_T: Tensor, batch: PairBatch) -> Tensor:
    """Summed log-prob per response. In float64: a float32 sum of 600 tokens moves by 7e-4 with its order."""
    sums = torch.zeros(len(batch.length_R), dtype=torch.float64, device=token_logps_T.device)
    return sums.index_add(0, batch.response_T, token_logps_T.double())


def pair_logps(response_logps_R: Tensor, batch: PairBatch) -> Tensor:
    """[P, 2], chosen first."""
    return torch.stack([response_logps_R[batch.chosen_P], response_logps_R[batch.rejected_P]], dim=1)
