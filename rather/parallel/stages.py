"""Pipeline parallel: a model cut into stages, run by one of torch's schedules.

Every rank holds all micro-batches of the step; what travels between stages are hidden states and,
backwards, their gradients. The last stage has the head, the log-probs and the loss.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from rather.config.strategies import Pipeline
from rather.data.batch import Columns, PairBatch
from rather.data.pack import empty_batch
from rather.errors import ConfigError
from rather.model.check import packed_twin, shared_keys
from rather.model.policy import PolicyModel, head_of, pair_columns
from rather.model.towers import decoder_of
from rather.parallel.context import filled_to
from rather.parallel.mesh import Mesh

Objective = Callable[[PairBatch, Columns], Tensor]  # a micro-batch, its columns -> what to minimise

# On any error it prints the whole schedule, thousands of lines, before it raises.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

# The virtual ones take all stages of a rank, the others the only one.
SCHEDULES: Mapping[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
TOLERANCE = 1e-4  # of summed log-probs of a cut twin
# Rounds of micro-batches at a time without gradients: their hidden states are kept until all are
# done.
EVALUATED = 4


# --- cutting ---


class _Entrance(nn.Module):
    """Returns the received activations in place of the embedding and of the first layer.

    It replaces both, because some families scale or shift embeddings in between (granite, gpt2).
    """

    def __init__(self, inbox: list[Tensor], weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.inbox = inbox  # what the stage before has sent
        self.weight = weight  # of a tied head: it keeps the embedding's name

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return self.inbox[0]


class _PassThrough(nn.Module):
    """A layer or norm of another stage, kept because families look up settings by index."""

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_states


class Stage(PolicyModel):
    """A part of a PolicyModel. Its parameters have the names of the whole model."""

    def __init__(self, causal_lm: Any, layers: range) -> None:
        super().__init__(causal_lm)
        base = decoder_of(causal_lm)
        embedding = causal_lm.get_input_embeddings()
        total = len(base.layers)
        self.first = layers.start == 0
        self.last = layers.stop == total
        self.tied = embedding.weight is head_of(causal_lm).weight
        self.batches: Sequence[PairBatch] = ()  # all of the step, this rank's share of each
        self.wanted: Collection[str] = ()
        self._inbox: list[Tensor] = []
        before, after = _ends(causal_lm)
        for index in set(range(total)) - set(layers):
            is_entrance = index == 0 and not self.first
            base.layers[index] = _Entrance(self._inbox) if is_entrance else _PassThrough()
        if not self.first:
            weight = embedding.weight if self.tied and self.last else None
            setattr(base, before, _Entrance(self._inbox, weight))
        if not self.last:
            setattr(base, after, _PassThrough())
            if self.is_reward:
                causal_lm.score = nn.Identity()
            else:
                causal_lm.set_output_embeddings(nn.Identity())

    def forward(self, *received: Tensor, where: Tensor) -> Tensor:  # type: ignore[override]
        """Return hidden states [1, N, D] of a micro-batch; the last stage its columns [C, P, 2]."""
        batch = self.batches[int(where)]
        self._inbox[:] = () if self.first else received
        hidden = self.hidden(batch)
        self._inbox.clear()
        if self.last:
            scored = self.score(hidden[0], batch, squares="squares" in self.wanted)
            return torch.stack(list(self.pair_sums(*scored, batch, self.wanted).values()))
        # Schedules detach in place, which views refuse.
        return hidden.clone() if hidden._is_view() else hidden

    @property
    def embedding(self) -> Any:
        return self.causal_lm.get_input_embeddings()


def _ends(causal_lm: Any) -> tuple[str, str]:
    """Return the names of embedding and final norm; refuse a base model with more parts."""
    config = causal_lm.config.get_text_config()
    names = list(getattr(config, "base_model_pp_plan", None) or ())
    base = decoder_of(causal_lm)
    head = head_of(causal_lm)
    if "layers" not in names or not hasattr(base, "layers"):
        raise _refused(config, "transformers has no plan of its stages")
    if count := shared_keys(config):
        raise _refused(config, f"its last {count} layers attend with the keys of earlier layers")
    before = names[0]
    after = names[-1]
    modules = (getattr(base, before), base.layers, getattr(base, after), head)
    with_stage = {id(parameter) for module in modules for parameter in module.parameters()}
    for name, parameter in causal_lm.named_parameters():
        if id(parameter) not in with_stage:
            raise _refused(config, f"{name} belongs to no stage")
    return before, after


def _refused(config: Any, why: str) -> ConfigError:
    return ConfigError(
        f"model family '{config.model_type}' cannot be cut into pipeline stages: {why}; set "
        "pp_size to 1 and use tensor parallel or sharding instead"
    )


def cut(policy: PolicyModel, pipeline: Pipeline, rank: int) -> list[Stage]:
    """Return the stages of a rank. They share their tensors with the whole model."""
    causal_lm = policy.causal_lm
    _ends(causal_lm)
    layers = len(decoder_of(causal_lm).layers)
    if layers < pipeline.stages:
        raise ConfigError(
            f"pp_size: {pipeline.ranks} ranks x {pipeline.virtual} = {pipeline.stages} stages, but "
            f"the model has only {layers} layers"
        )
    tensors = {id(tensor): tensor for tensor in chain(policy.parameters(), policy.buffers())}
    stages = []
    for number in pipeline.stages_of(rank):
        copied = copy.deepcopy(causal_lm, dict(tensors))
        stage = Stage(copied, pipeline.layers_of(number, layers))
        names = {name for name, _ in stage.named_parameters()}
        stage.exact = {name: weights for name, weights in policy.exact.items() if name in names}
        stage.rounding = policy.rounding
        stage.training = policy.training  # its parts are set already
        stages.append(stage)
    return stages


@torch.no_grad()
def check_cut(config: Any) -> None:
    """Refuse a family whose stages differ from the whole, on a twin with a stage per layer."""
    try:
        twin, batch = packed_twin(config)
        expected = pair_columns(twin, batch)["sum"]
        _ends(twin.causal_lm)
        layers = len(decoder_of(twin.causal_lm).layers)
        received: tuple[Tensor, ...] = ()
        for number in range(layers):
            (stage,) = cut(twin, Pipeline(layers), number)
            stage.batches = [batch]
            received = (stage(*received, where=torch.tensor([0])),)
        worst = float((received[0][0] - expected).abs().max())
    except ConfigError:
        raise
    except Exception as error:
        raise _refused(config, str(error)) from error
    if not worst <= TOLERANCE:
        raise _refused(config, f"its stages differ from the whole by {worst:.2g}")


# --- running ---


class _Stage(PipelineStage):
    """torch's stage, with fixes for schedules that split the backward pass or run forward only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._graphs: dict[int, list[Any]] = {}

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """torch detaches the outputs here and keeps nodes for the second half, but a node in
        Python, as the head's is, does not keep the graph that owns it."""
        if not full_backward and self.has_backward:
            outputs = [loss] if self.is_last else self.fwd_cache[bwd_chunk_id][0]
            self._graphs[bwd_chunk_id] = [output.grad_fn for output in outputs]
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the hooks that add gradients up in float32: torch adds these gradients past autograd,
        which runs none."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._graphs.pop(bwd_chunk_id, None)
        for parameter in self.submod.parameters():
            if parameter.grad is not None:
                for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                    hook(parameter)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        """Make received activations require gradients exactly if this run has a backward pass.

        torch 2.11 decides it in the first run of a schedule only. After a first run without
        backward pass, later ones would have no gradient to send to the stage before.
        """
        activations = super()._retrieve_recv_activations(fwd_chunk_id)
        for activation in activations:
            activation.requires_grad_(self.has_backward)
        return activations

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Skip torch 2.11's check for the last stage, whose output has one row per pair."""
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Drop connections within one rank, which torch 2.11 requests and gloo cannot make."""
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Pass gradients between two stages on one rank; unlike torch, allow for none."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class Stages(nn.Module):
    """The stages of this rank and the schedule that runs them: a Runner."""

    def __init__(
        self, stages: Sequence[Stage], pipeline: Pipeline, mesh: Mesh, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.pipeline = pipeline
        self.dtype = dtype
        self._own = list(stages)
        self._rank = mesh.rank("pp")
        self._group = mesh.group("pp")
        self._first_rank = pipeline.rank_of(0)
        self._last_rank = pipeline.rank_of(pipeline.stages - 1)
        self._schedule: tuple[tuple[int, int], Any] | None = None
        self._objective: Objective | None = None
        self._names: list[str] = []
        self._real = 0  # micro-batches that are not there to fill a schedule
        self._columns: dict[int, dict[str, Tensor]] = {}
        # What a trainer reads from a policy.
        self.exact: dict[str, Tensor] = {}
        self.rounding = stages[0].rounding
        self.tp_dims: dict[str, int] = {}
        self.tp_sizes: dict[str, int] = {}
        self.tp_partial: set[str] = set()
        self.extra_copies: set[str] = set()
        self.experts: dict[str, int] = {}
        for stage in stages:
            self.experts |= stage.experts
            self.exact |= stage.exact
            self.tp_dims |= stage.tp_dims
            self.tp_sizes |= stage.tp_sizes
            self.tp_partial |= stage.tp_partial
            # The late gradients of weights are added to what is gathered then: resharding in
            # between would lose them.
            if pipeline.rule.splits_backward and isinstance(stage, FSDPModule):
                stage.set_reshard_after_forward(False)
        self.tied = self._tie_ends([stage for stage in stages if stage.first or stage.last])
        if self.tied and self._rank == self._last_rank:
            self.extra_copies.add(self.tied)

    def _tie_ends(self, ends: Sequence[Stage]) -> str | None:
        """Share a tied embedding on this rank; return its name if another rank has a copy."""
        if not ends or not ends[0].tied:
            return None
        weight = ends[0].embedding.weight
        if len(ends) > 1:  # each was cut separately
            if isinstance(ends[0], FSDPModule):
                raise ConfigError(
                    f"pipeline_schedule: '{self.pipeline.schedule}' has both ends of the model on "
                    "one rank, and the embedding that they share cannot be sharded twice; take "
                    "another schedule, or no data parallelism"
                )
            ends[1].embedding.weight = weight
            ends[1].causal_lm.get_output_embeddings().weight = weight
        if not weight.requires_grad or self._first_rank == self._last_rank:
            return None
        return next(name for name, parameter in ends[0].named_parameters() if parameter is weight)

    @property
    def holds_last(self) -> bool:
        return self._rank == self._last_rank

    @property
    def _device(self) -> torch.device:
        """The device that computes: buffers are there, while shards may wait on the host."""
        return next(iter(self.buffers()), next(self.parameters())).device

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once, with its name in the whole model."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.split(".", 2)[2], parameter

    @torch.no_grad()
    def columns(
        self, batches: Sequence[PairBatch], wanted: Collection[str]
    ) -> list[dict[str, Tensor]] | None:
        """Return columns without gradients; None on ranks without the last stage."""
        at_once = EVALUATED * self.pipeline.multiple
        columns: list[dict[str, Tensor]] = []
        for start in range(0, len(batches), at_once):
            group = batches[start : start + at_once]
            self.backward(group, wanted, None)
            columns += [self._columns[i] for i in range(len(group)) if self._columns]
        return columns if self.holds_last else None

    def sum_copies(self, gradient_of: Callable[[str], Tensor | None]) -> None:
        """Sum the gradients of a tied embedding at both ends. A collective of the two ranks."""
        if self.tied is None:
            return
        peer = self._last_rank if self._rank == self._first_rank else self._first_rank
        gradient = gradient_of(self.tied)
        assert gradient is not None
        received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        exchange = [
            dist.P2POp(dist.isend, gradient.contiguous(), group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        gradient.add_(received)

    def backward(
        self, batches: Sequence[PairBatch], wanted: Collection[str], objective: Objective | None
    ) -> None:
        """Leave the gradients of the sum of all objectives in the parameters; without one, run
        forward only. Only the last stage calls `objective`."""
        number = self.pipeline.microbatches(len(batches))
        tokens = max(len(batch.ids_N) for batch in batches)
        filled = [filled_to(batch, tokens) for batch in batches]
        filled += [empty_batch(tokens)] * (number - len(batches))
        shares = [self._own[0].share(batch).to(str(self._device)) for batch in filled]
        for stage in self._own:
            stage.batches = shares
            stage.wanted = wanted
        self._objective = objective
        self._columns = {}
        self._real = len(batches)
        self._names = ["sum", *(name for name in ("shared", "squares") if name in wanted)]
        rows = len(shares[0].ids_N) // self._own[0].token_parts  # of hidden states between layers
        schedule = self._scheduled(number, rows)
        where = torch.arange(number)
        inputs = (where,) if self._rank == self._first_rank else ()
        target = where if self.holds_last else None
        run = schedule.step if objective else schedule.eval
        run(*inputs, where=where, target=target, return_outputs=False)

    def _loss(self, output: Tensor, where: Tensor) -> Tensor:
        """Return the loss of one micro-batch on the last stage; an empty one has a loss of 0."""
        number = int(where)
        if number >= self._real:
            return output.sum()
        columns = dict(zip(self._names, output, strict=True))
        self._columns[number] = {name: column.detach().clone() for name, column in columns.items()}
        if self._objective is None:
            return output.sum()
        return self._objective(self._own[-1].batches[number], columns)

    def _scheduled(self, number: int, tokens: int) -> Any:
        """Return the schedule for `number` micro-batches of `tokens` tokens; it is reused."""
        if self._schedule is None or self._schedule[0] != (number, tokens):
            self._schedule = None  # frees its buffers first
            # torch is given the shapes, so that it need not find them by running the model again.
            width = self._own[0].causal_lm.config.get_text_config().hidden_size
            shape = (1, tokens, width)
            hidden = torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)
            first = torch.empty(1, dtype=torch.int64, device="meta")
            stages = [
                _Stage(
                    stage,
                    index,
                    self.pipeline.stages,
                    self._device,
                    input_args=first if stage.first else hidden,
                    output_args=hidden,
                    group=self._group,
                )
                for stage, index in zip(self._own, self.pipeline.stages_of(self._rank), strict=True)
            ]
            make = SCHEDULES[self.pipeline.schedule]
            stages_of_rank = stages[0] if self.pipeline.rule.most_virtual == 1 else stages
            schedule = make(stages_of_rank, number, loss_fn=self._loss, scale_grads=False)
            self._schedule = (number, tokens), schedule
        return self._schedule[1]


def parts_of(policy: nn.Module) -> list[PolicyModel]:
    """Return the policy, or this rank's stages of it."""
    return [module for module in policy.modules() if isinstance(module, PolicyModel)]
