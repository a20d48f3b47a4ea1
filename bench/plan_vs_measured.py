"""Forecast against measured: memory and time of six configurations on one GPU, or of three small ones on a CPU.

    python bench/plan_vs_measured.py             # two to four minutes on an H200
    python bench/plan_vs_measured.py --cpu       # a few minutes
    python bench/plan_vs_measured.py --families  # memory of the families that are not plain decoders; also with --cpu
    python bench/plan_vs_measured.py --page      # makes the table of docs/plan.md from bench/results

Qwen2.5 shapes (on a CPU small Llamas) with random weights; UltraFeedback-like pairs; nothing is compiled, so that steps
can be measured without a minute of compilation. The forecast is made first, from a config.json alone; its time from a
calibration of seconds. Measured: the peak of training steps (GPU: allocated tensors; CPU: growth of the resident set
since before the models were made), the median of steps after one that warms up.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the workers

import torch
from common import (
    RESULTS,
    SHAPES,
    Shape,
    free,
    known_columns,
    machine,
    make_steps,
    pairs_of,
    synchronize,
    table,
    told,
    write_facts,
)

from rather.cluster.memory import Peak
from rather.config.load import config_from_dict
from rather.config.run_config import DPOConfig
from rather.config.schema import TrainingArgs
from rather.data.pack import pack
from rather.losses.objective import configure
from rather.model.budget import LADDER, choose_budget
from rather.model.policy import PolicyModel
from rather.model.sizes import few_layers, sizes_of
from rather.optim.optimizer import Optimizer, schedule
from rather.parallel.load import compute_dtype
from rather.plan.forecast import Forecast, PairSample
from rather.plan.memory import Device
from rather.plan.speed import measured_speed
from rather.train.rank_trainer import RankTrainer

PAGE = Path(__file__).parent.parent / "docs" / "plan.md"
WARM_UP, MEASURED = 1, 2
COLUMNS = (
    "configuration",
    "GiB forecast",
    "measured",
    "error",
    "s a step forecast",
    "measured",
    "error",
    "fits",
)


@dataclass(frozen=True)
class Case:
    """One configuration."""

    name: str
    shape: str
    pairs: int  # of a step
    tokens: int | None  # of a micro-batch; else as many as fit
    reference: bool = True  # online; else its log-probs are known
    rank: int | None = None  # of an adapter
    precision: str = "exact"
    recompute: str | None = None
    scale: float = 1.0  # of the lengths
    settings: dict[str, Any] = field(default_factory=dict)  # of the family, in its config.json


CUDA = [
    Case("0.5B, full", "0.5B", 64, None),
    Case("1.5B, full, reference cached", "1.5B", 48, 8192, reference=False),
    Case("3B, full, recompute full", "3B", 32, 8192, recompute="full"),
    Case("7B, full, lean, reference cached", "7B", 32, 4096, reference=False, precision="lean"),
    Case("3B, LoRA", "3B", 32, 8192, rank=16),
    Case("7B, LoRA", "7B", 32, 8192, rank=16),
]
SMALL = {
    "8M": Shape("llama", 256, 6, 4, 4, 768, 8000, True),
    "11M": Shape("qwen2", 320, 6, 5, 1, 1280, 12_000, True),
}
CPU = [
    Case("8M Llama, full", "8M", 8, 2048, scale=0.3),
    Case("11M Qwen2, full, recompute full", "11M", 4, 1024, recompute="full", scale=0.3),
    Case("11M Qwen2, LoRA", "11M", 4, 1024, rank=8, scale=0.3),
]


LINEAR = {"linear_num_key_heads": 8, "linear_num_value_heads": 8}
SCANS = ["linear_attention"] * 3 + ["full_attention"]
WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]


def families(width: int, layers: int, vocabulary: int) -> dict[str, dict[str, Any]]:
    """Settings of families by their name; `width` of a head, with 8 heads."""
    hidden = 8 * width
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
    linear = {**LINEAR, "linear_key_head_dim": width, "linear_value_head_dim": width}
    linear["layer_types"] = SCANS * (layers // 4)
    mamba = {"mamba_num_heads": 16, "mamba_head_dim": width, "ssm_state_size": width}
    latent = {"kv_lora_rank": hidden // 2, "qk_nope_head_dim": width, "v_head_dim": width}
    latent |= {"q_lora_rank": None, "qk_rope_head_dim": width // 2, "head_dim": width // 2}
    gemma = {"layer_types": WINDOWS * (layers // 4), "sliding_window": 128}
    gemma |= {"global_head_dim": width, "num_kv_shared_layers": 0}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    linear_experts = {
        **linear, **experts, "num_experts": 8, "shared_expert_intermediate_size": hidden // 2,
    }  # fmt: skip
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 8}
    text = {
        **sizes, "vocab_size": vocabulary, "head_dim": width, "num_key_value_heads": 4,
        "intermediate_size": 3 * hidden, "sliding_window": 128,
        "layer_types": WINDOWS * (layers // 4),
    }  # fmt: skip
    sight = {**sizes, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
    return {
        "qwen3_5_text": linear,
        "qwen3_5_moe_text": linear_experts,
        "qwen3_next": linear_experts,
        "olmo_hybrid": linear,
        "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * (layers // 4)},
        "gpt_oss": {
            **rope, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128,
            "intermediate_size": hidden,
        },
        "gemma4_text": {
            **gemma, "vocab_size_per_layer_input": 8000, "hidden_size_per_layer_input": width,
        },
        "gemma4_text shared keys": {
            **gemma, "vocab_size_per_layer_input": 8000, "hidden_size_per_layer_input": width,
            "num_kv_shared_layers": layers // 2,
            "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        },
        "gemma4_text experts": {
            **gemma, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8,
            "top_k_experts": 2, "moe_intermediate_size": hidden // 2,
        },
        "nemotron_h": {
            **mamba, "layers_block_type": ["mamba", "mlp", "attention", "mlp"] * (layers // 4),
            "n_groups": 2,
        },
        "falcon_h1": {
            "mamba_d_ssm": 2 * hidden, "mamba_n_heads": 16, "mamba_d_head": width,
            "mamba_d_state": width, "mamba_n_groups": 1,
        },
        "llama4_text": {
            "intermediate_size_mlp": 3 * hidden, "intermediate_size": hidden,
            "num_local_experts": 8, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        },
        "deepseek_v3": {
            **latent, **experts, "qk_head_dim": 3 * width // 2, "n_routed_experts": 8,
            "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        },
        "gemma3 frozen tower": {
            "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
            "vision_config": {**sight, "intermediate_size": 2 * hidden}, "mm_tokens_per_image": 4,
        },
    }  # fmt: skip


def family_cases(kind: str) -> list[Case]:
    """About 0.3B weights on a GPU, 20M on a CPU, where libraries alone hold about 40 MB."""
    width, layers, vocabulary = (128, 12, 32_000) if kind == "cuda" else (64, 4, 8000)
    shape = f"family {kind}"
    SMALL[shape] = Shape("", 8 * width, layers, 8, 4, 24 * width, vocabulary, True)
    options: dict[str, Any] = {"pairs": 2, "tokens": 1024, "scale": 0.5}
    if kind == "cuda":
        options = {"pairs": 8, "tokens": 4096}
    return [
        Case(
            name,
            shape,
            reference=False,
            settings={"model_type": name.split()[0], **more},
            **options,
        )
        for name, more in families(width, layers, vocabulary).items()
    ]


@dataclass
class Row:
    """What was forecast and what came."""

    name: str
    forecast_bytes: float = float("nan")
    measured_bytes: float = float("nan")
    forecast_seconds: float = float("nan")
    measured_seconds: float = float("nan")
    failed: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def memory_error(self) -> float:
        return self.forecast_bytes / self.measured_bytes - 1

    @property
    def time_error(self) -> float:
        return self.forecast_seconds / self.measured_seconds - 1

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "memory_error": self.memory_error, "time_error": self.time_error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument(
        "--page", action="store_true", help="write the table into docs/plan.md and run nothing"
    )
    parser.add_argument(
        "--families", action="store_true", help="other families than plain decoders"
    )
    parser.add_argument("--only", help="one configuration by its name")
    parser.add_argument(
        "--again", action="store_true", help="forecast again, and train only what was not measured"
    )
    parser.add_argument(
        "--train", help="only trains this configuration, and writes what was measured"
    )
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="configurations after it are left out"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    kind = "cpu" if args.cpu else "cuda"
    if args.train:
        train_here(args.train, args.json)
        return
    every = family_cases(kind) if args.families else CPU if args.cpu else CUDA
    cases = [case for case in every if args.only in (None, case.name)]
    name = "plan_families" if args.families else "plan_vs_measured"
    path, began, rows = args.json or RESULTS / f"{name}_{kind}.json", time.monotonic(), []
    known = known_peaks(path) if args.again else {}
    print(told(machine()), flush=True)
    for case in cases:
        train_it = train_in_child if args.cpu else train
        if case.name in known:
            train_it = partial(take_known, known[case.name])
        elif time.monotonic() - began > args.seconds:
            rows.append(Row(case.name, failed="no time left"))
            continue
        rows.append(measured(case, kind, train_it))
        write_facts(path, "plan_vs_measured", device=kind, cells=[row.as_json() for row in rows])
        print(line(rows[-1]), flush=True)
    table(f"forecast against measured, {kind}", COLUMNS, [cells(row) for row in rows])
    print(f"{time.monotonic() - began:.0f} s", flush=True)


def known_peaks(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a results file that were measured, by their names."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else []
    return {cell["name"]: cell for cell in cells if not cell["failed"]}


def take_known(
    cell: dict[str, Any],
    _config: DPOConfig,
    _case: Case,
    _kind: str,
    _steps: list[list[Any]],
    row: Row,
) -> None:
    row.measured_bytes, row.measured_seconds = cell["measured_bytes"], cell["measured_seconds"]
    row.more |= {name: cell["more"][name] for name in ("ran_with", "seconds")}


def train_in_child(
    _config: DPOConfig, case: Case, _kind: str, _steps: list[list[Any]], row: Row
) -> None:
    """In a process of its own, whose resident set is that of this configuration alone."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--cpu", "--train", case.name, "--json", str(file)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-300:])
        found = json.loads(file.read_text(encoding="utf-8"))
    row.measured_bytes, row.measured_seconds = found["bytes"], found["seconds"]
    row.more |= found["more"]


def train_here(name: str, file: Path) -> None:
    (case,) = (case for case in [*CPU, *family_cases("cpu")] if case.name == name)
    row = Row(name)
    with tempfile.TemporaryDirectory() as folder:
        train(config_of(case, Path(folder)), case, "cpu", steps_of(case), row)
    found = {"bytes": row.measured_bytes, "seconds": row.measured_seconds, "more": row.more}
    file.write_text(json.dumps(found), encoding="utf-8")


def measured(case: Case, kind: str, train_it: Callable[..., None]) -> Row:
    """Forecasts, then trains some steps. A configuration that fails must not cost the others."""
    row = Row(case.name)
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(case, Path(folder))
            steps = steps_of(case)
            plan = planned(config, case, kind, steps)
            row.forecast_bytes, row.forecast_seconds = (
                plan.parts.total,
                plan.seconds.total if plan.seconds else 0.0,
            )
            row.more = {
                "parts": asdict(plan.parts),
                "fits": plan.fits,
                "speed": plan.speed,
                **asdict(plan.chosen),
            }
            free()
            train_it(config, case, kind, steps, row)
    except Exception as error:
        traceback.print_exc()
        row.failed = f"{type(error).__name__}: {error}"[:300]
    free()
    return row


def shape_of(case: Case) -> Shape:
    return SMALL.get(case.shape) or SHAPES[case.shape]


def config_of(case: Case, folder: Path) -> DPOConfig:
    """A run's settings, with a model folder that holds a config.json and nothing else."""
    shape = shape_of(case)
    model = folder / "model"
    model.mkdir()
    values = {
        "model_type": shape.family,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    if case.settings:
        values |= {"head_dim": shape.hidden // shape.heads, "pad_token_id": None, **case.settings}
    (model / "config.json").write_text(json.dumps(values), encoding="utf-8")
    (folder / "pairs.jsonl").write_text("{}\n", encoding="utf-8")
    strategy = (
        {"strategy_config": {"recompute_granularity": case.recompute}} if case.recompute else {}
    )
    return config_from_dict(
        {
            "exp_name": "plan",
            "output_dir": str(folder),
            "pretrain": str(model),
            "sequence_length": 4096,
            "compile": "off",
            "precision": case.precision,
            "actor_train": {
                "data_args": {"file_name": str(folder / "pairs.jsonl")},
                "training_args": {"per_device_train_batch_size": case.pairs},
                "model_args": {"lora_rank": case.rank} if case.rank else {},
                "strategy_args": strategy,
                "max_tokens_per_microbatch_in_train": case.tokens,
            },
            "reference": {"offload": "off"},
        }
    )


def steps_of(case: Case) -> list[list[Any]]:
    """Pairs of a step to warm up with, and of those that are measured."""
    options: dict[str, Any] = {
        "steps": WARM_UP + MEASURED,
        "pairs": case.pairs,
        "scale": case.scale,
    }
    return [
        pairs_of(step) for step in make_steps("ultrafeedback", shape_of(case).vocabulary, **options)
    ]


def planned(config: DPOConfig, case: Case, kind: str, steps: list[list[Any]]) -> Forecast:
    """As `rather plan` does, of pairs that are not in a file."""
    actor = config.actor_train
    sizes = sizes_of(actor.model_path, actor.model_args)
    there = torch.cuda.get_device_properties(0).total_memory if kind == "cuda" else 64 << 30
    largest = max(pair.tokens for step in steps for pair in step)
    pairs = PairSample(sum(map(len, steps)), 0, len(steps), 1.0, steps, largest)
    device = Device(kind, there)
    forecast = Forecast(config, sizes, device, pairs, None, reference=case.reference)
    if case.settings:  # of other families, only memory is compared
        return forecast
    chosen = forecast.chosen
    speed = measured_speed(actor, sizes, steps[0], chosen, kind)
    return Forecast(config, sizes, device, pairs, speed, reference=case.reference)


def train(config: DPOConfig, case: Case, kind: str, steps: list[list[Any]], row: Row) -> None:
    """Policy, reference and optimizer as the workers build them; peak and seconds go into the row."""
    torch.set_flush_denormal(True)
    args = config.actor_train.model_args
    peak = Peak(kind)
    policy = PolicyModel(few_layers(config.actor_train.model_path, args, shape_of(case).layers, kind,
                                    compute_dtype(args, kind)))  # fmt: skip
    loss = configure(["sigmoid"], {"beta": 0.1})
    beside = case.reference and not args.has_adapter
    frozen = RankTrainer(copy.deepcopy(policy).requires_grad_(False), loss) if beside else None
    training = TrainingArgs()
    options: dict[str, Any] = {"schedule": schedule(training, 1000), "max_grad_norm": 1.0}
    lean = case.precision == "lean"
    trainer = RankTrainer(
        policy, loss, Optimizer(policy.named_parameters(), training, lean=lean, **options)
    )
    largest = max(pair.tokens for step in steps for pair in step)
    wanted: dict[str, Any] = {
        "tokens": case.tokens,
        "recompute": case.recompute,
        "largest_pair": largest,
    }
    budget = choose_budget(policy, trainer, offload=False, compiled=False, **wanted)
    row.more |= {"ran_with": f"bins of {budget.tokens} tokens, recompute {budget.recompute}"}
    peak.begin_training()
    taken = []
    for step in steps:
        batches = (
            pack(step, size, ladder=LADDER[kind])
            for size in (budget.tokens, 65536 if kind == "cuda" else 8192)
        )
        for_policy, for_reference = ([batch.pin_memory() for batch in each] for each in batches)
        synchronize()
        began = time.perf_counter()
        columns = (
            known_columns(len(step))
            if not case.reference
            else log_probs(frozen or trainer, for_reference)
        )
        trainer.train_step(for_policy, columns)
        synchronize()
        taken.append(time.perf_counter() - began)
    row.measured_seconds = statistics.median(taken[WARM_UP:])
    row.measured_bytes = float(peak.bytes)
    row.more["seconds"] = taken


def log_probs(trainer: RankTrainer, batches: list[Any]) -> Any:
    """Of the reference: a model of its own, or the policy with its adapters off."""
    if trainer.optimizer is None:
        return trainer.log_probs(batches)
    from rather.model.adapters import as_reference

    with as_reference(trainer.policy):
        return trainer.log_probs(batches)


# --- reports ---


def cells(row: Row) -> tuple[Any, ...]:
    if row.failed:
        return (row.name, row.failed[:60], *["-"] * 6)
    gib = (f"{number / 2**30:.2f}" for number in (row.forecast_bytes, row.measured_bytes))
    seconds = (f"{number:.3g}" for number in (row.forecast_seconds, row.measured_seconds))
    fits = "yes" if row.more.get("fits") else "no"
    return (row.name, *gib, f"{row.memory_error:+.1%}", *seconds, f"{row.time_error:+.1%}", fits)


def line(row: Row) -> str:
    return " | ".join(map(str, cells(row))) + f" | {row.more.get('ran_with', '')}"


def filled(page: str) -> str:
    """The page with the tables between their markers made anew, where there are results."""
    for kind in ("cuda", "cpu"):
        file = RESULTS / f"plan_vs_measured_{kind}.json"
        if not file.exists():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = [
            Row(**{key: cell[key] for key in Row.__dataclass_fields__}) for cell in found["cells"]
        ]
        lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [f"| {' | '.join(map(str, cells(row)))} |" for row in rows]
        text = "\n".join(lines)
        page = re.sub(
            rf"(<!-- {kind} -->\n).*?(<!-- end -->)", rf"\g<1>{text}\n\g<2>", page, flags=re.DOTALL
        )
    return page


if __name__ == "__main__":
    main()
