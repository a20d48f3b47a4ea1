"""The arithmetic of a forecast: by hand for a tiny model, against autograd and against an H200."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy as Choice
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoConfig, LlamaForCausalLM

from rather.cluster.worker import ActorWorker, RankInfo
from rather.config.load import changed, config_from_dict
from rather.config.run_config import DPOConfig
from rather.config.schema import ModelArgs
from rather.config.strategies import layout
from rather.data.batch import TokenPair
from rather.data.pack import pack
from rather.errors import ConfigError
from rather.model import layers
from rather.model.policy import PolicyModel, pair_columns
from rather.model.sizes import Sizes, few_layers, sizes_of
from rather.parallel.load import load_policy
from rather.plan.forecast import Forecast, PairSample, assumed_pairs, checkpoint_bytes
from rather.plan.memory import (
    PEFT,
    Chosen,
    Device,
    LayerBytes,
    MemoryForecast,
    RoleState,
    Work,
    role_state,
)
from rather.plan.speed import GPUS, Flops, listed_speed, passes

GIB = 1 << 30
QWEN = {
    "0.5B": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "7B": (3584, 28, 28, 4, 18_944, 152_064, False),
}
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "intermediate_size",
         "vocab_size", "tie_word_embeddings")  # fmt: skip


def model(folder: Path, name: str = "tiny", **changes: Any) -> Path:
    """A folder with a config.json and nothing else."""
    values: dict[str, Any] = dict(
        zip(NAMES, QWEN.get(name, (32, 2, 4, 2, 48, 63, True)), strict=True)
    )
    place = folder / f"{name}{len(list(folder.iterdir()))}"
    place.mkdir()
    family = {"model_type": "qwen2" if name in QWEN else "llama", "dtype": "bfloat16"}
    (place / "config.json").write_text(
        json.dumps({**family, **values, **changes}), encoding="utf-8"
    )
    return place


def config(pretrain: Path, **changes: Any) -> DPOConfig:
    values: dict[str, Any] = {
        "exp_name": "plan",
        "output_dir": str(pretrain / "output"),
        "pretrain": str(pretrain),
        "sequence_length": 1024,
        "compile": "off",
        "actor_train": {
            "data_args": {"file_name": "pairs.jsonl"},
            "training_args": {"per_device_train_batch_size": 16},
        },
    }
    return changed(config_from_dict(values), changes)


class Known(NamedTuple):
    """A model by its config.json, and what that says."""

    place: Path
    sizes: Sizes

    @staticmethod
    def of(place: Path) -> Known:
        return Known(place, sizes_of(str(place), ModelArgs()))

    def state(self, kind: str, role: str = "actor_train", **changes: Any) -> RoleState:
        found = config(self.place, **changes)
        section = getattr(found, role)
        return role_state(found, section, kind, self.sizes.shapes, section.model_args)

    def memory(
        self, kind: str = "cuda", gib: int = 80, *, reference: bool = True, compiled: bool = False,
        **changes: Any,
    ) -> MemoryForecast:  # fmt: skip
        found, device = config(self.place, **changes), Device(kind, gib * GIB)
        return MemoryForecast(found, self.sizes, device, reference=reference, compiled=compiled)

    def judged(self, gpu: str, sample: list[list[TokenPair]], **changes: Any) -> Forecast:
        found = config(self.place, **changes)
        device = Device("cuda", GPUS[gpu].gib * GIB)
        speed = listed_speed(gpu, self.sizes.weights, compiled=False)
        return Forecast(found, self.sizes, device, pairs_of(sample), speed)


def steps(
    pairs: int, prompt: int = 100, answer: int = 200, count: int = 1
) -> list[list[TokenPair]]:
    draw = np.random.default_rng(0)

    def pair() -> TokenPair:
        ids = [draw.integers(3, 60, n).astype(np.int32) for n in (prompt, answer, answer)]
        ids[1][0], ids[2][0] = 1, 2  # answers that begin alike share their beginning
        scored = ((prompt, prompt + answer),)
        return TokenPair(ids[0], ids[1], ids[2], scored, scored)

    return [[pair() for _ in range(pairs)] for _ in range(count)]


def pairs_of(sample: list[list[TokenPair]], total: int = 100) -> PairSample:
    return PairSample(
        len(sample[0]) * total, 0, total, 1.0, sample, max(pair.tokens for pair in sample[0])
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Known:
    return Known.of(model(folder))


@pytest.fixture(scope="module")
def seven(folder: Path) -> Known:
    return Known.of(model(folder, "7B"))


# --- by hand ---

ZERO3 = {
    "actor_train.device_mapping": [0, 1, 2, 3],
    "actor_train.strategy_args.strategy_name": "zero3",
}


def test_sizes_come_from_the_config_alone(tiny: Known) -> None:
    # Embeddings 63 x 32 (tied); in each of two layers q and o 32 x 32, k and v 16 x 32, three of
    # 48 x 32, two norms.
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32
    sizes = tiny.sizes
    assert (sizes.in_layers, sizes.weights) == (2 * layer, 63 * 32 + 2 * layer + 32)
    shape = sizes.query, sizes.key, sizes.gated, sizes.norms, sizes.stored
    assert shape == (32, 16, True, [32, 32], 2)


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({}, "cpu", (4, 4, 0, 8)),
        ({}, "cuda", (2, 4, 2, 8)),
        ({"precision": "lean"}, "cuda", (2, 2, 0, 2 + 4 / 256)),
        ({"actor_train.model_args.dtype": "fp16"}, "cuda", (2, 4, 4, 8)),
        ({"actor_train.model_args.dtype": "bf16"}, "cpu", (4, 4, 2, 8)),
        ({"actor_train.model_args.dtype": "bf16", "precision": "lean"}, "cpu",
         (4, 4, 0, 2 + 4 / 256)),
        (ZERO3, "cuda", (1, 1, 0.5, 2)),
        ({**ZERO3, "rounding": "nearest"}, "cuda", (1, 1, 0, 2)),
        ({"actor_train.device_mapping": [0, 1], "actor_train.strategy_args.tp_size": 2}, "cuda",
         (1, 2, 1, 4)),
    ],
)  # fmt: skip
def test_bytes_of_a_weight(
    tiny: Known, changes: dict[str, Any], kind: str, expected: tuple[float, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("rather.parallel.load.cpu_has_bf16", lambda: False)
    tp = layout(config(tiny.place, **changes).actor_train).tp
    weights = tiny.sizes.weights + 5 * 32 * (tp - 1)  # norms are not divided
    # Rows are dealt out whole, and the vocabulary is odd.
    expected_bytes = [weights * each for each in expected]
    state = tiny.state(kind, **changes)
    assert tuple(state.by_purpose) == pytest.approx(expected_bytes, rel=2e-3)


@pytest.mark.parametrize("synced", [True, False])
def test_a_moving_reference_keeps_the_low_bits(tiny: Known, synced: bool) -> None:
    state = tiny.state("cuda", "reference", sync_ref_model=synced)
    assert state.total == (4 if synced else 2) * tiny.sizes.weights


def test_an_adapter_freezes_the_base(tiny: Known) -> None:
    lora = {"actor_train.model_args.lora_rank": 4}
    adapter = 4 * 2 * (2 * (32 + 32) + 2 * (16 + 32) + 3 * (48 + 32))
    weights = 2 * tiny.sizes.weights + 2 * adapter
    state = tiny.state("cuda", **lora)
    assert state.by_purpose == (weights, 4 * adapter, 2 * adapter, 8 * adapter)
    found = config(tiny.place, **lora)
    saved = checkpoint_bytes(found.actor_train.model_args, found.precision, tiny.sizes.shapes)
    assert saved == 12 * adapter


def test_a_peak_adds_up_by_hand(tiny: Known) -> None:
    """One micro-batch of a step, in float32: no gradients are there when the head works."""
    memory = tiny.memory("cpu", 1)
    parts = memory.peak(Chosen(4096, "none", False, False, True), Work(50_000, 1_000, 1, 10))
    norms, attention, mlp = 2 * 3 * 32, 3 * 32 + 2 * 1.25 * 16, 4 * 48
    assert parts.activations == 50_000 * 4 * (2 * (norms + attention + mlp) + 3 * 32)
    weights = tiny.sizes.weights
    state = parts.weights, parts.moments, parts.reference
    assert state == (4 * weights, 8 * weights, 4 * weights)
    assert parts.total == sum(asdict(parts).values())


def test_an_adapter_on_a_cpu_brings_peft(tiny: Known) -> None:
    """The process grows by it, when the adapter is made."""
    adapter = {"actor_train.model_args.lora_rank": 4}
    for kind, changes, libraries in (("cpu", {}, 40), ("cpu", adapter, 96), ("cuda", adapter, 64)):
        parts = tiny.memory(kind, 1, **changes).peak(
            Chosen(8, "none", False, False), Work(0, 0, 2, 0)
        )
        assert libraries << 20 <= parts.buffers < (libraries + 1) << 20


@pytest.mark.wide
def test_what_importing_peft_takes() -> None:
    lines = """
import rather.pipeline.pipeline, transformers.models.llama.modeling_llama
from rather.cluster.memory import Peak
peak = Peak("cpu")
import rather.model.adapters
print(peak.bytes)
"""
    command = [sys.executable, "-c", lines]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(output) == pytest.approx(PEFT, rel=0.3)


def test_logits_above_the_limit_are_computed_in_chunks(seven: Known) -> None:
    running = LayerBytes(seven.sizes, "cuda", 2)
    few, many = running.head(1000), running.head(100_000)
    assert few[0] == 1000 * 152_064 * 2
    assert many[0] == 1 << 30
    assert replace(running, adapter=True).head(1000)[1] == 2 * 1000 * 3584 * 2


# --- against autograd ---


def saved_bytes(policy: PolicyModel, forward: Callable[[], object]) -> int:
    """Return what autograd keeps of a forward pass; parameters are not counted."""
    known = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(
    ("rank", "family"), [(None, "llama"), (4, "llama"), (None, "qwen3_moe")], ids=str
)
def test_activations_are_what_autograd_saves(folder: Path, rank: int | None, family: str) -> None:
    """On a CPU, of two models that differ by two layers; parameters are not counted."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    place = str(model(folder, **wide))
    if family == "qwen3_moe":
        own = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        AutoConfig.for_model(family, **wide, **own, **heads, vocab_size=63).save_pretrained(place)
    lora = {"actor_train.model_args.lora_rank": rank} if rank else {}
    args = config(Path(place), **lora).actor_train
    sizes = sizes_of(place, args.model_args)
    (batch,) = pack(steps(4, 64, 96)[0], 10**6)

    def saved(layers: int) -> int:
        policy = PolicyModel(few_layers(place, args.model_args, layers, "cpu", torch.float32))
        return saved_bytes(policy, lambda: pair_columns(policy, batch))

    measured = (saved(4) - saved(2)) / 2 / len(batch.ids_N)
    layer = LayerBytes(sizes, "cpu", 4, adapter=bool(rank))
    assert layer.kept == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize("level", ["half", "selective"])
def test_what_recomputing_layers_of_4_bit_weights_keep(
    folder: Path, level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of 4-bit weights are operators of bitsandbytes, which are computed again."""
    pytest.importorskip("bitsandbytes")
    rank = 4
    own = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
    place = str(model(folder, **own))
    changes = {"lora_rank": rank, "quantization": "4bit"}
    settings = {f"actor_train.model_args.{key}": v for key, v in changes.items()}
    args = config(Path(place), **settings).actor_train.model_args
    LlamaForCausalLM(AutoConfig.from_pretrained(place)).save_pretrained(place)
    policy = load_policy(place, args, "cpu")
    (batch,) = pack(steps(4, 64, 96)[0], 10**6)
    kept = 0

    def contexts(choose: Any) -> Any:
        def count(context: Any, operator: Any, *values: Any, **options: Any) -> Any:
            nonlocal kept
            choice = choose(context, operator, *values, **options)
            if choice == Choice.MUST_SAVE and not context.is_recompute:
                kept += values[-2].shape[0] * values[-1].shape[-1]
            return choice

        return create_selective_checkpoint_contexts(count)

    monkeypatch.setattr(layers, "create_selective_checkpoint_contexts", contexts)
    layers._run.cache_clear()
    layers.arrange_layers(policy, recompute=level)
    pair_columns(policy, batch)["sum"].sum().backward()
    layers._run.cache_clear()
    sizes = sizes_of(place, args)
    of_token = kept / 2 / len(batch.ids_N) - 7 * rank  # what the first matrices give
    layer = LayerBytes(sizes, "cuda", 2, level, adapter=True, quantized=True)
    assert layer.kept / 2 == of_token + sizes.hidden + sizes.query  # the input, and attention


# --- against an H200 (bench/results/gpu_vs_trl_*.json, LOG.md) ---


def test_peaks_that_an_h200_measured(folder: Path) -> None:
    for name, tokens, rows, batches, online, gib in [
        ("0.5B", 27_136, 20_503, 2, True, 39.26),
        ("0.5B", 23_552, 20_197, 1, False, 34.46),
        ("1.5B", 30_720, 9_977, 2, True, 87.44),
        ("7B", 4_096, 3_639, 13, False, 133.12),
    ]:
        memory = Known.of(model(folder, name)).memory(gib=140, reference=online, compiled=True)
        chosen = Chosen(tokens, "none", False, False, True)
        found = memory.peak(chosen, Work(tokens, rows, batches, tokens))
        assert found.total / GIB == pytest.approx(gib, rel=0.03), (name, tokens)


# --- what grows and what shrinks ---


def total(model: Known, tokens: int = 4096, level: Any = "none", **changes: Any) -> float:
    chosen = Chosen(tokens, level, False, False, True)
    return model.memory(**changes).peak(chosen, Work(tokens, tokens, 4, tokens)).total


def test_more_tokens_need_more_and_recomputing_needs_less(seven: Known) -> None:
    peaks = [total(seven, tokens) for tokens in (1024, 2048, 4096, 8192)]
    assert peaks == sorted(peaks)
    levels = [total(seven, 8192, level) for level in ("full", "selective", "half", "none")]
    assert levels == sorted(levels)
    assert len(set(levels)) == 4


def test_dividing_needs_less(seven: Known) -> None:
    mapped = {f"{role}.device_mapping": [*range(8)] for role in ("actor_train", "reference")}
    strategy = "actor_train.strategy_args"
    stages = ("zero3", "zero2", "zero1", "ddp")
    peaks = [total(seven, **mapped, **{f"{strategy}.strategy_name": stage}) for stage in stages]
    assert peaks == sorted(peaks)
    for axis in ("tp", "pp", "cp"):
        divided = {strategy: {f"{axis}_size": 4, "strategy_name": "zero1"}}
        assert total(seven, **mapped, **divided) < peaks[2], axis
    lean = total(seven, precision="lean")
    lora = total(seven, **{"actor_train.model_args.lora_rank": 8})
    quantised = {"actor_train.model_args": {"lora_rank": 8, "quantization": "4bit"}}
    assert total(seven, **quantised) < lora < lean < total(seven)


# --- what is said ---


OFFLOADING = {
    "zero2_cpu": {"actor_train.strategy_args": {"strategy_name": "zero2_cpu"}},
    "deepspeed": {
        "actor_train.strategy_args": {
            "strategy_name": "deepspeed_train",
            "strategy_config": {
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}
            },
        }
    },
    "reference": {"reference.strategy_args": {"strategy_name": "gemini_auto"}},
}


@pytest.mark.defect("H1")
@pytest.mark.parametrize("name", ["zero2_cpu", "deepspeed"])
def test_one_gpu_keeps_the_state_of_its_optimizer_on_the_host(seven: Known, name: str) -> None:
    resident = seven.judged("h200", steps(16))
    found = seven.judged("h200", steps(16), **OFFLOADING[name])
    assert found.parts.master == found.parts.moments == 0
    assert found.parts.weights == resident.parts.weights
    assert found.parts.gradients < resident.parts.gradients / 3
    assert found.seconds is not None
    assert resident.seconds is not None
    assert found.seconds.update > 1.0 > resident.seconds.update  # 14 bytes of a weight at 50 GB/s
    Forecast(found.config, seven.sizes, Device("cpu", 999 * GIB), pairs_of(steps(16)), None)


NOTHING_TO_OFFLOAD = {
    "reference": ({}, "a frozen model has no optimizer"),
    "adapter": ({"actor_train.model_args": {"lora_rank": 8}}, "the state of an adapter is small"),
    "lean": ({"precision": "lean"}, "precision: lean keeps little"),
    "fp32": ({"actor_train.model_args": {"dtype": "fp32"}}, "is for dtype: bf16, and it is fp32"),
}


@pytest.mark.defect("H1")
@pytest.mark.parametrize("case", NOTHING_TO_OFFLOAD)
def test_host_memory_is_refused_for_what_has_no_state_there(
    tiny: Known, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a plan and by the process that would load the model."""
    change, reason = NOTHING_TO_OFFLOAD[case]
    role = "reference" if case == "reference" else "actor_train"
    change = {**OFFLOADING["reference" if case == "reference" else "zero2_cpu"], **change}
    refused = rf"strategy_args: '\w+' keeps state in host memory, and .*{reason}"
    with pytest.raises(ConfigError, match=refused):
        tiny.judged("h100", steps(16), **change)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    worker = ActorWorker(config(tiny.place, **change), role, RankInfo(device="cuda:0"))
    with pytest.raises(ConfigError, match=f"{role}.{refused}"):
        worker.initialize(total_steps=1)


def test_batches_steps_and_disk_are_exact(tiny: Known) -> None:
    changes = {
        "actor_train.training_args.gradient_accumulation_steps": 4,
        "actor_train.device_mapping": [0, 1],
        "reference.device_mapping": [0, 1],
        "save_steps": 10,
        "max_ckpt_to_keep": 3,
    }
    found, weights = config(tiny.place, **changes), tiny.sizes.weights
    pairs = replace(pairs_of(steps(128)), data_bytes=5)
    own = Forecast(found, tiny.sizes, Device("cpu", GIB), pairs, None)
    assert own.batch == "16 per device x 4 accumulated x 2 data-parallel = 128 pairs per step"
    assert own.as_json()["pairs_per_step"] == 128
    assert own.step_tokens == 128 * 500
    expected = {"checkpoints": 4 * 12 * weights, "model": 2 * weights, "data": 5}
    assert own.disk == {**expected, "reference": 128 * 100 * 2 * 2 * 28}
    assert json.loads(json.dumps(own.as_json()))["memory_bytes"]["total"] == round(own.parts.total)


def test_flops_and_time_follow_from_each_other(tiny: Known) -> None:
    flops = Flops.of(pack(steps(4)[0], 10**6), tiny.sizes)
    cells = 4 * (300 * 300 / 2 + 200 * 300 - 200 * 200 / 2)
    assert flops.layers == 2 * tiny.sizes.in_layers * 4 * 500 + 4 * 2 * 32 * cells
    assert flops.head == 2 * 63 * 32 * 4 * 400
    assert passes("none", adapter=False) == 3 < passes("full", adapter=False) == 4
    slow, fast = (listed_speed(name, 7_600_000_000, compiled=True).train for name in ("l4", "h100"))
    assert fast / slow == pytest.approx(989 / 121)


def test_without_data_pairs_are_as_long_as_they_may_be() -> None:
    found = assumed_pairs(1024, 16, None, "none here")
    assert (len(found.sample[0]), found.largest, found.assumed) == (16, 3 * 512, "none here")


def test_a_missing_model_gives_a_one_line_error(tmp_path: Path) -> None:
    missing = r"found no config\.json of a causal language model"
    with pytest.raises(
        ConfigError, match=rf"nobody/nothing: {missing}.*hf download nobody/nothing "
    ):
        sizes_of("nobody/nothing", ModelArgs())
    for _ in range(2):
        with pytest.raises(ConfigError, match=missing):
            sizes_of(str(tmp_path), ModelArgs())
        (tmp_path / "config.json").write_text("{}")
