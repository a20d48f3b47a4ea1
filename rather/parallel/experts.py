"""Expert parallel: the ranks of a group, a part of dp, hold different experts of each layer.

Each rank routes its own tokens. A row per choice goes to the rank that has the expert (all-to-all),
through it, and back; the scores of the router are applied where the row came from. Routers and
everything else stay as they are, so the router loss sees nothing of this.

An expert's gradient is complete for the tokens of its ep group. It is summed over the other
dp / ep groups, and over cp, by FSDP2 on a mesh of its own (Mesh.plane).
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)

from rather.config.strategies import Layout
from rather.errors import ConfigError
from rather.model.check import expert_blocks, experts_of, twin_of
from rather.model.collectives import ranks_of
from rather.model.policy import PolicyModel
from rather.parallel.mesh import Mesh

TOLERANCE = 1e-4  # of a twin's experts, relative


def spread_experts(policy: PolicyModel, mesh: Mesh) -> None:
    """Leave in the policy the experts that this rank holds; also on the meta device."""
    group, ep = mesh.group("ep"), mesh.size("ep")
    if group is None:
        return
    for block_name, block in list(expert_blocks(policy)):
        experts = block.experts
        total = _keep(experts, mesh.rank("ep"), ep)
        for key, _ in experts.named_parameters():
            policy.experts[f"{block_name}.experts.{key}"] = total
        experts.group = group.group_name
        experts.forward = MethodType(_dispatch, experts)


def _keep(experts: Any, rank: int, ranks: int) -> int:
    """Keep one of `ranks` equal parts of stacked experts; return how many there were."""
    total: int = experts.num_experts
    for key, stacked in list(experts.named_parameters()):
        if len(stacked) != total:
            raise ConfigError(f"{key} of {tuple(stacked.shape)} does not stack {total} experts")
        experts_here = stacked.detach().chunk(ranks)[rank].clone()  # the whole can go
        setattr(experts, key, nn.Parameter(experts_here, stacked.requires_grad))
    experts.num_experts = total // ranks
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the host counts the rows that travel
def _dispatch(experts: Any, hidden_ND: Tensor, chosen_NK: Tensor, scores_NK: Tensor) -> Tensor:
    """Run experts that a group of ranks divides: the forward of their module."""
    (tokens, choices), group, experts_here = chosen_NK.shape, experts.group, experts.num_experts
    order = chosen_NK.flatten().argsort(stable=True)
    with torch.no_grad():
        experts_of_all = experts_here * ranks_of(group).size()
        sent_E = torch.bincount(chosen_NK.flatten(), minlength=experts_of_all)
        got_E = all_to_all_single(sent_E, None, None, group)
        got_E = wait_tensor(got_E)  # type: ignore[no-untyped-call]
        per_rank = torch.stack([got_E, sent_E]).view(2, -1, experts_here).sum(2)
        got, sent = per_rank.tolist()  # the host sync of a layer
        # Rows arrive by rank, then by expert. One of zeros follows, so that experts always have a
        # gradient: a rank that was sent nothing would leave FSDP2's sum, and the others would wait.
        local = torch.arange(experts_here, device=got_E.device).repeat(len(got))
        local = torch.cat([local.repeat_interleave(got_E), local[:1]])
    rows = all_to_all_single_autograd(hidden_ND[order // choices], got, sent, group)
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    done = type(experts).forward(experts, rows, local[:, None], rows.new_ones(len(rows), 1))[:-1]
    back = all_to_all_single_autograd(done.contiguous(), sent, got, group)
    each_NKD = back[order.argsort()].view(tokens, choices, -1)
    return (each_NKD * scores_NK[..., None]).sum(1).to(hidden_ND.dtype)


def refuse_adapted_experts(policy: PolicyModel, layout: Layout) -> None:
    """Refuse to divide experts that have adapters."""
    if not any(hasattr(block.experts, "parameter_name") for _, block in expert_blocks(policy)):
        return
    for key in ("tp", "pp", "ep"):
        if getattr(layout, key) > 1:
            raise ConfigError(
                f"lora_target: experts that have adapters cannot be divided; set {key}_size to 1"
            )


@torch.no_grad()
def check_experts(config: Any, ep: int) -> None:
    """Refuse a family whose experts cannot be divided, as two halves of a twin's experts show."""
    if experts_of(config) % ep or not experts_of(config):
        raise ConfigError(
            f"ep_size: {ep} does not divide the {experts_of(config)} experts of a layer of model "
            f"family '{config.model_type}'"
        )
    refused = f"ep_size: {ep}: the experts of model family '{config.model_type}' cannot be divided"
    try:
        twin_experts = next(expert_blocks(twin_of(config)))[1].experts
        x_ND = torch.linspace(-1, 1, 6 * twin_experts.hidden_dim).sin().view(6, -1)
        chosen_NK = torch.arange(12).view(6, 2) % twin_experts.num_experts
        scores_NK = torch.linspace(0.1, 0.9, 12).view(6, 2)
        expected, summed = twin_experts(x_ND, chosen_NK, scores_NK), torch.zeros_like(x_ND)
        for rank in range(2):
            half = copy.deepcopy(twin_experts)
            experts_per_rank = _keep(half, rank, 2) // 2
            n, k = (chosen_NK // experts_per_rank == rank).nonzero(as_tuple=True)
            rows = half(x_ND[n], chosen_NK[n, k, None] % experts_per_rank, torch.ones(len(n), 1))
            summed.index_add_(0, n, rows * scores_NK[n, k, None])
        worst = float((summed - expected).abs().max() / expected.abs().max())
    except Exception as error:
        raise ConfigError(f"{refused} ({error}); set ep_size to 1") from error
    if not worst < TOLERANCE:
        raise ConfigError(f"{refused}: results differ by {worst:.2g}; set ep_size to 1")
