"""Tensor parallel by transformers' own plan: ranks divide heads, MLP columns, vocabulary.

Routers and stacked experts are outside regions, like norms: every rank has them whole.

Parameters become plain local tensors, so that layers compile and shard as usual. A region begins
where an attention or MLP module is entered and ends behind its row-wise linear: everything between
works on this rank's columns.

Outside regions every rank computes the same from the same numbers, because a region ends with a sum
over ranks and its gradient begins with one: replicated weights get equal gradients everywhere, and
nothing has to be summed. A module whose plan only gathers columns (Qwen3.5's linear attention) is
not a region: between its projections every rank computes the same on all tokens.

With sequence parallel the ranks divide the tokens there, and a replicated weight's gradient is a
part of a sum over tp; so it is for a norm inside a region, which sees the heads of one rank, and
for keys and values if there are fewer heads of them than ranks: each rank computes all and takes
the one it needs. PolicyModel.tp_partial names them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rather.data.batch import PairBatch
from rather.errors import ConfigError
from rather.model.check import over_layers, packed_twin
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
SHARED = "shared_heads"  # keys or values of fewer heads than ranks: whole on all, which take one
VOCABULARY = "embedding_rowwise"  # embedding and head are cut whatever the plan says
EXPERTS = ("moe_tp_experts", "packed_colwise")  # stacked experts stay whole: ep divides them
TOLERANCE = 1e-3  # between a divided twin and a whole one, relative to the largest of each tensor
HEADS = "num_attention_heads"
KEY_HEADS = "num_key_value_heads"
TOKENS = 1  # the dimension of hidden states [1, N, D]

log = logging.getLogger(__name__)


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

    def enter(self, x: Tensor) -> Tensor:
        return enter(x, self.group)

    def all_tokens(self, x: Tensor) -> Tensor:
        return gather_same(x, TOKENS, self.group)

    def own_columns(self, x: Tensor) -> Tensor:
        return own_part(x, x.ndim - 1, self.group)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        rows = part(whole.shape[dim], self.rank, self.of)
        return whole.narrow(dim, *rows).clone()  # the whole can go


def part(size: int, rank: int, of: int) -> tuple[int, int]:
    """Return the first of a rank's rows or columns, and their number; shares differ by one."""
    first = size * rank // of
    return first, size * (rank + 1) // of - first


def split_model(policy: PolicyModel, mesh: Mesh, *, sequence_parallel: bool = False) -> None:
    """Leave in the policy what this rank holds of it; also on the meta device."""
    group = mesh.group("tp")
    if group is None:
        return
    ranks = _Ranks(mesh.rank("tp"), mesh.size("tp"), group.group_name, sequence_parallel)
    causal_lm = policy.causal_lm
    cutter = _Cutter(policy, ranks)
    planned = list(_planned(causal_lm, ranks.of))
    for module, key in list(_planned_heads(causal_lm)):
        cutter.cut(module, key, 0)
    ends_in_a_sum = {name.rpartition(".")[0] for name, _, style in planned if style in ROW}
    regions: set[nn.Module] = set()  # modules that run divided
    whole_regions: set[nn.Module] = set()  # modules of which only linear layers run divided
    for name, module, style in planned:
        if style in (SUMMED, SHARED):
            cutter.sum_gradients(module.parameters())
            if style == SHARED:
                module.register_forward_hook(partial(_take_own_head, ranks, causal_lm))
            continue
        above = name.rpartition(".")[0]
        region = causal_lm.get_submodule(above)
        is_whole = above not in ends_in_a_sum
        (whole_regions if is_whole else regions).add(region)
        cutter.cut_linear(module, style)
        if style in COLUMN:
            _run_columns(ranks, module, style, is_whole=is_whole)
        else:
            _run_rows(ranks, region, name, style)
    for region in regions:
        _change_input(region, ranks.begin)
    if whole_regions:
        _report_whole(causal_lm.config.model_type, type(next(iter(whole_regions))).__name__)
    cutter.cut_vocabulary()
    if sequence_parallel:
        _divide_tokens(policy, ranks, regions, whole_regions)


def _run_columns(ranks: _Ranks, module: nn.Module, style: str, *, is_whole: bool) -> None:
    """Let a linear layer give its own columns, or gather all of them."""
    if is_whole:
        _change_input(module, ranks.enter)
    if style == "colwise_gather_output":
        module.register_forward_hook(partial(_gather_columns, ranks))


def _run_rows(ranks: _Ranks, region: nn.Module, name: str, style: str) -> None:
    """Let a linear layer see its own rows, and sum the outputs of all ranks."""
    child = name.rpartition(".")[2]
    module: Any = getattr(region, child)
    if hasattr(module, "base_layer"):  # the sum comes after the adapter around the layer
        row = module.base_layer = _RowLinear(module.base_layer)
    else:
        row = module = _RowLinear(module)
        setattr(region, child, row)
    if style == "rowwise_split_input":
        _change_input(module, ranks.own_columns)
    module.register_forward_hook(partial(_sum, ranks, row))


def _divide_tokens(
    policy: PolicyModel, ranks: _Ranks, regions: set[nn.Module], whole_regions: set[nn.Module]
) -> None:
    """Divide the tokens outside regions, and name the parameters whose gradients are then sums."""
    for region in whole_regions:
        _change_input(region, ranks.all_tokens)
        region.register_forward_hook(partial(_keep_own_tokens, ranks))
    # Whole here, but seeing only this rank's tokens: all outside regions, and what a region's
    # last linear adds to its sum.
    inside = {id(weight) for region in regions | whole_regions for weight in region.parameters()}
    inside -= {id(module.bias) for module in policy.modules() if isinstance(module, _RowLinear)}
    policy.token_parts = ranks.of
    policy.tp_group = ranks.group
    policy.tp_partial |= {
        name
        for name, parameter in policy.named_parameters()
        if name not in policy.tp_dims
        and id(parameter) not in inside
        and not name.endswith(".score.weight")  # sees the gathered tokens
    }


def check_split(config: Any, mesh: Mesh, *, sequence_parallel: bool = False) -> None:
    """Refuse a family whose divided twin differs in log-probs or gradients. Collective."""
    group = mesh.group("tp")
    tp = mesh.size("tp")
    if group is None:
        return
    try:
        (twin, batch), (divided, _) = (packed_twin(config, max(2, tp)) for _ in range(2))
    except Exception:  # a config that cannot be shrunk
        return
    # A caller's process group may be of NCCL alone, which moves no tensor of a CPU.
    twin, divided, batch = twin.to(mesh.device), divided.to(mesh.device), batch.to(mesh.device)
    split_model(divided, mesh, sequence_parallel=sequence_parallel)
    refused = f"tp_size: {tp}: model family '{config.model_type}' cannot be divided"
    if sequence_parallel:
        refused += " with sequence_parallel: true"
    try:
        expected = _with_gradients(twin, batch)
        computed = _with_gradients(divided, filled_up(batch, divided.token_parts))
        partial_names = sorted(divided.tp_partial & computed.keys())
        all_reduce_([computed[name] for name in partial_names], group)
    except RuntimeError as error:
        raise ConfigError(f"{refused} ({error})") from error
    off = []
    for name, correct in expected.items():
        if (dim := divided.tp_dims.get(name)) is not None:
            correct = correct.narrow(dim, *part(correct.shape[dim], mesh.rank("tp"), tp))
        off.append((computed[name] - correct).abs().max() / (1e-6 + correct.abs().max()))
    worst = float(gather_ranks(torch.stack(off), group.group_name).max())
    if not worst < TOLERANCE:
        raise ConfigError(
            f"{refused} by transformers' plan: log-probs or gradients differ by {worst:.2g}; set "
            "tp_size to 1"
        )


def _with_gradients(policy: PolicyModel, batch: PairBatch) -> dict[str, Tensor]:
    logps = policy(batch)[0]
    logps.sin().sum().backward()
    gradients = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    return {"log-probs": logps.detach(), **gradients}


# --- what is cut ---


def _planned(causal_lm: Any, tp: int) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, module, style) of everything inside the layers that the family's plan names."""
    config = causal_lm.config.get_text_config()
    plan = causal_lm.tp_plan or {}
    family = f"model family '{causal_lm.config.model_type}'"
    styles = {style for name, style in plan.items() if name != "lm_head"}
    if not styles & {*COLUMN, *ROW}:
        raise ConfigError(
            f"tp_size: {tp}, but transformers has no tensor parallel plan for {family}"
        )
    if unknown := styles - {*COLUMN, *ROW, SUMMED, VOCABULARY, *EXPERTS}:
        raise ConfigError(
            f"tp_size: {tp}, but the plan of {family} has {', '.join(sorted(unknown))}, which is "
            "not supported; set tp_size to 1"
        )
    for name, module in causal_lm.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style in (None, VOCABULARY, *EXPERTS) or module is causal_lm.get_output_embeddings():
            continue
        if style != SUMMED:
            linear = getattr(module, "base_layer", module)  # within an adapter
            if not isinstance(linear, nn.Linear):
                raise ConfigError(
                    f"tp_size: {family}: {name} is not a linear layer; set tp_size to 1"
                )
            counts = _to_divide(name, linear, style, config)
            if _is_shared(counts, tp):
                counts.pop(KEY_HEADS)
                style = SHARED if name.endswith((".k_proj", ".v_proj")) else style
            _refuse_uneven(counts, tp, family)
        yield name, module, style


def _to_divide(name: str, linear: nn.Linear, style: str, config: Any) -> dict[str, int]:
    """Return the counts, by their names, that the ranks must divide for a linear layer."""
    if style in ("colwise_gather_output", "rowwise_split_input"):
        # Heads stay whole; only equal parts can be put together again.
        width = linear.out_features if style in COLUMN else linear.in_features
        return {f"the width of {name}": width}
    if "att" not in name.split(".")[-2]:
        return {}
    return {key: min(over_layers(config, key), default=0) for key in (HEADS, KEY_HEADS)}


def _is_shared(counts: dict[str, int], tp: int) -> bool:
    """Return whether several ranks share a key head."""
    key_heads = counts.get(KEY_HEADS, 0)
    return 0 < key_heads < tp and tp % key_heads == 0


def _refuse_uneven(counts: dict[str, int], tp: int, family: str) -> None:
    for dimension, count in counts.items():
        if count % tp:
            raise ConfigError(
                f"tp_size: {tp} does not divide {dimension}: {count} of {family}; set it to a "
                "divisor"
            )


def _planned_heads(causal_lm: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, key) of parameters with a number for each head, such as attention sinks."""
    plan = causal_lm.tp_plan or {}
    for name, module in causal_lm.named_modules():
        for key, parameter in module._parameters.items():
            style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.{key}"))
            if style == "colwise" and parameter is not None and parameter.ndim == 1:
                yield module, key


@cache
def _report_whole(family: str, module: str) -> None:
    log.info(
        "tp_size: '%s': %s runs whole on each rank, by transformers' plan; its projections are "
        "divided",
        family,
        module,
    )


class _Cutter:
    """Replaces parameters by what one rank holds of them, and records where each was cut."""

    def __init__(self, policy: PolicyModel, ranks: _Ranks) -> None:
        self.policy = policy
        self.ranks = ranks
        self.names = {id(parameter): name for name, parameter in policy.named_parameters()}

    def cut(self, module: nn.Module, key: str, dim: int) -> None:
        parameter: nn.Parameter | None = getattr(module, key)
        if parameter is None:
            return
        policy = self.policy
        name = self.names[id(parameter)]
        policy.tp_dims[name] = dim
        policy.tp_sizes[name] = parameter.shape[dim]
        shard = self.ranks.own(parameter.detach(), dim)
        setattr(module, key, nn.Parameter(shard, parameter.requires_grad))
        if name in policy.exact:
            policy.exact[name] = self.ranks.own(policy.exact[name], dim)

    def cut_linear(self, module: Any, style: str) -> None:
        """Cut a linear layer, and an adapter around it.

        A low-rank product is cut where the weight next to it is; the gradient of its other half
        is a part of a sum.
        """
        cut, uncut, dim = ("lora_A", "lora_B", 1) if style in ROW else ("lora_B", "lora_A", 0)
        for matrix in getattr(module, cut, {}).values():
            self.cut(matrix, "weight", dim)
        self.sum_gradients(matrix.weight for matrix in getattr(module, uncut, {}).values())
        linear = getattr(module, "base_layer", module)
        self.cut(linear, "weight", dim)
        if style in COLUMN:
            self.cut(linear, "bias", 0)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        self.policy.tp_partial |= {self.names[id(parameter)] for parameter in parameters}

    def cut_vocabulary(self) -> None:
        """Cut embedding and head, if they are here. A stage may hold a stand-in instead of the
        embedding, which has the weight of a tied head."""
        ranks = self.ranks
        causal_lm = self.policy.causal_lm
        embedding = causal_lm.get_input_embeddings()
        head = causal_lm.get_output_embeddings()
        shared = getattr(embedding, "weight", None)
        if isinstance(head, nn.Linear):
            first, _ = part(len(head.weight), ranks.rank, ranks.of)
            self.policy.words = Words(first, ranks.group)
            self.cut(head, "bias", 0)
            tied = shared is head.weight
            self.cut(head, "weight", 0)
            if tied:
                embedding.weight = head.weight
                shared = None
        if isinstance(embedding, nn.Embedding):
            _restrict(embedding, self.policy.vocabulary_size, ranks)
            if shared is not None:
                self.cut(embedding, "weight", 0)


# --- how the parts run ---


def _change_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Let a module see changed hidden states: its first argument, or a keyword."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _keep_own_tokens(ranks: _Ranks, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return own_part(output, TOKENS, ranks.group)


def _gather_columns(ranks: _Ranks, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return gather_same(output, output.ndim - 1, ranks.group)


def _take_own_head(
    ranks: _Ranks, causal_lm: Any, _module: nn.Module, _args: Any, output: Tensor
) -> Tensor:
    """Return the head of keys or values that the query heads of this rank attend with."""
    heads = causal_lm.config.get_text_config().num_key_value_heads
    width = output.shape[-1] // heads
    return output.narrow(-1, ranks.rank * heads // ranks.of * width, width)


class _RowLinear(nn.Linear):
    """This rank's columns in, its part of a sum over ranks out; the bias comes after the sum."""

    def __init__(self, own: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = own.weight.shape
        self.weight = own.weight
        self.bias = own.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _sum(ranks: _Ranks, linear: _RowLinear, _module: Any, _args: Any, output: Tensor) -> Tensor:
    summed = ranks.end(output)
    return summed if linear.bias is None else summed + linear.bias


def _restrict(embedding: nn.Embedding, words: int, ranks: _Ranks) -> None:
    """Restrict an embedding to this rank's words: others give zeros; ranks sum the results."""
    look_up = embedding.forward
    silent = embedding.padding_idx
    first, count = part(words, ranks.rank, ranks.of)
    embedding.num_embeddings = count
    if silent is not None:
        embedding.padding_idx = silent - first if 0 <= silent - first < count else None

    def forward(input_ids: Tensor) -> Tensor:
        rows = input_ids - first
        outside = (rows < 0) | (rows >= count)
        vectors = look_up(rows.masked_fill(outside, 0))
        return ranks.end(vectors.masked_fill(outside[..., None], 0))

    embedding.forward = forward  # type: ignore[assignment, method-assign]
