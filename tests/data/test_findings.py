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

from rather.config.run_config import DPOConfig
from rather.data import cache
from rather.data.findings import BARS, _length_bias, bar_labels, beyond_positions
from rather.data.prepare import Prepared, prepare
from rather.data.show import print_report, token_texts
from rather.data.template import TEMPLATES, load_tokenizer
from rather.tools.report.sections import data_page
from tests.data.conftest import _save, _tokenizer

Config = Callable[..., DPOConfig]
Write = Callable[..., Path]

SAME_PAIRS, SWAPPED, BOTH_WAYS = 3, 2, 3
LEAKED, FRESH = 3, 7
DRAW = random.Random(0)
WORDS = ["".join(DRAW.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(400)]


def text(words: int = 40) -> str:
    return " ".join(DRAW.choices(WORDS, k=words))


def fresh() -> dict[str, Any]:
    return {"prompt": text(), "chosen": text(), "rejected": text()}


def hand_made() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and evaluation rows.

    All that is repeated comes after the thirty rows that it repeats.
    """
    base = [fresh() for _ in range(30)]
    rows = list(base)
    for i in range(SAME_PAIRS):
        rows.append({key: f"  {value.upper()} \n" for key, value in base[i].items()})
    for i in range(SWAPPED):
        one = base[14 + i]
        rows.append({**one, "chosen": one["rejected"], "rejected": one["chosen"]})
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
    files = {}
    for name, rows in (("train", ROWS), ("held", HELD)):
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DPOConfig.model_validate(
        {
            "output_dir": str(folder / "out"),
            "pretrain": str(folders["chat"]),
            "actor_train": {"data_args": {"file_name": str(files["train"])}},
            "validation": {"data_args": {"file_name": {"held": str(files["held"])}}},
            "sequence_length": 2048,
        }
    )
    return prepare(config, console=Console(file=io.StringIO()))


def look_of(made: Prepared) -> dict[str, Any]:
    found: dict[str, Any] = made.report["look"]
    return found


def findings(made: Prepared) -> dict[str, dict[str, Any]]:
    return {f"{one['name']} {one['set']}": one for one in look_of(made)["findings"]}


def warned(entry: dict[str, Any]) -> dict[str, int]:
    return {kind: each["count"] for kind, each in entry["warned"].items()}


def test_the_number_of_each_problem_is_exact(flawed: Prepared) -> None:
    train = look_of(flawed)["sets"]["train"]
    assert train["pairs"] == len(ROWS) + 2  # a ranking of three gives three pairs
    assert train["prompts"] == 30 + 1
    assert warned(flawed.report["train"]) == {
        "duplicate_pair": SAME_PAIRS,
        "contradictory_pair": 2 * SWAPPED,
    }
    assert warned(flawed.report["evals"]["held"]) == {
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


def test_a_healthy_set_has_no_findings(config: Config, write: Write, console: Console) -> None:
    held = write([fresh() for _ in range(10)], "held.jsonl")
    made = prepare(
        config(
            write([fresh() for _ in range(60)]),
            sequence_length=1024,
            validation={"file_name": str(held)},
        ),
        console=console,
    )
    assert look_of(made)["findings"] == []
    assert "No problems found." in data_page(made.report, "run")


def test_tokens_of_an_older_cache_are_made_again(
    config: Config, write: Write, console: Console
) -> None:
    settings = config(write(ROWS[:5]), sequence_length=2048)
    file = prepare(settings, console=console).train.file.path
    older = pa.ipc.open_file(str(file)).read_all().drop_columns(["normal_prompt"])
    file.unlink()
    with pa.ipc.new_file(str(file), older.schema) as writer:
        writer.write_table(older)
    report = json.loads(file.with_suffix(".json").read_text())["report"]
    file.with_suffix(".json").write_text(
        json.dumps({"sha256": cache._sha(file, report), "report": report})
    )
    assert look_of(prepare(settings, console=console))["sets"]["train"]["pairs"] == 5


def test_answers_of_one_length_have_no_length_bias() -> None:
    for label in (np.array([1, 0, 1, 0]), np.ones(4)):
        assert _length_bias(np.full(4, 7), label)["correlation"] == 0


def test_length_bias_by_hand(config: Config, write: Write, console: Console) -> None:
    rows = [
        {"prompt": f"{i} {text(5)}", "chosen": text(30), "rejected": text(6)} for i in range(40)
    ]
    rows += [{**one, "prompt": f"again {one['prompt']}", "chosen": one["rejected"], "rejected": one["chosen"]}
             for one in rows[:8]]  # fmt: skip
    made = prepare(config(write(rows), sequence_length=1024), console=console)
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


def test_truncation_is_reported(config: Config, write: Write, console: Console) -> None:
    rows = [fresh() for _ in range(8)] + [{**fresh(), "chosen": text(300)} for _ in range(2)]
    cut = config(write(rows), sequence_length=900, data={"overlong": "truncate_response"})
    made = prepare(cut, console=console)
    assert findings(made)["truncation train"]["text"] == (
        "20 % of the pairs of train are cut to sequence_length: 0 lose the beginning of their "
        "prompt, 2 the end of an answer."
    )
    made = prepare(config(write(rows), sequence_length=900), console=console)
    assert made.report["train"]["dropped"]["too_long"]["count"] == 2


# --- signs of wrong labels, weights, positions and templates ---


def answers(count: int, **values: Any) -> list[dict[str, Any]]:
    return [{"prompt": text(6), "completion": text(8), **values} for _ in range(count)]


@pytest.mark.defect("X6")
@pytest.mark.parametrize(
    ("loss", "label", "word"),
    [("kto", True, "good"), ("bco", False, "bad"), ("apo_zero_unpaired", True, "good")],
)
def test_labels_that_are_all_the_same(
    config: Config, write: Write, console: Console, loss: str, label: bool, word: str
) -> None:
    settings = {"task": "unpaired", "pref_loss": loss}
    same = config(write(answers(4, label=label)), **settings)
    one = findings(prepare(same, console=console))["one_label train"]
    assert one["severity"] == "serious"
    assert one["text"].startswith(f"all 4 answers of train are {word}: ")


@pytest.mark.defect("X6")
def test_one_constant_score(config: Config, write: Write, console: Console) -> None:
    settings = {"task": "reward", "pref_loss": "regression"}
    same = config(write(answers(4, score=2.5)), **settings)
    one = findings(prepare(same, console=console))["one_score train"]
    assert (one["severity"], "score, 2.5:" in one["text"]) == ("serious", True)
    rows = [*answers(3, score=2.5), *answers(1, score=2.6)]
    assert not findings(prepare(config(write(rows), **settings), console=console))


@pytest.mark.defect("X6")
def test_weights_that_say_nothing(config: Config, write: Write, console: Console) -> None:
    rows = [{**fresh(), "weight": 1e-300}, *({**fresh(), "weight": 1.0} for _ in range(3))]
    one = findings(prepare(config(write(rows), sequence_length=900), console=console))
    assert one["tiny_weights train"]["severity"] == "warning"
    assert "25 % of the pairs" in one["tiny_weights train"]["text"]
    rows[0]["weight"] = 0.0  # left out on purpose
    assert not findings(prepare(config(write(rows), sequence_length=900), console=console))


@pytest.fixture
def number_of(config: Config, write: Write, console: Console) -> Callable[..., float | None]:
    """Return the number of a finding about training rows; None if it is not there."""

    def number(name: str, rows: list[dict[str, Any]], **settings: Any) -> float | None:
        made = prepare(config(write(rows), **{"sequence_length": 900, **settings}), console=console)
        finding = findings(made).get(f"{name} train")
        assert finding is None or (finding["severity"] == "serious") == (finding["number"] > 0.01)
        return finding and finding["number"]

    return number


@pytest.mark.defect("A8")
@pytest.mark.parametrize("eos", ["<unk>", None])
def test_an_end_that_cannot_be_learned(
    number_of: Any, write: Write, tmp_path: Path, eos: str | None
) -> None:
    """EOS for unknown words, a tokenizer without EOS, and a template that ends no turn."""
    endless = _save(tmp_path / "endless", _tokenizer(False), eos_token=eos)
    assert number_of("no_eos", ROWS[:3], pretrain=str(endless)) == 1
    turns = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    open_end = {"template": str(write(turns, "open.jinja"))}
    assert number_of("no_eos", ROWS[:3], data=open_end) == 1
    assert number_of("no_eos", ROWS[:3]) is None


@pytest.mark.defect("A8", "N4")
@pytest.mark.parametrize("unigram", [False, True])
def test_unknown_tokens_are_counted(number_of: Any, tmp_path: Path, unigram: bool) -> None:
    words = ["<unk>", "</s>", "a", "b", "c"]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    if unigram:
        model = models.Unigram([(word, -1.0) for word in words], unk_id=0)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    of_words = {"pretrain": str(_save(tmp_path / "words", tokenizer, eos_token="</s>"))}
    row = {"prompt": "a b", "chosen": " ü ö", "rejected": " c"}
    assert number_of("unknown_tokens", [row], **of_words) == 0.4
    known = {"prompt": "a b", "chosen": " b" * 149, "rejected": " c" * 149}
    rows = [known, known, known, row]
    assert number_of("unknown_tokens", rows, **of_words) == round(2 / 905, 4)
    assert number_of("unknown_tokens", [row]) is None, "a tokenizer of bytes"


@pytest.mark.defect("A8")
def test_weights_that_leave_few_pairs(number_of: Any) -> None:
    for weights, number in (
        ([1e6] + [1e-6] * 63, round(1 - 1 / 64, 4)),
        ([1e300] * 2 + [1.0] * 38, 0.95),
        ([0.0, 0.0, 5.0], None),
        ([0.1 * i for i in range(40)], None),
    ):
        rows = [{**fresh(), "weight": weight} for weight in weights]
        assert number_of("unequal_weights", rows) == number


@pytest.mark.defect("A8")
@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_answers_that_are_all_the_same(number_of: Any, side: str) -> None:
    rows = [{**fresh(), side: f" So{' ' * i} sorry."} for i in range(1, 11)]
    assert number_of("same_answers", rows) == 1
    rows[0][side] = rows[1][side] = text()
    assert number_of("same_answers", rows) is None


@pytest.mark.defect("A8")
def test_scores_and_betas_of_absurd_size(number_of: Any) -> None:
    settings = {"task": "reward", "pref_loss": "regression"}
    rows = [*answers(3, score=1500.0), *answers(1, score=-1e30)]
    assert number_of("huge_scores", rows, **settings) == 0.25
    assert number_of("huge_scores", rows[:3], **settings) is None
    assert number_of("tiny_beta", ROWS[:3], beta=1e-9) == 1
    assert number_of("tiny_beta", ROWS[:3], beta=0.001) is None


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
def test_a_template_of_another_model(config: Config, write: Write, console: Console) -> None:
    """It drops the prompt and ends answers with a mark that this tokenizer does not know."""
    text = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|stop|>{% endfor %}"
    other = {"template": str(write(text, "other.jinja"))}
    settings = config(write(ROWS[:3]), sequence_length=1024, data=other)
    found = findings(prepare(settings, console=console))
    for name in ("prompt_lost train", "end_as_text train"):
        assert (found[name]["severity"], found[name]["number"]) == ("serious", 1.0)


def different_prompts(made: Prepared) -> list[str]:
    """Return what is reported of pairs whose prompt differs from that at inference."""
    warned = made.report["train"]["warned"].get("prompt_differs", {"count": 0, "examples": []})
    assert warned["count"] == len(warned["examples"])
    return [example["detail"] for example in warned["examples"]]


def test_a_prompt_as_at_inference(
    config: Config, write: Write, console: Console, folders: dict[str, Path]
) -> None:
    made = prepare(config(write(ROWS[:3]), sequence_length=1024), console=console)
    assert not different_prompts(made)
    bos = config(write(ROWS[:3]), "plain", sequence_length=1024, data={"template": "chatml"})
    made = prepare(bos, console=console)
    difference = "training has '<s>' where chat template chatml gives ''"
    assert different_prompts(made) == [difference] * 3
    finding = findings(made)["prompt_difference train"]
    assert (finding["severity"], finding["number"]) == ("serious", 1.0)
    assert difference in finding["text"]


def test_plain_text_where_the_tokenizer_has_a_template(
    config: Config, write: Write, console: Console
) -> None:
    made = prepare(
        config(write(ROWS[:3]), sequence_length=1024, data={"template": "none"}), console=console
    )
    assert "the tokenizer's own chat template" in findings(made)["prompt_difference train"]["text"]
    assert len(different_prompts(made)) == 3


def test_a_separator_is_a_difference(config: Config, write: Write, console: Console) -> None:
    lines = config(write(ROWS[:3]), "plain", sequence_length=1024, data={"separator": "\n"})
    difference = "training has '\\n' where the tokenizer gives ''"
    assert different_prompts(prepare(lines, console=console)) == [difference] * 3
    spaces = config(write(ROWS[:3]), "plain", sequence_length=1024, data={"separator": " "})
    assert not different_prompts(prepare(spaces, console=console))


def test_a_template_bomb_is_not_rendered_for_plain_text(
    write: Write,
    config: Config,
    console: Console,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain text does not need the tokenizer's template: one that never ends costs nothing."""
    monkeypatch.setattr("rather.data.pool.ROW_SECONDS", 0.5)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "tokenizer.json").write_bytes((folders["chat"] / "tokenizer.json").read_bytes())
    settings = json.loads((folders["chat"] / "tokenizer_config.json").read_text())
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (bad / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": endless}))
    plain = config(
        write(ROWS[:3]), sequence_length=1024, data={"template": "none"}, pretrain=str(bad)
    )
    made = prepare(plain, console=console)
    assert len(made.train) == 3


def test_the_terminal_shows_findings_and_tokens_that_differ(
    flawed: Prepared, config: Config, write: Write, console: Console
) -> None:
    print_report(flawed.report, console)
    bos = config(write(ROWS[:3]), "plain", sequence_length=1024, data={"template": "chatml"})
    print_report(prepare(bos, console=console).report, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "serious: 30 % of the prompts of eval held are also in train" in shown
    assert "100 % of the pairs of train (3) have another prompt than at inference" in shown


@pytest.mark.parametrize("written", ["On the top shelf.", "naïve 日本語 🍞 bread", "a\n\nb  c"])
def test_texts_of_tokens_join_to_the_text(folders: dict[str, Path], written: str) -> None:
    tokenizer = load_tokenizer(str(folders["chat"]))
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
    folder, path = (
        team_data / "tokenizers/smollm2",
        team_data / "pairs/orca_dpo_validation.jsonl.gz",
    )
    config = DPOConfig.model_validate(
        {
            "output_dir": str(tmp_path),
            "pretrain": str(folder),
            "actor_train": {"data_args": {"file_name": str(path)}},
            "validation": {"data_args": {"split": 0.1}},
        }
    )
    made = prepare(config, console=console)
    told = findings(made)["length_bias train"]
    assert told["severity"] == "warning"
    assert told["number"] > 0.8
    assert "pick the shorter answer" in told["text"]
    assert not different_prompts(made)
    assert "warned" not in made.report["evals"][""]
    by_tokens = {pair.prompt.tobytes() for pair in made.train.take(range(len(made.train)))}
    assert look_of(made)["sets"]["train"]["prompts"] == len(by_tokens)


def test_inference_prompts_are_those_of_transformers(
    write: Write, config: Config, console: Console, folders: dict[str, Path]
) -> None:
    """The prompt is rendered by Rather in a child process; transformers gives the same."""
    template = TEMPLATES["qwen3"]
    made = prepare(
        config(write(ROWS[:4]), sequence_length=1024, data={"template": "qwen3"}), console=console
    )
    tokenizer: Any = load_tokenizer(str(folders["chat"]))
    tokenizer.chat_template = template
    for row, pair in zip(ROWS[:4], made.train.take(range(4)), strict=True):
        turns = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert pair.prompt.tolist() == ids
    assert not different_prompts(made)
