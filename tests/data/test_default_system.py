"""data_args.default_system: the system message of rows that have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from rather.config.load import config_from_dict
from rather.data.prepare import prepare
from rather.errors import ConfigError, DataError
from tests.tiny import make_model, make_pairs


def prompts(folder: Path, file: Path, **data: str) -> list[list[int]]:
    values = {
        "exp_name": "system",
        "pretrain": str(folder / "base"),
        "output_dir": str(folder / "output"),
        "actor_train": {"data_args": {"file_name": str(file), **data}},
    }
    pairs = prepare(config_from_dict(values)).train
    return [list(pair.prompt) for pair in pairs.take(range(len(pairs)))]


@pytest.mark.defect("U15")
def test_it_is_the_system_turn_of_rows_without_one(tmp_path: Path) -> None:
    make_model(tmp_path / "base")
    plain = make_pairs(tmp_path / "plain.jsonl", 3)
    turns = tmp_path / "turns.jsonl"
    text = '{"messages": [%s{"role": "user", "content": "w1"}], "chosen": "w2", "rejected": "w3"}\n'
    system = '{"role": "system", "content": "w9"}, '
    turns.write_text(text % "" + text % system, encoding="utf-8")
    bare, own = prompts(tmp_path, turns, template="chatml")
    with_default = prompts(tmp_path, turns, template="chatml", default_system="w9")
    assert with_default == [own, own]
    assert bare != own
    before = prompts(tmp_path, plain, template="chatml")
    after = prompts(tmp_path, plain, template="chatml", default_system="w9")
    assert all(len(new) > len(old) for new, old in zip(after, before, strict=True))
    with pytest.raises(DataError, match="default_system: there is no chat template"):
        prompts(tmp_path, plain, default_system="w9")
    with pytest.raises(ConfigError, match="it must not be empty"):
        prompts(tmp_path, plain, default_system="")
