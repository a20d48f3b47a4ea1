"""The same code on a CUDA device: kernels, precisions, a whole run, bits with `deterministic: true`."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rather.checkpoint.checkpoint import open_checkpoint
from rather.config.schema import ActorModelArgs, ModelArgs
from rather.data.pack import pack
from rather.errors import ConfigError
from rather.model.attention import IMPLEMENTATION, flash_attention_4, segment_attention
from rather.model.check import expert_blocks
from rather.model.experts import sorted_experts
from rather.model.policy import PolicyModel, pair_columns
from rather.parallel.load import load_policy
from rather.pipeline.pipeline import DPOPipeline
from tests.model import test_experts as experts
from tests.model.test_families import FAMILIES, VOCAB, tiny
from tests.padded import padded_logps, random_pairs
from tests.tiny import make_config, rows_of

pytestmark = pytest.mark.gpu


# Multi-head latent attention: keys are wider than values. All layers of DeepSeek are dense here,
# because rounding changes what a router chooses.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
REAL: dict[str, Any] = {  # 192 and 128
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
DENSE: dict[str, Any] = {"first_k_dense_replace": 3, "num_mtp_layers": 0}
LATENT_FAMILIES: dict[str, dict[str, Any]] = {
    "minicpm3": LATENT,
    "deepseek_v3": LATENT | DENSE,
    "deepseek_v3-real": LATENT | DENSE | REAL,
}


def both(
    family: str, dtype: torch.dtype, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Padded and packed log-probs on the GPU, and the cosine of their gradients."""
    pairs = random_pairs(5, VOCAB)
    plain, ours = (
        tiny(family, dtype, attention, **changes).cuda() for attention in ("eager", IMPLEMENTATION)
    )
    want = padded_logps(plain, pairs)
    got = torch.zeros_like(want)
    for batch in pack(pairs, 90):
        batch = batch.to("cuda")
        got = got.index_add(0, batch.pair_P, pair_columns(PolicyModel(ours), batch)["sum"])
    # Divided, because some families have log-probs so far apart that tanh has no slope there.
    for logps in (want, got):
        ((logps[:, 0] - logps[:, 1]) / 100).tanh().sum().backward()
    flat = [
        torch.cat([p.grad.flatten().float() for p in m.parameters() if p.grad is not None])
        for m in (plain, ours)
    ]
    return want.detach(), got.detach(), float(torch.cosine_similarity(*flat, dim=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded_in_float32(family: str) -> None:
    want, got, cosine = both(family, torch.float32)
    assert torch.allclose(got, want, rtol=1e-5, atol=0)
    assert cosine > 0.99999


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_as_good_as_padded_in_bfloat16(family: str) -> None:
    exact, _, _ = both(family, torch.float32)
    want, got, cosine = both(family, torch.bfloat16)
    assert (got - exact).abs().max() <= 2 * (want - exact).abs().max() + 0.1
    assert cosine > 0.98


@pytest.mark.defect("R2")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_latent_attention_is_as_good_as_padded_in_half_precision(
    family: str, dtype: torch.dtype
) -> None:
    exact, same, _ = both(family, torch.float32, **LATENT_FAMILIES[family])
    assert torch.allclose(same, exact, rtol=1e-4, atol=0)
    want, got, cosine = both(family, dtype, **LATENT_FAMILIES[family])
    assert (got - exact).abs().max() <= 2 * (want - exact).abs().max() + 0.1
    assert cosine > 0.98


@pytest.mark.defect("R2")
def test_deepseek_loads_and_trains_in_bfloat16(tmp_path: Path) -> None:
    """With experts: its log-probs are compared with the padded forward when it is loaded."""
    config = make_config(tmp_path, max_steps=2)
    model = experts.tiny("deepseek_v3", vocab_size=63)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # small, so that a router may choose another expert
                parameter.mul_(0.2)
    model.save_pretrained(config.actor_train.model_path)
    assert DPOPipeline(config).run() == 0
    losses = [line["loss"] for line in metrics(config.run_dir) if "loss" in line]
    assert losses[0] == pytest.approx(math.log(2), abs=0.05)


@pytest.mark.parametrize("size", [64, 128])
def test_flash_attention_4_is_as_good_as_torchs_kernel(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flash_attn.cute")
    assert flash_attention_4(torch.device("cuda:0"), size)
    (batch,) = pack(random_pairs(40, VOCAB), 4096)
    segments = batch.to("cuda").segments
    torch.manual_seed(0)
    shapes = [(1, heads, int(segments.cu_q[-1]), size) for heads in (6, 2, 2)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]

    def numbers(dtype: torch.dtype) -> list[torch.Tensor]:
        own = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        query, key, value = own
        out, _ = segment_attention(torch.nn.Identity(), query, key, value, None, segments=segments)
        return [out, *torch.autograd.grad(out.float().square().sum(), own)]

    exact, newest = numbers(torch.float32), numbers(torch.bfloat16)
    monkeypatch.setattr("rather.model.attention.flash_attention_4", lambda *_: None)
    for true, new, torchs in zip(exact, newest, numbers(torch.bfloat16), strict=True):
        assert (new - true).norm() <= 1.1 * (torchs - true).norm()


@pytest.mark.parametrize("places", [0, 1, 1000])
@pytest.mark.parametrize(("heads", "size"), [(2, 64), (3, 40), (8, 128)])
def test_keys_and_values_are_gathered_as_torch_does(heads: int, size: int, places: int) -> None:
    from rather.model.kernels import gather_by_key

    torch.manual_seed(0)
    one, two, other = torch.randn(3, 300, heads, size, device="cuda", dtype=torch.bfloat16)
    layouts = {
        "contiguous": one,
        "columns of a wider tensor": torch.cat([one, two], 1)[:, heads:],
        "heads first": other.transpose(0, 1).contiguous().transpose(0, 1),
    }
    index = torch.randint(300, (places,), device="cuda")
    for keys in layouts.values():
        for values in layouts.values():
            found = gather_by_key(keys, values, index)
            for got, whole in zip(found, (keys, values), strict=True):
                assert torch.equal(got, whole[index])
                assert got.is_contiguous()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sorted_experts_are_as_good_as_those_of_transformers(compiled: bool) -> None:
    model = experts.tiny("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    whole = next(expert_blocks(model))[1].experts.cuda()
    inputs = [x.cuda() for x in experts.chosen_experts(whole, 3000, 128)]
    exact = experts.expert_numbers(whole, ALL_EXPERTS_FUNCTIONS["grouped_mm"], *inputs)
    half = copy.deepcopy(whole).bfloat16()
    inputs[0], inputs[2] = inputs[0].bfloat16(), inputs[2].bfloat16()
    function = torch.compile(sorted_experts, dynamic=True) if compiled else sorted_experts
    ours, again = (experts.expert_numbers(half, function, *inputs) for _ in range(2))
    theirs = experts.expert_numbers(half, ALL_EXPERTS_FUNCTIONS["grouped_mm"], *inputs)
    for true, own, other, repeated in zip(exact, ours, theirs, again, strict=True):
        assert torch.equal(own, repeated)
        assert (own - true).norm() <= 1.1 * (other - true).norm() + 1e-3 * true.norm()


def test_falcon_is_refused(tmp_path: Path) -> None:
    config = FalconConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    FalconForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="falcon"):
        load_policy(str(tmp_path), ModelArgs(), "cuda:0")


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}], ids=["whole", "adapter"])
def test_loading_leaves_the_random_numbers_of_both_devices(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The seed of a run is set before its model comes, and dropout draws on the GPU."""
    model = make_config(tmp_path).actor_train.model_path
    torch.manual_seed(7)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    load_policy(model, ActorModelArgs(**changes), "cuda:0")
    for was, state in zip(before, (torch.get_rng_state(), torch.cuda.get_rng_state()), strict=True):
        assert torch.equal(was, state)


def metrics(run: Path) -> list[dict[str, Any]]:
    return rows_of(run / "metrics.jsonl")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_run_learns(tmp_path: Path, dtype: str) -> None:
    config = make_config(
        tmp_path,
        max_steps=12,
        actor_train__model_args__dtype=dtype,
        actor_train__training_args__num_train_epochs=9.0,
    )
    assert DPOPipeline(config).run() == 0
    lines = metrics(config.run_dir)
    assert lines[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert lines[-1]["eval/loss"] < 0.69
    assert lines[-1]["eval/rewards/accuracies"] > 0.7


def test_deterministic_gives_the_same_bits(tmp_path: Path) -> None:
    tensors = []
    for name, stop in (("whole", 12), ("cut", 5), ("cut", 12)):
        config = make_config(
            tmp_path,
            exp_name=name,
            max_steps=stop,
            deterministic=True,
            actor_train__training_args__num_train_epochs=9.0,
            actor_train__training_args__lr_scheduler_type="constant",
        )
        assert DPOPipeline(config).run() == 0
        tensors.append(open_checkpoint(config.run_dir / f"checkpoint-{stop}").tensors("model"))
    whole, _, cut = tensors
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
