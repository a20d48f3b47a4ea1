"""DPOTrainer from Python: models in memory, batches of either form, rows of text, loaders."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, TrainingArguments

from rather import DPOConfig, DPOPipeline, DPOTrainer
from rather.api.collate import (
    DataCollatorForPreferenceDataset,
    StatefulDistributedSampler,
    pairs_of,
)
from rather.config.schema import TrainingArgs
from rather.errors import ConfigError, DataError
from rather.model import check
from rather.train import rank_trainer
from tests.api.conftest import TOKENS, padded, rows
from tests.commands.conftest import rows_of
from tests.padded import random_pairs
from tests.tiny import CalledCuda, make_pairs, tiny_policy

LENGTH = 128


def stacked(batch: dict[str, torch.Tensor], *, shifted: bool = False) -> dict[str, torch.Tensor]:
    """The same batch with chosen rows first and rejected ones after them."""
    longest = max(batch[f"{side}_input_ids"].shape[1] for side in ("chosen", "rejected"))

    def both(name: str) -> torch.Tensor:
        sides = [batch[f"{side}_{name}"] for side in ("chosen", "rejected")]
        return torch.cat(
            [torch.nn.functional.pad(each, (0, longest - each.shape[1])) for each in sides]
        )

    ids, shown = both("input_ids"), both("attention_mask")
    labels = torch.where(both("loss_mask").bool(), ids, -100)
    if shifted:
        ids, shown, labels = ids[:, :-1], shown[:, :-1], labels[:, 1:]
    return {"input_ids": ids, "attention_mask": shown, "labels": labels}


def test_both_forms_of_a_batch_are_the_same_pairs(folder: Path) -> None:
    pairs = random_pairs(6, 60, seed=3)
    batch = padded(pairs, folder)
    forms = [batch, stacked(batch), stacked(batch, shifted=True)]
    forms.append({name.replace("rejected", "reject"): value for name, value in batch.items()})
    for form in forms:
        assert list(map(rows, pairs_of(form))) == list(map(rows, pairs))


def test_labels_that_are_not_tokens_are_refused(folder: Path) -> None:
    batch = stacked(padded(random_pairs(2, 60, seed=3), folder))
    batch["labels"] = torch.where(batch["labels"] >= 0, batch["labels"] + 1, -100)
    with pytest.raises(DataError, match="neither the tokens in place nor the next tokens"):
        pairs_of(batch)


def trainer_of(model: Any, /, own: type[DPOTrainer] = DPOTrainer, **changes: Any) -> DPOTrainer:
    config = DPOConfig(
        pref_loss="sigmoid", beta=0.1, label_smoothing=0.0, use_ref_model=True, max_steps=4
    )
    args = TrainingArgs(
        learning_rate=1e-3, lr_scheduler_type="constant", gradient_accumulation_steps=2
    )
    options = {"model": model, "train_config": config, "args": args}
    return own(**{"ref_model": copy.deepcopy(model), **options, **changes})


def test_seed_001_the_usage_example(model: Any, folder: Path) -> None:
    """Names, order and results are those of its usage section."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trainer = trainer_of(model, optimizer=optimizer, lr_scheduler=lr_scheduler)
    batches = [stacked(padded(random_pairs(4, 60, seed=seed), folder)) for seed in range(4)]
    steps = iter(batches)
    loss, metrics, skipped, grad_norm, num_zeros = trainer.training_step(
        models=[model], data_iterator=steps, seq_length=LENGTH
    )
    assert float(loss) == pytest.approx(math.log(2), abs=1e-6)
    assert [set(trainer.metrics_keys) <= set(each) for each in metrics] == [True, True]
    assert (skipped, isinstance(grad_norm, float), isinstance(num_zeros, int)) == (0, True, True)
    assert lr_scheduler.get_last_lr() == [5e-4]
    second, *_ = trainer.training_step(models=[model], data_iterator=steps, seq_length=LENGTH)
    assert float(second) != float(loss)


def test_rathers_adamw_and_torchs_take_the_same_steps(folder: Path) -> None:
    losses = []
    for given in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        optimizer = (
            torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0) if given else None
        )
        trainer = trainer_of(model, optimizer=optimizer)
        batches = iter([padded(random_pairs(4, 60, seed=seed), folder) for seed in range(8)])
        losses.append([float(trainer.training_step(model, batches, LENGTH)[0]) for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0][-1] != pytest.approx(math.log(2), abs=1e-3)


def test_reference_log_probs_are_the_padded_ones(model: Any, folder: Path) -> None:
    trainer = trainer_of(model)
    batches = [padded(random_pairs(3, 60, seed=seed), folder) for seed in range(2)]
    found = trainer.compute_reference_log_probs(
        trainer.reference.policy, batches, LENGTH, micro_batch_size=2
    )
    assert found is not None
    for batch, logps in zip(batches, found, strict=True):
        for side in ("chosen", "rejected"):
            ids, mask = batch[f"{side}_input_ids"], batch[f"{side}_loss_mask"][:, 1:]
            with torch.no_grad():
                logits = model(ids, attention_mask=batch[f"{side}_attention_mask"]).logits[:, :-1]
            tokens = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            expected = (tokens * mask).sum(1)
            assert torch.allclose(logps[f"reference_{side}_logps"].float(), expected, atol=1e-4)


def test_the_losses_are_those_of_the_papers(model: Any) -> None:
    trainer = trainer_of(model, train_config=DPOConfig(beta=0.3, label_smoothing=0.1))
    chosen, rejected, one, other = torch.randn(4, 5, dtype=torch.float64)
    losses, good, bad = trainer.dpo_loss(chosen, rejected, one, other)
    margin = 0.3 * ((chosen - one) - (rejected - other))
    sigmoid = torch.nn.functional.logsigmoid
    assert torch.allclose(losses, -0.9 * sigmoid(margin) - 0.1 * sigmoid(-margin))
    assert torch.allclose(good, 0.3 * (chosen - one))
    assert torch.allclose(bad, 0.3 * (rejected - other))
    lengths = torch.tensor([3, 4, 5, 6, 7, 7, 6, 5, 4, 3])
    chosen, rejected = -torch.rand(2, 5, dtype=torch.float64) * 9 - 1
    losses, good, _ = trainer.odds_ratio_loss(chosen, rejected, lengths)
    c, r = chosen / lengths[:5], rejected / lengths[5:]
    odds = (c - r) - (torch.log1p(-c.exp()) - torch.log1p(-r.exp()))
    assert torch.allclose(losses, -c - 0.3 * sigmoid(odds))
    assert torch.allclose(good, 0.3 * c)


def test_fit_takes_rows_datasets_and_loaders_alike(
    folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """The same pairs in the same order give the same losses, whatever they come in."""
    from datasets import Dataset  # a second, which children of test_resume.py need not spend

    text = rows_of(make_pairs(tmp_path / "p.jsonl", 12))
    losses = []
    for source in (text, Dataset.from_list(text)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        args = TrainingArgs(learning_rate=1e-3, per_device_train_batch_size=4)
        trainer = trainer_of(model, args=args, tokenizer=tokenizer)
        history = trainer.fit(
            source, eval_preference_dataloader=text[:3], log_dir=tmp_path / "logs"
        )
        losses.append([record["loss"] for record in history])
        assert "eval/loss" in history[-1]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert (tmp_path / "logs" / "metrics.jsonl").exists()
    generated = model.generate(torch.tensor([[1, 5]]), max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > 2, "the model still generates with its own attention"
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_each_step_is_logged_once_and_each_epoch_is_evaluated(model: Any, tmp_path: Path) -> None:
    data = TOKENS[:8]
    args = TrainingArgs(
        per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=9
    )
    config = DPOConfig(max_steps=3, track_with=None)
    trainer = trainer_of(model, args=args, train_config=config)
    history = trainer.fit(data, data[:2], log_dir=tmp_path)
    lines = rows_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if "eval/loss" in line] == [2, 3]
    assert ["eval/loss" in record for record in history] == [False, True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_adapter_is_trained_and_merged(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    settings = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, task_type="CAUSAL_LM")
    model = get_peft_model(model, settings)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    args = TrainingArgs(learning_rate=3e-2, lr_scheduler_type="constant", num_train_epochs=3)
    trainer = trainer_of(model, args=args, tokenizer=tokenizer)
    history = trainer.fit(TOKENS[:2])
    assert history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert history[-1]["loss"] < math.log(2) - 1e-3
    assert all(
        torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen
    )
    trainer.save_model(tmp_path / "merged", merge=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([[1, 5, 9, 11]])
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, model.eval()(ids).logits, atol=1e-5)
    with pytest.raises(ConfigError, match="give the PEFT model around it"):
        trainer_of(model.get_base_model())


def test_a_loader_of_batches(model: Any, tokenizer: Any) -> None:
    collate = DataCollatorForPreferenceDataset(tokenizer, max_length=LENGTH)
    loader = DataLoader(TOKENS[:10], batch_size=2, collate_fn=collate)
    assert len(trainer_of(model).fit(loader)) == 3, "five batches, two a step"


def test_arguments_of_transformers(model: Any, tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), learning_rate=2e-5, weight_decay=0.1, max_grad_norm=0.3
    )
    read = trainer_of(model, args=args).args
    assert (read.learning_rate, read.weight_decay, read.max_grad_norm) == (2e-5, 0.1, 0.3)


def test_the_numbers_of_a_step_are_of_its_pairs_however_they_are_batched(folder: Path) -> None:
    """Three pairs in micro-batches of two and one, or all in one."""
    told = []
    for size in (2, 3):
        args = TrainingArgs(
            learning_rate=1e-3, per_device_train_batch_size=size, gradient_accumulation_steps=2
        )
        trainer = trainer_of(AutoModelForCausalLM.from_pretrained(folder), args=args)
        told += trainer.fit(random_pairs(3, 60, seed=4))
    first, second = told
    assert {name: first[name] for name in DPOTrainer.metrics_keys} == pytest.approx(
        {name: second[name] for name in DPOTrainer.metrics_keys}, abs=1e-4
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"calculate_per_token_loss": True}, "one value per pair"),
        ({"ref_model": None}, "needs a reference"),
        ({"train_config": DPOConfig(pref_loss="orpo")}, "uses no reference"),
        ({"lr_scheduler": object()}, "belongs to an optimizer"),
        ({"model": None}, "give the model to train"),
    ],
)
def test_impossible_arguments_are_refused(model: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer_of(model, **changes)


def test_a_step_without_a_reference(model: Any, folder: Path) -> None:
    trainer = trainer_of(model, train_config=DPOConfig(pref_loss="orpo"), ref_model=None)
    batches = iter([padded(random_pairs(4, 60), folder)] * 2)
    loss, metrics, skipped, *_ = trainer.training_step(model, batches, LENGTH)
    assert (skipped, len(metrics)) == (0, 2)
    assert float(loss) > float(metrics[0]["sft_loss"]) > 0


def test_a_pipeline_lists_all_missing_keys() -> None:
    with pytest.raises(ConfigError) as refused:
        DPOPipeline(pipeline_config=DPOConfig())
    said = str(refused.value).splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "pretrain",
        "actor_train.data_args.file_name",
    ]


def test_wandb_needs_a_folder(model: Any) -> None:
    with pytest.raises(ConfigError, match="use_wandb: give log_dir too"):
        trainer_of(model).fit(iter([]), use_wandb=True)


def test_a_sequence_past_seq_length_is_refused(model: Any, folder: Path) -> None:
    with pytest.raises(DataError, match="longer than seq_length, 2"):
        trainer_of(model).training_step(
            model, iter([padded(random_pairs(2, 60, seed=1), folder)]), 2
        )


def test_the_sampler_resumes_inside_an_epoch() -> None:
    whole = StatefulDistributedSampler(range(10), num_replicas=2, rank=1, seed=3)
    whole.set_epoch(1)
    order = list(whole)
    assert len(order) == 5
    begun = StatefulDistributedSampler(range(10), num_replicas=2, rank=1, seed=3)
    begun.load_state_dict({"epoch": 1, "start_index": 2, "seed": 3})
    assert list(begun) == order[2:]
    begun.set_epoch(2)
    assert len(list(begun)) == 5, "the next epoch begins at its start"
    every = [StatefulDistributedSampler(range(10), 2, rank, seed=3) for rank in range(2)]
    assert sorted(i for sampler in every for i in sampler) == list(range(10))


def test_the_position_of_the_sampler_moves() -> None:
    whole = list(StatefulDistributedSampler(range(10), seed=3))
    sampler = StatefulDistributedSampler(range(10), seed=3)
    taken = [index for index, _ in zip(sampler, range(4), strict=False)]
    assert taken == whole[:4]
    state = sampler.state_dict()
    assert state == {"epoch": 0, "start_index": 5, "seed": 3}, "zip has asked for one more"
    again = StatefulDistributedSampler(range(10), seed=3)
    again.load_state_dict(state)
    assert list(again) == whole[5:]
    assert again.state_dict()["start_index"] == 10, "the end of the epoch"
    assert list(again) == whole, "the next pass begins at the start"
    with pytest.raises(ValueError, match="start_index must be from 0 to 10"):
        again.set_start_index(11)


def test_pairs_beyond_the_positions_are_refused() -> None:
    """With dynamic scaling the log-probs of a pair would depend on its neighbours."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_policy(rope_parameters=rope, max_position_embeddings=64).causal_lm
    trainer = DPOTrainer(model, DPOConfig(max_steps=9), copy.deepcopy(model))
    fits, long = (check.random_pairs(61, [(4, n, 6)]) for n in (60, 61))
    trainer.training_step(model, iter([fits]), LENGTH)
    for compute in (
        lambda: trainer.training_step(model, iter([long]), LENGTH),
        lambda: trainer.compute_reference_log_probs(
            trainer.ref_worker.causal_lm, [long], LENGTH, 1
        ),
        lambda: trainer.evaluate([long]),
    ):
        with pytest.raises(ConfigError, match=r"65 exceeds the 64 positions .*'llama'"):
            compute()


def swap(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Replace weights as libraries for moving averages do."""
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]


def assign(model: Any, weights: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(weights, assign=True)


@pytest.mark.defect("R3")
@pytest.mark.parametrize("replace_weights", [swap, assign])
def test_weights_that_the_caller_replaces_are_used_in_every_pass(
    replace_weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, too, where linear layers of other runs keep joined copies."""
    monkeypatch.setattr(rank_trainer, "device_of", CalledCuda)
    model, other = (tiny_policy(dtype=torch.bfloat16).causal_lm for _ in range(2))
    config = DPOConfig(pref_loss="orpo")
    trainer = DPOTrainer(model, config)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    replace_weights(model, {name: weight.clone() for name, weight in other.state_dict().items()})
    with torch.no_grad():
        layer, x = model.model.layers[0].self_attn, torch.randn(1, 5, 32).bfloat16()
        found = [layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)]
        own = other.model.layers[0].self_attn
        expected = [own.q_proj(x), own.k_proj(x), own.v_proj(x)]
    assert all(map(torch.equal, found, expected))
    assert trainer.policy.policy.causal_lm is model
