"""DeepSpeed and megatron-core with one rank against Rather's own engine: losses, norms, pairs/s.

    python bench/engines_gpu.py                                # on a GPU: bf16, rounding nearest, ~0.5B weights
    python bench/engines_gpu.py --device cpu --tiny            # tries the script itself, float32

All engines train the same random model on the same packed pairs in one process, one after the other. An engine whose
package cannot be imported is listed as not run, with the reason. The reference is a fixed column of log-probs, so that
only the policy is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import RESULTS, Shape, free, machine, make_steps, pairs_of, peak_gib, table, write_facts

from rather.config import plugins
from rather.config.schema import ModelArgs, TrainingArgs
from rather.config.strategies import Layout
from rather.data.batch import PairFacts
from rather.data.pack import pack
from rather.losses.objective import configure
from rather.model.attention import IMPLEMENTATION
from rather.model.policy import PolicyModel
from rather.optim.optimizer import Optimizer
from rather.optim.rounding import Rounding
from rather.parallel.mesh import build_mesh
from rather.train.engine import EngineJob
from rather.train.rank_trainer import RankTrainer

LARGE = Shape("qwen2", 896, 24, 14, 2, 4864, 151_936, tied=True)  # Qwen2.5-0.5B
TINY = Shape("qwen2", 64, 2, 4, 2, 96, 512, tied=True)
EXAMPLES = Path(__file__).parents[1] / "examples" / "engines"
ENGINES = {
    "torch": ("", Layout(1)),
    "DeepSpeed ZeRO-2": ("deepspeed_engine.py:DeepSpeedEngine", Layout(1, name="zero2")),
    "DeepSpeed ZeRO-3": ("deepspeed_engine.py:DeepSpeedEngine", Layout(1, name="zero3")),
    "megatron-core": ("megatron_engine.py:MegatronEngine", Layout(1, name="megatron_train")),
}


def make_policy(shape: Shape, device: str, dtype: torch.dtype) -> PolicyModel:
    torch.manual_seed(0)
    return PolicyModel(shape.model(dtype, device, IMPLEMENTATION).eval())


def make_trainer(name: str, shape: Shape, device: str, dtype: torch.dtype) -> RankTrainer:
    """Return the trainer of one engine, as a worker builds it."""
    training = TrainingArgs(learning_rate=1e-5, weight_decay=0.1)
    loss = configure(["sigmoid"], {"beta": 0.1})
    engine_name, layout = ENGINES[name]
    if not engine_name:
        policy = make_policy(shape, device, dtype)
        policy.rounding = Rounding("nearest")
        options: dict[str, Any] = {"schedule": lambda _: 1e-5, "max_grad_norm": 1.0}
        optimizer = Optimizer(
            policy.named_parameters(), training, rounding=policy.rounding, **options
        )
        return RankTrainer(policy, loss, optimizer)
    file, _, class_name = engine_name.partition(":")
    mesh = build_mesh(layout, device)
    dtype_name: Any = "bf16" if dtype == torch.bfloat16 else "fp32"
    job = EngineJob(
        "random", ModelArgs(dtype=dtype_name), device, mesh, layout, {}, training, 1.0,
        lambda _: 1e-5, "preference", lambda: make_policy(shape, device, dtype),
    )  # fmt: skip
    engine = plugins.load_function(EXAMPLES / file, class_name, "engine")(job)
    if problems := list(engine.problems()):
        raise RuntimeError("; ".join(problems))
    built = engine.build_policy()
    step_optimizer = engine.build_optimizer(built)
    runner = engine.build_runner(built, step_optimizer)
    return RankTrainer(built, loss, step_optimizer, mesh=mesh, runner=runner, owns_weights=False)


def train(trainer: RankTrainer, steps: list[Any], budget: int, warm_up: int) -> dict[str, Any]:
    """Train all steps; the time is that of the steps after the warm-up."""
    losses, norms, seconds, pairs = [], [], 0.0, 0
    for number, step in enumerate(steps):
        batches = pack(pairs_of(step), budget)
        facts = PairFacts.of_step(batches)
        reference = {"sum": -4.0 * facts.length.double()}
        began = time.perf_counter()
        result = trainer.train_step(batches, reference, facts)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if number >= warm_up:
            seconds += time.perf_counter() - began
            pairs += len(facts.weight)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return {"losses": losses, "norms": norms, "pairs_per_second": pairs / seconds}


def worst(values: list[float], others: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(values, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, default=RESULTS / "engines_gpu.json")
    parser.add_argument("--engines", nargs="*", default=list(ENGINES))
    options = parser.parse_args()
    device = "cuda:0" if options.device == "cuda" else "cpu"
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    shape = TINY if options.tiny else LARGE
    pairs, scale = (16, 0.05) if options.tiny else (64, 1.0)
    budget = 1024 if options.tiny else 16_384
    steps = make_steps(
        "ultrafeedback", shape.vocabulary, steps=options.steps, pairs=pairs, scale=scale
    )
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    backend = "nccl" if device != "cpu" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(
            backend, store=store, rank=0, world_size=1, timeout=timedelta(minutes=5)
        )
        results: dict[str, dict[str, Any]] = {}
        for name in options.engines:
            try:
                trainer = make_trainer(name, shape, device, dtype)
                results[name] = train(trainer, steps, budget, warm_up=2)
                results[name]["peak_gib"] = peak_gib()
                del trainer
            except Exception as error:  # the other engines still count
                results[name] = {"not_run": f"{type(error).__name__}: {error}".splitlines()[0]}
            gc.collect()
            free()
            write_facts(options.json, "engines_gpu", dtype=str(dtype), results=results)
        dist.destroy_process_group()
    own = results.get("torch", {})
    rows = []
    for name, result in results.items():
        if "not_run" in result:
            rows.append([name, "not run", result["not_run"][:90], "", ""])
            continue
        differences = [worst(result[key], own[key]) for key in ("losses", "norms")]
        rows.append([name, *differences, result["pairs_per_second"], result["peak_gib"]])
    columns = ["engine", "loss, largest relative difference", "norm", "pairs/s", "peak GiB"]
    table(f"one rank, {dtype}, rounding nearest, {shape.weights / 1e6:.0f}M weights", columns, rows)
    print(machine())


if __name__ == "__main__":
    main()
