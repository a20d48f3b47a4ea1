"""Explain a lack of device memory: where the memory of a worker goes, and three settings that need
less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rather.cluster.preflight import GIB, need_of
from rather.data.batch import PairBatch
from rather.errors import MemoryShortage
from rather.losses.objective import from_config
from rather.model.sizes import sizes_of
from rather.parallel.load import compute_dtype
from rather.parallel.shard import local
from rather.plan.memory import LayerBytes

if TYPE_CHECKING:
    from rather.cluster.worker import ActorWorker

UNIT = 1000  # tokens
FIXES = 3


def largest(batches: Sequence[PairBatch]) -> int:
    """Return the tokens of the largest micro-batch."""
    return max((len(batch.ids_N) for batch in batches), default=0)


def sentence(error: BaseException) -> str:
    """Return the first line of an error; the others are about the allocator."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip()


def shortage(error: BaseException) -> MemoryShortage:
    return MemoryShortage("\n".join([sentence(error), *getattr(error, "__notes__", ())]))


def explanation(worker: ActorWorker, tokens: int) -> str:
    """Return the table and the fixes. `tokens`: of the largest micro-batch; 0 if there is none
    yet."""
    rows = table(worker)
    width = max(map(len, rows))
    size = f" (the largest micro-batch has {tokens} tokens)" if tokens else ""
    lines = [f"Where the memory of {worker.device} goes{size}:"]
    lines += [f"  {name:{width}}  {number / GIB:8.3f} GiB" for name, number in rows.items()]
    lines += ["Any of these needs less:", *(f"  {fix}" for fix in fixes(worker, tokens))]
    return "\n".join(lines)


def table(worker: ActorWorker) -> dict[str, float]:
    """Return the bytes of what is there, and of what a micro-batch adds."""
    rows: dict[str, float] = {}
    kind = worker.device.split(":")[0]
    if hasattr(worker, "trainer"):
        trainer = worker.trainer
        rows["weights"] = sum(local(weight).nbytes for weight in trainer.policy.parameters())
        if trainer.optimizer:
            rows["gradients"] = trainer.optimizer.gradient_bytes()
            rows["masters and moments"] = trainer.optimizer.state_bytes()
        rows |= _per_tokens(worker, kind)
    elif need := need_of(worker.config, worker.worker_config, kind):
        rows[f"state of {worker.role}, computed"] = need.device + need.host
    rows["reference"] = _reference_alongside(worker, kind)
    return {name: number for name, number in rows.items() if number}


def _per_tokens(worker: ActorWorker, kind: str) -> dict[str, float]:
    """Return the bytes of a thousand scored tokens; activations as the planner measured them, else
    computed."""
    shape, planned, args = worker.layout, worker.planned, worker.source[1]
    if planned and planned.bytes_of_token:
        return {f"activations and logits of {UNIT} tokens, measured": UNIT * planned.bytes_of_token}
    sizes, level = sizes_of(*worker.source), planned.recompute if planned else "none"
    size, adapter = compute_dtype(args, kind).itemsize, args.has_adapter
    layer = LayerBytes(sizes, kind, size, level, worker.compiled, adapter)
    kept = layer.kept if planned else 0.0
    each = kept * sizes.layers / shape.pp / shape.tp / shape.cp
    logits = layer.head(UNIT, shape.tp)[0]
    return {
        f"activations of {UNIT} tokens, computed": UNIT * each,
        f"logits of {UNIT} tokens": logits,
    }


def _reference_alongside(worker: ActorWorker, kind: str) -> float:
    """Return the computed bytes of a reference that shares the device of the policy."""
    config = worker.config
    same = (config.reference.device_mapping or [0]) == (config.actor_train.device_mapping or [0])
    if worker.role != "actor_train" or not same or not from_config(config).needs_reference:
        return 0.0
    need = need_of(config, config.reference, kind)
    return need.device + (need.host if kind == "cpu" else 0.0) if need else 0.0


def fixes(worker: ActorWorker, tokens: int) -> list[str]:
    """Return three settings that are not yet made."""
    config, shape, role, planned = worker.config, worker.layout, worker.role, worker.planned
    trains, strategy = role == "actor_train", f"{role}.strategy_args"
    alone = worker.device.startswith("cuda") and shape.devices == 1
    offloads = alone and config.reference.offload != "on" and not config.sync_ref_model
    lean = config.precision != "lean" and worker.worker_config.model_args.dtype != "fp32"
    work = "train" if trains else "infer"
    name = "zero3" if trains else "fsdp2_infer"
    shards = shape.dp > 1 and (shape.stage < 3 if trains else not shape.stage)
    ways = {
        f"{role}.max_tokens_per_microbatch_in_{work}={tokens // 2}": tokens
        > config.sequence_length,
        f"{strategy}.strategy_config.recompute_granularity=full": trains
        and not (planned and planned.recompute == "full"),
        "precision=lean (moments of 8 bits, no masters)": trains and alone and lean,
        "reference.offload=on (it waits on the host)": offloads
        and _reference_alongside(worker, "cuda") > 0,
        f"{strategy}.strategy_name={name} (shards the weights)": shards,
        f"sequence_length={config.sequence_length // 2} (longer pairs are cut or dropped)": True,
        f"more devices: {role}.device_mapping, with strategy_name={name} or a larger tp_size": True,
    }
    return [way for way, has_effect in ways.items() if has_effect][:FIXES]
