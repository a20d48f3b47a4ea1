"""Families beyond plain attention on one GPU, with random weights: packed against padded, pairs/s, strict MFU.

    python bench/models_gpu.py                                   # all rows, at most 8 minutes
    python bench/models_gpu.py --rows qwen3.5-0.8B gpt-oss-20B --compile
    python bench/models_gpu.py --rows tiny --device cpu          # tries the script itself

Each row builds the model once. `packed = padded` are the mean and largest difference per token between the packed
log-probs and the model's own padded forward, both in bf16, and before that of two padded forwards with other padding, as
the noise of bf16; `from float32` are the differences of both to the padded forward of the same weights in float32.
Then the engine trains as bench/gpu_vs_trl.py does, on the same seeded UltraFeedback-like pairs, with the
reference online, and TRL with it if `trl` and `liger_kernel` can be imported: after all our rows, because Liger replaces
classes of transformers in the whole process. flash-linear-attention tunes its norm of queries and keys again for many
lengths, many seconds each: TRL is given the norm in torch instead, as ours has, so that it is not measured. Both scan with flash-linear-attention's kernels if they are installed and
right on the GPU, else with torch's functions; the settings say which. MFU counts matrix products and attention that are
needed; the scan of linear attention is not counted. A row that would begin after --limit seconds is not run.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    Cell,
    Shape,
    Step,
    free,
    machine,
    make_steps,
    ours,
    peak_gib,
    ratio,
    table,
    told,
    write_json,
)

PAIRS, WARM_UP = 64, 2
MOST_FOR_FLOAT32 = 6e9  # weights
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "max_position_embeddings": 8192}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e6}


@dataclass(frozen=True)
class ModelShape(Shape):
    """A shape by the settings of its own config; weights are counted on a model without memory."""

    settings: dict[str, Any]
    attention_layers: int
    attention_width: int  # of all heads: the mean of keys and values
    lora: int | None = None

    @property
    def config(self) -> Any:
        from transformers import AutoConfig

        sizes = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
        }
        return AutoConfig.for_model(self.family, **{**sizes, **ENDS, **self.settings})

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(self.config)
        return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    @property
    def weights(self) -> int:
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def block_weights(self) -> int:  # type: ignore[override]
        """Weights of the matrices of all layers that one token uses."""
        from rather.model.check import experts_of

        config, used = self.config, 0
        experts = experts_of(config)
        chosen = getattr(config, "num_experts_per_tok", 0)
        for name, shape in self.shapes.items():
            if ".layers." not in name or len(shape) < 2 or "conv1d" in name:
                continue
            is_stacked = ".experts." in name
            used += prod(shape) * chosen // experts if is_stacked else prod(shape)
        return used

    def forward_flops(self, tokens: float, rows: float, cells: float) -> float:
        attention = 4 * self.attention_layers * self.attention_width * cells
        return 2 * self.block_weights * tokens + 2 * self.head_weights * rows + attention

    def model(self, dtype: torch.dtype, device: str, attention: str, *, seed: int = 0) -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        with torch.device(device):
            causal_lm: Any = AutoModelForCausalLM
            if attention == "sdpa" and self.family == "gpt_oss":
                attention = "eager"  # sinks
            model = causal_lm.from_config(self.config, dtype=dtype, attn_implementation=attention)
        return model.to(device).eval()


def qwen3_5(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, words: int, **more: Any
) -> ModelShape:
    """Three layers of linear attention to one of attention."""
    width = more.get("head_dim", 256)
    settings = {
        "head_dim": width,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        **more,
    }
    sizes = (hidden, layers, heads, kv_heads, inner, words)
    return ModelShape("qwen3_5_text", *sizes, True, settings, layers // 4, heads * width)


MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "v_head_dim": 128,
    "head_dim": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
}
GPT_OSS = {
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rope_parameters": PLAIN_ROPE,
}
SMALL = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SMALL |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
ROWS: dict[str, ModelShape] = {
    "qwen3.5-0.8B": qwen3_5(1024, 24, 8, 2, 3584, 248_320, linear_num_value_heads=16),
    "qwen3.5-4B": qwen3_5(2560, 32, 16, 4, 9216, 248_320),
    "gpt-oss-20B": ModelShape(
        "gpt_oss", 2880, 24, 64, 8, 2880, 201_088, False, GPT_OSS, 24, 64 * 64, lora=16
    ),
    "deepseek-mla-2B": ModelShape(
        "deepseek_v3", 2048, 12, 16, 16, 8192, 129_280, False, MLA, 12, 16 * 160
    ),
    "tiny": qwen3_5(64, 4, 4, 2, 96, 512, **SMALL),
}


def main() -> None:
    args = arguments()
    print(told(machine()), flush=True)
    started, cells, differences = time.perf_counter(), [], {}
    peer = "" if args.only == "ours" else peer_problem(args.device)
    if peer:
        print(f"TRL is not measured: {peer}", flush=True)
    norm_in_torch()
    systems = {"ours": run_ours, "TRL, best": run_peer}
    if peer or args.only == "ours":
        del systems["TRL, best"]
    if args.only == "trl":
        del systems["ours"]
    for system, work in systems.items():
        for name in args.rows:
            cell = Cell(system, name, "online", args.pairs)
            if time.perf_counter() - started > args.limit:
                cell.failed = "not run: time is up"
                cells.append(cell)
                continue
            steps = measured_steps(args, name, args.steps, seed=0)
            differences[system, name] = attempt(cell, work, args, name, steps)
            add(args, cells, cell, steps)
    report(cells, differences, time.perf_counter() - started)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    whole = [name for name in ROWS if name != "tiny"]
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=whole)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=("ours", "trl"))
    parser.add_argument("--compile", action="store_true", help="ours with torch.compile: minutes")
    parser.add_argument("--differences", action="store_true", help="only packed = padded")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of an optimizer step")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after two others")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch; else by memory")
    parser.add_argument("--recompute", choices=("none", "half", "selective", "full"))
    parser.add_argument("--profile", action="store_true", help="print ours kernels of one step")
    parser.add_argument("--limit", type=float, default=390, help="no row begins after seconds")
    parser.add_argument("--json", type=Path, default=RESULTS / "models_gpu.json")
    return parser.parse_args()


def measured_steps(args: argparse.Namespace, name: str, count: int, *, seed: int) -> list[Any]:
    words = ROWS[name].vocabulary
    scale = 0.1 if name == "tiny" else 1.0
    return make_steps("ultrafeedback", words, steps=count, pairs=args.pairs, seed=seed, scale=scale)


def attempt(
    cell: Cell, work: Any, args: argparse.Namespace, name: str, steps: Sequence[Step]
) -> Any:
    """Return what the work returns; one broken cell must not cost the others."""
    try:
        return work(args, name, cell, steps)
    except torch.OutOfMemoryError:
        cell.failed = "OOM"
    except Exception as error:
        cell.failed = f"{type(error).__name__}: {error}"[:300]
    finally:
        free()
    return None


def add(args: argparse.Namespace, cells: list[Cell], cell: Cell, steps: Sequence[Step]) -> None:
    shape = ROWS[cell.lengths]
    if cell.seconds:
        cell.rate(shape, steps)
    cells.append(cell)
    if not args.differences:
        write_json(args.json, "models_gpu", [*earlier_cells(args.json, cells), *cells])
    numbers = f"{cell.pairs_per_second:.4g} pairs/s, MFU {cell.mfu or 0:.1%}"
    print(f"{cell.lengths}, {cell.system}: {cell.failed or numbers} ({cell.settings})", flush=True)


def earlier_cells(path: Path, cells: Sequence[Cell]) -> list[Cell]:
    """Return the stored cells of other commands, which measured other rows or the other system."""
    measured = {(cell.system, cell.lengths) for cell in cells}
    stored = json.loads(path.read_text())["cells"] if path.exists() else []
    names = {field.name for field in fields(Cell)}
    kept = [
        Cell(**{name: value for name, value in entry.items() if name in names}) for entry in stored
    ]
    return [cell for cell in kept if (cell.system, cell.lengths) not in measured]


# --- ours ---


def run_ours(
    args: argparse.Namespace, name: str, cell: Cell, steps: Sequence[Step]
) -> tuple[float, ...]:
    from rather.model.mixers import fused_problem, report_scan

    shape = ROWS[name]
    free()
    engine = ours(shape, args.device, compiled=args.compile, lora=shape.lora)
    report_scan(engine.policy.policy, args.device)
    found = difference(engine.policy.policy, shorter=name == "tiny")
    print(f"{name}: {shape.weights:,} weights, packed = padded {found}", flush=True)
    if args.differences:
        return found
    engine.plan(steps, tokens=args.budget, recompute=args.recompute)
    free()
    warm = measured_steps(args, name, WARM_UP, seed=1)
    while not cell.seconds:
        try:
            cell.seconds = [seconds for seconds, _ in engine.run([*warm, *steps])][WARM_UP:]
        except torch.OutOfMemoryError:
            if engine.budget < 4096:
                raise
        if not cell.seconds:
            engine.policy.forget()
            free()
            engine.halve()
    cell.settings, cell.peak_gib = engine.settings, peak_gib()
    if args.profile:
        print_kernels(engine, steps[:1])
    on_gpu = args.device.startswith("cuda")
    cell.settings += scan_of(shape, on_gpu and not fused_problem(torch.device(args.device)))
    cell.more["packed minus padded"] = found
    return found


def print_kernels(engine: Any, steps: Sequence[Step]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as kernels:
        list(engine.run(steps))
    print(kernels.key_averages().table(sort_by="cuda_time_total", row_limit=25), flush=True)


@torch.no_grad()
def difference(policy: Any, *, shorter: bool) -> tuple[float, ...]:
    """Mean and largest per token: padded otherwise minus padded, packed minus padded, and both from float32.

    The last four are left out where the weights have no room in float32.
    """
    from rather.data.pack import pack
    from rather.model.attention import IMPLEMENTATION
    from rather.model.check import _padded, random_pairs
    from rather.model.towers import set_attention

    model = policy.causal_lm
    lengths = ((18, 32, 29), (30, 11, 20)) if shorter else ((180, 320, 290), (301, 97, 205))
    pairs = random_pairs(policy.vocabulary_size, lengths)
    set_attention(model, "eager")
    padded = torch.cat([_padded(model, pair) for pair in pairs])
    other = torch.cat([_padded_behind(model, pair) for pair in pairs])
    set_attention(model, IMPLEMENTATION)
    (batch,) = pack(pairs, budget=10**6)
    batch = batch.to(str(model.device))
    packed = policy(batch)[0][batch.token_T].double()
    gaps = [(value - padded).abs() for value in (other, packed)]
    if policy.causal_lm.num_parameters() <= MOST_FOR_FLOAT32:
        exact = exact_logps(model, pairs)
        gaps += [(value - exact).abs() for value in (padded, packed)]
    return tuple(float(number) for gap in gaps for number in (gap.mean(), gap.max()))


def exact_logps(model: Any, pairs: Sequence[Any]) -> torch.Tensor:
    """Return the padded log-probs of the same weights in float32."""
    from rather.model.check import _padded
    from rather.model.towers import set_attention

    exact = copy.deepcopy(model).float()
    set_attention(exact, "eager")
    torch.set_float32_matmul_precision("highest")
    return torch.cat([_padded(exact, pair) for pair in pairs])


def _padded_behind(model: Any, pair: Any) -> torch.Tensor:
    """The same log-probs with 37 more tokens behind each answer, which none of them sees."""
    from dataclasses import replace

    from rather.model.check import _padded

    more = pair.prompt[:37]
    filled = {
        side: torch.cat([torch.from_numpy(x) for x in (getattr(pair, side), more)]).numpy()
        for side in ("chosen", "rejected")
    }
    logps = _padded(model, replace(pair, **filled))
    chosen, rejected = logps.split([len(filled["chosen"]), len(filled["rejected"])])
    return torch.cat([chosen[: len(pair.chosen)], rejected[: len(pair.rejected)]])


# --- TRL ---


def peer_problem(device: str) -> str:
    needed = ["trl", "datasets"]
    if device.startswith("cuda"):
        needed.append("liger_kernel")
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    return f"{', '.join(missing)} cannot be imported" if missing else ""


def scan_of(shape: ModelShape, has_kernels: bool) -> str:
    """Return how linear attention is computed; "" for models without."""
    if "linear_attention" not in shape.settings.get("layer_types", ()):
        return ""
    return ", scan by flash-linear-attention" if has_kernels else ", scan by torch's functions"


def run_peer(args: argparse.Namespace, name: str, cell: Cell, steps: Sequence[Step]) -> None:
    from transformers.utils.import_utils import is_flash_linear_attention_available
    from trl_peer import run_trl

    warm, shape = measured_steps(args, name, WARM_UP, seed=1), ROWS[name]
    batch = 8
    while True:
        try:
            options = {"variant": "best", "per_device": batch, "lora": shape.lora}
            run = run_trl(shape, args.device, [*warm, *steps], **options)
            break
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        free()
        batch //= 2
    cell.seconds, cell.peak_gib = run.seconds[WARM_UP:], run.peak_gib
    cell.settings = run.settings + scan_of(shape, is_flash_linear_attention_available())


@cache
def norm_in_torch() -> None:
    """Let padded forwards normalise queries and keys in torch, not in flash-linear-attention."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as family

    rule = family.torch_chunk_gated_delta_rule

    def normed_before(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("use_qk_l2norm_in_kernel", False):
            query, key = family.l2norm(query), family.l2norm(key)
        return rule(query, key, *args, **kwargs)

    family.torch_chunk_gated_delta_rule = normed_before


def mean_and_largest(gaps: Sequence[float]) -> str:
    mean, largest = gaps
    return f"{mean:.2g}, {largest:.2g}"


def report(cells: Sequence[Cell], differences: dict[str, Any], seconds: float) -> None:
    rows = []
    for cell in cells:
        shape = ROWS[cell.lengths]
        peers = [c for c in cells if c.lengths == cell.lengths and c.system.startswith("TRL")]
        is_ours = cell.system == "ours"
        gaps = differences.get((cell.system, cell.lengths)) if is_ours else None
        rows.append(
            (
                cell.lengths + (f" LoRA {shape.lora}" if shape.lora else ""),
                cell.system,
                f"{shape.weights / 1e9:.3g}B",
                mean_and_largest(gaps[2:4]) if gaps else None,
                mean_and_largest(gaps[:2]) if gaps else None,
                mean_and_largest(gaps[4:6]) if gaps and gaps[4:] else None,
                mean_and_largest(gaps[6:]) if gaps and gaps[6:] else None,
                cell.failed.split(":")[0] or cell.pairs_per_second,
                None if cell.mfu is None else f"{cell.mfu:.1%}",
                ratio(cell, peers[0]) if is_ours and peers else None,
                cell.peak_gib,
                cell.settings,
            )
        )
    heads = ("model", "system", "weights", "packed = padded: mean, max", "bf16 noise: mean, max")
    heads += ("padded from float32", "packed from float32")
    heads += ("pairs/s", "strict MFU", "x TRL", "peak GiB", "settings")
    for cell in cells:
        if cell.failed:
            print(f"{cell.lengths}, {cell.system}: {cell.failed}")
    title = f"UltraFeedback-like pairs, reference online, {seconds:.0f} s in all"
    table(title, heads, rows)


if __name__ == "__main__":
    main()
