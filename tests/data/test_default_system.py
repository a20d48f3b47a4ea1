"""data_args.default_system: the system message of rows that have none."""

from __future__ import annotations

import pytest

from rather.errors import ConfigError, DataError
from tests.data.conftest import Prepare
from tests.data.rows import system, user


@pytest.mark.defect("U15")
def test_it_is_the_system_turn_of_rows_without_one(prepare_pairs: Prepare) -> None:
    def prompts(rows: list[dict[str, object]], **data: str) -> list[list[int]]:
        pairs = prepare_pairs(rows, "plain", data=data).train
        return [pair.prompt.tolist() for pair in pairs.take(range(len(pairs)))]

    answers = {"chosen": "w2", "rejected": "w3"}
    turns = [{"messages": [*first, user("w1")], **answers} for first in ([], [system("w9")])]
    text = {"prompt": "w1", **answers}
    bare, own, of_text = prompts([*turns, text], template="chatml")
    assert bare == of_text != own
    assert prompts([*turns, text], template="chatml", default_system="w9") == [own] * 3
    with pytest.raises(DataError, match=r"data_args\.default_system: "):
        prompts([text], default_system="w9")
    with pytest.raises(ConfigError, match=r"data_args\.default_system: "):
        prompts([text], default_system="")
