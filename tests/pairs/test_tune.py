"""`rather tune` chooses a setting, stays in its budget, and continues where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rather.errors import ConfigError, NonFiniteError
from rather.tools import tune
from tests.cells import cells
from tests.tiny import make_config


def test_a_small_budget_trains_few_steps(tmp_path: Path) -> None:
    base = make_config(tmp_path)
    tuning = tune.Tuning(tmp_path / "x.yaml", base, [], tmp_path, 100.0)
    tuning.state = {"seconds": 20.0, "rounds": {}}
    tuning.state["runs"] = {"range-a": {"steps": 4, "step_seconds": 0.5, "start_seconds": 1.0}}
    # 9 settings, then 3 for twice as many further steps; the best of them is chosen.
    assert tuning._first_steps(9, 1000) == int((0.9 * 80 - 12 * 1.0) / (15 * 0.5))
    assert tuning._first_steps(9, 2) == 2
    tuning.state["seconds"] = 99.0
    assert tuning._first_steps(9, 1000) == 1


@pytest.mark.parametrize("text", ["20", "m", "0m", "1d", "-5m"])
def test_a_budget_needs_a_unit(text: str) -> None:
    with pytest.raises(ConfigError, match="--budget"):
        tune.seconds_of(text)
    assert tune.seconds_of("1.5h") == 5400


GOOD = {"values": {tune.RATE: "1e-6"}, "steps": 4, "step_seconds": 0.1, "start_seconds": 1.0}
STATE = {"seconds": 3.0, "runs": {"a": GOOD}, "rounds": {"range": 4, "rate": "1e-6"}, "asked": {}}
DAMAGED: dict[str, Any] = {
    "another type": [],
    "no runs": {"seconds": 1.0, "rounds": {}},
    "text as seconds": {**STATE, "seconds": "many"},
    "runs as a list": {**STATE, "runs": []},
    "a run without values": {**STATE, "runs": {"a": {"steps": 4}}},
    "negative steps": {**STATE, "runs": {"a": {**GOOD, "steps": -1}}},
    "no times": {**STATE, "runs": {"a": {"values": {}, "steps": 4}}},
    "a rate of 0": {**STATE, "rounds": {"rate": "0"}},
    "an older version's shares": {**STATE, "runs": {"a": {**GOOD, "forgetting_kept": 0.9}}},
    "a loss that is a text": {**STATE, "runs": {"a": {**GOOD, "loss": "x"}}},
}


@pytest.mark.defect("X13")
@pytest.mark.parametrize("case", ["not JSON", *DAMAGED])
def test_a_damaged_state_is_refused(tmp_path: Path, case: str) -> None:
    file = tmp_path / tune.STATE
    file.write_text(json.dumps(DAMAGED[case]) if case in DAMAGED else "{")
    with pytest.raises(ConfigError, match=r"tune\.json: is damaged .* to tune from scratch"):
        tune.read_state(file)


def tuning(folder: Path, *losses: object) -> tune.Tuning:
    """What was measured, as it is read from the file: JSON has no NaN."""
    runs = {f"run-{i}": {**GOOD, "loss": loss} for i, loss in enumerate(losses)}
    (folder / tune.STATE).write_text(json.dumps({**STATE, "runs": runs}))
    config = make_config(folder)
    state = tune.read_state(folder / tune.STATE)
    return tune.Tuning(folder / "dpo.yaml", config, [], folder, 60.0, state)


@pytest.mark.defect("X13")
def test_if_every_rate_diverges_none_is_called_best(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="No setting is usable: each one diverged, failed"):
        tuning(tmp_path, "nan", "inf").ranked(["run-0", "run-1"])
    assert tuning(tmp_path, "nan", 0.5, 0.4).ranked(["run-0", "run-1", "run-2"]) == [
        "run-2",
        "run-1",
    ]


def rewards(*margins: float) -> tune.Rewards:
    return tune.Rewards(np.array(margins), np.arange(len(margins), dtype=np.uint64))


def test_a_win_smaller_than_its_interval_goes_to_the_gentler_setting() -> None:
    draw = np.random.default_rng(0)
    margins = draw.normal(1.0, 1.0, 400)
    noise = draw.normal(0.0, 0.5, 400)
    candidates = {
        "strong": rewards(*(margins + 0.001)), "gentle": rewards(*(margins + noise * 0.1 + 0.003))
    }  # fmt: skip
    harm = {"strong": (False, 0.9), "gentle": (False, 0.1)}
    assert tune.choose(candidates, harm) == "gentle"
    # It lost more right answers than allowed, though perhaps by chance.
    assert tune.choose(candidates, {**harm, "gentle": (True, 0.1)}) == "strong"
    candidates["strong"] = rewards(*(margins + 0.5))
    assert tune.choose(candidates, harm) == "strong"
    # Not clearly worse, but by more than a standard error: it would give too much away.
    loser, better = rewards(*(margins + noise * 0.3 + 0.002)), rewards(*margins)
    gain = better.gain_over(loser)
    assert gain.error < gain.mean < gain.error * 1.96
    candidates = {"strong": better, "gentle": loser}
    assert tune.choose(candidates, harm) == "strong"
    # Unless the better one lost more right answers than allowed.
    assert tune.choose(candidates, {**harm, "strong": (True, 0.9)}) == "gentle"
    # Few pairs have a large error, but no setting gives away more than 0.005.
    few = {"strong": rewards(*margins[:40]), "gentle": rewards(*(margins + noise)[:40])}
    gain = few["strong"].gain_over(few["gentle"])
    assert tune.GIVEN_AWAY < gain.mean < gain.error
    assert tune.choose(few, harm) == "strong"


def test_prompts_count_and_are_never_in_both_parts() -> None:
    """The gain differs between prompts: 400 pairs of 20 prompts are 20 observations."""
    draw = np.random.default_rng(0)
    margins = draw.normal(1.0, 1.0, 400)
    shift = np.repeat(draw.normal(0.1, 0.4, 20), 20)
    prompts = np.repeat(draw.integers(0, 2**63, 20).astype(np.uint64), 20)
    shifted = tune.Rewards(margins + shift, prompts)
    by_prompt = shifted.gain_over(rewards(*margins))
    by_pair = rewards(*(margins + shift)).gain_over(rewards(*margins))
    assert by_prompt.mean == by_pair.mean
    assert (by_prompt.prompts, by_pair.prompts) == (20, 400)
    assert by_prompt.error > 3 * by_pair.error
    chooses, decides = shifted.divided()
    assert not set(chooses.prompts) & set(decides.prompts)
    assert (len(chooses.margins), len(decides.margins)) == (140, 260)


def test_rewards_that_are_too_sure_have_a_higher_loss() -> None:
    assert rewards(1.0, 1.0, -1.0).loss < rewards(10.0, 10.0, -10.0).loss
    assert rewards(1.0, 1.0, -1.0).accuracy == rewards(10.0, 10.0, -10.0).accuracy


def test_a_setting_beyond_a_limit_cannot_win(tmp_path: Path) -> None:
    state = tuning(tmp_path, 0.2, 0.5)
    state.runs["run-0"]["problem"] = "eval/drift is 1.64 nats per token, above drift_limit (1)."
    assert state.ranked(["run-0", "run-1"]) == ["run-1"]


def test_a_budget_without_two_full_runs_is_refused(tmp_path: Path) -> None:
    """A step takes 0.1 s and a start 1 s: 1,000 steps take 116 s with the margin."""
    state = tuning(tmp_path, 0.5)
    with pytest.raises(ConfigError, match=r"two full runs.* --budget 236s") as refused:
        state._reserve(1000)
    assert refused.value.exit_code == 2
    state.budget = 240.0
    state._reserve(1000)
    assert state.reserved == pytest.approx(2 * 1.15 * 101)
    state.budget = 1000.0  # room for the search, too
    state._reserve(1000)
    assert state.reserved == pytest.approx(3 * 1.15 * 101)


BEYOND = {"problem": "eval/drift is 3 nats per token, above drift_limit (1)."}
LOST, KEPT = {"forgetting_kept": 0.9}, {"forgetting_kept": 0.96}
FIRST, LOWER, HIGHER = ("1e-06", "-"), ("3.33e-07", "-"), ("3e-06", "-")
TRADED = [("3.33e-07", "0.3"), ("1.11e-07", "0.9")]  # the same rewards with smaller rates
GENTLER = [("3.7e-08", "0.9"), ("1.23e-08", "0.9")]


@pytest.mark.parametrize(
    ("losses", "others", "tried", "is_last"),
    [
        # First the rate, in the direction that was better; then beta, traded for the rate.
        ([0.4, 0.5, 0.45, 0.4, 0.4], [{}] * 5, [FIRST, LOWER, HIGHER, *TRADED], True),
        # A trade that is clearly worse is not followed by another.
        ([0.4, 0.5, 0.45, 0.6], [{}] * 4, [FIRST, LOWER, HIGHER, TRADED[0]], True),
        # The best rate exceeds a limit: first its rewards from smaller rates, then the next one's.
        (
            [0.4, 0.5, 0.4, 0.4, 0.55], [BEYOND, {}, {}, {}, {}],
            [FIRST, LOWER, *TRADED, ("1.11e-07", "0.3")], True,
        ),
        # Beyond a limit nothing stronger is tried: beta and rate, then ever smaller rates.
        (
            [0.4, 0.45, 0.41, 0.42, 0.5, 0.6], [BEYOND] * 5 + [{}],
            [FIRST, LOWER, *TRADED, *GENTLER], True,
        ),
        # Lost answers ask for gentler finalists before stronger ones, and for two more than usual.
        (
            [0.4, 0.5, 0.4, 0.4, 0.4, 0.4, 0.5], [LOST] * 7,
            [FIRST, LOWER, *TRADED, *GENTLER, HIGHER], True,
        ),
        # The first of these is clearly worse: the next would be as well, and could not win.
        ([0.4, 0.5, 0.4, 0.4, 0.6, 0.5], [LOST] * 6,
         [FIRST, LOWER, *TRADED, GENTLER[0], HIGHER], False),
        # One that keeps the answers is enough if it is about as good as the best.
        ([0.4, 0.5, 0.4, 0.4, 0.5], [LOST, LOST, LOST, KEPT, LOST],
         [FIRST, LOWER, *TRADED, HIGHER], False),
        ([0.4, 0.5, 0.4, 0.4, 0.4], [LOST, KEPT, LOST, LOST, LOST],
         [FIRST, LOWER, *TRADED, GENTLER[0]], False),
    ],
)  # fmt: skip
def test_which_finalists_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    losses: list[float], others: list[dict[str, Any]], tried: list[Any], is_last: bool,
) -> None:  # fmt: skip
    """With these results, in the order in which `_next_finalist` asks for them."""
    monkeypatch.setattr(tune.Tuning, "beta", lambda _, values: float(values.get("beta", 0.1)))
    chosen: dict[str, tune.Rewards] = {}
    monkeypatch.setattr(tune.Tuning, "_chooses", lambda _, name: chosen[name])
    state = tuning(tmp_path, 0.5)
    asked = []
    for number, (loss, more) in enumerate(zip(losses, others, strict=True)):
        values = state._next_finalist()
        assert values is not None
        asked.append((values[tune.RATE], values.get("beta", "-")))
        state.runs[f"final-{number}"] = {**GOOD, "values": values, "loss": loss, **more}
        chosen[f"final-{number}"] = rewards(*np.linspace(-0.1, 0.1, 100) - loss)
    assert asked == tried
    assert not is_last or state._next_finalist() is None


def test_full_runs_that_cost_little_follow_the_range_test(tmp_path: Path) -> None:
    state = tuning(tmp_path, 0.5)
    state.state["rounds"]["direct"] = 1
    assert (state._next_finalist() or {})[tune.RATE] == "3.33e-07", "a third of its best rate"


class Finalists:
    """Finalists that were measured, as stubs: what `Tuning.result` makes of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tuning = tuning(folder)
        self.rewards: dict[str, tune.Rewards] = {}
        draw = np.random.default_rng(0)
        # Two periods of the noise choose.
        self.margins = draw.normal(1.0, 1.0, 402)
        self.noise = np.tile(draw.normal(0.0, 0.3, 67), 6)
        monkeypatch.setattr(tune.Tuning, "_rewards", self.read)
        monkeypatch.setattr(tune.Tuning, "_next_finalist", lambda _: None)

    def read(self, name: str, *, first: bool = False) -> tune.Rewards:
        return rewards(*np.zeros(402)) if first else self.rewards[name]

    def add(
        self, name: str, better_by: float, lost: int, drift: float, won: int = 0, **more: str
    ) -> None:
        known = 30
        self.tuning.runs[f"final-{name}"] = {
            **GOOD, "values": {tune.RATE: "1e-08"}, "loss": 0.4, "drift": drift,
            "forgetting_asked": 150, "forgetting_known": known, "forgetting_right_before": 90,
            "forgetting_right": 90 - 3 * lost + 3 * won,
            "forgetting_kept": 1 - lost / known, "forgetting_loss": 3.1,
            "forgetting_loss_before": 3.0, **more,
        }  # fmt: skip
        noise = np.roll(self.noise, len(self.rewards))
        self.rewards[f"final-{name}"] = rewards(*(self.margins + noise + better_by))


@pytest.fixture
def finalists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Finalists:
    return Finalists(tmp_path, monkeypatch)


def test_of_equal_finalists_one_that_keeps_the_right_answers_wins(finalists: Finalists) -> None:
    finalists.add("strong", 0.02, lost=3, drift=0.2)
    finalists.add("gentlest", 0.0, lost=2, drift=0.05)
    finalists.add("keeps", 0.0, lost=1, drift=0.1)
    finalists.add("worse", -0.5, lost=0, drift=0.01)
    found = finalists.tuning.result()
    assert found["best"] == "final-keeps"
    assert (
        "final-keeps keeps more right answers than final-strong, whose loss is" in found["reason"]
    )
    assert "right:" not in found["reason"]
    finalists.add("gentler", 0.0, lost=0, drift=0.09)
    assert finalists.tuning.result()["best"] == "final-gentler"
    finalists.add("much better", 0.5, lost=0, drift=0.3)
    assert "; " not in finalists.tuning.result()["reason"]


@pytest.mark.defect("E4")
@pytest.mark.parametrize("spread", cells([2.0], [0.3]))
def test_settings_that_change_nothing_are_rarely_written(spread: float) -> None:
    """At most 5 % of 200 cases; settings that are worse are written less often."""
    for pairs, finalists in ((20, 8), (60, 2), (300, 8)):
        draw, written = np.random.default_rng(pairs), {0.0: 0, 0.02: 0}
        center, prompts = equal_loss(spread), np.arange(pairs, dtype=np.uint64)
        nothing, harm = rewards(*np.zeros(pairs)), {str(i): (0.0, 0.0) for i in range(finalists)}
        for _ in range(200):
            noise = np.sqrt(0.1) * draw.normal(size=(finalists, pairs))
            noise += np.sqrt(0.9) * draw.normal(size=pairs)
            for worse in written:
                margins = center + spread * noise - 4 * worse
                every = {str(i): tune.Rewards(row, prompts) for i, row in enumerate(margins)}
                written[worse] += tune.decide(every, nothing, harm)[2] != tune.NOTHING
        assert written[0.02] <= written[0.0] <= 0.05 * 200, (pairs, finalists)


def equal_loss(spread: float) -> float:
    """Return the mean of normal margins whose mean loss is that of no training."""
    grid = np.linspace(-6, 6, 2001)
    weight = np.exp(-(grid**2) / 2)
    low, high = 0.0, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        loss = weight @ np.logaddexp(0, -(middle + spread * grid)) / weight.sum()
        low, high = (middle, high) if loss > np.log(2) else (low, middle)
    return low


@pytest.mark.defect("E12")
def test_a_gain_is_shown_by_the_surest_finalist() -> None:
    """The lowest loss may come from one that is very wrong about a few pairs."""
    draw = np.random.default_rng(0)
    margins = np.where(draw.random(240) < 0.1, -draw.exponential(6, 240), draw.normal(3, 1, 240))
    finalists = {name: rewards(*(scale * margins)) for name, scale in SCALES.items()}
    nothing, harm = rewards(*np.zeros(240)), {name: (0.0, SCALES[name]) for name in SCALES}
    by_loss = min(finalists, key=lambda name: finalists[name].divided()[0].loss)
    proposed, gain, best = tune.decide(finalists, nothing, harm)
    assert (by_loss, proposed) == ("strong", "gentle")
    assert finalists[by_loss].gain_over(nothing).mean > gain.mean > gain.low > 0
    assert best != tune.NOTHING
    assert tune.decide({"strong": finalists["strong"]}, nothing, harm)[2] == tune.NOTHING


SCALES = {"strong": 0.5, "gentle": 0.05}


@pytest.mark.defect("E12")
@pytest.mark.parametrize(
    ("pairs", "held_out"), [(60, 20), (900, 300), (1000, 300), (1539, 308), (5000, 1000), (9000, 1000)]
)  # fmt: skip
def test_enough_pairs_are_held_out_and_enough_are_left(pairs: int, held_out: int) -> None:
    assert tune.held_out_of(pairs) == held_out


@pytest.mark.defect("E4")
def test_what_was_not_shown_is_said(finalists: Finalists) -> None:
    finalists.margins = np.random.default_rng(1).permutation(np.linspace(-0.97, 1.23, 402))
    finalists.add("small", 0.0, lost=0, drift=0.2)
    found = finalists.tuning.result()
    assert found["best"] == tune.NOTHING
    assert found["reason"].startswith("final-small is not shown to be better: it")
    pairs = int(found["reason"].split("about ")[1].split(" ")[0].replace(",", ""))
    assert 402 < pairs < 10_000
    assert found["reason"].endswith(" held-out pairs would decide")


@pytest.mark.defect("E7")
def test_a_finalist_beyond_a_limit_does_not_win(finalists: Finalists) -> None:
    finalists.add("far", 2.0, lost=0, drift=0.1, problem="eval/drift is 3, above drift_limit (1)")
    assert finalists.tuning.result()["best"] == tune.NOTHING
    finalists.add("near", 0.5, lost=0, drift=0.1)
    assert finalists.tuning.result()["best"] == "final-near"


def test_if_none_keeps_the_right_answers_it_is_said(
    finalists: Finalists, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of those that lost too many, the one that kept most is chosen, with both numbers."""
    finalists.add("strong", 0.05, lost=5, won=7, drift=0.2)
    finalists.add("gentle", 0.0, lost=3, won=5, drift=0.1)
    finalists.add("gentlest", 0.0, lost=4, won=9, drift=0.05)
    finalists.add("broken", 0.0, lost=10, drift=0.01, problem="only 67%")
    found = finalists.tuning.result()
    assert found["best"] == "final-gentle"
    kept = "kept 27 of the 30 answers that the base knew (right: 90 of 150 before, 96 after)"
    assert found["reason"].endswith(f"; it {kept}, and no finalist about as good kept 95%")
    facts = tune.facts(found, "final-broken")
    assert facts == (
        "drift 0.01, loss on neutral text +0.100, kept 20 of the 30 answers that the base knew "
        "(right: 90 of 150 before, 60 after)"
    )
    assert tune.facts({"runs": {"a": {"drift": 0.1}}}, "a") == "drift 0.1, forgetting not measured"
    monkeypatch.setenv("COLUMNS", "250")
    tune.print_result(found)
    printed = capsys.readouterr().out
    assert kept in printed
    assert "0.0000" not in printed, "rewards of 0 have no accuracy"


@pytest.mark.parametrize(("rate", "is_said"), [("1e-09", True), ("1e-07", False)])
def test_gentler_settings_that_did_not_fit_are_named(
    finalists: Finalists, monkeypatch: pytest.MonkeyPatch, rate: str, is_said: bool
) -> None:
    finalists.add("strong", 0.0, lost=3, drift=0.2)
    monkeypatch.setattr(tune.Tuning, "_next_finalist", lambda _: {tune.RATE: rate})
    reason = finalists.tuning.result()["reason"]
    assert reason.endswith("; a larger --budget tries gentler settings") is is_said
