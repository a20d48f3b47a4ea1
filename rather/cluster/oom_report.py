"""A shortage of memory, told: where the memory of a worker goes, and three settings that need less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rather.cluster.preflight import need_of
from rather.config.strategies import layout
from rather.data.batch import PairBatch
from rather.errors import MemoryShortage
from rather.losses.objective import from_config
from rather.model.sizes import sizes_of
from rather.parallel.shard import local
from rather.plan.activations import Running, head, kept
from rather.plan.state import itemsize

if TYPE_CHECKING:
    from rather.cluster.worker import ActorWorker

UNIT = 1000  # tokens
FIXES = 3


@contextmanager
def explained(worker: ActorWorker, batches: Sequence[PairBatch] = ()) -> Iterator[None]:
    """An out-of-memory error gets the table and the fixes as a note: whoever repeats the work needs neither."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(explanation(worker, largest(batches)))
        raise


def largest(batches: Sequence[PairBatch]) -> int:
    """Tokens of the largest micro-batch."""
    return max((len(batch.ids_N) for batch in batches), default=0)


def sentence(error: BaseException) -> str:
    """Its first line, for the rest is about the allocator."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip()


def shortage(error: BaseException) -> MemoryShortage:
    return MemoryShortage("\n".join([sentence(error), *getattr(error, "__notes__", ())]))


def explanation(worker: ActorWorker, tokens: int) -> str:
    """`tokens`: those of the largest micro-batch; 0 where there is none yet."""
    rows = table(worker)
    width = max(map(len, rows))
    lines = [f"  {name:{width}}  {number / 2**30:8.3f} GiB" for name, number in rows.items()]
    ways = [f"  {way}" for way in fixes(worker, tokens)]
    size = f" (the largest micro-batch has {tokens} tokens)" if tokens else ""
    return "\n".join(
        [
            f"Where the memory of {worker.device} goes{size}:",
            *lines,
            "Any of these needs less:",
            *ways,
        ]
    )


# --- where it goes ---


def table(worker: ActorWorker) -> dict[str, float]:
    """Bytes of what lies there, and of what a micro-batch adds."""
    rows: dict[str, float] = {}
    if hasattr(worker, "trainer"):
        trainer = worker.trainer
        rows["weights"] = sum(local(weight).nbytes for weight in trainer.policy.parameters())
        if trainer.optimizer:
            rows["gradients"] = trainer.optimizer.gradient_bytes()
            rows["masters and moments"] = trainer.optimizer.state_bytes()
        rows |= {name: number for name, number in _of_tokens(worker).items() if number}
    elif need := need_of(worker.config, worker.worker_config, worker.device.split(":")[0]):
        rows[f"state of {worker.role}, computed"] = need.device + need.host
    if other := _beside(worker):
        rows["reference"] = other
    return rows


def _of_tokens(worker: ActorWorker) -> dict[str, float]:
    """Of a thousand scored tokens; activations as the planner measured them, else computed."""
    found, kind, planned, args = (
        worker.layout,
        worker.device.split(":")[0],
        worker.planned,
        worker.source[1],
    )
    sizes, level = sizes_of(*worker.source), planned.recompute if planned else "none"
    running = Running(kind, itemsize(args, kind), level, worker.compiled, args.has_adapter)
    rows = {f"logits of {UNIT} tokens": head(sizes, UNIT, running, found.tp).logits}
    if planned is None:
        return rows
    if planned.bytes_of_token:
        return {f"activations and logits of {UNIT} tokens, measured": UNIT * planned.bytes_of_token}
    each = kept(sizes, running) * sizes.layers / found.pp / found.tp / found.cp
    return {f"activations of {UNIT} tokens, computed": UNIT * each, **rows}


def _beside(worker: ActorWorker) -> float:
    """Of a reference that shares the device of the policy, computed."""
    config = worker.config
    shares = (config.reference.device_mapping or [0]) == (config.actor_train.device_mapping or [0])
    if worker.role != "actor_train" or not shares or not from_config(config).needs_reference:
        return 0.0
    kind = worker.device.split(":")[0]
    need = need_of(config, config.reference, kind)
    return need.device + (need.host if kind == "cpu" else 0.0) if need else 0.0


# --- what needs less ---


def fixes(worker: ActorWorker, tokens: int) -> list[str]:
    """Three settings that are not yet made."""
    ways = (
        _for_policy(worker, tokens)
        if worker.role == "actor_train"
        else _for_reference(worker, tokens)
    )
    return [way for way, has_effect in ways if has_effect][:FIXES]


def _for_policy(worker: ActorWorker, tokens: int) -> list[tuple[str, bool]]:
    config, found, alone = (
        worker.config,
        layout(worker.worker_config),
        worker.device.startswith("cuda"),
    )
    strategy = "actor_train.strategy_args"
    alone = alone and found.devices == 1
    lean = alone and config.precision != "lean" and worker.worker_config.model_args.dtype != "fp32"
    parks = (
        alone
        and _beside(worker) > 0
        and config.reference.offload != "on"
        and not config.sync_ref_model
    )
    recomputes = worker.planned is not None and worker.planned.recompute == "full"
    return [
        (
            f"actor_train.max_tokens_per_microbatch_in_train={tokens // 2}",
            tokens > config.sequence_length,
        ),
        (f"{strategy}.strategy_config.recompute_granularity=full", not recomputes),
        ("precision=lean (moments of 8 bits, no masters)", lean),
        ("reference.offload=on (it waits on the host)", parks),
        (
            f"{strategy}.strategy_name=zero3 (divides weights and optimizer)",
            found.dp > 1 and found.stage < 3,
        ),
        (f"sequence_length={config.sequence_length // 2} (longer pairs are cut or dropped)", True),
        (
            f"more devices: actor_train.device_mapping, with {strategy}.strategy_name=zero3 or a larger tp_size",
            True,
        ),
    ]


def _for_reference(worker: ActorWorker, tokens: int) -> list[tuple[str, bool]]:
    config, found = worker.config, layout(worker.worker_config)
    strategy = "reference.strategy_args"
    return [
        (
            f"reference.max_tokens_per_microbatch_in_infer={tokens // 2}",
            tokens > config.sequence_length,
        ),
        (
            f"{strategy}.strategy_name=fsdp2_infer (divides the weights)",
            found.dp > 1 and not found.stage,
        ),
        (f"sequence_length={config.sequence_length // 2} (longer pairs are cut or dropped)", True),
        ("reference.device_mapping with devices of its own", True),
    ]
