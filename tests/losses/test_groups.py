"""Losses over all scored answers of a prompt: formulas in NumPy, written pair by pair and rank by
rank; and nothing depends on micro-batches, ranks or the order of rows."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rather.data.batch import GroupLogps, PairFacts, PairLogps, TokenPair
from rather.data.pack import pack
from rather.data.prepare import BadRows, prepare
from rather.errors import ConfigError
from rather.losses.losses import LOSSES
from rather.losses.metrics import order_agreement
from rather.losses.objective import configure, from_config
from rather.pipeline.pipeline import DPOPipeline
from rather.train.rank_trainer import RankTrainer
from tests.losses.test_batching import VOCAB, Outcome, Stepper, assert_same, small
from tests.padded import random_pairs
from tests.tiny import make_config, metrics

GROUPS = [5, 3, 5, 5, 1, 3, 5, 3, 8]  # of each answer: sizes 4, 3, 1 and 1
SCORES = np.array([2.0, 0.5, -1.0, 2.0, 3.0, 0.25, 0.0, 4.0, 1.0])


def answers() -> tuple[PairLogps, dict[int, list[int]]]:
    draw = np.random.default_rng(5)
    count = len(GROUPS)
    policy, reference = -draw.uniform(2, 9, (2, count, 2))
    policy[1] = reference[1] + [4.0, 0.0]  # beyond the clip
    length = draw.integers(1, 9, (count, 2)).astype(float)
    extra = {"group": torch.tensor(GROUPS).double(), "score": torch.tensor(SCORES)}
    rows = {group: [i for i, g in enumerate(GROUPS) if g == group] for group in set(GROUPS)}
    return PairLogps(*map(torch.tensor, (policy, reference, length)), extra), rows


def reward_rpo(a: Any, s: Any, length: Any, beta: float, reward_scale: float) -> float:
    pairs = list(itertools.combinations(range(len(a)), 2))
    errors = [(beta * (a[i] - a[j]) - reward_scale * (s[i] - s[j])) ** 2 for i, j in pairs]
    return float(np.mean(errors)) if pairs else 0.0


def listwise(a: Any, s: Any, length: Any, beta: float) -> float:
    total = 0.0
    for i in range(len(a)):
        worse = [math.exp(beta * a[j]) for j in range(len(a)) if s[j] < s[i]]
        mine = math.exp(beta * a[i])
        total -= math.log(mine / (mine + sum(worse)))
    return total


def advantage(a: Any, s: Any, length: Any, clip_range: float, length_normalization: bool) -> float:
    if s.std() == 0:
        return 0.0
    gained = []
    for i in range(len(a)):
        worth = (s[i] - s.mean()) / s.std()
        ratio = math.exp(a[i] / length[i] if length_normalization else a[i])
        near = min(max(ratio, 1 - clip_range), 1 + clip_range)
        gained.append(min(ratio * worth, near * worth))
    return -float(np.mean(gained))


FORMULAS = {f.__name__: f for f in (reward_rpo, listwise, advantage)}
NUMBERS: list[tuple[str, dict[str, Any]]] = [
    ("reward_rpo", {"beta": 0.1, "reward_scale": 1.0}),
    ("reward_rpo", {"beta": 0.6, "reward_scale": 0.3}),
    ("listwise", {"beta": 0.1}),
    ("listwise", {"beta": 0.9}),
    ("advantage", {"clip_range": 0.2, "length_normalization": False}),
    ("advantage", {"clip_range": 0.05, "length_normalization": True}),
]


@pytest.mark.parametrize(("name", "numbers"), NUMBERS)
def test_equals_its_formula_in_float64(name: str, numbers: dict[str, Any]) -> None:
    x, rows = answers()
    assert x.reference is not None
    got = configure([name], numbers)(x)
    ratios = (x.policy - x.reference)[:, 0].numpy()
    for members in rows.values():
        length = x.length[members, 0].numpy()
        wanted = FORMULAS[name](ratios[members], SCORES[members], length, **numbers)
        np.testing.assert_allclose(got[members], wanted, rtol=1e-12, atol=1e-15)
    assert LOSSES[name].numbers.keys() == numbers.keys()


def test_without_ties_listwise_is_plackett_luce() -> None:
    x, rows = answers()
    assert x.reference is not None
    members = rows[3]
    order = sorted(members, key=lambda i: -SCORES[i])
    rewards = 0.1 * (x.policy - x.reference)[:, 0]
    wanted = sum(float(rewards[order[i:]].logsumexp(0) - rewards[order[i]]) for i in range(3))
    assert configure(["listwise"], {})(x)[members].tolist() == pytest.approx([wanted] * 3)


def test_agreement_counts_other_scores_only() -> None:
    x, rows = answers()
    assert x.reference is not None
    members = rows[5]
    columns = (x.policy, x.reference, x.length)
    found = order_agreement(
        GroupLogps(*(c[members, 0][None] for c in columns), torch.tensor(SCORES[members])[None])
    )
    ratios = (x.policy - x.reference)[members, 0].tolist()
    scores = SCORES[members]
    for i in range(4):
        others = [j for j in range(4) if scores[j] != scores[i]]
        right = [(ratios[i] > ratios[j]) == (scores[i] > scores[j]) for j in others]
        assert float(found[0, i]) == pytest.approx(np.mean(right))


# --- batching and ranks ---


def scored_answers() -> list[TokenPair]:
    """Nine answers to four prompts, with weights of their rows."""
    pairs = random_pairs(9, VOCAB, seed=11, longest=9)
    prompts = {group: pairs[GROUPS.index(group)].prompt for group in GROUPS}
    rows = []
    for pair, group, score in zip(pairs, GROUPS, SCORES, strict=True):
        start, end = len(prompts[group]), len(pair.chosen)
        rows.append(
            replace(
                pair.only("chosen"),
                prompt=prompts[group],
                chosen_scored=((start, start + end),),
                score=float(score),
                group=group,
                weight=1.0 + group / 4,
            )
        )
    return rows


def group_step(name: str, order: list[int], budget: int, dp: int = 1) -> Outcome:
    """One step in any order, in any micro-batches and on any number of ranks, in float64."""
    loss, answers = configure([name], {}), scored_answers()
    moved = torch.randn(9, 2, generator=torch.Generator().manual_seed(5)).double() / 9
    known = RankTrainer(small(torch.float64), loss).log_probs(pack(answers, 10**6))["sum"]
    rows = [answers[i] for i in order]
    stepper = Stepper(small(torch.float64), loss, dp)
    reference = {"sum": (known + moved)[order]}
    found = stepper.step(stepper.share(rows, budget), reference, PairFacts.of_pairs(rows))
    return replace(found, policy=found.policy[np.argsort(order)])


ORDER, SHUFFLED = list(range(9)), [4, 2, 8, 0, 1, 7, 3, 6, 5]


@pytest.mark.parametrize("name", FORMULAS)
def test_neither_budget_nor_order_matters(name: str) -> None:
    whole = group_step(name, ORDER, 10**6)
    assert whole.gradient.norm() > 1e-3
    for order, budget in ((ORDER, 1), (ORDER[::-1], 30), (SHUFFLED, 12)):
        assert_same(group_step(name, order, budget), whole, 1e-9)


# --- a run ---


def write_scored(file: Path) -> str:
    """Twelve prompts with four scored answers each; the last prompt has two."""
    draw = np.random.default_rng(2)
    with file.open("w") as out:
        for i in range(12):
            words = draw.permutation(40)[: 4 if i < 11 else 2].tolist()
            row = {"prompt": f"w{i}", "responses": [f" w{w} w{i}" for w in words]}
            print(json.dumps({**row, "scores": [w / 10 for w in words]}), file=out)
    return str(file)


def test_a_run_learns_the_order_of_scores(tmp_path: Path) -> None:
    file = write_scored(tmp_path / "scored.jsonl")
    config = make_config(
        tmp_path, pref_loss="listwise", actor_train__data_args__file_name=file,
        validation__data_args__file_name=file, max_steps=6,
        actor_train__training_args__learning_rate=3e-3,
    )  # fmt: skip
    assert (config.task, config.rows) == ("scored", "scored")
    pipeline = DPOPipeline(config)
    assert pipeline.run() == 0
    evaluated = [row for row in metrics(config) if "eval/loss" in row]
    assert evaluated[-1]["eval/rewards/accuracies"] > 0.8
    assert evaluated[-1]["eval/pairs"] == 46
    steps = [pipeline.source.order.step(i) for i in range(6)]
    groups = pipeline.data.train.groups
    assert groups is not None
    whole = {tuple(part) for part in np.split(np.arange(46), groups[1:])}
    for rows in steps:  # no group is split between steps
        taken = set(rows.tolist())
        assert all(taken.isdisjoint(group) or taken.issuperset(group) for group in whole)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="group_responses: task: scored needs all answers"):
        make_config(tmp_path, task="scored", group_responses=False)
    with pytest.raises(ConfigError, match="'listwise' is for task: scored"):
        from_config(make_config(tmp_path, task="sft", pref_loss="listwise"))
    with pytest.raises(BadRows, match="no scores: give rows with responses and scores"):
        prepare(make_config(tmp_path, task="scored"))
