"""DeepSpeed's ZeRO as an engine of Rather: `actor_train.engine: deepspeed_engine.py:DeepSpeedEngine`.

    torchrun --nproc-per-node 2 -m rather train dpo.yaml \\
        actor_train.engine=examples/engines/deepspeed_engine.py:DeepSpeedEngine \\
        actor_train.strategy_args.strategy_name=zero2

ZeRO-1, 2 and 3 with DeepSpeed's own optimizer step around torch's AdamW. Tested with DeepSpeed 0.19.8
(`pip install rather[engines]`). Checkpoints are Rather's, gathered on the first rank: for models of up
to about 3B weights. Its public calls cannot restore a state before the first step, so that a few
private ones are used; PRIVATE lists them, and tests/engines checks each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rather.config.strategies import STAGES
from rather.data.batch import Columns, PairBatch
from rather.model.policy import PolicyModel
from rather.train.engine import Engine, EngineJob, StepOptimizer

KINDS = ("exp_avg", "exp_avg_sq")
# What DeepSpeed does not promise: attributes of its optimizer, by ZeRO stage.
PRIVATE = {
    1: (
        "single_partition_of_fp32_groups",
        "update_lp_params",
        "_hp_optimizer_states_linked",
        "_lazy_init_hp_params_optimizer_state",
        "scaled_global_norm",
    ),
    3: (
        "fp32_partitioned_groups_flat",
        "_reassign_or_swap_out_partitioned_parameters",
        "persistent_parameters",
        "_get_norm_groups",
    ),
}
PRIVATE[2] = PRIVATE[1]


def import_deepspeed(device: str) -> Any:
    """Import DeepSpeed for a kind of device; on a CPU, without compiling C++ at the first use."""
    os.environ.setdefault("DS_ACCELERATOR", device.split(":")[0])
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    import deepspeed

    # `deepspeed.comm.torch` as an attribute is torch itself.
    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # a killed build would leave a lock for ever
    return deepspeed


def zero_stage(job: EngineJob) -> int:
    """Return the stage that strategy_args name; a layout of one device has none."""
    if job.layout.name == "deepspeed_train":
        return int(job.strategy_config.get("zero_optimization", {}).get("stage", 0))
    return STAGES.get(job.layout.name) or 0


class DeepSpeedRunner:
    """Runs micro-batches through a DeepSpeed engine."""

    def __init__(self, engine: Any, policy: PolicyModel, device: str) -> None:
        self.engine, self.policy, self.device = engine, policy, device

    def _columns(self, batch: PairBatch, wanted: Collection[str]) -> dict[str, Tensor]:
        logps, squared = self.engine(batch, squares="squares" in wanted)
        return self.policy.pair_sums(logps, squared, batch, wanted)

    @torch.no_grad()
    def columns(
        self, batches: Sequence[PairBatch], wanted: Collection[str]
    ) -> list[dict[str, Tensor]]:
        return [self._columns(batch.to(self.device), wanted) for batch in batches]

    def backward(
        self,
        batches: Sequence[PairBatch],
        wanted: Collection[str],
        objective: Callable[[PairBatch, Columns], Tensor],
    ) -> None:
        for number, batch in enumerate(batches, start=1):
            self.engine.set_gradient_accumulation_boundary(number == len(batches))
            local_batch = batch.to(self.device)
            loss = objective(local_batch, self._columns(local_batch, wanted))
            self.engine.backward(loss, scale_wrt_gas=False)


class Gathered(Mapping[str, Tensor]):
    """Whole tensors by name, gathered on access; ranks other than the first get empty ones."""

    def __init__(
        self, parameters: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor]
    ) -> None:
        self.parameters, self.gather = parameters, gather

    def __getitem__(self, name: str) -> Tensor:
        whole = self.gather(self.parameters[name])
        return whole.cpu().clone() if dist.get_rank() == 0 else whole.new_empty(0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


class DeepSpeedOptimizer(StepOptimizer):
    """The optimizer inside a DeepSpeed engine."""

    def __init__(self, engine: Any, policy: PolicyModel, job: EngineJob) -> None:
        self.engine, self.zero, self.schedule = engine, engine.optimizer, job.schedule
        self.stage, self.world = zero_stage(job), dist.get_world_size()
        self.parameters: dict[str, Any] = dict(policy.named_parameters())

    @property
    def scale(self) -> float:
        """DeepSpeed means over ranks where Rather sums: the objective and the router loss."""
        return float(self.world)

    @property
    def masters(self) -> Mapping[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return Gathered(self.parameters, safe_get_full_fp32_param)

    def grad_norm(self, _names: Collection[str] | None = None) -> Tensor:
        """Return a share of the norm of all ranks, which DeepSpeed has already summed."""
        if self.stage < 3:
            norm = self.zero.scaled_global_norm()
        else:
            norms = [torch.as_tensor(norm).float() for norm in self.zero._get_norm_groups()]
            norm = torch.linalg.vector_norm(torch.stack(norms))
        return torch.as_tensor(norm, dtype=torch.float64) / self.world**0.5

    def step(self, _grad_norm: float) -> None:
        for group in self.zero.param_groups:
            group["lr"] = self.lr
        self.engine.step()
        self.updates += 1

    def zero_grad(self) -> None:
        self.zero.zero_grad()

    def moments(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        if not self.updates:
            return {}
        self._link_states()
        moments = {}
        for kind in KINDS:
            of_kind = Gathered(
                self.parameters, lambda p, kind=kind: safe_get_full_optimizer_state(p, kind)
            )
            moments |= {f"{name}.{kind}": tensor for name, tensor in of_kind.items()}
        return moments

    def load(
        self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int
    ) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        self.updates = updates
        if updates:
            self._make_states(updates)
            for name, parameter in self.parameters.items():
                for kind in KINDS:
                    state = moments[f"{name}.{kind}"].to(parameter.device)
                    safe_set_full_optimizer_state(parameter, state, kind)
        self.set_masters(masters)

    def set_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Set the float32 weights, and those of the forward pass to the nearest ones."""
        from deepspeed.utils import safe_set_full_fp32_param

        for name, parameter in self.parameters.items():
            if name in masters:
                safe_set_full_fp32_param(parameter, masters[name].float().to(parameter.device))
        if self.stage < 3:
            self.zero.update_lp_params()
            return
        # `safe_set_full_fp32_param` leaves the weights of the forward pass as they were.
        for number in range(len(self.zero.fp32_partitioned_groups_flat)):
            self.zero._reassign_or_swap_out_partitioned_parameters(number)
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)

    def _make_states(self, updates: int) -> None:
        """Make what AdamW makes at its first step: without it, no state can be set."""
        flat = (
            self.zero.single_partition_of_fp32_groups
            if self.stage < 3
            else self.zero.fp32_partitioned_groups_flat
        )
        for part in flat:
            state = {kind: torch.zeros_like(part) for kind in KINDS}
            self.zero.optimizer.state[part] = {"step": torch.tensor(float(updates)), **state}
        self._link_states()

    def _link_states(self) -> None:
        """Link the states of all groups: DeepSpeed does so when only the first one has any."""
        if self.stage < 3:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()


class DeepSpeedEngine(Engine):
    """ZeRO-1 to 3 on data-parallel ranks."""

    def problems(self) -> Iterable[str]:
        job = self.job
        layout, key = job.layout, "actor_train.strategy_args"
        if not dist.is_initialized():
            yield "DeepSpeed needs a process group: start with torchrun --nproc-per-node N, or on Ray"
        for axis in ("tp", "pp", "cp", "ep"):
            if getattr(layout, axis) > 1:
                yield f"{key}.{axis}_size: {getattr(layout, axis)} is not possible, only data parallel"
        if zero_stage(job) == 0:
            yield f"{key}.strategy_name: '{layout.name}' names no ZeRO stage; use zero1, zero2 or zero3"
        if layout.name == "hsdp" or layout.shard not in (1, layout.dp):
            yield f"{key}.strategy_config.shard_size: replicas of shards are not possible"
        if layout.host:
            yield f"{key}: shards in host memory are not possible with this engine"
        if layout.recompute not in (None, "none"):
            yield f"{key}.strategy_config.recompute_granularity: {layout.recompute} is not possible"
        if zero_stage(job) == 1 and self._is_bf16():
            yield f"{key}.strategy_name: ZeRO-1 adds up in bfloat16; use zero2 or zero3, or dtype fp32"

    def _is_bf16(self) -> bool:
        from rather.parallel.load import compute_dtype

        return compute_dtype(self.job.args, self.job.device) == torch.bfloat16

    def build_policy(self) -> PolicyModel:
        return self.job.load()

    def build_optimizer(self, policy: PolicyModel) -> DeepSpeedOptimizer:
        job, args = self.job, self.job.training
        decayed = [p for p in policy.parameters() if p.ndim >= 2]
        plain = [p for p in policy.parameters() if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": args.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        betas = (args.adam_beta1, args.adam_beta2)
        adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=args.learning_rate,
            betas=betas,
            eps=args.adam_epsilon,
        )
        deepspeed = import_deepspeed(job.device)
        self.engine, _, _, _ = deepspeed.initialize(
            model=policy, optimizer=adamw, config=self.settings(), dist_init_required=False
        )
        optimizer = DeepSpeedOptimizer(self.engine, policy, job)
        if policy.exact:
            optimizer.set_masters(policy.exact)
            policy.exact = {}
        return optimizer

    def settings(self) -> dict[str, Any]:
        """Return DeepSpeed's own configuration; keys of zero_optimization are the user's."""
        job = self.job
        zero = dict(job.strategy_config.get("zero_optimization", {}))
        zero |= {"stage": zero_stage(job)}
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": job.max_grad_norm,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        if self._is_bf16():  # gradients are added up in float32, as in Rather
            settings |= {
                "bf16": {"enabled": True},
                "communication_data_type": "fp32",
                "data_types": {"grad_accum_dtype": "fp32"},
            }
        return settings

    def build_runner(self, policy: PolicyModel, _optimizer: Any) -> DeepSpeedRunner:
        return DeepSpeedRunner(self.engine, policy, self.job.device)
