"""The router loss of a mixture of experts, over all real tokens of an optimizer step.

With E experts it is E x sum over e of f_e P_e: f_e is the share of the rows (a token in a layer)
that chose expert e, P_e its mean probability. transformers computes the same over the rows of one
padded batch. Here rows are those of the whole step, on all ranks; fillers do not count, and a
prompt that answers share counts once. So it does not depend on how a step is divided.

It is not a sum over micro-batches, but only P has a gradient. Once the choices of the step are
counted, each probability of expert e has the slope `coefficient x E x f_e / rows`, which every
router adds to the gradient of its own probabilities in the ordinary pass. If a step has several
micro-batches, a pass without gradients and without the head counts first; it costs one forward
pass. A single micro-batch is counted on its way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rather.data.batch import Columns, PairBatch
from rather.errors import ConfigError
from rather.model.check import experts_of, routed, routers_of
from rather.model.policy import PolicyModel
from rather.parallel.mesh import Mesh
from rather.parallel.stages import Objective, Stages, parts_of


class Balance:
    """Counts what the routers of a policy choose, and adds the gradient of their loss."""

    def __init__(
        self, policy: PolicyModel | Stages, mesh: Mesh, coefficient: float, device: str
    ) -> None:
        models = parts_of(policy)
        config: Any = models[0].causal_lm.config.get_text_config()
        self.coefficient = coefficient
        self.mask_N = torch.ones(0, device=device)
        self._world = mesh.world
        self._staged = isinstance(policy, Stages)
        # Ranks of a tp group see the same tokens, or with sequence parallel a part of them each.
        self._parts = models[0].token_parts
        self._part = mesh.rank("tp") % self._parts
        self._reports = mesh.rank("tp") == 0 or self._parts > 1
        # LongCat-Flash also chooses among experts that do nothing.
        experts = experts_of(config) + (getattr(config, "zero_expert_num", None) or 0)
        # Choices and summed probabilities of each layer since `reset`.
        shape = (config.num_hidden_layers, 2, experts)
        self.record = torch.zeros(shape, dtype=torch.float64, device=device)
        self.step = torch.zeros_like(self.record)  # of the last step, over all ranks
        self.slope = torch.zeros(experts, device=device)
        for model in models:
            model.balance = self
            for layer, router in routers_of(model):
                router.balance = self
                router.balance_record = self.record[layer]
                router.forward = MethodType(_count, router)

    def see(self, batch: PairBatch) -> Tensor:
        """Count the tokens of this micro-batch from now on."""
        # FSDP2 casts what it passes on to the dtype of the weights.
        self.mask_N = batch.counted_N.float().chunk(self._parts)[self._part]
        return self.mask_N

    def see_again(self, mask_N: Tensor, _gradient: Tensor) -> None:
        self.mask_N = mask_N

    def backward(
        self,
        runner: Any,
        batches: Sequence[PairBatch],
        wanted: Collection[str],
        objective: Objective,
        scale: float,
    ) -> None:
        """Run `runner.backward` with the router loss of the step added to the objective."""
        self.record.zero_()
        at_once = not self.coefficient or (len(batches) == 1 and not self._staged)
        if not at_once:
            with torch.no_grad():
                runner.columns([batch.without_pairs() for batch in batches], ())
            self._finish_counting(scale)

        def counted(batch: PairBatch, columns: Columns) -> Tensor:
            if at_once and self.coefficient:
                self._finish_counting(scale)
            return objective(batch, columns)

        runner.backward(batches, wanted, counted)
        if not self.coefficient:  # counted twice where activations are recomputed: equal shares
            self._finish_counting(scale)

    @torch.no_grad()
    def _finish_counting(self, scale: float) -> None:
        """Sum the counts over all ranks, and set the slopes for backward."""
        self.step.copy_(self.record if self._reports else torch.zeros_like(self.record))
        if self._world > 1:
            dist.all_reduce(self.step)
        choices, probabilities = self.step.sum(0)
        rows = probabilities.sum().clamp(min=1)
        slope = scale * self.coefficient * len(choices) * choices / rows.square()
        # Written through `data`, so that graphs which saved the slopes see the update.
        self.slope.data.copy_(slope)

    def metrics(self) -> dict[str, float]:
        """Return the loss and how the last step used the experts; a load of 1 is the mean."""
        choices, probabilities = self.step.sum(0)
        rows = probabilities.sum().clamp(min=1)
        loss = len(choices) * (choices @ probabilities) / rows.square()
        layers = self.step[:, 0][self.step[:, 1].sum(1) > 0]
        if not len(layers):  # all layers of this model are dense
            return {}
        loads = layers / layers.mean(1, keepdim=True)
        numbers = {
            "router_loss": loss,
            "experts/max_load": loads.max(),
            "experts/idle": (loads == 0).double().mean(),
        }
        numbers |= {f"experts/load/{i}": load for i, load in enumerate(loads.mean(0))}
        return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))


def balance_of(
    policy: PolicyModel | Stages, mesh: Mesh, coefficient: float | None, device: str
) -> Balance | None:
    """Return the balance of a policy that is trained; None if it has no routers."""
    if not any(p.requires_grad for p in policy.parameters()):
        return None
    config = parts_of(policy)[0].causal_lm.config.get_text_config()
    if not experts_of(config):
        if coefficient:
            raise ConfigError(
                f"actor_train.model_args.moe_aux_loss_coef: model family '{config.model_type}' has "
                "no experts; remove it"
            )
        return None
    if coefficient is None:
        coefficient = float(getattr(config, "router_aux_loss_coef", None) or 0)
    return Balance(policy, mesh, coefficient, device)


def _count(router: Any, *args: Tensor) -> tuple[Tensor, ...]:
    """Run a router and count its choices; all layers share this function and its compiled code."""
    outputs: tuple[Tensor, ...] = type(router).forward(router, *args)
    logits, scores, chosen_NK = routed(router, outputs)
    balance: Balance = router.balance
    mask_N = balance.mask_N
    record = router.balance_record
    if len(mask_N) != len(logits):  # generation
        return outputs
    if hasattr(router, "per_expert_scale"):  # Gemma 4 returns probabilities
        p_NE = logits.float()
    elif hasattr(router, "e_score_correction_bias") and not hasattr(router, "classifier"):
        # Independent affinities (DeepSeek-V3), but not in LongCat-Flash.
        affinity = logits.float().sigmoid()
        p_NE = affinity / affinity.sum(-1, keepdim=True)
    else:
        p_NE = logits.float().softmax(-1)
    p_E = (p_NE * mask_N[:, None]).sum(0)
    mask_NK = mask_N.repeat_interleave(chosen_NK.shape[1])
    choices_E = torch.zeros_like(p_E).scatter_add(0, chosen_NK.flatten(), mask_NK)
    scores = torch.ops.rather.balance(scores, p_E, choices_E, record, balance.slope)
    return (scores, logits) if len(outputs) == 2 else (logits, scores, chosen_NK)


# One operator, so that compiled layers neither specialise on a layer nor drop the counting. It adds
# to `record` without saying so: nothing else in a graph reads that, and recomputed activations are
# counted after the record has been read.
@torch.library.custom_op("rather::balance", mutates_args=())
def _balance(
    scores: Tensor, p_E: Tensor, choices_E: Tensor, record: Tensor, slope: Tensor
) -> Tensor:
    record.data.add_(torch.stack([choices_E, p_E]))
    return scores.clone()


@_balance.register_fake
def _(scores: Tensor, *_rest: Tensor) -> Tensor:
    return torch.empty_like(scores)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[-1])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, ctx.saved_tensors[0].clone(), None, None, None


_balance.register_autograd(_differentiate, setup_context=_save)
