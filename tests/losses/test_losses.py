"""Values, gradients and edges of every loss and modifier, and what a config may ask of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from rather.config.load import config_from_dict
from rather.config.schema import LOSS_MODIFIERS, LOSS_NUMBERS
from rather.data.batch import PairLogps
from rather.errors import ConfigError
from rather.losses.objective import PairLoss, configure, from_config
from rather.pipeline.pipeline import DPOPipeline
from tests.cells import read_table
from tests.config.conftest import smallest
from tests.losses.formulas import (
    FORMULAS,
    PAIRWISE,
    Array,
    Numbers,
    as_logps,
    bent,
    damped,
    likelihood,
    sft,
    some_pairs,
    without_reference,
)
from tests.tiny import make_config

PAIRS = some_pairs()
REFERENCE_FREE = ("sft", "orpo", "simpo", "cpo", "alphapo")
WITH_REFERENCE = tuple(name for name in FORMULAS if name not in REFERENCE_FREE)
# Which losses take a modifier; all others must refuse it by name.
TAKERS: dict[str, tuple[str, ...]] = {
    "f_divergence_type": (
        "sigmoid",
        "sigmoid_norm",
        "hinge",
        "ipo",
        "robust",
        "exo_pair",
        "discopop",
        "rdpo",
    ),
    "soft_labels": ("sigmoid", "sigmoid_norm", "simpo", "cpo"),
    "reference_free": WITH_REFERENCE,
    "ld_alpha": WITH_REFERENCE,
    "use_weighting": tuple(name for name in FORMULAS if not name.startswith("aot")),
    "rpo_alpha": tuple(FORMULAS),
    "pref_ftx": tuple(FORMULAS),
}
ON: dict[str, dict[str, Any]] = {
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js": {"f_divergence_type": "js"},
    "alpha": {"f_divergence_type": "alpha"},
    "alpha 2": {"f_divergence_type": "alpha", "f_alpha_divergence_coef": 2.0},
    "alpha 1": {"f_divergence_type": "alpha", "f_alpha_divergence_coef": 1.0},
    "soft_labels": {"soft_labels": True},
    "reference_free": {"reference_free": True},
    "ld_alpha": {"ld_alpha": 0.3},
    "use_weighting": {"use_weighting": True},
    "rpo_alpha": {"rpo_alpha": 0.7},
    "pref_ftx": {"pref_ftx": 0.7},
}


def combinations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every loss alone and with each modifier that it takes."""
    for name in FORMULAS:
        yield name, {}
        yield from ((name, change) for change in ON.values() if name in TAKERS[next(iter(change))])


COMBINATIONS = list(combinations())
EACH = pytest.mark.parametrize(
    ("name", "modifiers"),
    COMBINATIONS,
    ids=[f"{name} {' '.join(map(str, m.values()))}" for name, m in COMBINATIONS],
)


def all_numbers(name: str, **changes: Any) -> dict[str, Any]:
    return {**PAIRWISE[name].numbers, **changes}


def expected(name: str, modifiers: dict[str, Any], p: Numbers = PAIRS, **changes: Any) -> Array:
    """The same by the independent formulas."""
    numbers = all_numbers(name, **changes)
    seen = p
    if "f_divergence_type" in modifiers and modifiers.get("f_alpha_divergence_coef") != 1:
        seen = bent(
            p, modifiers["f_divergence_type"], modifiers.get("f_alpha_divergence_coef", 0.5)
        )
    if "reference_free" in modifiers:
        seen = without_reference(p)
    if "ld_alpha" in modifiers:
        seen = damped(p, modifiers["ld_alpha"])
    if "soft_labels" in modifiers:
        numbers["label_smoothing"] = 1 - p.label
    losses = FORMULAS[name](seen, **numbers)
    if "use_weighting" in modifiers:
        losses = losses * likelihood(p)
    losses = losses + modifiers.get("rpo_alpha", 0.0) * sft(p)
    return losses + modifiers.get("pref_ftx", 0.0) * -p.policy_w / p.length_w


def inputs(modifiers: dict[str, Any], p: Numbers = PAIRS) -> PairLogps:
    """A loss that has no reference is given none."""
    x = as_logps(p, soft_labels="soft_labels" in modifiers)
    return x._replace(reference=None) if "reference_free" in modifiers else x


# --- values and gradients ---


def test_every_loss_has_a_formula() -> None:
    assert set(FORMULAS) == set(PAIRWISE)
    assert {name for name, rule in PAIRWISE.items() if not rule.reference} == set(REFERENCE_FREE)


@EACH
def test_the_formula(name: str, modifiers: dict[str, Any]) -> None:
    got = configure([name], {}, modifiers=modifiers)(inputs(modifiers)).numpy()
    np.testing.assert_allclose(got, expected(name, modifiers), rtol=1e-9)
    plain = configure([name], {})(inputs({})).numpy()
    if modifiers and modifiers.get("f_alpha_divergence_coef") != 1:
        assert not np.allclose(got, plain, rtol=1e-4)


NUMBERS = [(name, number) for name, rule in PAIRWISE.items() for number in rule.numbers]


def other(value: Any) -> Any:
    return not value if isinstance(value, bool) else 0.3 if value is None else 1.5 * value + 0.03


@pytest.mark.parametrize(("name", "number"), NUMBERS)
def test_every_number_of_every_loss_turns(name: str, number: str) -> None:
    changed = {number: other(PAIRWISE[name].numbers[number])}
    got = configure([name], changed)(inputs({})).numpy()
    np.testing.assert_allclose(got, expected(name, {}, **changed), rtol=1e-9)
    assert not np.allclose(got, expected(name, {}), rtol=1e-4)


def test_alphapo_at_zero_is_simpo() -> None:
    bare = configure(["alphapo"], {"alphapo_alpha": 0.0, "beta": 2.0, "gamma": 0.4})(inputs({}))
    near = configure(["alphapo"], {"alphapo_alpha": 1e-7, "beta": 2.0, "gamma": 0.4})(inputs({}))
    simpo = configure(["simpo"], {"beta": 2.0, "gamma": 0.4})(inputs({}))
    torch.testing.assert_close(bare, simpo)
    torch.testing.assert_close(near, simpo, rtol=1e-5, atol=0)


def differentiable(
    objective: PairLoss, x: PairLogps
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The objective as a function of all that carries a gradient."""
    names = [name for name in ("policy/shared",) if "shared" in objective.token_columns]

    def value(policy: Tensor, *columns: Tensor) -> Tensor:
        return objective(
            x._replace(policy=policy, extra={**x.extra, **dict(zip(names, columns, strict=True))})
        )

    leaves = (x.policy, *(x.extra[name] for name in names))
    return value, tuple(leaf.clone().requires_grad_() for leaf in leaves)


@EACH
def test_gradcheck(name: str, modifiers: dict[str, Any]) -> None:
    objective = configure([name], {}, modifiers=modifiers)
    value, leaves = differentiable(objective, inputs(modifiers))
    if "use_weighting" in modifiers:  # the weight is a constant by definition
        weight = torch.from_numpy(likelihood(PAIRS))
        slope = torch.autograd.grad(value(*leaves).sum(), leaves[0])[0]
        plain, _ = differentiable(configure([name], {}), inputs({}))
        wanted = torch.autograd.grad((plain(*leaves) * weight).sum(), leaves[0])[0]
        torch.testing.assert_close(slope, wanted)
    else:
        assert gradcheck(value, leaves)


# --- edges ---


def pairs_at(policy: Any, reference: Any, length: Any) -> PairLogps:
    """Rows of (chosen, rejected)."""
    numbers = [torch.tensor(rows, dtype=torch.float64) for rows in (policy, reference, length)]
    extra = {
        "margin": torch.ones(len(numbers[0]), dtype=torch.float64),
        "soft_label": torch.full((len(numbers[0]),), 0.8, dtype=torch.float64),
        "mean_chosen_length": numbers[2][:, 0].mean(),
        "policy/shared": numbers[0] / 2,
        "reference/shared": numbers[1] / 2,
        "policy/squares": numbers[0].clamp(min=-5.0),
    }
    return PairLogps(numbers[0], numbers[1], numbers[2], extra)


WILD = {"beta": 1.0, "discopop_tau": 2.0, "alphapo_alpha": 1.0}
FAR = [1.0, 30.0, 39.0, 41.0, 60.0, 79.0, 81.0, 200.0, 1e4]
EDGES = {
    "log-prob 0": pairs_at(
        [[0, 0], [0, -3], [-3, 0]], [[0, 0], [-2, -2], [-2, -2]], [[3, 2], [3, 2], [3, 2]]
    ),
    "length 1": pairs_at([[-1, -2], [-30, -1e-9]], [[-2, -1], [-1, -1]], [[1, 1], [1, 1]]),
    "equal pairs": pairs_at([[-7, -7]] * 3, [[-7, -7]] * 3, [[4, 4]] * 3),
    "margins up": pairs_at(
        [[-1, -m - 1] for m in FAR], [[-m - 1, -1] for m in FAR], [[1, 1]] * len(FAR)
    ),
    "margins down": pairs_at(
        [[-m - 1, -1] for m in FAR], [[-1, -m - 1] for m in FAR], [[1, 1]] * len(FAR)
    ),
}


@EACH
def test_finite_at_the_edges(name: str, modifiers: dict[str, Any]) -> None:
    """Also in the float32 of the tokens, where the gradient goes; and with larger numbers."""
    wild = {number: value for number, value in WILD.items() if number in PAIRWISE[name].numbers}
    for (edge, x), numbers in product(EDGES.items(), ({}, wild)):
        objective = configure([name], numbers, modifiers=modifiers)
        if "soft_labels" not in modifiers:
            x = x._replace(
                extra={key: column for key, column in x.extra.items() if key != "soft_label"}
            )
        leaf = x.policy.float().requires_grad_()
        losses = objective(x._replace(policy=leaf.double()))
        losses.mean().backward()
        assert leaf.grad is not None
        assert torch.isfinite(losses).all(), edge
        assert torch.isfinite(leaf.grad).all(), edge


# --- what may be asked ---


@pytest.mark.parametrize("name", FORMULAS)
def test_a_number_of_another_loss_is_an_error_that_names_its_own(name: str) -> None:
    own = PAIRWISE[name].numbers
    listed = ", ".join(own) or "no numbers"
    for number in LOSS_NUMBERS:
        if number in own:
            continue
        for value in (True, False) if number == "length_normalization" else (0.25,):
            does_so_anyway = name == "sft" or value is (
                name in ("sigmoid_norm", "orpo", "simpo", "alphapo")
            )
            if number == "length_normalization" and does_so_anyway:
                configure([name], {number: value})
                continue
            message = re.escape(f"{number}: loss '{name}' takes {listed}; it has no {number}.")
            with pytest.raises(ConfigError, match=message):
                configure([name], {number: value})


def test_the_numbers_of_a_config_are_those_of_the_losses() -> None:
    others = {
        *("desirable_weight", "undesirable_weight", "center_rewards_coefficient"),
        *("reward_scale", "clip_range"),
    }
    assert set(LOSS_NUMBERS) == {number for _, number in NUMBERS} | others  # of other tasks


@pytest.mark.parametrize("name", FORMULAS)
def test_neutral_values_pass(name: str) -> None:
    neutral = {
        "label_smoothing": 0.0,
        "gamma": 0.0,
        "cpo_alpha": 0.0,
        "odpo_alpha": 0.0,
        "alphapo_alpha": 0,
    }
    numbers = {key: value for key, value in neutral.items() if key not in PAIRWISE[name].numbers}
    modifiers = {
        "rpo_alpha": 0.0,
        "pref_ftx": 0.0,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": None,
        "ld_alpha": 1.0,
        "use_weighting": False,
        "soft_labels": False,
        "reference_free": False,
    }
    assert set(modifiers) == set(LOSS_MODIFIERS)
    objective = configure([name], numbers, modifiers=modifiers)
    assert objective.token_columns == frozenset()
    torch.testing.assert_close(
        objective(inputs({})), configure([name], {})(inputs({})), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", FORMULAS)
def test_modifiers_are_refused_by_name(name: str) -> None:
    for change in ON.values():
        key = next(iter(change))
        if name in TAKERS[key]:
            configure([name], {}, modifiers=change)
        else:
            with pytest.raises(
                ConfigError, match=f"{key}: not supported by loss '{name}'; supported by: "
            ) as caught:
                configure([name], {}, modifiers=change)
            named = str(caught.value).split("supported by: ")[1].rstrip(".").split(", ")
            assert set(named) == set(TAKERS[key])


def test_sft_in_a_mixture_takes_any_modifier_that_the_other_loss_takes() -> None:
    for change in ON.values():
        assert configure(["sigmoid", "sft"], {}, modifiers=change).terms


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        configure(
            ["simpo"], {"cpo_alpha": 1.0}, modifiers={"ld_alpha": 0.5, "reference_free": True}
        )
    assert all(key in str(caught.value) for key in ("cpo_alpha", "ld_alpha", "reference_free"))


# --- mixtures ---


def test_a_weighted_list_is_the_weighted_sum() -> None:
    names, weights = ["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]
    got = configure(names, {"beta": 0.3}, weights)(inputs({})).numpy()
    parts = [
        expected("sigmoid", {}, beta=0.3),
        expected("bco_pair", {}, beta=0.3),
        expected("sft", {}),
    ]
    np.testing.assert_allclose(
        got, sum(w * part for w, part in zip(weights, parts, strict=True)), rtol=1e-9
    )
    unweighted = configure(names, {"beta": 0.3})(inputs({})).numpy()
    np.testing.assert_allclose(unweighted, sum(parts), rtol=1e-9)


def test_a_number_goes_to_every_loss_that_has_it() -> None:
    got = configure(
        ["sigmoid", "ipo"], {"beta": 0.3, "length_normalization": False, "label_smoothing": 0.1}
    )
    want = expected("sigmoid", {}, beta=0.3, label_smoothing=0.1)
    want = want + expected("ipo", {}, beta=0.3, length_normalization=False)
    np.testing.assert_allclose(got(inputs({})).numpy(), want, rtol=1e-9)


@pytest.mark.parametrize(
    "change", [{"ld_alpha": 0.3}, {"f_divergence_type": "js"}, {"reference_free": True}]
)
def test_likelihoods_are_not_modified(change: dict[str, Any]) -> None:
    """sft, rpo_alpha, pref_ftx and WPO's weight keep the plain log-probs."""
    likelihoods = {"rpo_alpha": 0.7, "pref_ftx": 0.4, "use_weighting": True}
    got = configure(["sigmoid", "sft"], {}, [1.0, 2.0], {**change, **likelihoods})(
        inputs(change)
    ).numpy()
    want = (expected("sigmoid", change) + 2 * expected("sft", {})) * likelihood(PAIRS)
    np.testing.assert_allclose(
        got, want + 0.7 * sft(PAIRS) - 0.4 * PAIRS.policy_w / PAIRS.length_w, rtol=1e-9
    )


def test_rewards_are_those_of_the_preference() -> None:
    x = inputs({})
    sums = 0.3 * np.stack([PAIRS.a, PAIRS.b], axis=1)
    np.testing.assert_allclose(
        configure(["sft", "sigmoid"], {"beta": 0.3}).rewards(x).numpy(), sums
    )
    averages = 0.3 * np.stack(
        [PAIRS.policy_w / PAIRS.length_w, PAIRS.policy_l / PAIRS.length_l], axis=1
    )
    np.testing.assert_allclose(configure(["orpo"], {"beta": 0.3}).rewards(x).numpy(), averages)
    np.testing.assert_allclose(configure(["sft"], {}).rewards(x).numpy(), averages / 0.3)


# --- through a config ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


def asked(folder: Path, **changes: Any) -> tuple[list[str], dict[str, Any]]:
    """Names and numbers of the objective that a config asks for."""
    objective = from_config(make_config(folder, **changes))
    return [term.name for term in objective.terms], dict(objective.terms[0].numbers)


def test_the_spellings_of_a_loss(folder: Path) -> None:
    assert asked(folder) == (["sigmoid"], {})
    assert asked(folder, ipo=True) == (["ipo"], {})
    assert asked(folder, ipo=True, length_normalization=False) == (
        ["ipo"],
        {"length_normalization": False},
    )
    assert asked(folder, loss_type="dpo_loss", gamma=0.5, beta=0.2) == (
        ["sigmoid"],
        {"gamma": 0.5, "beta": 0.2},
    )
    simpo = {
        "loss_type": "simpo_loss",
        "gamma": 1.4,
        "length_normalization": True,
        "disable_reference_model": True,
    }
    assert asked(folder, **simpo) == (["simpo"], {"gamma": 1.4})
    assert asked(folder, pref_loss="orpo", label_smoothing=0.0) == (["orpo"], {})
    assert asked(folder, pref_loss=["sigmoid", "sft"])[0] == ["sigmoid", "sft"]


REFUSED = """
    pref_loss=sigmod | pref_loss: unknown loss 'sigmod'; did you mean 'sigmoid'?
    f_alpha_divergence_coef=0.3 | f_alpha_divergence_coef: only f_divergence_type: alpha
    label_smoothing=0.1 + soft_labels=true | soft_labels, label_smoothing: two sources of the same chance
    pref_loss=simpo + gamma=1 + gamma_beta_ratio=0.5 | gamma, gamma_beta_ratio: two ways to set the same margin
    pref_loss=exo_pair + label_smoothing=0 | label_smoothing: loss 'exo_pair' takes its logarithm
    pref_loss=[sigmoid, aot] + use_weighting=true | use_weighting: not supported by loss 'aot'; supported by: sigmoid,
    pref_loss=[sigmoid, ipo] + gamma_beta_ratio=0.5 | gamma_beta_ratio: loss 'sigmoid' takes beta, label_smoothing, gamma, length_normalization; loss 'ipo' takes beta, length_normalization
    loss_type=simpo_loss + length_normalization=false | length_normalization: loss 'simpo' takes beta,
    use_ref_model=false | use_ref_model: loss 'sigmoid' needs a reference model
    disable_reference_model=true + ipo=true | disable_reference_model: loss 'ipo' needs a reference model
    use_ref_model=true + pref_loss=orpo | use_ref_model: loss 'orpo' compares with no reference; remove the key
    disable_reference_model=false + pref_loss=orpo | disable_reference_model: loss 'orpo' compares with no reference
    sync_ref_model=true + pref_loss=simpo | sync_ref_model: loss 'simpo' compares with no reference
    drift_limit=0.5 + pref_loss=orpo | drift_limit: loss 'orpo' compares with no reference
    drift_limit=0.5 + task=reward + pref_loss=bradley_terry | drift_limit: loss 'bradley_terry' compares with no reference; remove the key
    pref_loss=sft + beta=0.2 | beta: loss 'sft' takes no numbers
"""


@pytest.mark.parametrize(("settings", "said"), read_table(REFUSED))
def test_configs_that_are_refused(settings: str, said: str) -> None:
    config = config_from_dict(smallest(*settings.split(" + ")))
    with pytest.raises(ConfigError) as refused:
        from_config(config)
    (line,) = refused.value.problems
    assert line.startswith(said)


def test_a_stated_reference_that_agrees_passes(folder: Path) -> None:
    assert from_config(make_config(folder, use_ref_model=True)).needs_reference
    assert from_config(make_config(folder, disable_reference_model=False)).needs_reference
    assert not from_config(
        make_config(folder, use_ref_model=False, pref_loss="simpo")
    ).needs_reference
    assert not from_config(
        make_config(folder, disable_reference_model=True, reference_free=True)
    ).needs_reference


@pytest.mark.parametrize(
    "changes",
    [*({"pref_loss": name} for name in REFERENCE_FREE), {"reference_free": True}],
    ids=str,
)
def test_no_reference_is_built_where_none_is_needed(folder: Path, changes: dict[str, Any]) -> None:
    assert DPOPipeline(make_config(folder, **changes)).reference is None


def test_a_reference_is_built_where_one_is_needed(folder: Path) -> None:
    assert DPOPipeline(make_config(folder, pref_loss=["sft", "sigmoid"])).reference is not None


def test_apply_loss_mask_false_scores_every_token(folder: Path) -> None:
    pair = DPOPipeline(make_config(folder, apply_loss_mask=False)).data.train.take([0])[0]
    assert pair.chosen_scored == ((1, len(pair.prompt) + len(pair.chosen)),)
    masked = DPOPipeline(make_config(folder)).data.train.take([0])[0]
    assert masked.chosen_scored == ((len(pair.prompt), len(pair.prompt) + len(pair.chosen)),)


def test_a_loss_without_its_column_is_refused(folder: Path) -> None:
    for change, column in (
        ({"pref_loss": "odpo"}, "margin"),
        ({"soft_labels": True}, "soft_label"),
    ):
        with pytest.raises(Exception, match=f"reads the column {column}: 40 of 40"):
            DPOPipeline(make_config(folder, **change))
