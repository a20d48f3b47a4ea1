"""Megatron-Core's own pipeline schedule and checkpoints, on ranks: scripts, not RankTrainer."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rather.model.policy import PolicyModel
from tests.engines.ranks import EXAMPLES
from tests.same.canonical import (
    Outcome,
    Setup,
    make_loss,
    make_optimizer,
    make_policy,
    make_step,
    pairs_of,
)


def engine_module() -> Any:
    from rather.config import plugins

    cls = plugins.load_function(EXAMPLES / "megatron_engine.py", "MegatronEngine", "engine")
    import sys

    return sys.modules[cls.__module__]


def stage_of(source: PolicyModel, tp: int, pp: int) -> tuple[Any, Any, int]:
    """Return the engine's module, the GPTModel of this rank with its weights, and its stage."""
    module = engine_module()
    module.use_cpu()
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
    )
    config = source.causal_lm.config
    stage = parallel_state.get_pipeline_model_parallel_rank()
    ends = {"pre_process": stage == 0, "post_process": stage == pp - 1}
    gpt = module.make_gpt(config, torch.float32, tp=tp, pp=pp, **ends)
    weights = module._Plain({name: p.detach() for name, p in source.named_parameters()})
    tensors = module.megatron_tensors(weights, config)
    rank = parallel_state.get_tensor_model_parallel_rank()
    module.fill(gpt, tensors, rank, tp, stage * config.num_hidden_layers // pp)
    return module, gpt, stage


def run_pipeline(setup: Setup) -> Outcome:
    """Train on two stages with Megatron's 1F1B; micro-batches have different sizes."""
    source = make_policy(setup)
    module, gpt, stage = stage_of(source, tp=1, pp=2)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    gpt.config.batch_p2p_comm = gpt.config.deallocate_pipeline_outputs = False
    policy = module.MegatronPolicy(source, gpt, 0, 1, None)
    loss, optimizer = make_loss(setup), make_optimizer(policy, setup)
    schedule, outcome = get_forward_backward_func(), Outcome([], [], [], {})
    for pairs in pairs_of(setup):
        step = make_step(pairs, 1)
        total, sums = float(step.facts.weight.sum()), torch.zeros((), dtype=torch.float64)

        def forward(batches: Any, model: Any, step: Any = step, total: float = total, sums: Tensor = sums) -> Any:  # fmt: skip
            batch = next(batches)
            embedded = None
            if stage == 0:
                embedded = model.embedding(
                    input_ids=batch.ids_N[None], position_ids=batch.positions_N[None]
                )
            states = model.decoder(
                hidden_states=embedded,
                attention_mask=batch.segments,
                rotary_pos_emb=policy.rope(batch),
            )

            def score(states: Tensor) -> Any:
                scored = policy.score(states.transpose(0, 1)[0], batch)
                columns = policy.pair_sums(*scored, batch)
                reference = {k: v[batch.pair_P] for k, v in step.reference.items()}
                facts = step.facts.at(batch.pair_P)
                x = facts.with_logps(columns, reference, step.facts.mean_chosen_length)
                value = (loss(x) @ batch.weight_P) / total
                sums.add_(value.detach())
                return value.float(), torch.tensor(1, dtype=torch.int), {}

            return states, score

        batches = step.dealt[0]
        schedule(
            forward_step_func=forward, data_iterator=iter(batches), model=[gpt],
            num_microbatches=len(batches), seq_length=1, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        square = optimizer.grad_norm() ** 2
        dist.all_reduce(square)
        dist.all_reduce(sums)
        optimizer.step(float(square.sqrt()))
        optimizer.zero_grad()
        outcome.losses.append(float(sums))
        outcome.grad_norms.append(float(square.sqrt()))
    return outcome


def write_checkpoint(setup: Setup, folder: str) -> None:
    """Let megatron-core write the canonical model on tp 2 x pp 2."""
    _, gpt, _ = stage_of(make_policy(setup), tp=2, pp=2)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    # Its writer starts a process, which ranks of the pool, as daemons, may not.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    state = {"model": gpt.sharded_state_dict(), "iteration": 1}
    dist_checkpointing.save(state, folder, strategy)


def load_checkpoint(setup: Setup, folder: str) -> list[str]:
    """Let megatron-core load a checkpoint on tp 2 x pp 2; return the weights that differ."""
    _, gpt, _ = stage_of(make_policy(setup), tp=2, pp=2)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    expected = {name: p.detach().clone() for name, p in gpt.named_parameters()}
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.zero_()
    state = {"model": gpt.sharded_state_dict()}
    loaded = dist_checkpointing.load(state, folder, strict=StrictHandling.LOG_ALL)
    gpt.load_state_dict(loaded["model"], strict=False)
    return [name for name, p in gpt.named_parameters() if not torch.equal(p, expected[name])]
