"""Tensor parallel from transformers' own plan: the ranks of a group divide heads, MLP columns and
the vocabulary.

Parameters become plain local tensors, so that layers compile and shard as ever. A region begins
where an attention or MLP module is entered and ends behind its row-wise linear: all that lies
between works on this rank's columns.

Outside regions every rank computes the same from the same numbers, because a region ends with a sum
over ranks and its gradient begins with one: replicated weights get equal gradients everywhere, and
nothing has to be summed. With sequence parallel the ranks divide the tokens there, and a replicated
weight's gradient is a part of a sum over tp; so it is for a norm inside a region, which sees the
heads of one rank. PolicyModel.tp_partial names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rather.data.batch import PairBatch
from rather.data.pack import pack
from rather.errors import ConfigError
from rather.model.attention import IMPLEMENTATION
from rather.model.check import twin_of, two_pairs
from rather.model.collectives import (
    Group,
    all_reduce_,
    enter,
    gather,
    gather_ranks,
    gather_same,
    leave,
    own_part,
    scatter_sum,
)
from rather.model.head import Words
from rather.model.policy import PolicyModel
from rather.parallel.context import filled_up
from rather.parallel.mesh import Mesh

COLUMN = ("colwise", "colwise_gather_output")
ROW = ("rowwise", "rowwise_split_input")
SUMMED = "replicated_with_grad_allreduce"
VOCABULARY = "embedding_rowwise"  # embedding and head are cut whatever the plan says
TOLERANCE = (
    1e-3  # between a divided twin and a whole one, relative to the largest number of each tensor
)
TOKENS = 1  # the dimension of hidden states [1, N, D]


class _Ranks(NamedTuple):
    """The ranks that divide the work, and whether tokens outside regions are divided as well."""

    rank: int
    of: int
    group: Group
    sequence: bool

    def begin(self, x: Tensor) -> Tensor:
        return gather(x, TOKENS, self.group) if self.sequence else enter(x, self.group)

    def end(self, x: Tensor) -> Tensor:
        return scatter_sum(x, TOKENS, self.group) if self.sequence else leave(x, self.group)


def part(size: int, rank: int, of: int) -> slice:
    """Return a rank's share of so many rows or columns; shares differ by at most one."""
    return slice(size * rank // of, size * (rank + 1) // of)


def split_model(policy: PolicyModel, mesh: Mesh, *, sequence_parallel: bool = False) -> None:
    """Leave in the policy what this rank holds of it; also on the meta device."""
    group = mesh.group("tp")
    if group is None:
        return
    ranks = _Ranks(mesh.rank("tp"), mesh.size("tp"), group.group_name, sequence_parallel)
    cutter = _Cutter(policy, ranks)
    regions: set[nn.Module] = set()
    for place, module, style in list(_planned(policy.causal_lm, ranks.of)):
        above, _, child = place.rpartition(".")
        region = policy.causal_lm.get_submodule(above)
        if style == SUMMED:
            cutter.sum_gradients(module.parameters())
            continue
        regions.add(region)
        linear = _linear_of(module)
        if style in ROW:
            cutter.cut_adapters(module, "lora_A", "lora_B", 1)
            cutter.cut(linear, "weight", 1)
            _end_region(
                region, child, _RowLinear(linear), ranks, whole_input=style == "rowwise_split_input"
            )
        else:
            cutter.cut_adapters(module, "lora_B", "lora_A", 0)
            cutter.cut(linear, "weight", 0)
            cutter.cut(linear, "bias", 0)
            if style == "colwise_gather_output":
                module.register_forward_hook(partial(_whole_columns, ranks))
    for region in regions:
        region.register_forward_pre_hook(partial(_begin, ranks), with_kwargs=True)
    cutter.cut_vocabulary()
    if sequence_parallel:
        policy.token_parts = ranks.of
        policy.tp_partial |= _on_token_shards(policy, regions)


def check_split(config: Any, mesh: Mesh, *, sequence_parallel: bool = False) -> None:
    """Refuse a family whose divided twin has other log-probs or gradients than the whole one.
    Collective."""
    group, tp = mesh.group("tp"), mesh.size("tp")
    if group is None:
        return
    try:
        twins = [PolicyModel(twin_of(config, kv_heads=max(2, tp))) for _ in range(2)]
    except Exception:  # a config that cannot be shrunk
        return
    for twin in twins:
        twin.causal_lm.set_attn_implementation(IMPLEMENTATION)
    whole, divided = twins
    split_model(divided, mesh, sequence_parallel=sequence_parallel)
    (batch,) = pack(two_pairs(whole.vocabulary_size), budget=10**6)
    try:
        expected = _with_gradients(whole, batch)
        found = _with_gradients(divided, filled_up(batch, divided.token_parts))
        all_reduce_([found[name] for name in sorted(divided.tp_partial & found.keys())], group)
    except RuntimeError as error:
        raise ConfigError(
            f"tp_size: {tp}: model family '{config.model_type}' cannot be divided ({error})"
        ) from error
    for name, dim in divided.tp_dims.items():
        expected[name] = _own(expected[name], dim, mesh.rank("tp"), tp)
    off = {
        name: float((found[name] - one).abs().max() / (1e-6 + one.abs().max()))
        for name, one in expected.items()
    }
    worst = max(
        gather_ranks(torch.tensor(list(off.values())), group.group_name).amax(dim=0).tolist()
    )
    if not worst < TOLERANCE:
        names = (
            ", ".join([name for name in off if not off[name] < TOLERANCE][:3])
            or "those of another rank"
        )
        raise ConfigError(
            f"tp_size: {tp}: model family '{config.model_type}' cannot be divided by transformers' "
            f"plan: log-probs or gradients differ by {worst:.2g} ({names}); set tp_size to 1"
        )


def _with_gradients(policy: PolicyModel, batch: PairBatch) -> dict[str, Tensor]:
    logps = policy(batch)[0]
    logps.sin().sum().backward()
    return {
        "log-probs": logps.detach(),
        **{n: p.grad for n, p in policy.named_parameters() if p.grad is not None},
    }


# --- what is cut ---


def _planned(causal_lm: Any, tp: int) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, module, style) of everything inside the layers that the family's plan names."""
    family = causal_lm.config.model_type
    plan: dict[str, str] = causal_lm.tp_plan or {}
    styles = {style for name, style in plan.items() if name != "lm_head"}
    if not styles & {*COLUMN, *ROW}:
        raise ConfigError(
            f"tp_size: {tp}, but transformers has no tensor parallel plan for model family "
            f"'{family}'"
        )
    if unknown := styles - {*COLUMN, *ROW, SUMMED, VOCABULARY}:
        raise ConfigError(
            f"tp_size: {tp}, but the plan of model family '{family}' has "
            f"{', '.join(sorted(unknown))}, which is not supported; set tp_size to 1"
        )
    for name, module in causal_lm.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or style == VOCABULARY or module is causal_lm.get_output_embeddings():
            continue
        if style != SUMMED:
            _refuse_indivisible(causal_lm, name, module, style, tp)
        yield name, module, style


def _refuse_indivisible(causal_lm: Any, name: str, module: Any, style: str, tp: int) -> None:
    module = _linear_of(module)
    if not isinstance(module, nn.Linear):
        family = causal_lm.config.model_type
        raise ConfigError(
            f"tp_size: model family '{family}': {name} is a {type(module).__name__}, no linear "
            "layer"
        )
    config = causal_lm.config.get_text_config()
    counts = {
        key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")
    }
    if style not in (
        "colwise",
        "rowwise",
    ):  # heads stay whole; only equal parts can be put together again
        counts = {
            f"the width of {name}": module.out_features if style in COLUMN else module.in_features
        }
    elif "att" not in name.rpartition(".")[0].rpartition(".")[2]:
        return
    for what, count in counts.items():
        if count and count % tp:
            raise ConfigError(
                f"tp_size: {tp} does not divide {what}: {count} of model "
                f"'{causal_lm.config.model_type}'"
            )


class _Cutter:
    """Replaces parameters of a policy by what one rank holds of them, and records where each was
    cut."""

    def __init__(self, policy: PolicyModel, ranks: _Ranks) -> None:
        self.policy, self.ranks = policy, ranks
        self.names = {id(parameter): name for name, parameter in policy.named_parameters()}

    def cut(self, module: nn.Module, key: str, dim: int) -> None:
        whole: nn.Parameter | None = getattr(module, key)
        if whole is None:
            return
        policy, name, at = self.policy, self.names[id(whole)], (dim, self.ranks.rank, self.ranks.of)
        policy.tp_dims[name], policy.tp_sizes[name] = dim, whole.shape[dim]
        setattr(module, key, nn.Parameter(_own(whole.detach(), *at), whole.requires_grad))
        if name in policy.exact:
            policy.exact[name] = _own(policy.exact[name], *at)

    def cut_adapters(self, module: Any, which: str, other: str, dim: int) -> None:
        """Cut a low-rank product where the weight next to it is; the gradient of its other half is
        a part of a sum."""
        for matrix in getattr(module, which, {}).values():
            self.cut(matrix, "weight", dim)
        self.sum_gradients(matrix.weight for matrix in getattr(module, other, {}).values())

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        self.policy.tp_partial |= {self.names[id(parameter)] for parameter in parameters}

    def cut_vocabulary(self) -> None:
        """Cut embedding and head, if they are here; tied ones are one part. A stage may hold a
        stand-in instead."""
        policy, ranks = self.policy, self.ranks
        embedding = policy.causal_lm.get_input_embeddings()
        head = policy.causal_lm.get_output_embeddings()
        tied = isinstance(head, nn.Linear) and getattr(embedding, "weight", None) is head.weight
        if isinstance(embedding, nn.Embedding):
            _restrict(embedding, part(len(embedding.weight), ranks.rank, ranks.of), ranks)
            self.cut(embedding, "weight", 0)
        if isinstance(head, nn.Linear):
            policy.words = Words(part(len(head.weight), ranks.rank, ranks.of).start, ranks.group)
            self.cut(head, "bias", 0)
            if tied and isinstance(embedding, nn.Embedding):
                head.weight = embedding.weight
            else:
                self.cut(head, "weight", 0)
            if tied:
                embedding.weight = head.weight


def _linear_of(module: Any) -> Any:
    """Return the linear layer itself, also if an adapter surrounds it."""
    return getattr(module, "base_layer", module)


def _own(whole: Tensor, dim: int, rank: int, of: int) -> Tensor:
    own = part(whole.shape[dim], rank, of)
    return whole.narrow(dim, own.start, own.stop - own.start).clone()  # so that the whole can go


def _on_token_shards(policy: PolicyModel, regions: set[nn.Module]) -> set[str]:
    """Return the parameters that are whole here and see only this rank's tokens: all outside
    regions, and what a region's last linear adds to its sum."""
    inside = {id(parameter) for region in regions for parameter in region.parameters()}
    inside -= {id(module.bias) for module in policy.modules() if isinstance(module, _RowLinear)}
    return {
        name
        for name, parameter in policy.named_parameters()
        if name not in policy.tp_dims and id(parameter) not in inside
    }


# --- how the parts run ---


def _begin(ranks: _Ranks, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Enter a region: hidden states are the first argument, or a keyword."""
    if args:
        return (ranks.begin(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": ranks.begin(kwargs["hidden_states"])}


def _whole_columns(ranks: _Ranks, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return gather_same(output, output.ndim - 1, ranks.group)


class _RowLinear(nn.Linear):
    """This rank's columns in, its part of a sum over ranks out; the bias comes after the sum,
    once."""

    def __init__(self, own: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = own.weight.shape
        self.weight, self.bias = own.weight, own.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _end_region(
    region: nn.Module, child: str, linear: _RowLinear, ranks: _Ranks, *, whole_input: bool
) -> None:
    """Sum over ranks after the linear layer, or after the adapter that surrounds it."""
    last = region.get_submodule(child)
    if hasattr(last, "base_layer"):
        last.base_layer = linear
    else:
        setattr(region, child, linear)
        last = linear
    if whole_input:
        last.register_forward_pre_hook(partial(_own_columns, ranks))
    last.register_forward_hook(partial(_summed, ranks, linear))


def _own_columns(ranks: _Ranks, _module: nn.Module, args: tuple[Any, ...]) -> Any:
    x, *others = args
    return (own_part(x, x.ndim - 1, ranks.group), *others)


def _summed(
    ranks: _Ranks, linear: _RowLinear, _module: nn.Module, _args: Any, output: Tensor
) -> Tensor:
    out = ranks.end(output)
    return out if linear.bias is None else out + linear.bias


def _restrict(embedding: nn.Embedding, own: slice, ranks: _Ranks) -> None:
    """Restrict an embedding to this rank's words: others give zeros, and the sum over ranks is the
    whole."""
    look_up: Callable[[Tensor], Tensor] = embedding.forward
    silent = embedding.padding_idx
    embedding.num_embeddings = own.stop - own.start
    embedding.padding_idx = (
        silent - own.start if silent is not None and own.start <= silent < own.stop else None
    )

    def forward(input_ids: Tensor) -> Tensor:
        places = input_ids - own.start
        outside = (places < 0) | (places >= own.stop - own.start)
        found = look_up(places.masked_fill(outside, 0))
        return ranks.end(found.masked_fill(outside[..., None], 0))

    embedding.forward = forward  # type: ignore[assignment, method-assign]
