"""Findings about pairs: hand-made sets with a known number of each problem."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from rather.data import cache
from rather.data.findings import BARS, _length_bias, bar_labels, beyond_positions
from rather.data.prepare import Prepared, prepare
from rather.data.show import print_report, token_texts
from rather.data.template import TEMPLATES
from rather.tools.report.sections import data_page
from tests.data.conftest import Prepare, Write, _save, _tokenizer, counts, data_config
from tests.data.files import write_arrow
from tests.tiny import write_rows

Find = Callable[..., dict[str, dict[str, Any]]]

SAME_PAIRS, SWAPPED, BOTH_WAYS = 3, 2, 3
LEAKED, FRESH = 3, 7
DRAW = random.Random(0)
WORDS = ["".join(DRAW.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(400)]


def text(words: int = 40) -> str:
    return " ".join(DRAW.choices(WORDS, k=words))


def fresh() -> dict[str, Any]:
    return {"prompt": text(), "chosen": text(), "rejected": text()}


def swapped(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "chosen": row["rejected"], "rejected": row["chosen"]}


def hand_made() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and evaluation rows.

    All that is repeated comes after the thirty rows that it repeats.
    """
    base = [fresh() for _ in range(30)]
    rows = list(base)
    for i in range(SAME_PAIRS):
        rows.append({key: f"  {value.upper()} \n" for key, value in base[i].items()})
    for i in range(SWAPPED):
        rows.append(swapped(base[14 + i]))
    for i in range(BOTH_WAYS):
        rows.append({**base[18 + i], "chosen": text(), "rejected": base[18 + i]["chosen"]})
    rows.append({"prompt": text(), "responses": [text(), text(), text()], "ranks": [1, 2, 3]})
    held = [{**fresh(), "prompt": base[i]["prompt"].title()} for i in range(LEAKED - 1)]
    held += [base[22]]
    return rows, held + [fresh() for _ in range(FRESH)]


ROWS, HELD = hand_made()


@pytest.fixture(scope="module")
def flawed(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("flawed")
    train, held = write_rows(folder / "train", ROWS), write_rows(folder / "held", HELD)
    settings = {"validation": {"file_name": {"held": held}}, "sequence_length": 2048}
    config = data_config(folder, folders["chat"], train, **settings)
    return prepare(config, console=Console(file=io.StringIO()))


@pytest.fixture
def find(prepare_pairs: Prepare) -> Find:
    """Prepare training rows; return what is found, by the names of the findings."""

    def by_name(rows: Any, tokenizer: str = "chat", **settings: Any) -> dict[str, dict[str, Any]]:
        made = prepare_pairs(rows, tokenizer, **{"sequence_length": 2048, **settings})
        return {one["name"]: one for one in look_of(made)["findings"]}

    return by_name


def look_of(made: Prepared) -> dict[str, Any]:
    found: dict[str, Any] = made.report["look"]
    return found


def findings(made: Prepared) -> dict[str, dict[str, Any]]:
    return {f"{one['name']} {one['set']}": one for one in look_of(made)["findings"]}


def test_the_number_of_each_problem_is_exact(flawed: Prepared) -> None:
    train = look_of(flawed)["sets"]["train"]
    assert train["pairs"] == len(ROWS) + 2  # a ranking of three gives three pairs
    assert train["prompts"] == 30 + 1
    assert counts(flawed.report["train"], "warned") == {
        "duplicate_pair": SAME_PAIRS,
        "contradictory_pair": 2 * SWAPPED,
    }
    assert counts(flawed.report["evals"]["held"], "warned") == {
        "in_training_data": 1,
        "prompt_in_training_data": LEAKED,
    }


def test_every_place_is_listed(flawed: Prepared) -> None:
    places = {
        kind: next(iter(each["places"].values()))
        for entry in (flawed.report["train"], flawed.report["evals"]["held"])
        for kind, each in entry["warned"].items()
    }
    assert places["duplicate_pair"] == [31 + i for i in range(SAME_PAIRS)]
    assert places["contradictory_pair"] == [15, 16, 34, 35]
    assert places["in_training_data"] == [3]
    assert places["prompt_in_training_data"] == [1, 2, 3]


def test_findings_say_the_number_and_what_to_do(flawed: Prepared) -> None:
    found = findings(flawed)
    leaked = "30 % of the prompts of eval held are also in train, and so are 1 of its 10 pairs"
    assert leaked in found["leakage eval held"]["text"]
    assert found["leakage eval held"]["severity"] == "serious"
    assert found["contradictory_pairs train"]["number"] == round(2 * SWAPPED / (len(ROWS) + 2), 4)
    assert "duplicate_pairs train" in found
    assert "length_bias train" not in found
    assert all(one["advice"].endswith(".") for one in found.values())
    severities = [one["severity"] for one in look_of(flawed)["findings"]]
    assert severities == sorted(severities, key=["serious", "warning", "info"].index)


def test_a_healthy_set_has_no_findings(prepare_pairs: Prepare, write: Write) -> None:
    held = write([fresh() for _ in range(10)], "held.jsonl")
    rows = [fresh() for _ in range(60)]
    made = prepare_pairs(rows, sequence_length=1024, validation={"file_name": held})
    assert look_of(made)["findings"] == []
    assert "No problems found." in data_page(made.report, "run")


def test_tokens_of_an_older_cache_are_made_again(prepare_pairs: Prepare, write: Write) -> None:
    rows = write(ROWS[:5])
    file = prepare_pairs(rows, sequence_length=2048).train.file.path
    older = pa.ipc.open_file(str(file)).read_all().drop_columns(["normal_prompt"])
    file.unlink()
    write_arrow(file, older)
    checked = file.with_suffix(".json")
    report = json.loads(checked.read_text())["report"]
    checked.write_text(json.dumps({"sha256": cache._sha(file, report), "report": report}))
    made = prepare_pairs(rows, sequence_length=2048)
    assert look_of(made)["sets"]["train"]["pairs"] == 5


def test_answers_of_one_length_have_no_length_bias() -> None:
    for label in (np.array([1, 0, 1, 0]), np.ones(4)):
        assert _length_bias(np.full(4, 7), label)["correlation"] == 0


def test_length_bias_by_hand(prepare_pairs: Prepare) -> None:
    rows = [
        {"prompt": f"{i} {text(5)}", "chosen": text(30), "rejected": text(6)} for i in range(40)
    ]
    for row in rows[:8]:
        rows.append(swapped(row) | {"prompt": f"again {row['prompt']}"})
    made = prepare_pairs(rows, sequence_length=1024)
    bias = look_of(made)["sets"]["train"]["length_bias"]
    chosen, rejected = (made.train.lengths(side).astype(float) for side in ("chosen", "rejected"))
    assert bias["longer_wins"] == bias["chosen_longer"] == round(40 / 48, 4)
    assert bias["correlation"] == round(
        float(np.corrcoef([*chosen, *rejected], [1] * 48 + [0] * 48)[0, 1]), 4
    )
    assert bias["difference"] == float(np.median(chosen - rejected))
    found = findings(made)["length_bias train"]
    assert found["severity"] == "warning"
    assert 'accuracy of "pick the longer answer": 83 %' in found["text"]


def test_bars_hold_every_pair(flawed: Prepared) -> None:
    lengths = look_of(flawed)["sets"]["train"]["lengths"]
    for part, spread in lengths.items():
        n = flawed.train.lengths(part)
        width = spread["edges"][1] - spread["edges"][0]
        by_hand = [int(((n >= edge) & (n < edge + width)).sum()) for edge in spread["edges"][:-1]]
        assert spread["counts"] == [*by_hand, int((n >= spread["edges"][-1]).sum())]
        assert spread["longest"] == n.max()
        assert len(spread["counts"]) == BARS
    assert lengths["chosen"]["edges"][1] == lengths["rejected"]["edges"][1]
    assert bar_labels({"edges": [0, 50, 100]}) == ["0-49", "50-99", "100 and more"]
    assert bar_labels({"edges": [0, 1]}) == ["0", "1 and more"]


def test_truncation_is_reported(prepare_pairs: Prepare, find: Find) -> None:
    rows = [fresh() for _ in range(8)] + [{**fresh(), "chosen": text(300)} for _ in range(2)]
    cut = find(rows, sequence_length=900, data={"overlong": "truncate_response"})
    assert cut["truncation"]["text"] == (
        "20 % of the pairs of train are cut to sequence_length: 0 lose the beginning of their "
        "prompt, 2 the end of an answer."
    )
    made = prepare_pairs(rows, sequence_length=900)
    assert made.report["train"]["dropped"]["too_long"]["count"] == 2


# --- signs of wrong labels, weights, positions and templates ---


def answers(count: int, **values: Any) -> list[dict[str, Any]]:
    return [{"prompt": text(6), "completion": text(8), **values} for _ in range(count)]


def weighted(*weights: float) -> list[dict[str, Any]]:
    return [{**fresh(), "weight": weight} for weight in weights]


def sorry(side: str, count: int) -> list[dict[str, Any]]:
    """Ten pairs; so many of them have the same answer, but for its spaces."""
    rows = [{**fresh(), side: f" So{' ' * i} sorry."} for i in range(1, count + 1)]
    return rows + [fresh() for _ in range(10 - count)]


REGRESSION = {"task": "reward", "pref_loss": "regression"}
ONE_BETTER = [*answers(3, score=2.5), *answers(1, score=2.6)]
ONE_HUGE = [*answers(3, score=1500.0), *answers(1, score=-1e30)]


@pytest.mark.defect("A8", "X6")
@pytest.mark.parametrize(
    ("name", "rows", "settings", "number"),
    [
        ("one_score", answers(4, score=2.5), REGRESSION, 1),
        ("one_score", ONE_BETTER, REGRESSION, None),
        ("huge_scores", ONE_HUGE, REGRESSION, 0.25),
        ("huge_scores", ONE_HUGE[:3], REGRESSION, None),
        ("tiny_beta", ROWS[:3], {"beta": 1e-9}, 1),
        ("tiny_beta", ROWS[:3], {"beta": 0.001}, None),
        ("tiny_weights", weighted(1e-300, 1, 1, 1), {}, 0.25),
        ("tiny_weights", weighted(0, 1, 1, 1), {}, None),
        ("unequal_weights", weighted(1e6, *[1e-6] * 63), {}, round(1 - 1 / 64, 4)),
        ("unequal_weights", weighted(*[1e300] * 2, *[1] * 38), {}, 0.95),
        ("unequal_weights", weighted(0, 0, 5), {}, None),
        ("unequal_weights", weighted(*range(40)), {}, None),
        ("same_answers", sorry("chosen", 10), {}, 1),
        ("same_answers", sorry("rejected", 10), {}, 1),
        ("same_answers", sorry("chosen", 8), {}, None),
        ("same_answers", sorry("rejected", 8), {}, None),
    ],
)
def test_labels_scores_weights_and_beta(
    find: Find, name: str, rows: Any, settings: dict[str, Any], number: float | None
) -> None:
    found = find(rows, **settings)
    if number is None:
        assert name not in found
    else:
        severity = "warning" if name == "tiny_weights" else "serious"
        assert (found[name]["number"], found[name]["severity"]) == (number, severity)


@pytest.mark.defect("X6")
@pytest.mark.parametrize(
    ("loss", "label", "word"),
    [("kto", True, "good"), ("bco", False, "bad"), ("apo_zero_unpaired", True, "good")],
)
def test_labels_that_are_all_the_same(find: Find, loss: str, label: bool, word: str) -> None:
    one = find(answers(4, label=label), task="unpaired", pref_loss=loss)["one_label"]
    assert one["severity"] == "serious"
    assert one["text"].startswith(f"all 4 answers of train are {word}: ")


@pytest.mark.defect("A8")
@pytest.mark.parametrize("eos", ["<unk>", None])
def test_an_end_that_cannot_be_learned(
    find: Find, write: Write, tmp_path: Path, eos: str | None
) -> None:
    """EOS for unknown words, a tokenizer without EOS, and a template that ends no turn."""
    endless = _save(tmp_path / "endless", _tokenizer(False), eos_token=eos)
    turns = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    for settings in ({"pretrain": endless}, {"data": {"template": write(turns, "open.jinja")}}):
        assert find(ROWS[:3], **settings)["no_eos"]["number"] == 1
    assert "no_eos" not in find(ROWS[:3])


@pytest.mark.defect("A8", "N4")
@pytest.mark.parametrize("unigram", [False, True])
def test_unknown_tokens_are_counted(find: Find, tmp_path: Path, unigram: bool) -> None:
    words = ["<unk>", "</s>", "a", "b", "c"]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    if unigram:
        model = models.Unigram([(word, -1.0) for word in words], unk_id=0)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    of_words = {"pretrain": _save(tmp_path / "words", tokenizer, eos_token="</s>")}
    row = {"prompt": "a b", "chosen": " ü ö", "rejected": " c"}
    known = {"prompt": "a b", "chosen": " b" * 149, "rejected": " c" * 149}
    assert find([row], **of_words)["unknown_tokens"]["number"] == 0.4
    few = find([known, known, known, row], **of_words)["unknown_tokens"]
    assert (few["number"], few["severity"]) == (round(2 / 905, 4), "warning")
    assert "unknown_tokens" not in find([row]), "a tokenizer of bytes"


@pytest.mark.defect("X6")
def test_sequences_beyond_the_positions_of_a_model(flawed: Prepared) -> None:
    lengths = flawed.train.lengths("prompt") + np.maximum(
        flawed.train.lengths("chosen"), flawed.train.lengths("rejected")
    )
    longest = int(lengths.max())
    sets = {"train": flawed.train}
    assert list(beyond_positions(sets, longest)) == []
    [one] = beyond_positions(sets, longest - 1)
    assert one["number"] == round(float((lengths == longest).mean()), 4)
    [one] = beyond_positions(sets, 10)
    assert (one["severity"], one["number"]) == ("serious", 1.0)
    assert f"(up to {longest})" in one["text"]


@pytest.mark.defect("U3")
def test_a_template_of_another_model(find: Find, write: Write) -> None:
    """It drops the prompt and ends answers with a mark that this tokenizer does not know."""
    text = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|stop|>{% endfor %}"
    found = find(ROWS[:3], data={"template": write(text, "other.jinja")})
    for name in ("prompt_lost", "end_as_text"):
        assert (found[name]["severity"], found[name]["number"]) == ("serious", 1.0)


BOS = "training has '<s>' where chat template chatml gives ''"
LINE_END = "training has '\\n' where the tokenizer gives ''"


@pytest.mark.parametrize(
    ("tokenizer", "data", "difference"),
    [
        ("chat", {}, None),
        ("chat", {"template": "none"}, "the tokenizer's own chat template"),
        ("plain", {"template": "chatml"}, BOS),
        ("plain", {"separator": "\n"}, LINE_END),
        ("plain", {"separator": " "}, None),
    ],
)
def test_a_prompt_as_at_inference(
    find: Find, tokenizer: str, data: dict[str, str], difference: str | None
) -> None:
    found = find(ROWS[:3], tokenizer, data=data)
    if difference is None:
        assert "prompt_difference" not in found
    else:
        finding = found["prompt_difference"]
        assert (finding["severity"], finding["number"]) == ("serious", 1.0)
        assert difference in finding["text"]


def test_a_template_bomb_is_not_rendered_for_plain_text(
    prepare_pairs: Prepare, tmp_path: Path
) -> None:
    """Plain text does not need the tokenizer's template: one that never ends costs nothing."""
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    bad = _save(tmp_path / "bad", _tokenizer(False), eos_token="</s>", chat_template=endless)
    made = prepare_pairs(ROWS[:3], sequence_length=1024, data={"template": "none"}, pretrain=bad)
    assert len(made.train) == 3


def test_the_terminal_shows_findings_and_tokens_that_differ(
    flawed: Prepared, prepare_pairs: Prepare, console: Console
) -> None:
    print_report(flawed.report, console)
    data = {"template": "chatml"}
    print_report(prepare_pairs(ROWS[:3], "plain", sequence_length=1024, data=data).report, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "serious: 30 % of the prompts of eval held are also in train" in shown
    assert "100 % of the pairs of train (3) have another prompt than at inference" in shown


@pytest.mark.parametrize("written", ["On the top shelf.", "naïve 日本語 🍞 bread", "a\n\nb  c"])
def test_texts_of_tokens_join_to_the_text(tokenizer: Any, written: str) -> None:
    ids = tokenizer(f"<|im_start|>{written * 20}<|im_end|>").input_ids
    texts = token_texts(ids, tokenizer)
    assert len(texts) == len(ids)
    assert "".join(texts) == f"<|im_start|>{written * 20}<|im_end|>"


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    class Bytes:
        @staticmethod
        def decode(ids: list[int], **_: object) -> str:
            return bytes(ids).decode("utf-8", "replace")

    written = "naïve 😀 — 漢字 end" * 4
    texts = token_texts(list(written.encode()), Bytes())
    assert "".join(texts) == written
    assert len(texts) == len(written.encode())


def test_real_pairs(team_data: Path, tmp_path: Path, console: Console) -> None:
    """A known length bias is found; prompts are as at inference, and whole prompts are held out."""
    pairs = team_data / "pairs/orca_dpo_validation.jsonl.gz"
    model = team_data / "tokenizers/smollm2"
    config = data_config(tmp_path, model, pairs, validation={"split": 0.1})
    made = prepare(config, console=console)
    told = findings(made)["length_bias train"]
    assert told["severity"] == "warning"
    assert told["number"] > 0.8
    assert "pick the shorter answer" in told["text"]
    assert "prompt_differs" not in made.report["train"]["warned"]
    assert "warned" not in made.report["evals"][""]
    by_tokens = {pair.prompt.tobytes() for pair in made.train.take(range(len(made.train)))}
    assert look_of(made)["sets"]["train"]["prompts"] == len(by_tokens)


def test_inference_prompts_are_those_of_transformers(
    prepare_pairs: Prepare, tokenizer: Any
) -> None:
    """The prompt is rendered by Rather in a child process; transformers gives the same."""
    made = prepare_pairs(ROWS[:4], sequence_length=1024, data={"template": "qwen3"})
    qwen3 = {"chat_template": TEMPLATES["qwen3"], "add_generation_prompt": True}
    for row, pair in zip(ROWS[:4], made.train.take(range(4)), strict=True):
        turns = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(turns, return_dict=False, **qwen3)
        assert pair.prompt.tolist() == ids
    assert "prompt_differs" not in made.report["train"]["warned"]
