"""Tokenised pairs as folders: what `rather data --save` and ColossalChat write is read back token
by token.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rather.config.load import dump_yaml
from rather.config.run_config import DPOConfig
from rather.data.batch import TokenPair
from rather.data.prepare import BadRows, Prepared, prepare
from rather.data.save import save
from rather.errors import ConfigError, DataError, DiskError
from tests.commands.conftest import exits, succeed
from tests.data.conftest import everything
from tests.data.files import save_to_disk
from tests.tiny import make_config, rows_of, write_rows

EOS = 2


def colossal_row(pair: TokenPair, text: dict[str, Any], padded: int = 0) -> dict[str, Any]:
    """The raw columns stay beside the tokens; padding, with the id of EOS, comes with an attention
    mask.
    """
    row = {"context": [{"from": "user", "content": text["prompt"]}]}
    for side, answer, spans in (
        ("chosen", pair.chosen, pair.chosen_scored),
        ("rejected", pair.rejected, pair.rejected_scored),
    ):
        ids = [*pair.prompt.tolist(), *answer.tolist()]
        mask = [0] * len(ids)
        for a, b in spans:
            mask[a:b] = [1] * (b - a)
        fill = max(0, padded - len(ids))
        row[side] = [{"from": "assistant", "content": text[side]}]
        row[f"{side}_input_ids"] = ids + [EOS] * fill
        row[f"{side}_loss_mask"] = mask + [0] * fill
        row[f"{side}_label_decode"] = " ".join(map(str, ids))
        if padded:
            row[f"{side}_attention_mask"] = [1] * len(ids) + [0] * fill
    return row


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def config(folder: Path) -> DPOConfig:
    return make_config(folder, exp_name="json", max_steps=3, save_steps=None, validation={})


@pytest.fixture(scope="module")
def prepared(config: DPOConfig) -> Prepared:
    return prepare(config)


@pytest.fixture(scope="module")
def colossal(folder: Path, prepared: Prepared) -> Path:
    """Two parts, one as ColossalChat's script leaves it, one padded as its collator does."""
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    texts = list(map(json.loads, lines))
    pairs = prepared.train.take(range(40))
    plain = [colossal_row(*each) for each in zip(pairs[:25], texts[:25], strict=True)]
    padded = [colossal_row(*each, padded=64) for each in zip(pairs[25:], texts[25:], strict=True)]
    save_to_disk(folder / "colossal" / "part-00000", plain)
    save_to_disk(folder / "colossal" / "part-00001", padded)
    return folder / "colossal"


def from_folder(folder: Path, name: Path, **changes: Any) -> DPOConfig:
    return make_config(
        folder, **{"actor_train__data_args": {"file_name": str(name)}, "validation": {}, **changes}
    )


def prepare_folder(folder: Path, name: Path, **changes: Any) -> Prepared:
    return prepare(from_folder(folder, name, **changes))


def test_colossalchat_rows_are_read_token_by_token(
    folder: Path, prepared: Prepared, colossal: Path
) -> None:
    read = prepare_folder(folder, colossal)
    assert everything(read.train) == everything(prepared.train)
    assert read.report["train"]["ignored_columns"] == [
        "chosen", "chosen_label_decode", "context", "rejected", "rejected_label_decode",
    ]  # fmt: skip
    one = prepare_folder(folder, colossal / "part-00001")
    assert everything(one.train) == everything(prepared.train)[25:]


def test_the_masks_can_be_set_aside(folder: Path, colossal: Path) -> None:
    read = prepare_folder(folder, colossal, apply_loss_mask=False).train.take(range(40))
    assert all(pair.chosen_scored == ((1, len(pair.prompt) + len(pair.chosen)),) for pair in read)


def test_a_named_format_reads_the_text_next_to_the_tokens(
    folder: Path, prepared: Prepared, colossal: Path
) -> None:
    data = {"file_name": str(colossal), "format": "colossal", "template": "chatml"}
    read = prepare_folder(folder, colossal, actor_train__data_args=data)
    assert read.report["train"]["template"]["name"] == "chatml"
    assert everything(read.train) != everything(prepared.train)
    assert "chosen_input_ids" in read.report["train"]["ignored_columns"]


GOOD = {
    "chosen_input_ids": [1, 5, 6, 7, 2],
    "chosen_loss_mask": [0, 0, 0, 1, 1],
    "rejected_input_ids": [1, 5, 6, 8, 2],
    "rejected_loss_mask": [0, 0, 0, 1, 1],
}
BAD: dict[str, list[dict[str, Any]]] = {
    "bad_mask": [
        {"chosen_loss_mask": [0, 1]},
        {"chosen_attention_mask": [1, 1]},
        {"chosen_attention_mask": [1, 1, 0, 1, 1]},
        {"chosen_attention_mask": [1, 1, 1, 1, 0]},
    ],
    "bad_type": [{"chosen_loss_mask": [0, 0, 0, 2, 1]}, {"rejected_input_ids": [1, 5, 6, -1, 2]}],
    "missing_key": [{"rejected_loss_mask": None}],
    "nothing_scored": [{"rejected_loss_mask": [1, 0, 0, 0, 0]}],
    "identical_after_truncation": [{"rejected_input_ids": [1, 5, 6, 7, 2]}],
    "prompt_mismatch": [{"rejected_input_ids": [3, 5, 6, 7, 2]}],
    "too_long": [{"rejected_input_ids": [1, 5] * 40, "rejected_loss_mask": [0, 1] * 40}],
}


def test_rows_that_do_not_fit_together_are_dropped_and_counted(
    folder: Path, tmp_path: Path
) -> None:
    rows, expected = [GOOD], {}
    for kind, changes in BAD.items():
        expected[kind] = [len(rows) + 1 + place for place in range(len(changes))]
        rows += [GOOD | change for change in changes]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    report = prepare_folder(folder, file, max_bad_fraction=1.0).report["train"]
    dropped = {kind: entry["places"][str(file)] for kind, entry in report["dropped"].items()}
    assert dropped == expected
    assert report["pairs"] == 1
    with pytest.raises(BadRows, match="bad_mask"):
        prepare_folder(folder, file)


def test_left_padding_and_several_turns(folder: Path, tmp_path: Path) -> None:
    turns = {**GOOD, "chosen_loss_mask": [0, 1, 0, 1, 1], "rejected_loss_mask": [1, 1, 0, 1, 0]}
    left = {
        **GOOD,
        "chosen_input_ids": [EOS, EOS, 1, 5, 6, 7, 2],
        "chosen_attention_mask": [0, 0, 1, 1, 1, 1, 1],
        "chosen_loss_mask": [0, 0, 0, 0, 0, 1, 1],
    }
    file = write_rows(tmp_path / "rows.jsonl", (turns, left))
    first, second = prepare_folder(folder, file).train.take([0, 1])
    assert (first.chosen_scored, first.rejected_scored) == (((1, 2), (3, 5)), ((1, 2), (3, 4)))
    assert (second.prompt.tolist(), second.chosen.tolist()) == ([1, 5, 6], [7, 2])
    assert second.chosen_scored == ((3, 5),)


def test_save_and_read_back(folder: Path, tmp_path: Path) -> None:
    rows = enumerate(rows_of(folder / "pairs.jsonl"))
    rows = [{**row, "weight": 0.5, "margin": 2.0, "id": f"row {i}"} for i, row in rows]
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    first = prepare(make_config(folder, actor_train__data_args={"file_name": str(file)}))
    out = tmp_path / "new" / "tokens"
    assert save(first, out) == [out, out / "validation"]
    held_out = {"data_args": {"file_name": str(out / "validation")}}
    again = prepare_folder(folder, out, validation=held_out)
    assert everything(again.train) == everything(first.train)
    assert everything(again.evals[""]) == everything(first.evals[""])
    assert [entry.name for entry in out.parent.iterdir()] == ["tokens"]


@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
def test_datasets_opens_what_is_saved(prepared: Prepared, tmp_path: Path) -> None:
    from datasets import load_from_disk

    save(prepared, tmp_path / "tokens")
    opened = load_from_disk(str(tmp_path / "tokens"))
    assert opened.column_names == [
        "chosen_input_ids", "chosen_attention_mask", "chosen_loss_mask",
        "rejected_input_ids", "rejected_attention_mask", "rejected_loss_mask",
        "weight", "margin", "soft_label", "id",
    ]  # fmt: skip
    assert len(opened) == 40
    assert sum(opened[0]["chosen_attention_mask"]) == len(opened[0]["chosen_input_ids"])


def test_a_folder_that_holds_something_is_left_alone(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; name a new folder"):
        save(prepared, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.defect("X16")
def test_a_save_that_was_complete_when_it_was_killed_is_not_repeated(
    prepared: Prepared, tmp_path: Path
) -> None:
    folder = tmp_path / "tokens"
    saved = save(prepared, folder)
    file = folder / "data-00000-of-00001.arrow"
    stamp, content = file.stat().st_mtime_ns, file.read_bytes()
    assert save(prepared, folder) == saved
    assert file.stat().st_mtime_ns == stamp
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match="is not empty"):
        save(prepared, folder)
    file.write_bytes(content)
    (folder / "mine.txt").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        save(prepared, folder)


def test_a_save_that_fails_leaves_nothing(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskError, match="No space left"):
        save(prepared, tmp_path / "tokens")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_save_left_is_gone_after_the_next(prepared: Prepared, tmp_path: Path) -> None:
    left = tmp_path / ".tmp-tokens" / "half.arrow"
    left.parent.mkdir()
    left.write_bytes(b"half")
    save(prepared, tmp_path / "tokens")
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokens"]
    assert not (tmp_path / "tokens" / "half.arrow").exists()


def test_a_folder_of_several_sets_asks_for_one(folder: Path, tmp_path: Path) -> None:
    for name in ("train", "test"):
        save_to_disk(tmp_path / "sets" / name, [GOOD])
    (tmp_path / "sets" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"it holds dataset_dict.json, test, train\); name one"):
        prepare_folder(folder, tmp_path / "sets")


def test_the_command_saves(folder: Path, tmp_path: Path) -> None:
    config = from_folder(folder, folder / "pairs.jsonl", output_dir=str(tmp_path / "out"))
    (tmp_path / "dpo.yaml").write_text(dump_yaml(config))
    command = ["data", tmp_path / "dpo.yaml", "--save", tmp_path / "tokens"]
    assert f"tokenised pairs are in {tmp_path / 'tokens'}" in succeed(*command).output
    succeed(*command)  # it is complete
    (tmp_path / "tokens" / "mine.txt").touch()
    exits(2, *command)
