"""PolicyModel: packed pairs -> log-probs of their scored tokens. Base model and head in one module.

Only this module is trained, frozen as the reference, sharded or compiled: the rest is arithmetic on
two numbers per pair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rather.data.batch import PairBatch
from rather.model.collectives import Group, enter, gather, gather_same, leave
from rather.model.experts import use_sorted_experts
from rather.model.head import Words, token_logps
from rather.model.mixers import mix_over_paths
from rather.model.towers import decoder_of
from rather.model.vision import Vision
from rather.optim.rounding import Rounding

START = "reference"  # in the parameter names of an adapter's frozen start


def head_of(causal_lm: Any) -> Any:
    """Return the linear layer after the base model: of a language model, or of a reward model."""
    return causal_lm.score if hasattr(causal_lm, "score") else causal_lm.get_output_embeddings()


class PolicyModel(nn.Module):
    """A Hugging Face causal language model whose forward takes a PairBatch.

    A reward model has a head `score` of one row instead, and scores instead of log-probs.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        mix_over_paths(causal_lm)
        use_sorted_experts(causal_lm)
        self.exact: dict[str, Tensor] = {}  # float32 source weights, if this model rounds them
        self.rounding = Rounding()
        # The part of the whole model on this rank. For parameters sharded over tp: the dimension,
        # and its full size; parameters that are not sharded, but whose gradient is a term of a sum
        # over tp; parameters that another pipeline stage also holds, and counts.
        self.tp_dims: dict[str, int] = {}
        self.tp_sizes: dict[str, int] = {}
        self.tp_partial: set[str] = set()
        self.extra_copies: set[str] = set()
        self.experts: dict[str, int] = {}  # parameters of which ep ranks hold parts: all experts
        self.vocabulary_size = int(causal_lm.get_input_embeddings().weight.shape[0])
        self.words: Words | None = None  # this rank's part of the vocabulary, if ranks divide it
        self.token_parts = 1  # with sequence parallel: among how many tp ranks tokens are divided
        self.tp_group: Group | None = None  # those ranks
        self.context: Group | None = None  # ranks that divide the tokens of a micro-batch ...
        self.divide: Callable[[PairBatch], PairBatch] | None = None  # ... and how
        self.vision: Vision | None = None  # of a model that sees images
        self.balance: Any = None  # of the routers of a trained mixture of experts
        self.is_reward = hasattr(causal_lm, "score")
        config = causal_lm.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies its logits, Granite divides them.
        factors = [getattr(config, key, None) for key in ("logit_scale", "logits_scaling")]
        self.scale = float(factors[0] or 1.0) / float(factors[1] or 1.0)

    def hidden(self, batch: PairBatch) -> Tensor:
        """Return the hidden states of the base model: [1, N, D]."""
        mask_N = self.balance.see(batch) if self.balance else None
        states: Tensor = decoder_of(self.causal_lm)(
            **(self.vision.inputs(batch) if self.vision else {"input_ids": batch.ids_N[None]}),
            # Segments define what each token sees. A mask of four dimensions is used as it is;
            # without one, transformers would search the positions for packed sequences, and wait
            # for the device to do so.
            attention_mask=batch.ids_N.new_ones((1, 1, 1, 1), dtype=torch.bool),
            position_ids=batch.positions_N.unsqueeze(-2),  # [1, N], or [3, 1, N] with images
            segments=batch.segments,
            use_cache=False,
        ).last_hidden_state
        if mask_N is not None and states.requires_grad:
            # Backward may compute layers again, after other micro-batches have been seen.
            states.register_hook(partial(self.balance.see_again, mask_N))
        return states

    def forward(self, batch: PairBatch, *, squares: bool = False) -> tuple[Tensor, Tensor]:
        """Return the log-prob of each scored token in float32; with `squares` also log sum p^2."""
        return self.score(self.hidden(batch)[0], batch, squares=squares)

    def score(
        self, hidden_ND: Tensor, batch: PairBatch, *, squares: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Run the head alone, on the hidden states of the base model."""
        head = head_of(self.causal_lm)
        if self.is_reward:
            if self.tp_group and self.token_parts > 1:
                hidden_ND = gather_same(hidden_ND, 0, self.tp_group)
            rows_UD = hidden_ND.index_select(0, batch.rows_U).float()
            scores_U = rows_UD @ head.weight[0].float()
            return scores_U, scores_U.new_empty(0)  # not a view: FSDP2 warns of views
        if self.words and self.token_parts > 1:
            hidden_ND = gather(hidden_ND, 0, self.words.group)
        rows_UD = hidden_ND.index_select(0, batch.rows_U)
        if self.words and self.token_parts == 1:
            rows_UD = enter(rows_UD, self.words.group)
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
        """Return this rank's share of a micro-batch, on the CPU: nothing waits for a device."""
        placed = self.vision.place(batch) if self.vision else batch
        return self.divide(placed) if self.divide else placed

    def pair_sums(
        self, logps_U: Tensor, squared_U: Tensor, batch: PairBatch, wanted: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Return the columns of a micro-batch, or this rank's share, from its scored tokens."""
        counted = logps_U.double().index_select(0, batch.token_T)
        columns = {"sum": _per_pair(counted, batch)}
        if "shared" in wanted:
            columns["shared"] = _per_pair(counted * batch.shared_T, batch)
        if "squares" in wanted:
            columns["squares"] = _per_pair(squared_U.double().index_select(0, batch.token_T), batch)
        if self.context is None:
            return columns
        # Each rank then has the loss of whole responses, and its own tokens get their gradient.
        summed = leave(torch.stack(list(columns.values())), self.context)
        return dict(zip(columns, summed.unbind(), strict=True))


def pair_columns(
    policy: PolicyModel, batch: PairBatch, wanted: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the columns of a micro-batch: "sum", and if wanted "shared" and "squares".

    "shared" is the sum within the length of the shorter response.
    """
    share = policy.share(batch)
    if share is not batch:
        share = share.to(str(next(policy.parameters()).device))
    logps_U, squared_U = policy(share, squares="squares" in wanted)
    return policy.pair_sums(logps_U, squared_U, share, wanted)


def _per_pair(values_T: Tensor, batch: PairBatch) -> Tensor:
    """Return [P, 2] sums over each response, in float64.

    A float32 sum of 600 tokens changes by 7e-4 with its order.
    """
    sums = torch.zeros(batch.length_P2.numel(), dtype=torch.float64, device=values_T.device)
    return sums.index_add(0, batch.cell_T, values_T).view(-1, 2)
