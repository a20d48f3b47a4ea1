"""Pairs and templates are untrusted: they run no code, open no files, exhaust no memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import sys
import tarfile
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rather.api.feed import Feed
from rather.config.load import load_config
from rather.data import json_rows, pool
from rather.data.json_rows import DropReason
from rather.data.prepare import prepare
from rather.data.read import find_sources
from rather.data.template import ChatTemplate, load_tokenizer
from rather.errors import DataError
from tests.commands.conftest import exits
from tests.data.files import reasons, rows_of, save_to_disk, write_arrow
from tests.security.conftest import Config, Data
from tests.tiny import write_rows

ROW = {"prompt": "w1 w2", "chosen": " w3", "rejected": " w4"}
ESCAPES = [
    "{{ cycler.__init__.__globals__.os.system('touch code-ran-here') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''|attr('__class__') }}",
    "{{ 'x'.format_map({'x': messages}) ~ '{0.__class__}'.format(messages) }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('code-ran-here', 'w') }}",
    "{{ strftime_now.__globals__.json.codecs.open('code-ran-here', 'w') }}",
    "{{ self._TemplateReference__context.environment.globals }}",
    "{% include 'code-ran-here' %}",
    "{% import 'os' as os %}{{ os.system('touch code-ran-here') }}",
    "{% set x = messages.append(1) %}",
    "{{ messages[0].__setitem__('content', 'x') }}",
    "{{ namespace.__init__.__globals__ }}",
]


# --- rows ---


def test_rows_are_text_and_nothing_else(data: Data, tmp_path: Path) -> None:
    texts = [
        *ESCAPES,
        "${oc.env:HOME}",
        "!!python/object/apply:os.system ['touch code-ran-here']",
        "`touch x`",
    ]
    rows = [
        {**ROW, "prompt": text, "_target_": "os.system", "__reduce__": text, "id": "../../x"}
        for text in texts
    ]
    data(0, write_rows(tmp_path / "pairs.jsonl", rows), sequence_length=128)


def test_a_script_next_to_the_data_is_not_run(data: Data, tmp_path: Path, python: str) -> None:
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name in ("pairs.py", "__init__.py", "dataset_infos.json", "sitecustomize.py"):
        (folder / name).write_text(python)
    data(0, write_rows(folder / "pairs.jsonl", [ROW] * 8))
    for refused in (folder / "pairs.py", folder):
        data(3, refused)


@pytest.mark.parametrize(
    "name", ["https://example.org/p.jsonl", "gs://bucket/p.jsonl", "file:///etc/passwd"]
)
def test_an_address_is_not_fetched(data: Data, name: str) -> None:
    assert f"{name} is an address" in data(3, name)


def test_only_regular_files_are_opened(data: Data, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    for name in ("pipe", "link", "gone", "../../../../../../dev/zero"):
        data(3, tmp_path / name)


# --- archives and tables ---


def archives(text: bytes) -> dict[str, bytes]:
    zipped, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("../code-ran-here", text)
    with tarfile.open(fileobj=tarred, mode="w") as archive:
        member = tarfile.TarInfo("../code-ran-here")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    packed = {b"BZh91AY": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
    return {
        "a zip archive": zipped.getvalue(),
        "a tar archive": tarred.getvalue(),
        "a gzipped table or archive": gzip.compress(tarred.getvalue()),
        **{f"packed by {name}": first + text for first, name in packed.items()},
    }


@pytest.mark.parametrize("told", archives(b""))
def test_archives_are_never_unpacked(data: Data, tmp_path: Path, told: str) -> None:
    file = tmp_path / "deep" / "pairs.json"
    file.parent.mkdir()
    file.write_bytes(archives(json.dumps(ROW).encode())[told])
    assert told in data(3, file)


def test_types_of_a_table_are_not_unpickled(data: Data, tmp_path: Path, pickled: bytes) -> None:
    """Once pyarrow made any type that a file described by a pickle."""
    fields = [
        pa.field("prompt", pa.string(), metadata={
            b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickled,
        }),
        pa.field("chosen", pa.string(), metadata={b"pickle": pickled}),
        pa.field("rejected", pa.string()),
    ]  # fmt: skip
    schema = pa.schema(fields, metadata={b"pandas": pickled, b"huggingface": pickled})
    columns = [pa.array([ROW[name]] * 8) for name in ("prompt", "chosen", "rejected")]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    data(0, write_arrow(tmp_path / "pairs.arrow", batch, pa.ipc.new_stream))


def test_a_folder_of_tables_cannot_lead_out(tmp_path: Path) -> None:
    folder, outside = tmp_path / "saved", tmp_path / "outside"
    save_to_disk(outside, [{"a": 1}])
    named = json.loads((outside / "state.json").read_text())["_data_files"][0]["filename"]
    folder.mkdir()
    link = folder / named
    for state, target, place in (
        (f"../outside/{named}", None, f"saved/{named}: no such file"),
        (named, outside / named, "outside its folder"),
        (named, named, f"saved/{named}: "),
    ):
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": state}]}))
        link.unlink(missing_ok=True)
        if target:
            link.symlink_to(target)
        with pytest.raises(DataError, match=place):
            find_sources(folder)
    link.unlink()
    (folder / "state.json").unlink()
    for name, target in (("part-00000", outside), ("state.json", outside / "state.json")):
        (folder / name).symlink_to(target)
        with pytest.raises(DataError, match=f"saved/{name}: is a link to .*outside its folder"):
            find_sources(folder)


def test_a_table_that_lies_about_its_size(data: Data, tmp_path: Path) -> None:
    stream = b"\xff\xff\xff\xff" + struct.pack("<i", 2**31 - 1)
    for content in (stream, b"ARROW1\0\0" + b"\xff" * 64, b"PAR1" + b"\xff" * 64):
        (tmp_path / "pairs.arrow").write_bytes(content)
        data(3, tmp_path / "pairs.arrow")


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_damaged_arrow_is_an_error_or_counted(tmp_path: Path, kind: str) -> None:
    """Offsets of a damaged file would be followed into any memory."""
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    rows = [{name: f"{text} {i}" for name, text in ROW.items()} for i in range(64)]
    good = write_arrow(tmp_path / "good.arrow", pa.Table.from_pylist(rows), new)
    assert rows_of(good) == list(enumerate(rows, 1))
    data, random, outcomes = good.read_bytes(), Random(0), set()
    for _ in range(150):
        damaged = bytearray(data)
        damaged[random.randrange(8, len(data))] ^= 1 << random.randrange(8)
        (tmp_path / "bad.arrow").write_bytes(damaged)
        try:
            outcomes.add("dropped" if reasons(tmp_path / "bad.arrow") else "read")
        except DataError as error:
            assert "damaged arrow file after row" in str(error)  # noqa: PT017
            outcomes.add("refused")
    assert {"refused", "read"} <= outcomes  # a flipped letter is another text


def test_a_column_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": ["a"]}), file)
    file.write_bytes(file.read_bytes().replace(b"prompt", b"\xffrompt"))
    with pytest.raises(DataError, match="damaged parquet file after row 0"):
        rows_of(file)


def test_an_offset_out_of_range_is_refused(tmp_path: Path) -> None:
    """It would be read as the text of a row."""
    batch = pa.record_batch([["abcde", "fghi", "k"]] * 3, names=["prompt", "chosen", "rejected"])
    file = write_arrow(tmp_path / "x.arrow", batch, pa.ipc.new_stream)
    content = file.read_bytes()
    good, bad = (np.array([0, 5, middle, 10], "<i4").tobytes() for middle in (9, 200))
    assert content.count(good) == 3
    file.write_bytes(content.replace(good, bad, 1))
    with pytest.raises(DataError, match="damaged arrow file after row"):
        rows_of(file)


def test_a_value_that_python_cannot_hold_costs_its_row(tmp_path: Path) -> None:
    days = pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32())
    file = write_arrow(tmp_path / "x.arrow", pa.record_batch([days], names=["a"]))
    assert reasons(file) == [(2, "bad_type")]


def test_gzip_that_unfolds_to_gigabytes(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "SUSPICIOUS", 4 << 20)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b" " * (16 << 20)))
    assert "200 times its size" in data(3, tmp_path / "x.jsonl.gz")


# --- templates ---


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    turns = ({"role": "user", "content": "w1"},)
    try:
        rendered = ChatTemplate("hostile", template).render(turns, False, None, {})
    except DropReason as dropped:
        rendered = dropped.reason
    assert rendered in ("", "x", "template_error")
    assert turns == ({"role": "user", "content": "w1"},)


NESTED = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
)
BOMBS = {
    "nested ranges": NESTED + "{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a power of a variable": "{% set n = messages | length %}{{ (n + 9) ** ((n + 9) ** 9) }}",
    "a long text": "{{ 'a' * 3000000000 }}",
    "a long text of a variable": "{{ messages[0].content * 3000000000 }}",
    "a doubled list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a wide number": "{{ '%0999999999d' % 1 }}",
    "recursion": "{% macro f(x) %}{{ f(x + 1) }}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}",
    "a deep expression": "{{ " + "(" * 20_000 + ")" * 20_000 + " }}",
    "a long number": "{{ " + "9" * 5_000 + " }}",
    "deep loops": "{% for x in messages %}" * 60 + "{% endfor %}" * 60,
}


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")


@ON_LINUX
@pytest.mark.parametrize("case", BOMBS)
def test_a_template_bomb_ends_within_its_limits(
    config: Config, tmp_path: Path, small: None, case: str
) -> None:
    bomb = tmp_path / "bomb.jinja"
    bomb.write_text(BOMBS[case])
    settings = load_config(config(actor_train__data_args__template=str(bomb)))
    with pytest.raises(DataError, match=f"chat template {bomb}") as caught:
        prepare(settings, console=Console(file=io.StringIO()))
    assert caught.value.exit_code == 3


@ON_LINUX
def test_the_command_has_the_limits_that_are_promised(data: Data, tmp_path: Path) -> None:
    assert (pool.ROW_SECONDS, pool.MEMORY) == (30.0, 2 << 30)
    bomb = tmp_path / "bomb.jinja"
    bomb.write_text(
        "{{ messages[-1].content * (9000000000 if messages[0].content == 'w1 w1' else 1) }}"
    )
    pairs = write_rows(tmp_path / "pairs.jsonl", [ROW, ROW, BOMBED])
    said = data(3, pairs, actor_train__data_args__template=str(bomb))
    assert f"{pairs}:3 (line 3): chat template {bomb}" in said
    assert "2048 MiB" in said


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test can wait for."""
    monkeypatch.setattr(pool, "ROW_SECONDS", 0.5)
    monkeypatch.setattr(pool, "MEMORY", 300 << 20)


@ON_LINUX
@pytest.mark.parametrize(
    "case", ["nested ranges", "a long text of a variable", "recursion", "a deep expression"]
)
def test_a_models_own_template_bomb_ends_a_chat(model: Path, small: None, case: str) -> None:
    (model / "chat_template.jinja").write_text(BOMBS[case])
    assert "chat template native" in exits(3, "chat", model, "--prompt", "w1")


BOMBED = {**ROW, "prompt": "w1 w1"}
AT_A_PROMPT = "{{ messages[-1].content }}{% if messages[0].content == 'w1 w1' %}BOMB{% endif %}"
AT_A_PROMPT = AT_A_PROMPT.replace("BOMB", BOMBS["nested ranges"])


def test_a_template_that_bombs_only_at_an_eval_prompt(
    config: Config, model: Path, small: None
) -> None:
    (model / "chat_template.jinja").write_text(AT_A_PROMPT)
    exits(0, "data", config())  # the cache is warm, and the template was tried on every row
    prompts = {"prompts": ["w2", "w1 w1"], "max_new_tokens": 4}
    said = exits(3, "train", config(track_with=None, eval_prompts=prompts))
    assert "eval_prompts: chat template native" in said
    assert "0.5 s" in said


def test_a_template_bombs_at_a_row_of_python(config: Config, model: Path, small: None) -> None:
    (model / "chat_template.jinja").write_text(AT_A_PROMPT)
    feed = Feed([ROW, BOMBED], load_config(config()), 8, load_tokenizer(str(model)))
    with pytest.raises(DataError, match=r"rows of text: chat template native .* 0\.5 s"):
        list(feed.micro_batches())


def test_the_child_that_renders_is_given_no_secret(
    config: Config, tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "canary-canary")
    exits(0, "data", config(actor_train__data_args__cache_dir=str(tmp_path / "cache")))
    environments = [options["env"] for _, options in started if options.get("env")]
    assert environments
    assert "canary-canary" not in str(environments)
