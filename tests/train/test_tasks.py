"""Tasks other than preference: single answers with labels, and SFT."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from rather.checkpoint.checkpoint import newest_good
from rather.commands.chat import Speaker
from rather.commands.export import export
from rather.commands.plan import plan
from rather.commands.score import score
from rather.config.load import config_from_dict, dump_yaml
from rather.config.schema import ModelArgs
from rather.config.show import public_values
from rather.data.formats import ANSWERS
from rather.data.pairs import stored_numbers
from rather.data.prepare import prepare
from rather.data.save import save
from rather.errors import ConfigError, DataError
from rather.losses.objective import from_config
from rather.parallel.load import load_policy
from rather.pipeline.pipeline import DPOPipeline
from rather.tools.report.pairs import read_ledger
from rather.tools.sweep import choose_metric
from tests.commands.conftest import rather
from tests.runs import trained
from tests.tiny import make_config, make_model, metrics, rows_of, write_rows

ROLES_WITH_DATA = ("actor_train", "validation")
pytestmark = pytest.mark.usefixtures("no_self_check")


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_rows(file, rows))


# --- partners ---


def test_partners_are_a_permutation_by_the_seed_and_never_of_the_same_prompt(
    tmp_path: Path,
) -> None:
    rows = [
        {"prompt": f"w{i // 3}", "completion": f" w{i} w{i + 1}", "label": i % 2 == 0}
        for i in range(30)
    ]
    file = write(tmp_path / "thumbs.jsonl", rows)
    config = make_config(tmp_path, task="unpaired", actor_train__data_args__file_name=file)
    data = prepare(config).train
    one, again, other = (data.with_partners(seed, 64) for seed in (1, 1, 2))
    assert one.partners
    assert again.partners
    assert other.partners
    partners = one.partners[0]
    assert sorted(partners) == list(range(30))
    assert np.array_equal(partners, again.partners[0])
    assert not np.array_equal(partners, other.partners[0])
    prompts = data.column("prompt_hash")
    assert (prompts != prompts[partners]).all()
    for row, pair in enumerate(one.take(range(30))):
        [answer] = data.take([int(partners[row])])
        assert np.array_equal(pair.partner, answer.chosen)
        start = len(pair.prompt)
        assert pair.partner_scored == ((start, start + len(answer.chosen)),)
    [short] = data.with_partners(1, len(pair.prompt) + 2).take([29])  # the limit cuts the partner
    assert short.partner is not None
    assert len(short.partner) == 2
    assert len(short.rejected) == 0
    assert short.partner_scored == ((start, start + 2),)


def test_labels_and_scores_are_in_the_columns_of_earlier_files(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"w{i}", "completion": f" w{i}", "label": i == 1, "score": i / 4}
        for i in range(3)
    ]
    file = write(tmp_path / "answers.jsonl", rows)
    for task, loss, name, column, values in (
        ("unpaired", "kto", "label", "soft_label", [0.0, 1.0, 0.0]),
        ("reward", "regression", "score", "margin", [0.0, 0.25, 0.5]),
    ):
        files = dict.fromkeys((f"{role}__data_args__file_name" for role in ROLES_WITH_DATA), file)
        data = prepare(make_config(tmp_path, task=task, pref_loss=loss, **files)).train
        assert data.file.table.column(column).to_pylist() == values
        assert data.column(name).tolist() == values
        for pair, value in zip(data.take(range(3)), values, strict=True):
            assert getattr(pair, name) == value
            assert math.isnan(getattr(pair, column))
            assert stored_numbers(pair)[column] == value


def test_one_prompt_has_no_partners(tmp_path: Path) -> None:
    rows = [{"prompt": "w1", "completion": f" w{i}", "label": i % 2} for i in range(8)]
    file = write(tmp_path / "thumbs.jsonl", rows)
    config = make_config(tmp_path, task="unpaired", actor_train__data_args__file_name=file)
    with pytest.raises(DataError, match="8 of 8 answers belong to one prompt; take bco"):
        DPOPipeline(config)


# --- a run ---


def test_reference_log_probs_of_partners_come_from_the_cache(shared: Path) -> None:
    for name in ("partners", "partners-again"):
        config = trained(shared, name, task="unpaired", max_steps=3)
    report = json.loads((config.run_dir / "report.json").read_text())
    assert report["reference"]["pairs_computed"] == 0


def test_labels_of_one_kind_are_a_warning_and_a_threshold_of_zero_is_one(tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i}", "completion": " w1", "label": i % 2} for i in range(10)]
    file = write(tmp_path / "thumbs.jsonl", rows)
    for threshold, warnings in ((None, 0), (0, 1)):  # 0 and 1 are both desirable
        config = make_config(
            tmp_path, task="unpaired", actor_train__data_args__file_name=file,
            actor_train__data_args__label_threshold=threshold,
        )  # fmt: skip
        found = [text for text in prepare(config).report["warnings"] if "desirable" in text]
        assert len(found) == warnings
    assert "10 answers are desirable and 0 undesirable" in found[0]
    assert "add answers of the other kind, or check the labels" in found[0]


def test_labels_and_weights_change_what_is_trained(shared: Path) -> None:
    found = []
    for name, changes in {
        "plain": {},
        "weights": {"desirable_weight": 3.0, "undesirable_weight": 0.5},
        "bco": {"pref_loss": "bco"},
        "apo": {"pref_loss": "apo_zero_unpaired"},
    }.items():
        config = trained(shared, f"labels-{name}", task="unpaired", **changes)
        last = metrics(config)[-1]
        assert last["eval/rewards/margins"] > 0
        assert last["eval/rewards/accuracies"] > 0.5
        assert "eval/rewards/length_correlation" not in last
        assert "eval/calibrated_loss" not in last  # needs pairs
        assert last["eval/drift"] > metrics(config)[0]["eval/drift"] == 0
        assert last["eval/pairs"] == 18
        found.append(last["eval/rewards/margins"])
    assert len({round(margin, 9) for margin in found}) == 4


def test_drift_limit_protects_answers_with_labels(shared: Path) -> None:
    for limit, best_step in ((1e-9, 0), (1000.0, 3)):
        config = make_config(
            shared, exp_name=f"limit-{limit}", task="unpaired", max_steps=3, save_best=True,
            metric_for_best_model="eval/rewards/margins", drift_limit=limit,
        )  # fmt: skip
        pipeline = DPOPipeline(config)
        assert pipeline.run() == 0
        assert pipeline.progress.best_step == best_step


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "unpaired", "pref_loss": "kto"},
        pytest.param(
            {"task": "unpaired", "pref_loss": "bco"}, marks=pytest.mark.defect("R4", "E7"), id="bco"
        ),
    ],
)
def test_eval_prints_what_training_logged_last(
    shared: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = make_config(shared, exp_name=f"eval-{changes['pref_loss']}", max_steps=3, **changes)
    pipeline = DPOPipeline(config)
    assert pipeline.run() == 0
    logged = {name: value for name, value in metrics(config)[-1].items() if "eval/" in name}
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    printed = rather("eval", tmp_path / "run.yaml")
    assert printed.exit_code == 0, printed.output
    assert json.loads(printed.stdout) == pytest.approx(logged, rel=1e-6)
    if changes["pref_loss"] == "bco":
        assert logged["eval/baseline"] == pytest.approx(pipeline.progress.running[1])
        assert logged["eval/baseline"] != 0


@pytest.mark.defect("R4")
def test_eval_of_other_weights_compares_with_their_own_mean(
    shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(tmp_path / "foreign", seed=3)
    config = make_config(shared, exp_name="foreign", max_steps=1, task="unpaired", pref_loss="bco")
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    printed = rather("eval", tmp_path / "run.yaml", "--model", tmp_path / "foreign")
    assert printed.exit_code == 0, printed.output
    found = json.loads(printed.stdout)
    labels = {"chosen": 9, "rejected": 9}  # of the held-out answers
    mean = sum(count * found[f"eval/rewards/{side}"] for side, count in labels.items()) / 18
    assert found["eval/baseline"] == pytest.approx(mean)
    assert found["eval/baseline"] != 0
    assert "rewards are compared with their mean over the held-out answers" in caplog.text


def test_plan_data_report_and_card_speak_of_answers(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"task": "unpaired", "max_steps": 2, "logging_steps": 1, "report_html": True}
    config = trained(shared, "answers", **changes)
    assert " answers/s" in capsys.readouterr().out
    for name in ("report.html", "model/README.md"):
        text = (config.run_dir / name).read_text()
        assert "nswers" in text
        assert not re.search(
            r"\bpairs\b(?!\.jsonl)", re.sub(r"(?s)<(script|style).*?</\1>", "", text)
        )
    shown = json.loads((config.run_dir / "data_report.json").read_text())["shown"]
    assert {name for one in shown for name in one["sides"]} == {"desirable", "undesirable"}
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(config))
    plan(file, [], None, None, as_json=False)
    text = capsys.readouterr().out
    assert "8 answers per step" in text
    assert "pairs" not in text


def test_a_loss_of_another_task_is_refused(tmp_path: Path) -> None:
    for task, loss in (("preference", "kto"), ("unpaired", "sigmoid"), ("sft", "kto")):
        with pytest.raises(ConfigError, match=f"loss '{loss}' is for task"):
            from_config(make_config(tmp_path, task=task, pref_loss=loss))
    with pytest.raises(ConfigError, match="takes one loss"):
        from_config(make_config(tmp_path, task="unpaired", pref_loss=["kto", "bco"]))


# --- SFT ---


def test_sft_has_the_loss_of_transformers(tmp_path: Path) -> None:
    """A padded batch with labels on the answers alone; packed, in micro-batches of any size."""
    rows = [
        {"prompt": "w1 w2", "completion": " w3 w4 w5 w6"},
        {"prompt": "w7", "completion": " w8"},
        {"prompt": "w1 w2", "completion": " w9 w10 w11"},
    ]
    file = write(tmp_path / "answers.jsonl", rows)
    config = make_config(
        tmp_path, task="sft", max_steps=1, validation__data_args__file_name=file,
        actor_train__data_args__file_name=file, actor_train__max_tokens_per_microbatch_in_train=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(config.pretrain)
    tokenizer: Any = AutoTokenizer.from_pretrained(config.pretrain)
    sequences, starts = [], []
    for row in rows:
        starts.append(len(tokenizer(row["prompt"]).input_ids))
        sequences.append([*tokenizer(row["prompt"] + row["completion"]).input_ids, 2])
    size = max(map(len, sequences))
    ids = torch.tensor([ids + [0] * (size - len(ids)) for ids in sequences])
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for i, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        labels[i, start : len(sequence)] = ids[i, start : len(sequence)]
        mask[i, : len(sequence)] = 1
    out = model(input_ids=ids, attention_mask=mask, labels=labels)
    out.loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert DPOPipeline(config).run() == 0
    before, trained, _ = metrics(config)
    assert before["eval/loss"] == pytest.approx(float(out.loss), rel=1e-6)
    assert trained["loss"] == pytest.approx(float(out.loss), rel=1e-6)
    assert trained["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert not [name for name in trained if name.startswith("rewards/")]


# --- reward models ---


def padded_scores(folder: Path, texts: list[list[str]]) -> torch.Tensor:
    """Scores of an exported model, by transformers alone, in one padded batch."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer([text for pair in texts for text in pair], padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits.view(-1, 2).double()


@pytest.mark.parametrize("changes", [{}, {"actor_train__model_args__lora_rank": 4}])
def test_an_exported_reward_model_gives_the_scores_of_the_run(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The end token of the tokenizer is its padding token; texts differ in length."""
    make_config(tmp_path)
    file = tmp_path / "base" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": "</s>"}))
    config = trained(tmp_path, "run", task="reward", **changes)
    last = metrics(config)[-1]
    assert "eval/logps/chosen" not in last
    rows = rows_of(tmp_path / "held_out.jsonl")
    texts = [[row["prompt"] + row[side] + " </s>" for side in ANSWERS] for row in rows]
    folder = config.run_dir / "model"
    found = padded_scores(folder, texts)
    assert last["eval/rewards/accuracies"] == (found[:, 0] > found[:, 1]).double().mean()
    for i, side in enumerate(ANSWERS):
        assert last[f"eval/rewards/{side}"] == pytest.approx(float(found[:, i].mean()), abs=1e-5)
    out = tmp_path / "scores.jsonl"
    keys = [f"output_dir={tmp_path}/scored", "sequence_length=64"]
    numbers = score(str(folder), tmp_path / "held_out.jsonl", keys, None, [], out)
    assert numbers["rewards/accuracies"] == last["eval/rewards/accuracies"]
    scored = torch.tensor([[line[f"rewards/{side}"] for side in ANSWERS] for line in rows_of(out)])
    assert torch.allclose(scored.double(), found, atol=1e-5)
    last_one = newest_good(config.run_dir)
    assert last_one
    sources = [last_one.path, *config.run_dir.glob("adapter")]
    assert len(sources) == 1 + len(changes)
    for i, source in enumerate(sources):
        assert export(str(source), tmp_path / f"copy-{i}").startswith("scores before and after")
        assert torch.allclose(padded_scores(tmp_path / f"copy-{i}", texts), found, atol=1e-5)
        with pytest.raises(ConfigError, match="is a reward model, which writes no text"):
            Speaker.load(str(source))
    with pytest.raises(ConfigError, match="reward model, which writes no text; set task: reward"):
        load_policy(str(folder), ModelArgs(), "cpu")


def test_a_reward_model_learns_scores_and_trains_on(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"w{i} w{i + 1}", "completion": " w5" * (i % 5 + 1), "score": float(i % 5)}
        for i in range(40)
    ]
    file = write(tmp_path / "scored.jsonl", rows)
    changes = {"actor_train__data_args__file_name": file, "validation__data_args__file_name": file}
    changes |= {"task": "reward", "pref_loss": "regression"}
    epochs = {"actor_train__training_args__num_train_epochs": 4.0}
    config = trained(tmp_path, "first", **epochs, **changes)
    before, *_, after = (line for line in metrics(config) if "eval/scores/error" in line)
    assert after["eval/scores/error"] < 0.7 * before["eval/scores/error"]
    model = str(config.run_dir / "model")
    again = trained(tmp_path, "again", max_steps=1, pretrain=model, **changes)
    assert metrics(again)[0]["eval/loss"] == pytest.approx(after["eval/loss"], rel=1e-5)


def test_what_a_task_cannot_have_is_refused(tmp_path: Path) -> None:
    for changes, text in (
        ({"task": "reward", "eval_prompts": {"prompts": ["w1"]}}, "writes no answers"),
        ({"task": "reward", "actor_train__model_args__quantization": "4bit",
          "actor_train__model_args__lora_rank": 2}, "whole weights"),
        ({"task": "unpaired", "actor_train__data_args__corrections": "c.jsonl"}, "belongs to pairs"),
        ({"task": "sft", "pair_ledger": True}, "pair_ledger: belongs to task: preference"),
        ({"actor_train__data_args__label_threshold": 0}, "belongs to task: unpaired"),
        ({"task": "bco"}, "losses such as kto and bco .task: unpaired. are named by pref_loss"),
        ({"task": "dpo"}, "did you mean 'preference'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            make_config(tmp_path, **changes)
    config = make_config(tmp_path, task="sft")
    assert not config_from_dict(public_values(config)).pair_ledger  # as a run folder has it
    assert choose_metric(config, None) == "eval/loss"
    assert choose_metric(make_config(tmp_path, task="reward"), None) == "eval/rewards/accuracies"
    with pytest.raises(ConfigError, match="Runs with task: preference write it"):
        read_ledger(config.run_dir)
    with pytest.raises(ConfigError, match="only pairs are saved as tokens"):
        save(prepare(config), tmp_path / "saved")
