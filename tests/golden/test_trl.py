"""Our losses on stored log-probs equal what real TRL 1.16 gave for the same tokens. Made by
make_trl.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rather.data.batch import PairLogps
from rather.losses.objective import configure

GOLDEN: dict[str, Any] = json.loads(
    Path(__file__).with_name("trl_1_16.json").read_text(encoding="utf-8")
)
PAIRS: list[dict[str, Any]] = GOLDEN["pairs"]
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in GOLDEN["cases"]}
SIDES = ("chosen", "rejected")
DIVERGENCES = {"js_divergence": "js", "alpha_divergence": "alpha", "forward_kl": "forward_kl"}
MODIFIERS = ("ld_alpha", "use_weighting", "f_alpha_divergence_coef")


def per_pair(kind: str, *, shared: bool = False) -> Tensor:
    """[P, 2] sums over an answer's tokens, or over as many as the pair's shorter answer has."""
    return torch.tensor(
        [
            [sum(pair[f"{kind}_{side}"][: shorter(pair) if shared else None]) for side in SIDES]
            for pair in PAIRS
        ],
        dtype=torch.float64,
    )


def shorter(pair: dict[str, Any]) -> int:
    return min(len(pair["chosen_ids"]), len(pair["rejected_ids"]))


def stored() -> PairLogps:
    length = torch.tensor(
        [[len(pair[f"{side}_ids"]) for side in SIDES] for pair in PAIRS], dtype=torch.float64
    )
    extra = {
        "mean_chosen_length": length[:, 0].mean(),
        "policy/squares": per_pair("squares"),
        "policy/shared": per_pair("policy", shared=True),
        "reference/shared": per_pair("reference", shared=True),
    }
    return PairLogps(per_pair("policy"), per_pair("reference"), length, extra)


def ours(names: list[str], numbers: dict[str, Any], weights: Any = None, **modifiers: Any) -> float:
    return float(configure(names, numbers, weights, modifiers)(stored()).mean())


def of_dpo(settings: dict[str, Any]) -> float:
    given = dict(settings)
    names, weights = given.pop("loss_type"), given.pop("loss_weights", None)
    modifiers = {key: given.pop(key) for key in MODIFIERS if key in given}
    if "f_divergence_type" in given:
        modifiers["f_divergence_type"] = DIVERGENCES[given.pop("f_divergence_type")]
    if names == ["sft"]:
        del given["beta"]  # which TRL does not read there, and we refuse
    return ours(names, given, weights, **modifiers)


def of_cpo(settings: dict[str, Any]) -> float:
    """TRL's CPO trainer: hinge and ipo are ours without a reference, and cpo_alpha is rpo_alpha
    for all but cpo."""
    given = dict(settings)
    kind, alpha = given.pop("loss_type"), given.pop("cpo_alpha", 0.0)
    if kind == "sigmoid":
        return ours(["cpo"], {**given, "cpo_alpha": alpha})
    if kind in ("hinge", "ipo"):
        return ours([kind], given, reference_free=True, rpo_alpha=alpha)
    numbers = {"simpo_gamma": "gamma", "alpha": "alphapo_alpha"}
    return ours(
        [kind], {numbers.get(key, key): value for key, value in given.items()}, rpo_alpha=alpha
    )


DIFFERENT = ("sigmoid smoothed", "orpo")


@pytest.mark.parametrize("name", [name for name in CASES if name not in DIFFERENT])
def test_equal_to_trl(name: str) -> None:
    case = CASES[name]
    got = {"dpo": of_dpo, "cpo": of_cpo}[case["trainer"]](case["settings"])
    assert got == pytest.approx(case["loss"], rel=1e-5)


def test_the_cases_distinguish_the_losses() -> None:
    """On these pairs no two losses give one value, so that a swapped name cannot pass."""
    losses = sorted(case["loss"] for name, case in CASES.items() if name != "sigmoid smoothed")
    assert min(np.diff(losses) / np.array(losses[1:])) > 2e-5
    assert GOLDEN["versions"]["trl"].startswith("1.16.")


def test_stored_masks_are_ragged() -> None:
    lengths = [(len(pair["chosen_ids"]), len(pair["rejected_ids"])) for pair in PAIRS]
    assert {np.sign(chosen - rejected) for chosen, rejected in lengths} == {-1, 0, 1}
    for pair in PAIRS:
        for side in SIDES:
            kinds = ("policy", "reference", "squares")
            assert {len(pair[f"{kind}_{side}"]) for kind in kinds} == {len(pair[f"{side}_ids"])}


# --- differences in meaning: docs/losses/differences.md ---


def margins() -> Any:
    x = stored()
    assert x.reference is not None
    ratios = (x.policy - x.reference).numpy()
    return 0.3 * (ratios[:, 0] - ratios[:, 1])


def test_sigmoid_smooths_labels_where_trl_ignores_them() -> None:
    case, plain = CASES["sigmoid smoothed"], CASES["sigmoid"]
    assert case["loss"] == plain["loss"]
    z = margins()
    want = np.mean(0.8 * np.logaddexp(0, -z) + 0.2 * np.logaddexp(0, z))
    assert ours(["sigmoid"], {"beta": 0.3, "label_smoothing": 0.2}) == pytest.approx(
        want, rel=1e-12
    )
    assert want != pytest.approx(case["loss"], rel=1e-3)


def test_orpo_has_trls_odds_ratio_and_the_papers_nll() -> None:
    """TRL's NLL counts the prompt and is a mean over tokens; the paper's is the chosen answer's
    own average."""
    case, x = CASES["orpo"], stored()
    average = (x.policy / x.length).numpy()
    nll = -average[:, 0].mean()
    assert ours(["orpo"], {"beta": 0.3}) - nll == pytest.approx(
        -0.3 * case["log_odds_ratio"], rel=1e-5
    )
    assert case["loss"] == pytest.approx(case["nll_loss"] - 0.3 * case["log_odds_ratio"], rel=1e-6)
    assert nll != pytest.approx(case["nll_loss"], rel=1e-3)


def test_wpo_weighs_each_pairs_own_likelihood_term() -> None:
    """TRL cannot run sft with use_weighting: it writes into an expanded tensor."""
    x = stored()
    weight = np.exp(((x.policy - x.extra["policy/squares"]) / x.length).numpy()).prod(axis=1)
    nll = (-x.policy[:, 0] / x.length[:, 0].mean()).numpy()
    want = np.mean(weight * (np.logaddexp(0, -margins()) + nll))
    assert ours(["sigmoid", "sft"], {"beta": 0.3}, use_weighting=True) == pytest.approx(
        want, rel=1e-12
    )
