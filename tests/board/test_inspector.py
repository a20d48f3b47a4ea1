"""The pair inspector: its numbers equal a padded computation, and it says what it cannot show."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rather.checkpoint import checkpoint
from rather.config.found import Trust
from rather.config.run_config import DPOConfig
from rather.errors import ConfigError, DataError
from rather.pipeline.pipeline import DPOPipeline
from rather.tools.board import session as sessions
from rather.tools.board.inspector import Inspector, PairQuestion
from rather.tools.board.session import Session
from tests.padded import padded_logps
from tests.tiny import make_config, make_model, until

SIDES = ("chosen", "rejected")


def run(folder: Path, **changes: Any) -> DPOConfig:
    config = make_config(folder, report_html=False, **changes)
    assert DPOPipeline(config).run() == 0
    return config


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def padded_tokens(model: Any, ids: list[int], scored: list[int]) -> list[float]:
    """Log-probs of the scored tokens by Hugging Face's own forward over one row."""
    with torch.no_grad():
        spread = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), dim=-1)
    return [float(spread[place - 1, ids[place]]) for place in scored]


def loaded(folder: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def check(session: Session, models: dict[str, Any], name: str, index: int) -> dict[str, Any]:
    """Compares a shown pair with what the models say of it, token by token and in sum."""
    shown = session.pair(name, index)
    (pair,) = session.dataset(name).take([index])
    sums = {model: padded_logps(found, [pair])[0] for model, found in models.items()}
    for place, side in enumerate(("chosen", "rejected")):
        told = shown["sides"][side]
        ids = np.concatenate([pair.prompt, getattr(pair, side)]).tolist()
        assert len(told["texts"]) == len(ids)
        for model, found in models.items():
            assert told["logps"][model] == pytest.approx(
                padded_tokens(found, ids, told["scored"]), abs=2e-5
            )
            assert told["sums"][model] == pytest.approx(float(sums[model][place]), abs=1e-4)
    return shown


def test_numbers_are_those_of_a_padded_computation(trained: dict[str, DPOConfig]) -> None:
    config = trained["second"]
    files = tree(config.run_dir)
    session = Session(config.run_dir)
    base, model = loaded(str(config.pretrain)), loaded(config.run_dir / "model")
    for name, index in (("train", 0), ("train", 39), ("held-out", 4)):
        with torch.no_grad():
            shown = check(session, {"reference": base, "before": base, "after": model}, name, index)
        ratios = [
            shown["sides"][side]["sums"]["after"] - shown["sides"][side]["sums"]["reference"]
            for side in SIDES
        ]
        assert shown["rewards"]["after"] == pytest.approx(
            [0.3 * ratio for ratio in ratios], abs=1e-6
        )
        assert shown["rewards"]["before"] == [0.0, 0.0]
        assert ratios[0] != ratios[1]
    assert shown["models"]["after"] == "model/ of step 5"
    assert shown["sets"] == {"train": 40, "held-out": 9}
    assert tree(config.run_dir) == files  # nothing was written there


def test_an_unfinished_run_is_shown_from_its_checkpoint(tmp_path: Path) -> None:
    """With an adapter, whose checkpoint holds only that; the exported model merges the same."""
    adapter = {"lora_rank": 2, "init_lora_weights": "gaussian"}
    config = run(tmp_path, max_steps=3, save_steps=2, actor_train__model_args=adapter)
    ended = Session(config.run_dir).pair("train", 1)
    (config.run_dir / ".finished").unlink()
    session = Session(config.run_dir)
    shown = session.pair("train", 1)
    assert shown["models"] == {
        "reference": config.pretrain, "before": "the reference itself", "after": "checkpoint-3"
    }  # fmt: skip
    for side in SIDES:
        assert shown["sides"][side]["sums"] == pytest.approx(ended["sides"][side]["sums"], abs=1e-4)
        assert shown["sides"][side]["sums"]["after"] != shown["sides"][side]["sums"]["before"]
    with torch.no_grad():
        base, merged = loaded(str(config.pretrain)), loaded(config.run_dir / "model")
        check(session, {"reference": base, "before": base, "after": merged}, "held-out", 0)


def test_a_separate_reference_and_one_that_moves(tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=5)
    config = run(
        tmp_path,
        max_steps=1,
        save_steps=1,
        reference__model_args={"model_name_or_path": str(other)},
    )
    base = loaded(tmp_path / "base")
    models = {"reference": loaded(other), "before": base, "after": loaded(config.run_dir / "model")}
    with torch.no_grad():
        shown = check(Session(config.run_dir), models, "train", 3)
    assert shown["rewards"]["before"] != [0.0, 0.0]
    assert shown["models"]["before"] == str(tmp_path / "base")

    moving = run(
        tmp_path,
        exp_name="moving",
        max_steps=4,
        save_steps=2,
        sync_ref_model=True,
        ref_model_sync_steps=2,
    )
    newest = checkpoint.newest_good(moving.run_dir)
    assert newest
    moved = loaded(tmp_path / "base")
    names = {
        name.removeprefix("causal_lm."): tensor
        for name, tensor in newest.tensors("reference").items()
    }
    moved.load_state_dict(names, strict=False)
    models = {"reference": moved, "before": base, "after": loaded(moving.run_dir / "model")}
    with torch.no_grad():
        shown = check(Session(moving.run_dir), models, "train", 2)
    assert shown["models"]["reference"].endswith("moved up to step 4")
    assert (
        shown["sides"]["chosen"]["sums"]["reference"] != shown["sides"]["chosen"]["sums"]["before"]
    )


def test_a_loss_without_a_reference_is_compared_with_its_start(tmp_path: Path) -> None:
    config = run(tmp_path, pref_loss="simpo", beta=2.0, max_steps=2, save_steps=None)
    base, model = loaded(str(config.pretrain)), loaded(config.run_dir / "model")
    with torch.no_grad():
        shown = check(Session(config.run_dir), {"reference": base, "after": model}, "train", 0)
    for side, place in (("chosen", 0), ("rejected", 1)):
        told = shown["sides"][side]
        for when in ("before", "after"):  # simpo rewards the mean log-prob
            mean = sum(told["logps"][when]) / len(told["scored"])
            assert shown["rewards"][when][place] == pytest.approx(2.0 * mean, rel=1e-5)


def test_single_answers_have_their_label_and_reward_models_are_refused(tmp_path: Path) -> None:
    session = Session(run(tmp_path, task="unpaired", max_steps=1).run_dir)
    for index, label in ((0, "desirable"), (1, "undesirable")):
        found = session.pair("train", index)
        (side,) = found["sides"].items()
        assert side[0] == label
        (reward,) = found["rewards"]["after"]
        sums = side[1]["sums"]
        assert reward == pytest.approx(0.1 * (sums["after"] - sums["reference"]), abs=1e-9)
    session = Session(run(tmp_path, exp_name="scores", task="reward", max_steps=1).run_dir)
    with pytest.raises(ConfigError, match="see its scores with `rather score`"):
        session.pair("train", 0)


def test_search(trained: dict[str, DPOConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(trained["first"].run_dir)
    held_out = session.dataset("held-out").take(range(9))
    texts = [" ".join(map(session.decode, (p.prompt, p.chosen, p.rejected))) for p in held_out]
    word = texts[7].split()[3]
    found = session.search("held-out", word.upper(), 0)
    expected = [index for index, text in enumerate(texts) if word in text]
    assert [hit["index"] for hit in found["hits"]] == expected
    assert 0 < len(expected) < 9
    every = session.search("train", "", 0)
    assert [hit["index"] for hit in every["hits"]] == list(range(20))
    assert every["next"] == 20
    none = session.search("train", "no such words", 0)
    assert none == {"sets": {"train": 40, "held-out": 9}, "hits": [], "next": None, "total": None}
    everything = list(range(39, -1, -1))
    monkeypatch.setattr(Session, "_pairs_of", lambda *_: everything)
    page = session.search("train", "likely_flipped", 20)
    assert [hit["index"] for hit in page["hits"]] == everything[20:]
    assert (page["total"], page["next"]) == (40, None)
    monkeypatch.setattr(sessions, "SEARCH_SECONDS", -1.0)
    slow = session.search("train", "no such words", 5)
    assert (slow["hits"], slow["next"]) == ([], 6)


def test_errors_of_a_session(
    trained: dict[str, DPOConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(trained["first"].run_dir)
    with pytest.raises(DataError, match="'held-out' has 9 pairs, counted from 0"):
        session.pair("held-out", 9)
    with pytest.raises(DataError, match="no set 'x'; it has train, held-out"):
        session.pair("x", 0)
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        Session(tmp_path)
    text = (trained["first"].run_dir / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(
        ConfigError, match="no trained weights yet, neither a checkpoint nor model/"
    ):
        Session(tmp_path).pair("train", 0)
    (tmp_path / "config.yaml").write_text(
        text.replace("trust_remote_code: false", "trust_remote_code: true")
    )
    trusted = Session(tmp_path, Trust(remote_code=False, paths=True))
    assert not trusted.config.actor_train.model_args.trust_remote_code
    monkeypatch.setattr(sessions, "free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match=r"2 models of .* need 0\.0 GiB of memory"):
        session.pair("train", 0)


# --- the thread ---


class Fake:
    """A session that computes when it is let to."""

    def __init__(self, run_dir: Path, events: list[str]) -> None:
        self.run_dir, self.events, self.may = run_dir, events, Event()
        self.doing = "opening the run"

    def pair(self, dataset: str, index: int) -> dict[str, Any]:
        self.events.append(f"{self.run_dir} {index} begins")
        assert self.may.wait(60)
        if index == 13:
            raise RuntimeError("a library's own hf_abcdefghijklmnopqrstuvwx")
        return {"index": index}

    def close(self) -> None:
        self.events.append(f"{self.run_dir} closed")


def inspector_with(events: list[str], fakes: dict[Path, Fake]) -> Inspector:
    """An inspector whose sessions are fakes, which it adds to `fakes` by their runs."""

    class Opened(Inspector):
        def open_session(self, run_dir: Path) -> Any:
            fakes[run_dir] = Fake(run_dir, events)
            return fakes[run_dir]

    return Opened()


def test_one_question_and_one_run_at_a_time() -> None:
    events: list[str] = []
    made: dict[Path, Fake] = {}
    inspector = inspector_with(events, made)
    a, b = Path("a"), Path("b")
    first, other, failing = (
        PairQuestion(run, "train", place) for run, place in ((a, 0), (b, 1), (a, 13))
    )
    assert inspector.ask(first) == {"state": "working", "doing": "opening the run"}
    until(lambda: events == ["a 0 begins"])
    for question in (other, failing):
        assert inspector.ask(question) == {"state": "working", "doing": "waiting for its turn"}
    made[a].may.set()
    until(lambda: inspector.ask(first)["state"] == "done")
    assert events == ["a 0 begins"]  # nobody asked for the others again, so they cost nothing
    answers = []

    def is_refused() -> bool:
        answers.append(inspector.ask(failing))
        return bool(answers[-1]["state"] == "refused")

    for _ in range(2):  # a refused question is tried again
        until(is_refused)
    assert answers[-1]["why"] == "RuntimeError: a library's own [hidden]"
    inspector.ask(other)
    until(lambda: b in made)
    made[b].may.set()
    until(lambda: inspector.ask(other)["state"] == "done")
    assert events == ["a 0 begins", "a 13 begins", "a 13 begins", "a closed", "b 1 begins"]


def test_a_run_that_saves_while_its_models_load_is_answered(tmp_path: Path) -> None:
    """With the weights that were there; the next ones are for a later question."""
    events: list[str] = []
    fakes: dict[Path, Fake] = {}
    inspector = inspector_with(events, fakes)
    question = PairQuestion(tmp_path, "train", 0)
    inspector.ask(question)
    until(lambda: len(events) == 1)
    (tmp_path / "LATEST").write_text("checkpoint-2\n")
    assert inspector.ask(question)["state"] == "working"
    fakes[tmp_path].may.set()
    until(lambda: inspector.ask(question)["state"] == "done")
    assert len(events) == 1
    assert inspector.ask(question)["state"] == "working"
    until(lambda: len(events) == 3)
    fakes[tmp_path].may.set()
    until(lambda: inspector.ask(question)["state"] == "done")
    assert events[1:] == [f"{tmp_path} closed", f"{tmp_path} 0 begins"]
