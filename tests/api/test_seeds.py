"""What the documents of other trainers promise (ROLL's pipeline and trainer, ColossalChat's): names,
import paths, and the methods to override."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather import DPOConfig, DPOTrainer
from rather.api.collate import DataCollatorForPreferenceDataset, StatefulDistributedSampler
from rather.cluster.worker import ActorWorker, RankInfo, make_worker
from rather.coati import NAMES
from rather.coati import DPOTrainer as CoatiTrainer
from rather.config.load import config_from_dict, load
from rather.errors import ConfigError, DataError
from tests.api import test_coati
from tests.api.conftest import padded
from tests.api.test_trainer import LENGTH, trainer_of
from tests.commands.conftest import rather
from tests.config.conftest import smallest
from tests.house.source import ROOT
from tests.padded import random_pairs
from tests.tiny import make_pairs

TABLE = re.compile(r"^\| `((?:roll|mcore_adapter|coati|colossalai)\.[\w.]+)` \| `([\w.]+)`", re.M)


class Same(DPOTrainer):
    """Overrides the loss without changing it."""

    seen: list[tuple[int, ...]]

    def _post_compute_loss(self, labels: Any, loss_mask: Any, *others: Any) -> Any:
        logits = others[-1]
        assert labels.shape == loss_mask.shape == logits.shape[:2]
        self.seen = [*getattr(self, "seen", []), tuple(logits.shape)]
        loss, metrics = super()._post_compute_loss(labels, loss_mask, *others)
        return loss, {**metrics, "logits/mean": logits.detach().mean()}


class FromLogits(DPOTrainer):
    """A loss with the signature of the seed, computed from the logits alone."""

    def _post_compute_loss(
        self, labels: Any, loss_mask: Any, ref_chosen_logps: Any, ref_rejected_logps: Any,
        logits: Any,
    ) -> Any:  # fmt: skip
        tokens = logits.log_softmax(-1).gather(2, labels[..., None])[..., 0] * loss_mask
        chosen, rejected = tokens.sum(-1).split(len(labels) // 2)
        ratios = (chosen - ref_chosen_logps) - (rejected - ref_rejected_logps)
        return -logsigmoid(0.1 * ratios).mean(), {"ratios": ratios.mean()}


class Doubled(DPOTrainer):
    def dpo_loss(self, *logps: Any) -> Any:
        losses, *rewards = super().dpo_loss(*logps)
        return 2 * losses, *rewards


def steps(own: type[DPOTrainer], folder: Path, count: int = 3) -> tuple[Any, list[float], Any]:
    """Return the trainer, its losses and the metrics of its last step."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = trainer_of(model, own=own)
    batches = iter([padded(random_pairs(4, 60, seed=seed), folder) for seed in range(2 * count)])
    results = [trainer.training_step(model, batches, LENGTH) for _ in range(count)]
    return trainer, [float(result[0]) for result in results], results[-1][1]


def test_seed_001_post_compute_loss_is_the_place_to_override(folder: Path) -> None:
    _, expected, plain = steps(DPOTrainer, folder)
    trainer, losses, metrics = steps(Same, folder)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] != pytest.approx(losses[0], abs=1e-4)
    assert len(trainer.seen) == 6, "each micro-batch"
    assert all(shape[0] == 8 and shape[2] == trainer.policy.policy.vocabulary_size
               for shape in trainer.seen)  # fmt: skip
    for name in DPOTrainer.metrics_keys:
        assert [each[name] for each in metrics] == pytest.approx(
            [each[name] for each in plain], abs=1e-4
        )
    assert all("logits/mean" in each for each in metrics)
    _, losses, metrics = steps(FromLogits, folder)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert all("ratios" in each for each in metrics)


def test_seed_001_dpo_loss_is_called_where_it_is_overridden(folder: Path) -> None:
    _, expected, _ = steps(DPOTrainer, folder, count=1)
    _, losses, _ = steps(Doubled, folder, count=1)
    assert losses == pytest.approx([2 * loss for loss in expected], abs=1e-5)
    held_out = [padded(random_pairs(3, 60, seed=9), folder)]
    plain, doubled = (
        trainer_of(AutoModelForCausalLM.from_pretrained(folder), own=own)
        for own in (DPOTrainer, Doubled)
    )
    expected_metrics, found = plain.evaluate(held_out), doubled.evaluate(held_out)
    assert found["loss"] == pytest.approx(2 * expected_metrics["loss"], abs=1e-5)
    assert found["logps/chosen"] == pytest.approx(expected_metrics["logps/chosen"], abs=1e-4)


def test_seed_001_an_override_without_effect_is_refused(model: Any, folder: Path) -> None:
    for config in (DPOConfig(pref_loss="ipo"), DPOConfig(rpo_alpha=0.5)):
        with pytest.raises(ConfigError, match="would not call dpo_loss"):
            trainer_of(model, own=Doubled, train_config=config)
    weighted = padded(random_pairs(2, 60, seed=1), folder) | {"weight": torch.tensor([1.0, 2.0])}
    with pytest.raises(DataError, match="gets no weights"):
        trainer_of(model, own=Same).training_step(model, iter([weighted, weighted]), LENGTH)


def test_seed_002_the_first_yaml_of_roll_loads(tmp_path: Path) -> None:
    """It has a group of environments, and neither beta nor ipo."""
    older = (ROOT / "tests" / "config" / "roll" / "older" / "dpo_config.yaml").read_text()
    first = older.replace("defaults:\n", "defaults:\n  - ../config/envs@_here_\n")
    first = re.sub(r"(?m)^(ipo|beta|label_smoothing):.*\n", "", first)
    (tmp_path / "dpo_config.yaml").write_text(first)
    config = load(tmp_path / "dpo_config.yaml")
    assert (config.global_batch(), config.loss_names) == (64, ["sigmoid"])


def test_seed_000_the_worker_class_of_roll_is_rathers() -> None:
    name = "roll.pipeline.dpo.actor_worker.ActorWorker"
    config = config_from_dict(smallest(f"reference.worker_cls={name}"))
    assert config.reference.worker_cls is None, "its log-probs are cached as usual"
    assert type(make_worker("actor_train", config, RankInfo(), name)) is ActorWorker


def test_seeds_000_to_004_the_table_of_imports_is_true() -> None:
    pairs = TABLE.findall((ROOT / "docs" / "api.md").read_text())
    names = {theirs for theirs, _ in pairs}
    assert {
        "roll.pipeline.dpo.dpo_pipeline.DPOPipeline",
        "roll.distributed.executor.cluster.Cluster",
        "mcore_adapter.trainer.dpo_trainer.DPOTrainer",
        "mcore_adapter.trainer.dpo_config.DPOConfig",
        "coati.trainer.DPOTrainer",
    } <= names
    for _, ours in pairs:
        module, _, name = ours.rpartition(".")
        assert getattr(importlib.import_module(module), name)


SIGNATURES = {
    "__init__": "model train_config ref_model args",
    "odds_ratio_loss": "chosen_logps rejected_logps response_lens",
    "dpo_loss": "policy_chosen_logps policy_rejected_logps reference_chosen_logps "
    "reference_rejected_logps",
    "_post_compute_loss": "labels loss_mask ref_chosen_logps ref_rejected_logps logits",
    "compute_reference_log_probs": "models data_list seq_length micro_batch_size",
    "training_step": "models data_iterator seq_length",
}
COATI = {
    "__init__": "actor ref_model booster actor_optim plugin actor_lr_scheduler tokenizer max_epochs "
    "beta gamma length_normalization apply_loss_mask accumulation_steps start_epoch save_interval "
    "save_dir coordinator",
    "fit": "train_preference_dataloader eval_preference_dataloader log_dir use_wandb",
}


@pytest.mark.parametrize(
    ("own", "signatures"), [(DPOTrainer, SIGNATURES), (CoatiTrainer, COATI)], ids=["001", "003"]
)
def test_seeds_001_and_003_the_signatures(own: type, signatures: dict[str, str]) -> None:
    for name, expected in signatures.items():
        _, *given = inspect.signature(getattr(own, name)).parameters.values()
        by_place = [each.name for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
        assert by_place == expected.split(), name


def test_seed_001_the_eight_metrics() -> None:
    assert DPOTrainer.metrics_keys == [
        "loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies",
        "rewards/margins", "logps/chosen", "logps/rejected", "sft_loss",
    ]  # fmt: skip


def test_seed_004_the_workflow(folder: Path, tmp_path: Path) -> None:
    """Its seven steps: data in Arrow files, models, boosters, loaders, training, checkpoints, model."""
    make_pairs(tmp_path / "pairs.jsonl", 12)
    config = tmp_path / "dpo.yaml"
    config.write_text(
        f"pretrain: {folder}\nsequence_length: 64\noutput_dir: {tmp_path}/output\n"
        f"actor_train: {{data_args: {{file_name: {tmp_path}/pairs.jsonl}}}}\n"
    )
    assert rather("data", config, "--save", tmp_path / "arrow").exit_code == 0
    [file] = (tmp_path / "arrow").glob("**/*.arrow")
    with pa.memory_map(str(file)) as source:
        rows: Any = pa.ipc.open_stream(source).read_all().to_pylist()
    sides = {
        f"{side}_{part}" for side in ("chosen", "rejected") for part in ("input_ids", "loss_mask")
    }
    assert sides <= set(rows[0])

    actor = AutoModelForCausalLM.from_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    adapted: Any = get_peft_model(actor, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    tokenizer.pad_token = tokenizer.eos_token
    collate = DataCollatorForPreferenceDataset(tokenizer=tokenizer, max_length=64)
    train, held_out = (
        DataLoader(part, batch_size=2, sampler=StatefulDistributedSampler(part), collate_fn=collate)
        for part in (rows[:8], rows[8:])
    )
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = test_coati.trainer_of(
        folder, adapted, ref_model=reference, actor_optim=optimizer, actor_lr_scheduler=schedule,
        tokenizer=tokenizer, save_interval=2, save_dir=tmp_path / "saved",
    )  # fmt: skip
    history = trainer.fit(train, held_out, log_dir=tmp_path / "logs")
    assert history[-1]["loss"] < history[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert (tmp_path / "saved" / "eval_result_epoch1.txt").is_file()
    assert list((tmp_path / "saved").glob("checkpoint-*"))
    [*_, last] = sorted((tmp_path / "saved").glob("epoch-*"))
    merged = AutoModelForCausalLM.from_pretrained(last / "modeling")
    pairs = zip(merged.parameters(), reference.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs), "adapters are merged into the base"


def test_seed_003_its_metric_names_are_in_the_docs() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    rows = {"chosen_reward": "chosen_rewards", "rejected_reward": "rejected_rewards",
            "reward_accuracy": "accuracy"}  # fmt: skip
    for theirs, ours in rows.items():
        assert ours in NAMES.values()
        assert f"`{theirs}`" in page
        assert ours in page
