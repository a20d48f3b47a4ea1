"""What a plan forecasts, what is refused before loading and what is advised on a shortage agree."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from typing import Any

import pytest
from transformers import AutoConfig

from rather.cluster.memory import Ledger, Room, need_of
from rather.cluster.worker import ActorWorker, RankInfo
from rather.config.load import changed
from rather.config.run_config import DPOConfig
from rather.config.schema import ActorModelArgs
from rather.config.strategies import layout
from rather.errors import ConfigError, MemoryShortage
from rather.losses.objective import from_config
from rather.model.budget import Budget
from rather.plan.forecast import Forecast, assumed_pairs
from rather.plan.memory import Chosen, Device, MemoryForecast, Work, adapter_weights
from tests.plan.test_arithmetic import Known, config, model

GIB = 1 << 30
STRATEGY, ARGS = "actor_train.strategy_args", "actor_train.model_args"
DETAILS = f"{STRATEGY}.strategy_config"
# Settings that are drawn from, for one GPU and for several.
ONE: list[dict[str, Any]] = [
    {},
    {"precision": "lean"},
    {STRATEGY: {"strategy_name": "zero2_cpu"}},
    {STRATEGY: {"strategy_name": "zero2_cpu"}, f"{DETAILS}.recompute_granularity": "full"},
    {f"{ARGS}.lora_rank": 16},
    {ARGS: {"lora_rank": 16, "quantization": "4bit"}},
    {ARGS: {"lora_rank": 8, "modules_to_save": "embed_tokens, lm_head"}},
    {f"{ARGS}.dtype": "fp16"},
    {f"{ARGS}.dtype": "fp32"},
    {"reference.offload": "on"},
    {"sync_ref_model": True},
    {f"{ARGS}.disable_gradient_checkpointing": True},
    {"pref_loss": "simpo"},
]
MANY: list[dict[str, Any]] = [
    {"strategy_name": "ddp"},
    {"strategy_name": "zero1", "tp_size": 2},
    {"strategy_name": "zero2", "strategy_config": {"recompute_granularity": "selective"}},
    {"strategy_name": "zero3"},
    {"strategy_name": "zero2_cpu"},
    {"strategy_name": "gemini_auto"},
    {"strategy_name": "hsdp", "strategy_config": {"shard_size": 2}},
    {"strategy_name": "3d", "pp_size": 2, "strategy_config": {"zero_stage": 1}},
    {"tp_size": 2, "strategy_config": {"sequence_parallel": True}},
    {"pp_size": 4, "strategy_config": {"pipeline_schedule": "zbv"}},
    {"cp_size": 2, "strategy_config": {"offload_activations": True}},
    {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 2}}},
    {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 2}},
]  # fmt: skip
WIDE = [
    {},
    {},
    {f"{ARGS}.lora_rank": 16},
    {"rounding": "nearest"},
    {"reference.device_mapping": [9]},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Known]:
    folder = tmp_path_factory.mktemp("models")
    experts = folder / "experts"
    AutoConfig.for_model(
        "qwen3_moe", vocab_size=32_000, hidden_size=1024, num_hidden_layers=8, head_dim=64,
        num_attention_heads=16, num_key_value_heads=4, moe_intermediate_size=512, num_experts=32,
        num_experts_per_tok=4, dtype="bfloat16",
    ).save_pretrained(experts)  # fmt: skip
    return [*map(Known.of, (model(folder, "0.5B"), model(folder, "7B"), experts))]


def drawn(models: list[Known], seed: int) -> Forecast:
    """The forecast of a config that is possible, on a GPU with more or less than it needs."""
    draw = random.Random(seed)
    while True:
        known = draw.choice(models)
        if draw.random() < 0.5:
            change = draw.choice(ONE)
        else:
            roles = ("actor_train", "reference")
            devices = {f"{role}.device_mapping": [0, 1, 2, 3] for role in roles}
            change = {**devices, STRATEGY: draw.choice(MANY), **draw.choice(WIDE)}
        device = Device("cuda", draw.choice([2, 6, 24, 40, 80, 140]) * GIB, 64 * GIB)
        pairs = assumed_pairs(1024, 16, None, "none here")
        try:
            return Forecast(config(known.place, **change), known.sizes, device, pairs, None)
        except ConfigError:
            continue


def rank_of(found: DPOConfig, role: str) -> ActorWorker:
    """A rank whose model is not loaded, on a GPU that is not there."""
    worker = ActorWorker(found, role, RankInfo(device="cuda:0"))
    section = getattr(found, role)
    worker.source, worker.layout = (section.model_path, section.model_args), layout(section)
    worker.compiled = False
    return worker


@pytest.mark.parametrize("seed", range(30))
def test_plan_preflight_and_advice_agree(models: list[Known], seed: int) -> None:
    forecast = drawn(models, seed)
    found, sizes, device = forecast.config, forecast.sizes, forecast.device
    ranks = layout(found.actor_train).devices

    # What is refused before loading does not fit by the plan either.
    ledger, needs = Ledger(), {}
    room = Room("here", 0, free=round(64 * GIB * ranks), device=round(device.memory))
    rooms = [room._replace(place=place) for place in range(ranks)]
    try:
        for role in ("actor_train", "reference"):
            shares = role == "actor_train" or found.shares_devices
            if role == "reference":
                shares &= from_config(found).needs_reference and not found.reference_is_policy
            if shares and ranks > 1:  # a single process tries whether its model fits
                needs[role] = need_of(found, getattr(found, role), "cuda")
                ledger.add(role, needs[role], rooms)
    except ConfigError:
        assert not forecast.fits, "refused what would fit"
    policy = need_of(found, found.actor_train, "cuda", narrow=forecast.chosen.narrow)
    assert policy is not None
    assert policy.device <= forecast.parts.total
    assert policy.host == pytest.approx(forecast.host)

    # The config takes each setting that is advised, and a pass then needs less.
    rank, level = rank_of(found, "actor_train"), forecast.chosen.recompute
    rank.planned = Budget(4096, level)

    def needed(changed_config: DPOConfig, tokens: int, rows: int) -> float:
        recompute = layout(changed_config.actor_train).recompute or level
        parked = changed_config.reference.offload == "on"
        chosen = Chosen(tokens, recompute, narrow=False, parked=parked)
        memory = MemoryForecast(changed_config, sizes, device, reference=True, compiled=False)
        work = Work(tokens, rows, 4, tokens)
        return max(parts.total for parts in memory.in_training(chosen, work))

    before = needed(found, 4096, 4000)
    advised = [way.split(" ")[0] for way in rank._memory_fixes(4096)]
    assert advised
    for way in advised:
        key, separator, value = way.partition("=")
        if not separator:
            assert way == "more"
            continue
        other = changed(found, {key: int(value) if value.isdigit() else value})
        halves = "max_tokens" in key or key == "sequence_length"
        assert needed(other, *((2048, 2000) if halves else (4096, 4000))) < before, way


def test_experts_keep_their_bytes_in_4_bits(models: list[Known]) -> None:
    """bitsandbytes quantises linear layers, and a stack of experts is none."""
    experts = models[2]
    weights = []
    for args in ({"lora_rank": 16}, {"lora_rank": 16, "quantization": "4bit"}):
        memory = experts.memory("cuda", 80, **{ARGS: args})
        weights.append(memory.state().on_device.weights)
    assert weights[1] > 2 * experts.sizes.of_experts
    linears = 8 * (1024 * (1024 + 2 * 256 + 1024) + 32 * 1024)
    assert weights[0] - weights[1] == pytest.approx(linears * (2 - 0.516), rel=1e-3)


def test_an_adapter_counts_all_that_it_trains(models: list[Known]) -> None:
    sizes = models[1].sizes
    one, two, text = (
        adapter_weights(ActorModelArgs(lora_rank=4, lora_target=target), sizes.shapes)
        for target in ("q_proj", ["q_proj", "self_attn.v_proj"], "q_proj, v_proj")
    )
    assert one == 28 * 4 * 2 * 3584
    assert two == text == one + 28 * 4 * (3584 + 512)
    saved = ActorModelArgs(
        lora_rank=4, lora_target="q_proj", modules_to_save="embed_tokens,lm_head"
    )
    assert adapter_weights(saved, sizes.shapes) == one + 2 * 152_064 * 3584


@pytest.mark.parametrize(("gib", "fits"), [(200, True), (50, False)])
def test_a_plan_counts_host_memory(
    models: list[Known], monkeypatch: pytest.MonkeyPatch, gib: int, fits: bool
) -> None:
    """As the rank does that would refuse to begin: moments, low bits and the sums of layers."""
    from rather.commands.plan import verdict

    offloading = config(models[1].place, **{STRATEGY: {"strategy_name": "zero2_cpu"}})
    sizes = models[1].sizes
    pairs = assumed_pairs(1024, 16, None, "none here")
    forecast = Forecast(offloading, sizes, Device("cuda", 80 << 30, gib * GIB), pairs, None)
    assert " of 80 GiB (" in forecast.line()
    assert forecast.host == pytest.approx(10 * sizes.weights + 4 * sizes.in_layers)
    assert forecast.fits == fits
    assert ("of host memory per rank, available 50.00 GiB" in verdict(forecast, [])) != fits
    assert json.loads(json.dumps(forecast.as_json()))["host_bytes"] == round(forecast.host)
    monkeypatch.setattr("rather.cluster.worker.free_memory", lambda: gib * GIB)
    worker = rank_of(offloading, "actor_train")
    refused = pytest.raises(MemoryShortage, match=r"keeps .+ GiB of optimizer state")
    with nullcontext() if fits else refused:
        worker._refuse_small_host()
