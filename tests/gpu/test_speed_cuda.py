"""The quick paths of a CUDA device give the numbers of the plain ones: attention, head, compilation, planning."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from rather.config.schema import ActorModelArgs, TrainingArgs
from rather.data.batch import PairBatch, TokenPair
from rather.data.pack import pack
from rather.losses.objective import configure
from rather.model import attention, head
from rather.model.adapters import inject
from rather.model.attention import IMPLEMENTATION
from rather.model.budget import LEAST, REHEARSED, REHEARSED_PAIR, SHARE, choose_budget
from rather.model.layers import LEVELS, Recompute, arrange_layers
from rather.model.policy import PolicyModel
from rather.optim.optimizer import Optimizer, schedule
from rather.optim.summing import ungroup_projections
from rather.pipeline.pipeline import DPOPipeline
from rather.train.rank_trainer import RankTrainer
from tests.padded import random_pairs
from tests.tiny import make_config

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def small_model(
    dtype: torch.dtype = BF16, *, kind: Any = Qwen2ForCausalLM, adapter: int = 0, **sizes: Any
) -> PolicyModel:
    torch.manual_seed(0)
    defaults = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "vocab_size": 997,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = kind.config_class(**{**defaults, **heads, **sizes}, initializer_range=0.08)
    config._attn_implementation = IMPLEMENTATION
    model = kind(config)
    if adapter:
        inject(model, ActorModelArgs(lora_rank=adapter, lora_target="all-linear"))
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return PolicyModel(model.to("cuda", dtype).eval())


def batches(count: int = 24, budget: int = 512) -> list[PairBatch]:
    return [batch.to("cuda") for batch in pack(random_pairs(count, 990), budget, ladder=64)]


OTHER = pytest.mark.defect("R2")


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "widths",  # of keys and values
    [
        (32, 32),
        pytest.param((32, 16), marks=OTHER),
        pytest.param((16, 32), marks=OTHER),
        pytest.param((192, 128), marks=OTHER),
        pytest.param((128, 64), marks=OTHER),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_attention_operator_equals_the_loop(
    kv_heads: int, widths: tuple[int, int], window: int | None
) -> None:
    torch.manual_seed(1)
    (batch,) = batches(9, 10**6)
    tokens = len(batch.ids_N)
    of_keys, of_values = widths
    shapes = [(4, of_keys), (kv_heads, of_keys), (kv_heads, of_values)]
    made = [torch.randn(1, heads, tokens, width, device="cuda") for heads, width in shapes]
    weight = torch.randn(1, tokens, 4, of_values, device="cuda")

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.to(BF16).to(dtype).requires_grad_() for x in made]
        out, _ = attention.segment_attention(
            torch.nn.Identity(), *inputs, None, segments=batch.segments, sliding_window=window
        )
        (out * weight.to(dtype)).sum().backward()
        return [out.detach().float(), *(x.grad.float() for x in inputs)]

    for quick, plain in zip(run(BF16), run(torch.float32), strict=True):
        assert (quick - plain).norm() / plain.norm() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_the_head_kernels_equal_torch(
    scale: float, kept: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    rows, width, vocabulary = 37, 64, 20_011
    hidden = torch.randn(rows, width, device="cuda").to(dtype)
    weight = (torch.randn(vocabulary, width, device="cuda") * 0.3).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,), device="cuda")
    monkeypatch.setitem(head.CHUNK_BYTES, "cuda", 10 * vocabulary * 4)
    monkeypatch.setitem(head.KEEP_BYTES, "cuda", 1 << 40 if kept else 0)

    def run(fused: bool) -> list[torch.Tensor]:
        if not fused:
            monkeypatch.setattr(head._Treatment, "_is_fused", lambda *_: False)
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logps, squares = head.token_logps(h, w, None, targets, scale=scale, squares=True)
        (logps * torch.linspace(-1, 2, rows, device="cuda")).sum().backward()
        return [logps.detach(), squares, h.grad.float(), w.grad.float()]

    bound = 1e-5 if dtype == torch.float32 else 0.01
    for quick, plain in zip(run(True), run(False), strict=True):
        assert (quick - plain).norm() / plain.norm() < bound


def numbers(policy: PolicyModel, parts: list[PairBatch]) -> list[torch.Tensor]:
    policy.zero_grad()
    logps = []
    for batch in parts:
        logp, _ = policy(batch)
        (logp * torch.linspace(-1, 1, len(logp), device="cuda")).sum().backward()
        logps.append(logp.detach())
    return [
        torch.cat(logps),
        *(p.grad.float().flatten() for p in policy.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_compiled_layers_give_the_plain_numbers(level: Recompute) -> None:
    """bfloat16 within the rounding that the plain path itself shows against float32."""
    parts = batches()
    exact, plain = numbers(small_model(torch.float32), parts), numbers(small_model(), parts)
    policy = small_model()
    arrange_layers(policy, recompute=level, compiled=True)
    compiled = numbers(policy, parts)
    for got, want, true in zip(compiled, plain, exact, strict=True):
        rounding = (want - true).norm() / true.norm()
        assert (got - true).norm() / true.norm() <= 1.5 * rounding + 1e-3
    seen = counters["stats"]["unique_graphs"]
    more = numbers(policy, batches(40, 640))
    assert more[0].isfinite().all()
    assert counters["stats"]["unique_graphs"] == seen  # other sizes, the same code


def test_small_layers_are_compiled_several_at_a_time() -> None:
    """Two groups of five layers, policy and reference: the plain numbers, two graphs."""
    parts = batches()
    exact = numbers(small_model(torch.float32, num_hidden_layers=10), parts)
    plain = numbers(small_model(num_hidden_layers=10), parts)
    torch._dynamo.reset()
    counters["stats"].clear()
    policy, reference = (small_model(num_hidden_layers=10) for _ in range(2))
    for model in (policy, reference.requires_grad_(False)):
        arrange_layers(model, compiled=True, alone=True)
    compiled = numbers(policy, parts)
    with torch.no_grad():
        compiled.append(torch.cat([reference(batch)[0] for batch in parts]))
    more = numbers(policy, batches(40, 640))
    assert more[0].isfinite().all()
    assert counters["stats"]["unique_graphs"] == 2
    for got, want, true in zip(compiled, [*plain, plain[0]], [*exact, exact[0]], strict=True):
        rounding = (want - true).norm() / true.norm()
        assert (got - true).norm() / true.norm() <= 1.5 * rounding + 1e-3


def test_compiled_in_float32_equals_plain() -> None:
    parts = batches()
    plain, policy = numbers(small_model(torch.float32), parts), small_model(torch.float32)
    arrange_layers(policy, compiled=True)
    for got, want in zip(numbers(policy, parts), plain, strict=True):
        assert (got - want).norm() / want.norm() < 1e-5


def trainer(policy: PolicyModel) -> RankTrainer:
    args = TrainingArgs(learning_rate=1e-4)
    optimizer = Optimizer(
        policy.named_parameters(), args, schedule=schedule(args, 10), max_grad_norm=1.0
    )
    return RankTrainer(policy, configure(["sigmoid"], {}), optimizer)


def sums(work: RankTrainer, parts: list[PairBatch]) -> dict[str, torch.Tensor]:
    """The gradients of a step by name."""

    def objective(_batch: PairBatch, columns: Any) -> torch.Tensor:
        return (columns["sum"] @ torch.tensor([1.0, -0.5], device="cuda").double()).sum()

    optimizer = work.optimizer
    assert optimizer is not None
    optimizer.zero_grad()
    optimizer.begin_sums()
    work.runner.backward(parts, (), objective)
    return {name: grad.float() for name, grad in optimizer.named_gradients().items()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("adapter", [0, 8], ids=["whole", "adapter"])
@pytest.mark.parametrize("kind", [Qwen2ForCausalLM, LlamaForCausalLM])
def test_layers_that_need_fewer_kernels_give_the_same_gradients(
    kind: Any, adapter: int, compiled: bool
) -> None:
    """Query, key and value in one product, with biases and without; adapters within products."""
    parts, options = batches(), {"kind": kind, "adapter": adapter}
    exact = sums(trainer(small_model(torch.float32, **options)), parts)
    without = trainer(small_model(**options))
    ungroup_projections(without.policy.modules())
    plain = sums(without, parts)
    work = trainer(small_model(**options))
    grouped = [module for module in work.policy.modules() if getattr(module, "group", None)]
    assert grouped
    assert isinstance(work.policy, PolicyModel)
    arrange_layers(work.policy, compiled=compiled)
    quick = sums(work, parts)
    assert quick.keys() == plain.keys() == exact.keys()
    for name, true in exact.items():
        rounding = (plain[name] - true).norm() / true.norm()
        assert (quick[name] - true).norm() / true.norm() <= 1.5 * rounding + 2e-3, name
    for name, again in sums(work, parts).items():  # the sums begin with zeros
        assert (again - quick[name]).norm() <= 0.01 * again.norm(), name


def test_one_host_synchronisation_a_step() -> None:
    policy, reference = (
        trainer(small_model()),
        RankTrainer(small_model().requires_grad_(False), configure(["sigmoid"], {})),
    )
    parts = [batch.pin_memory() for batch in pack(random_pairs(24, 990), 512, ladder=64)]
    for _ in range(2):
        policy.train_step(parts, reference.log_probs(parts))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy.train_step(parts, reference.log_probs(parts))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    assert len(waits) == 1, waits


def test_the_planner_recomputes_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    work = trainer(small_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=8))
    options: dict[str, Any] = {
        "tokens": None,
        "recompute": None,
        "offload": False,
        "compiled": False,
    }
    chosen = choose_budget(work.policy, work, **options, largest_pair=100)
    assert (chosen.tokens, chosen.recompute) == (32768, "none")
    rooms = {level: _need(work, level) for level in LEVELS}
    assert rooms["full"] < rooms["selective"] < rooms["half"] < rooms["none"]
    for level in LEVELS:
        room = int(1.02 * rooms[level] / SHARE)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda room=room: (room, room))
        assert choose_budget(work.policy, work, **options, largest_pair=100).recompute == level


def _need(work: RankTrainer, level: Recompute) -> float:
    """Bytes of the smallest useful micro-batch, from the line through the planner's two sizes."""
    arrange_layers(work.policy, recompute=level)
    ids = np.arange(508, dtype=np.int32)
    pair = TokenPair(ids[:8], ids, ids, ((8, 516),), ((8, 516),))
    peaks = []
    for tokens in REHEARSED:
        pairs = [
            replace(pair, chosen=ids + side, rejected=ids + side + 1)
            for side in range(tokens // REHEARSED_PAIR)
        ]
        (batch,) = pack(pairs, tokens, ladder=tokens)
        resting = torch.cuda.memory_allocated()
        work.rehearse(batch)
        torch.cuda.reset_peak_memory_stats()
        work.rehearse(batch)
        work.forget()
        peaks.append(torch.cuda.max_memory_allocated() - resting)
    of_token = (peaks[1] - peaks[0]) / (REHEARSED[1] - REHEARSED[0])
    return peaks[0] + of_token * (LEAST - REHEARSED[0])


def test_step_zero_is_ln_2_to_the_bit_where_both_sides_run_the_same_bins() -> None:
    policy, reference = (
        trainer(small_model()),
        RankTrainer(small_model().requires_grad_(False), configure(["sigmoid"], {})),
    )
    parts = pack(random_pairs(24, 990), 512, ladder=64)
    result = policy.train_step(parts, reference.log_probs(parts))
    loss = result.sums["loss"] / result.sums["weight"]
    assert loss == pytest.approx(float(torch.tensor(2.0, dtype=torch.float64).log()), abs=1e-15)


@pytest.mark.parametrize("precision", ["exact", "lean"])
def test_a_compiled_run_learns(tmp_path: Path, precision: str) -> None:
    config = make_config(
        tmp_path,
        compile="on",
        precision=precision,
        max_steps=12,
        actor_train__training_args__num_train_epochs=9.0,
    )
    assert DPOPipeline(config).run() == 0
