"""Runs of a mixture of experts: metrics, report, health, export in the files' own names, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rather.config.run_config import DPOConfig
from rather.config.schema import ActorModelArgs
from rather.errors import ConfigError
from rather.model.adapters import inject
from rather.pipeline.checks import check_step_zero
from rather.pipeline.pipeline import DPOPipeline
from rather.tracking.health import read_findings
from tests.cluster.test_torchrun import torchrun
from tests.model.test_experts import tiny
from tests.runs import steps
from tests.same.test_experts import make_experts
from tests.tiny import make_config, make_pairs


def experts_run(folder: Path, family: str = "qwen3_moe", **changes: Any) -> DPOConfig:
    """A run whose base is a tiny mixture of experts in bfloat16."""
    make_experts(folder / "base", family)
    for name, count in (("pairs", 40), ("held_out", 9)):
        make_pairs(folder / f"{name}.jsonl", count, seed=count)
    return make_config(folder, **changes)


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> DPOConfig:
    """A router that a large learning rate and no router loss push to few experts."""
    config = experts_run(
        tmp_path_factory.mktemp("wild"),
        max_steps=13,
        logging_steps=1,
        report_html=True,
        actor_train__training_args={"learning_rate": 0.05, "per_device_train_batch_size": 40,
                                    "num_train_epochs": 13},
        actor_train__model_args={"moe_aux_loss_coef": 0},
    )  # fmt: skip
    assert DPOPipeline(config).run() == 0
    return config


def test_metrics_report_and_finding(wild: DPOConfig) -> None:
    lines = steps(wild)
    assert lines[0]["router_loss"] == pytest.approx(2, rel=0.2)  # two experts per token
    assert sum(lines[0][f"experts/load/{i}"] for i in range(8)) == pytest.approx(8)
    report = (wild.run_dir / "report.html").read_text()
    assert all(name in report for name in ("Router loss", "Idle experts", "Load of the experts"))
    [one] = [each for each in read_findings(wild.run_dir) if each.name == "experts_collapse"]
    assert lines[-1]["router_loss"] > 1.5 * lines[0]["router_loss"]
    assert "experts got no token" in one.text


def test_the_export_has_the_names_of_the_source_and_the_rounded_weights(wild: DPOConfig) -> None:
    exported = wild.run_dir / "model" / "model.safetensors"
    with (
        safe_open(exported, "pt") as new,
        safe_open(f"{wild.pretrain}/model.safetensors", "pt") as old,
    ):
        assert set(new.keys()) == set(old.keys())
        assert "model.layers.1.mlp.experts.7.down_proj.weight" in new.keys()  # noqa: SIM118
    again = AutoModelForCausalLM.from_pretrained(wild.run_dir / "model")
    assert again.dtype == torch.bfloat16


# --- adapters ---


def test_adapters_leave_the_experts_as_they_are(tmp_path: Path) -> None:
    config = experts_run(
        tmp_path, "deepseek_v3", max_steps=2, actor_train__model_args={"lora_rank": 2}
    )
    assert DPOPipeline(config).run() == 0
    adapter = load_file(config.run_dir / "adapter" / "adapter_model.safetensors")
    assert adapter
    assert all("self_attn" in name for name in adapter)
    merged, source = (
        load_file(Path(folder) / "model.safetensors")
        for folder in (config.run_dir / "model", config.pretrain)
    )
    assert merged.keys() == source.keys()
    for name, weight in source.items():
        same = torch.equal(merged[name], weight) and merged[name].dtype == weight.dtype
        assert same or f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight" in adapter


@pytest.mark.parametrize(
    ("target", "text"),
    [("experts", "name stacked experts as experts.gate_up_proj and experts.down_proj"),
     ("gate_up_proj", "name stacked experts as experts.gate_up_proj and experts.down_proj"),
     ("gate_proj,up_proj,down_proj", "experts: name stacked experts as experts.gate_up_proj")],
)  # fmt: skip
def test_adapters_on_experts_are_refused(target: str, text: str) -> None:
    args = ActorModelArgs(lora_rank=2, lora_target=target)
    with pytest.raises(ConfigError, match=rf"lora_target: .*{text}"):
        inject(tiny("qwen3_moe"), args)


# --- choices that flip ---


def test_a_flipped_choice_passes_the_check_of_the_first_step(tmp_path: Path) -> None:
    config, lengths = make_config(tmp_path), torch.full((3, 2), 10.0)
    logps = torch.full((3, 2), -30.0, dtype=torch.float64)
    roles = (config.actor_train, config.reference)

    def check(off: float, *, routed: bool) -> None:
        check_step_zero(roles, "cpu", lengths, logps, logps + off, None, routed=routed)

    check(0.1, routed=True)  # 0.01 per token
    for off, routed in ((0.1, False), (1.0, True)):
        with pytest.raises(ConfigError, match="differ by"):
            check(off, routed=routed)


# --- several ranks ---


@pytest.mark.wide
def test_ranks_train_as_one_process_and_resume_on_another_ep(tmp_path: Path) -> None:
    """Two ranks with half of the experts each, then four, then one process, from one run folder."""
    options: dict[str, Any] = {
        "train_batch_size": 12, "save_steps": 2, "logging_steps": 1,
        "actor_train__training_args": {"learning_rate": 1e-5, "lr_scheduler_type": "constant",
                                       "num_train_epochs": 2},
        "actor_train__max_tokens_per_microbatch_in_train": 64,
        "actor_train__model_args": {"moe_aux_loss_coef": 0.1, "dtype": "fp32"},
    }  # fmt: skip
    alone = experts_run(tmp_path, exp_name="alone", max_steps=6, **options)
    assert DPOPipeline(alone).run() == 0
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, {"ep_size": 2}),
        (4, {"ep_size": 2, "strategy_name": "fsdp2_train"}),
    ]
    for last, (ranks, strategy) in zip((2, 4), layouts, strict=True):
        both = make_config(
            tmp_path, exp_name="both", max_steps=last, **options,
            actor_train__device_mapping=list(range(ranks)), actor_train__strategy_args=strategy,
        )  # fmt: skip
        done = torchrun(both, ranks)
        assert done.returncode == 0, done.stderr
    assert "dp 4 x ep 2" in done.stderr
    assert DPOPipeline(make_config(tmp_path, exp_name="both", max_steps=6, **options)).run() == 0
    for key in ("loss", "grad_norm", "router_loss"):
        one, other = ([line[key] for line in steps(each)] for each in (alone, both))
        assert other == pytest.approx(one, rel=1e-4), key
