"""How layers run changes memory and time, never a number: recomputed, in part or whole, offloaded, compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PretrainedConfig,
)

from rather.config.schema import ActorModelArgs, ModelArgs
from rather.data.batch import PairBatch
from rather.data.pack import pack
from rather.errors import ConfigError
from rather.model import budget
from rather.model.adapters import inject
from rather.model.attention import IMPLEMENTATION
from rather.model.budget import Budget, choose_budget, default_tokens
from rather.model.layers import LEVELS, Recompute, _run, arrange_layers, layers_of, plain_layers
from rather.model.policy import PolicyModel
from rather.parallel.load import load_policy
from tests.padded import random_pairs
from tests.tiny import make_model

SMALL: dict[str, Any] = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


def one_batch() -> PairBatch:
    (batch,) = pack(random_pairs(4, 60), budget=10**6)
    return batch


OPT = {"hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 2, "ffn_dim": 24}
OPT |= {"num_attention_heads": 2, "max_position_embeddings": 64}
DROPOUT: dict[str, tuple[type[Any], PretrainedConfig]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **SMALL)),
    "opt": (OPTForCausalLM, OPTConfig(**OPT, **SMALL)),
}


def policy_of(family: str, base: Path, tmp_path: Path) -> PolicyModel:
    folder = base
    if family in DROPOUT:
        model, config = DROPOUT[family]
        model(config).save_pretrained(folder := tmp_path / family)
    return load_policy(str(folder), ModelArgs(), "cpu")


class Products(TorchDispatchMode):
    """Counts matrix products by the width of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.widths.append(args[-1].shape[-1])
        return func(*args, **(kwargs or {}))


def seen(policy: PolicyModel, batch: PairBatch) -> list[torch.Tensor]:
    policy.zero_grad()
    logps, _ = policy(batch)
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return [logps.detach(), *(p.grad.clone() for p in policy.parameters() if p.grad is not None)]


def assert_same_bits(policy: PolicyModel, batch: PairBatch, plain: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, plain, seen(policy, batch)))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", ["llama", *DROPOUT])
def test_no_bit_changes(
    base: Path, tmp_path: Path, family: str, level: Recompute, offload: bool
) -> None:
    policy, batch = policy_of(family, base, tmp_path), one_batch()
    plain = seen(policy, batch)
    arrange_layers(policy, recompute=level, offload=offload)
    assert_same_bits(policy, batch, plain)
    with torch.no_grad():
        assert torch.equal(policy(batch)[0], plain[0])  # no dropout


def small_llama(layers: int) -> PolicyModel:
    sizes = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=2, **SMALL)
    config._attn_implementation = IMPLEMENTATION
    return PolicyModel(LlamaForCausalLM(config).eval())


def two_attentions() -> PolicyModel:
    """Every second layer sees a window, so layers of a group are called with different masks."""
    config = Gemma2Config(
        hidden_size=16, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=7, attn_logit_softcapping=None, **SMALL,
    )  # fmt: skip
    config._attn_implementation = IMPLEMENTATION
    return PolicyModel(Gemma2ForCausalLM(config).eval())


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers are traced as for compilation, but run as they are, so that bits can be compared."""
    trace = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda run, dynamic, **_: trace(run, dynamic=dynamic))
    _run.cache_clear()
    yield
    _run.cache_clear()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("layers", [4, 10])
def test_no_bit_changes_in_groups_of_layers(layers: int) -> None:
    policy, batch = small_llama(layers), one_batch()
    plain = seen(policy, batch)
    arrange_layers(policy, compiled=True, alone=True)
    first, *rest = layers_of(policy)
    hidden = torch.ones(1, 3, 16)
    assert all(layer(hidden) is hidden for layer in (first, *rest[:2]))  # wait for the last one
    for _ in range(2):
        assert_same_bits(policy, batch, plain)
    with plain_layers(policy):
        assert_same_bits(policy, batch, plain)
    arrange_layers(policy, recompute="full")
    assert_same_bits(policy, batch, plain)


@pytest.mark.usefixtures("traced")
def test_each_layer_of_a_group_keeps_its_own_arguments() -> None:
    policy, batch = two_attentions(), one_batch()
    plain = seen(policy, batch)
    arrange_layers(policy, compiled=True, alone=True)
    assert_same_bits(policy, batch, plain)


@pytest.mark.parametrize(
    ("layers", "adapter", "small", "sizes"),
    [
        (10, 0, 10**6, [5, 5]),
        (9, 0, 10**6, [3, 3, 3]),
        (7, 0, 10**6, []),
        (10, 0, 100, []),
        (10, 2, 10**6, []),
    ],
)
def test_which_layers_form_groups(
    layers: int, adapter: int, small: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rather.model.layers.SMALL", small)
    policy = small_llama(layers)
    if adapter:
        inject(policy.causal_lm, ActorModelArgs(lora_rank=adapter, lora_target="all-linear"))
    arrange_layers(policy, compiled=True, alone=True)
    forwards = [layer.forward for layer in layers_of(policy)]
    groups = {forward.func.__self__ for forward in forwards if isinstance(forward, partial)}
    assert [len(group.layers) for group in groups] == sizes


def test_selective_repeats_the_wide_products_alone_and_full_repeats_all() -> None:
    policy, batch = small_llama(3), one_batch()
    config = policy.causal_lm.config
    counts = {}
    for level in LEVELS:
        arrange_layers(policy, recompute=level)
        logps, _ = policy(batch)
        with Products() as products:
            logps.sum().backward()
        counts[level] = products.widths
    wide = config.intermediate_size
    repeated = 2 * config.num_hidden_layers  # gate and up of each layer
    assert len(counts["half"]) == len(counts["none"]) + repeated // 2
    assert counts["half"].count(wide) == counts["none"].count(wide) + repeated // 2
    assert len(counts["selective"]) == len(counts["none"]) + repeated
    assert counts["selective"].count(wide) == counts["none"].count(wide) + repeated
    assert len(counts["full"]) > len(counts["selective"]) + config.num_hidden_layers


def test_recomputing_keeps_less(base: Path) -> None:
    """Bytes that the graph holds between forward and backward."""
    policy, batch = load_policy(str(base), ModelArgs(), "cpu"), one_batch()
    held = {}
    for level in LEVELS:
        arrange_layers(policy, recompute=level)
        kept: dict[int, int] = {}

        def pack_hook(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
            policy(batch)
        held[level] = sum(kept.values())
    assert held["full"] < held["none"]


def test_a_family_whose_layers_cannot_recompute_says_so(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(str(base), ModelArgs(), "cpu")
    monkeypatch.setattr("rather.model.layers.GradientCheckpointingLayer", torch.nn.Conv3d)
    with pytest.raises(ConfigError, match="disable_gradient_checkpointing to true"):
        arrange_layers(policy, recompute="full")
    arrange_layers(policy, compiled=True)  # told in the log, and runs as it is
    seen(policy, one_batch())


class Never:
    """A CPU has memory enough."""

    def rehearse(self, batch: PairBatch) -> None:
        raise AssertionError

    def forget(self) -> None:
        raise AssertionError


def test_on_a_cpu_configured_limits_are_used_and_nothing_is_recomputed_by_default(
    base: Path,
) -> None:
    policy = load_policy(str(base), ModelArgs(), "cpu")
    rest: dict[str, Any] = {"offload": False, "compiled": False, "largest_pair": 9000}
    for tokens, level, budget_chosen in (
        (None, None, (4096, "none")),
        (700, "full", (700, "full")),
    ):
        chosen = choose_budget(policy, Never(), tokens=tokens, recompute=level, **rest)
        assert chosen == Budget(*budget_chosen)


@pytest.mark.parametrize(
    ("at_least", "tried"),
    [("none", ["none", "half", "selective"]), ("half", ["half", "selective"]), ("full", ["full"])],
)
def test_a_budget_recomputes_at_least_so_much(
    at_least: Any, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is simulated: only from `selective` on a micro-batch fits."""
    levels: list[str] = []
    fitting = {"none": 0, "half": 0, "selective": 8192, "full": 9216}
    arrange = lambda _, *, recompute, **__: levels.append(recompute)  # noqa: E731
    monkeypatch.setattr(budget, "arrange_layers", arrange)
    monkeypatch.setattr(budget, "_tokens_that_fit", lambda *_: fitting[levels[-1]])
    monkeypatch.setattr(budget, "_largest_tried", lambda _, __, tokens, *___: tokens)
    device = SimpleNamespace(type="cuda")
    policy: Any = SimpleNamespace(causal_lm=SimpleNamespace(device=device), balance=None)
    rest: dict[str, Any] = {"offload": False, "compiled": False, "largest_pair": 100}
    chosen = choose_budget(policy, Never(), tokens=None, recompute=None, at_least=at_least, **rest)
    assert levels == tried
    assert chosen == Budget(fitting[tried[-1]], chosen.recompute)


def test_with_a_router_loss_a_step_may_be_one_large_micro_batch() -> None:
    assert default_tokens("cuda", 0.001) == 2 * default_tokens("cuda", 0.0)
    assert default_tokens("cpu", 0.001) == default_tokens("cpu", 0.0)
