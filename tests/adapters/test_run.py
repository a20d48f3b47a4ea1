"""Training adapters in one process: what the reference is, what is trained, what is saved, and that it resumes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rather.checkpoint.checkpoint import newest_good, open_checkpoint
from rather.cluster.host import Host, Process
from rather.cluster.memory import need_of
from rather.cluster.worker import ActorWorker, RankInfo, make_worker
from rather.commands import score
from rather.config.run_config import DPOConfig
from rather.config.schema import ModelArgs
from rather.data.pack import pack
from rather.data.prepare import prepare
from rather.errors import CheckpointError
from rather.losses.objective import from_config
from rather.model.check import two_pairs
from rather.model.policy import PolicyModel, pair_columns
from rather.optim.rounding import Rounding
from rather.parallel.load import load_policy
from rather.pipeline.checks import identity_of, refuse_other_run
from rather.pipeline.pipeline import DPOPipeline
from rather.run_folder.model_source import Weights, weights_of
from tests.runs import assert_equal, saved, steps
from tests.tiny import in_child, make_config, metrics
from tests.train.test_resume import KILLED, train_killed

STEPS = 3
LN_2 = math.log(2)
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "some": {"lora_target": "q_proj,v_proj", "lora_alpha": 3},
    "rslora": {"use_rslora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa-rslora": {"init_lora_weights": "pissa_niter_4", "use_rslora": True},
    "modules": {"modules_to_save": ["lm_head", "embed_tokens"], "model_name_or_path": "untied"},
    "bf16": {"dtype": "bf16"},
}


def config_of(folder: Path, name: str, changes: dict[str, Any], **more: Any) -> DPOConfig:
    args = {"lora_rank": 4, **changes}
    if "model_name_or_path" in args:
        args["model_name_or_path"] = str(folder / args["model_name_or_path"])
    settings = {f"actor_train__model_args__{key}": value for key, value in args.items()}
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "actor_train__training_args__learning_rate": 0.01,
        "exp_name": name,
    }
    options["reference__cache__enabled"] = False  # so that each run asks its reference
    return make_config(folder, **{**options, **settings, **more})


def trained(config: DPOConfig) -> DPOPipeline:
    pipeline = DPOPipeline(config)
    assert pipeline.run() == 0
    return pipeline


def log_probs(policy: PolicyModel) -> Tensor:
    (batch,) = pack(two_pairs(policy.vocabulary_size), budget=10**6)
    with torch.no_grad():
        return pair_columns(policy, batch)["sum"]


def reference_of(pipeline: DPOPipeline) -> Tensor:
    """The log-probs of the same pairs by the role of the reference."""
    (batch,) = pack(two_pairs(pipeline.actor_train.embedding_rows()), budget=10**6)
    assert pipeline.reference is not None
    return pipeline.reference.compute_log_probs([batch])["sum"]


def policy_of(pipeline: DPOPipeline) -> PolicyModel:
    assert isinstance(pipeline.actor_train, ActorWorker)
    policy = pipeline.actor_train.trainer.policy
    assert isinstance(policy, PolicyModel)
    return policy


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(3, 50)[None]).logits.float()
    return found


def first_loss(pipeline: DPOPipeline) -> float:
    loss: float = steps(pipeline.config)[0]["loss"]
    return loss


def assert_merged(pipeline: DPOPipeline, close: float = 1e-5) -> Tensor:
    """The exported model is the policy. Return its logits."""
    policy = policy_of(pipeline).causal_lm
    policy.set_attn_implementation("eager")
    merged = logits(
        AutoModelForCausalLM.from_pretrained(pipeline.config.run_dir / "model", dtype=torch.float32)
    )
    assert torch.allclose(merged, logits(policy), atol=close)
    return merged


@pytest.mark.parametrize("name", VARIANTS)
def test_from_the_base_to_the_merged_model(shared: Path, name: str) -> None:
    config = config_of(shared, name, VARIANTS[name])
    pipeline = trained(config)
    exact = name != "bf16"
    args = ModelArgs(dtype=config.actor_train.model_args.dtype)
    rounding = Rounding(config.rounding)
    base = load_policy(config.actor_train.model_path, args, "cpu", rounding=rounding)
    # Before any training the policy is the reference, and the reference is the base, also after training.
    assert first_loss(pipeline) == pytest.approx(LN_2, abs=1e-12 if exact else 1e-3)
    assert metrics(config)[-1]["eval/loss"] < LN_2
    close = {"rtol": 0, "atol": 1e-12 if "pissa" not in name else 1e-4}
    assert torch.allclose(reference_of(pipeline), log_probs(base), **close)
    assert not torch.allclose(log_probs(policy_of(pipeline)), log_probs(base), atol=1e-2)
    # Only the adapter has gradients, masters, moments, and a place in the checkpoint.
    policy, wanted = (
        policy_of(pipeline),
        [".lora_", *([".modules_to_save."] if name == "modules" else [])],
    )
    held = {key for key, parameter in policy.named_parameters() if parameter.requires_grad}
    assert held
    assert all(".default." in key and any(part in key for part in wanted) for key in held)
    saved = open_checkpoint(config.run_dir / f"checkpoint-{STEPS}")
    assert saved.tensors("model").keys() == held
    assert {key.rpartition(".")[0] for key in saved.tensors("optimizer")} == held
    assert all(parameter.grad is None for parameter in policy.parameters())
    # The merged model, and PEFT's on the original base, are the policy.
    source = AutoModelForCausalLM.from_pretrained(
        config.actor_train.model_path, dtype=torch.float32
    )
    opened = PeftModel.from_pretrained(source, config.run_dir / "adapter")
    assert torch.allclose(
        assert_merged(pipeline, 1e-5 if exact else 0.05), logits(opened), atol=1e-5
    )
    assert opened.peft_config["default"].base_model_name_or_path == str(
        Path(config.actor_train.model_path).absolute()
    )


def test_pissa_with_a_separate_reference_is_exported_on_the_original_base(
    shared: Path,
) -> None:
    config = config_of(shared, "apart", VARIANTS["pissa"], reference__model_args__dtype="fp32")
    assert not config.reference_is_policy
    assert_merged(trained(config))


def test_sizes_are_those_of_the_adapter(shared: Path) -> None:
    """Counted: rank 4 on the 7 linear layers of 2 decoder layers, in float32 with two moments."""
    pipeline = trained(config_of(shared, "sizes", {}))
    run = pipeline.config.run_dir
    attention, mlp = [(32, 32), (32, 16), (32, 16), (32, 32)], [(32, 48), (32, 48), (48, 32)]
    weights = 2 * 4 * sum(map(sum, attention + mlp))
    assert weights == 3712
    for group, each in (("model", 1), ("optimizer", 2)):
        with safe_open(run / f"checkpoint-{STEPS}" / f"{group}-00001.safetensors", "pt") as file:
            assert sum(file.get_tensor(key).numel() for key in file.keys()) == each * weights  # noqa: SIM118
    files = [path.stat().st_size for path in (run / "adapter").glob("*.safetensors")]
    assert 4 * weights < sum(files) < 4 * weights + 8192
    # In the middle of a step: weights, gradients, moments. No second model, and the check before a run knew it.
    assert isinstance(pipeline.actor_train, ActorWorker)
    trainer, policy = pipeline.actor_train.trainer, policy_of(pipeline)
    assert trainer.optimizer is not None
    (batch,) = pack(two_pairs(policy.vocabulary_size), budget=10**6)
    trainer.rehearse(batch)
    held = [
        *policy.parameters(),
        *trainer.optimizer.gradients(),
        *trainer.optimizer.moments().values(),
    ]
    need = need_of(pipeline.config, pipeline.config.actor_train, "cpu")
    assert need is not None
    assert sum(tensor.numel() * tensor.element_size() for tensor in held) == need.once
    assert pipeline.actor_train.memory_need(pipeline.config.reference) is None


def test_an_existing_adapter_is_trained_on_and_is_the_reference(shared: Path, tuned: Path) -> None:
    args = {"lora_rank": None, "adapter_name_or_path": str(tuned)}
    pipeline = trained(config_of(shared, "existing", args))
    assert first_loss(pipeline) == pytest.approx(LN_2, abs=1e-12)
    began = load_policy(str(shared / "base"), ModelArgs(adapter_name_or_path=str(tuned)), "cpu")
    base = load_policy(str(shared / "base"), ModelArgs(), "cpu")
    assert torch.equal(reference_of(pipeline), log_probs(began))
    assert not torch.allclose(log_probs(began), log_probs(base), atol=0.1)
    # `began` is what PEFT makes of the folder.
    peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(shared / "base"), tuned
    ).eval()
    began.causal_lm.set_attn_implementation("eager")
    assert torch.allclose(logits(began.causal_lm), logits(peft), atol=1e-5)
    assert_merged(pipeline)


@pytest.mark.parametrize("name", ["dora", "pissa-rslora", "modules"])
def test_what_a_run_left_is_trained_on(shared: Path, name: str) -> None:
    first = trained(config_of(shared, f"first-{name}", VARIANTS[name]))
    base = {key: VARIANTS[name][key] for key in VARIANTS[name].keys() & {"model_name_or_path"}}
    left = {
        "lora_rank": None,
        "adapter_name_or_path": str(first.config.run_dir / "adapter"),
        **base,
    }
    pipeline = trained(config_of(shared, f"second-{name}", left))
    assert first_loss(pipeline) == pytest.approx(LN_2, abs=1e-12)
    assert torch.allclose(reference_of(pipeline), log_probs(policy_of(first)), atol=1e-3)
    assert not torch.allclose(
        log_probs(policy_of(pipeline)), log_probs(policy_of(first)), atol=1e-2
    )
    assert_merged(pipeline)


def test_the_base_can_be_the_reference_of_an_existing_adapter(shared: Path, tuned: Path) -> None:
    args = {"lora_rank": None, "adapter_name_or_path": str(tuned)}
    pipeline = trained(
        config_of(shared, "above", args, reference__model_args__adapter_name_or_path=None)
    )
    base = load_policy(str(shared / "base"), ModelArgs(), "cpu")
    assert torch.equal(reference_of(pipeline), log_probs(base))
    assert first_loss(pipeline) != pytest.approx(LN_2, abs=1e-6)


def test_another_model_as_reference_is_a_second_model(shared: Path) -> None:
    config = config_of(
        shared, "second", {}, reference__model_args__model_name_or_path=str(shared / "untied")
    )
    pipeline = trained(config)
    other = load_policy(str(shared / "untied"), ModelArgs(), "cpu")
    assert torch.equal(reference_of(pipeline), log_probs(other))


def test_the_cache_distinguishes_adapters(shared: Path, tuned: Path) -> None:
    """What was computed for the base must not answer for the adapter, and the other way round."""

    def counts(name: str, args: dict[str, Any]) -> dict[str, Any]:
        config = config_of(
            shared, name, args, output_dir=str(shared / "cached"), reference__cache__enabled=True
        )
        trained(config)
        report: dict[str, Any] = json.loads((config.run_dir / "report.json").read_text())[
            "reference"
        ]
        return report

    assert counts("base", {"lora_rank": None})["pairs_from_cache"] == 0
    assert counts("off", {})["pairs_computed"] == 0
    existing = {"lora_rank": None, "adapter_name_or_path": str(tuned)}
    assert counts("first", existing)["pairs_from_cache"] == 0
    assert counts("second", existing)["pairs_computed"] == 0


def test_the_merged_model_and_the_checkpoint_are_evaluated_as_the_run_was(shared: Path) -> None:
    """`rather eval` and `rather score` load them without the policy that trained them."""
    config = config_of(shared, "evaluated", VARIANTS["pissa"])
    trained(config)
    pipeline = DPOPipeline(config)
    pipeline.initialize(model=str(config.run_dir / "model"))
    last = metrics(config)[-1]
    assert pipeline.evaluate()["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-5)
    assert pipeline.reference is not None
    assert not any("lora" in name for name, _ in policy_of(pipeline).named_parameters())
    saved = newest_good(config.run_dir)
    assert saved
    policy, base = weights_of(str(saved.path)), config.reference
    reference = Weights("base", base.model_path, base.tokenizer_path, base.model_args)
    (held_out,) = prepare(config).evals.values()
    sums = [
        score._forward(model, None, config, held_out)[1]["sum"] for model in (policy, reference)
    ]
    margins = (sums[0] - sums[1]) @ torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert float(-torch.nn.functional.logsigmoid(0.1 * margins).mean()) == pytest.approx(
        last["eval/loss"], rel=1e-5
    )


def test_roles_in_one_process_of_a_cluster_are_neighbours(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rather.cluster.host.end_with_others", lambda _driver: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    host, config = Host({}, 1, Process.this()), config_of(shared, "hosted", {})
    for role in ("actor_train", "reference"):
        make = partial(make_worker, role, config, RankInfo(device="cpu"))
        assert host.add(role, make) is None  # or a Failure
        assert host.call(role, "initialize", (3,)) is None
    assert host.workers["reference"].borrowed is host.workers["actor_train"]
    assert host.workers["reference"].trainer is host.workers["actor_train"].trainer


# --- killed and resumed ---


@pytest.mark.parametrize("variant", ["lora", "pissa"])
def test_killed_and_resumed_to_the_bit(shared: Path, variant: str) -> None:
    def config(name: str) -> DPOConfig:
        return config_of(shared, name, VARIANTS[variant], max_steps=5, save_steps=2, **KILLED)

    killed, whole = config(f"killed-{variant}"), config(f"whole-{variant}")
    assert in_child(train_killed, killed, "3") == -signal.SIGKILL
    assert in_child(train_killed, killed) == 0
    trained(whole)
    assert_equal(saved(killed, 5), saved(whole, 5))
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (killed.run_dir / file).read_bytes() == (whole.run_dir / file).read_bytes()


def test_an_adapter_on_other_base_weights_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, "run", {})
    trained(config)
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    save_file({name: weight * 1.01 for name, weight in weights.items()}, file, {"format": "pt"})
    longer = config_of(tmp_path, "run", {}, max_steps=STEPS + 1)
    with pytest.raises(CheckpointError) as refused:
        DPOPipeline(longer).run()
    for name in ("model", "reference"):
        assert re.search(
            rf"^  {name} weights: \w{{12}} then, \w{{12}} now$", str(refused.value), re.M
        )
    # A checkpoint of an older version does not know its base weights.
    found = open_checkpoint(config.run_dir / f"checkpoint-{STEPS}")
    identity = identity_of(longer, from_config(longer), prepare(longer))
    for name in ("model weights", "reference weights"):
        del found.state["identity"][name]
    with caplog.at_level("INFO"):
        refuse_other_run(found, identity, [])
    assert caplog.text.count("weights: unknown then or now, taken as unchanged") == 2


def test_a_checkpoint_of_another_adapter_is_refused(shared: Path) -> None:
    trained(config_of(shared, "changed", {}))
    with pytest.raises(CheckpointError, match=r"adapter.lora_rank: 4 then, 8 now"):
        DPOPipeline(config_of(shared, "changed", {"lora_rank": 8}, max_steps=9)).run()
