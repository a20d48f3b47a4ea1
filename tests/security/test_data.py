"""Pairs and templates are untrusted: they run no code, open no files, exhaust no memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
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
from rather.data.read import chunks, find_sources, parsed_rows
from rather.data.template import ChatTemplate, load_tokenizer
from rather.errors import DataError
from tests.security.conftest import rather

Config = Callable[..., Path]
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


def test_rows_are_text_and_nothing_else(config: Config, tmp_path: Path, marker: Path) -> None:
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
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    done = rather("data", config(actor_train__data_args__file_name=str(file), sequence_length=128))
    assert done.exit_code == 0, done.output


def test_a_script_next_to_the_data_is_not_run(
    config: Config, tmp_path: Path, marker: Path, python: str
) -> None:
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name in ("pairs.py", "__init__.py", "dataset_infos.json", "sitecustomize.py"):
        (folder / name).write_text(python)
    (folder / "pairs.jsonl").write_text("\n".join([json.dumps(ROW)] * 8))
    assert (
        rather(
            "data", config(actor_train__data_args__file_name=str(folder / "pairs.jsonl"))
        ).exit_code
        == 0
    )
    assert (
        rather("data", config(actor_train__data_args__file_name=str(folder / "pairs.py"))).exit_code
        == 3
    )
    assert rather("data", config(actor_train__data_args__file_name=str(folder))).exit_code == 3


@pytest.mark.parametrize(
    "name", ["https://example.org/p.jsonl", "gs://bucket/p.jsonl", "file:///etc/passwd"]
)
def test_an_address_is_not_fetched(config: Config, marker: Path, name: str) -> None:
    done = rather("data", config(actor_train__data_args__file_name=name))
    assert done.exit_code == 3
    assert "is an address; only local files, s3://" in done.stderr


def test_only_regular_files_are_opened(config: Config, tmp_path: Path, marker: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    for name in ("pipe", "link", "gone", "../../../../../../dev/zero"):
        done = rather("data", config(actor_train__data_args__file_name=str(tmp_path / name)))
        assert done.exit_code == 3, done.output


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
def test_archives_are_never_unpacked(
    config: Config, tmp_path: Path, marker: Path, told: str
) -> None:
    file = tmp_path / "deep" / "pairs.json"
    file.parent.mkdir()
    file.write_bytes(archives(json.dumps(ROW).encode())[told])
    done = rather("data", config(actor_train__data_args__file_name=str(file)))
    assert done.exit_code == 3
    assert told in done.stderr


def test_types_of_a_table_are_not_unpickled(
    config: Config, tmp_path: Path, marker: Path, pickled: bytes
) -> None:
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
    with pa.ipc.new_stream(str(tmp_path / "pairs.arrow"), schema) as writer:
        writer.write_batch(batch)
    done = rather("data", config(actor_train__data_args__file_name=str(tmp_path / "pairs.arrow")))
    assert done.exit_code == 0, done.output


def test_a_folder_of_tables_cannot_lead_out(tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    private = tmp_path / "private.arrow"
    with pa.ipc.new_stream(str(private), pa.schema([("a", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch([[1]], names=["a"]))
    state = {"_data_files": [{"filename": "../private.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"saved/private\.arrow: no such file"):
        find_sources(folder)
    (folder / "private.arrow").symlink_to(private)
    with pytest.raises(DataError, match="outside its folder; copy the file into it"):
        find_sources(folder)
    (folder / "private.arrow").unlink()
    (folder / "private.arrow").symlink_to("private.arrow")
    with pytest.raises(DataError, match=r"saved/private\.arrow: "):
        find_sources(folder)
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("private.arrow", "state.json"):
        (folder / name).unlink()
    private.rename(outside / "data.arrow")
    (outside / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (folder / "part-00000").symlink_to(outside)
    with pytest.raises(DataError, match=r"saved/part-00000: is a link to .*outside its folder"):
        find_sources(folder)
    (folder / "state.json").symlink_to(outside / "state.json")
    with pytest.raises(DataError, match=r"saved/state\.json: is a link to .*outside its folder"):
        find_sources(folder)


def test_a_table_that_lies_about_its_size(config: Config, tmp_path: Path, marker: Path) -> None:
    stream = b"\xff\xff\xff\xff" + struct.pack("<i", 2**31 - 1)
    for content in (stream, b"ARROW1\0\0" + b"\xff" * 64, b"PAR1" + b"\xff" * 64):
        (tmp_path / "pairs.arrow").write_bytes(content)
        done = rather(
            "data", config(actor_train__data_args__file_name=str(tmp_path / "pairs.arrow"))
        )
        assert done.exit_code == 3, done.output


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_damaged_arrow_is_an_error_or_counted(tmp_path: Path, marker: Path, kind: str) -> None:
    """Offsets of a damaged file would be followed into any memory."""
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    rows = [{name: f"{text} {i}" for name, text in ROW.items()} for i in range(64)]
    table, good = pa.Table.from_pylist(rows), tmp_path / "good.arrow"
    with new(str(good), table.schema) as writer:
        writer.write_table(table)
    assert [row for row in rows_of(good) if isinstance(row, dict)] == rows
    data, random, outcomes = good.read_bytes(), Random(0), set()
    for _ in range(150):
        damaged = bytearray(data)
        damaged[random.randrange(8, len(data))] ^= 1 << random.randrange(8)
        (tmp_path / "bad.arrow").write_bytes(damaged)
        try:
            found = list(rows_of(tmp_path / "bad.arrow"))
            outcomes.add("dropped" if any(isinstance(row, DropReason) for row in found) else "read")
        except DataError as error:
            assert "damaged arrow file after row" in str(error)  # noqa: PT017
            outcomes.add("refused")
    assert {"refused", "read"} <= outcomes  # a flipped letter is another text


def rows_of(file: Path) -> Iterator[Any]:
    for source in find_sources(file):
        for chunk in chunks(source, 0):
            yield from (row for _, row in parsed_rows(chunk))


def test_a_column_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": ["a"]}), file)
    file.write_bytes(file.read_bytes().replace(b"prompt", b"\xffrompt"))
    with pytest.raises(DataError, match="damaged parquet file after row 0"):
        list(rows_of(file))


def test_an_offset_out_of_range_is_refused(tmp_path: Path) -> None:
    """It would be read as the text of a row."""
    batch = pa.record_batch([["abcde", "fghi", "k"]] * 3, names=["prompt", "chosen", "rejected"])
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), batch.schema) as writer:
        writer.write_batch(batch)
    data = (tmp_path / "x.arrow").read_bytes()
    good, bad = (np.array([0, 5, middle, 10], "<i4").tobytes() for middle in (9, 200))
    assert data.count(good) == 3
    (tmp_path / "x.arrow").write_bytes(data.replace(good, bad, 1))
    with pytest.raises(DataError, match="damaged arrow file after row"):
        list(rows_of(tmp_path / "x.arrow"))


def test_a_value_that_python_cannot_hold_costs_its_row(tmp_path: Path) -> None:
    days = pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32())
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), pa.schema([("a", pa.date32())])) as writer:
        writer.write_batch(pa.record_batch([days], names=["a"]))
    good, bad = rows_of(tmp_path / "x.arrow")
    assert isinstance(good, dict)
    assert bad.reason == "bad_type"


def test_gzip_that_unfolds_to_gigabytes(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "SUSPICIOUS", 4 << 20)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b" " * (16 << 20)))
    done = rather("data", config(actor_train__data_args__file_name=str(tmp_path / "x.jsonl.gz")))
    assert done.exit_code == 3
    assert "unpacks to more than 200 times its size" in done.stderr


# --- templates ---


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_stays_in_its_sandbox(marker: Path, template: str) -> None:
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


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
@pytest.mark.parametrize("case", BOMBS)
def test_a_template_bomb_ends_within_its_limits(
    config: Config, tmp_path: Path, marker: Path, small: None, case: str
) -> None:
    (tmp_path / "bomb.jinja").write_text(BOMBS[case])
    settings = load_config(config(actor_train__data_args__template=str(tmp_path / "bomb.jinja")))
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        prepare(settings, console=Console(file=io.StringIO()))
    assert caught.value.exit_code == 3
    assert f"chat template {tmp_path / 'bomb.jinja'}" in str(caught.value)
    assert time.monotonic() - began < 60


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_the_command_has_the_limits_that_are_promised(
    config: Config, tmp_path: Path, marker: Path
) -> None:
    assert (pool.ROW_SECONDS, pool.MEMORY) == (30.0, 2 << 30)
    bomb, pairs = tmp_path / "bomb.jinja", tmp_path / "pairs.jsonl"
    bomb.write_text(
        "{{ messages[-1].content * (9000000000 if messages[0].content == 'w1 w1' else 1) }}"
    )
    pairs.write_text("\n".join(map(json.dumps, [ROW, ROW, {**ROW, "prompt": "w1 w1"}])))
    data = {
        "actor_train__data_args__file_name": str(pairs),
        "actor_train__data_args__template": str(bomb),
    }
    done = rather("data", config(**data))
    assert done.exit_code == 3, done.output
    said = (
        f"{pairs}:3 (line 3): chat template {bomb} and tokenizer took more than 2048 MiB of memory"
    )
    assert said in done.stderr


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test can wait for."""
    monkeypatch.setattr(pool, "ROW_SECONDS", 0.5)
    monkeypatch.setattr(pool, "MEMORY", 300 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
@pytest.mark.parametrize(
    "case", ["nested ranges", "a long text of a variable", "recursion", "a deep expression"]
)
def test_a_models_own_template_bomb_ends_a_chat(
    model: Path, marker: Path, small: None, case: str
) -> None:
    (model / "chat_template.jinja").write_text(BOMBS[case])
    began = time.monotonic()
    done = rather("chat", model, "--prompt", "w1")
    assert done.exit_code == 3, done.output
    assert "chat template native" in done.stderr
    assert time.monotonic() - began < 60


AT_A_PROMPT = "{{ messages[-1].content }}{% if messages[0].content == 'w1 w1' %}BOMB{% endif %}"
AT_A_PROMPT = AT_A_PROMPT.replace("BOMB", BOMBS["nested ranges"])


def test_a_template_that_bombs_only_at_an_eval_prompt(
    config: Config, model: Path, small: None
) -> None:
    (model / "chat_template.jinja").write_text(AT_A_PROMPT)
    yaml = config(track_with=None)
    assert rather("data", yaml).exit_code == 0, (
        "the cache is warm, and the template was tried on every row"
    )
    done = rather(
        "train",
        config(track_with=None, eval_prompts={"prompts": ["w2", "w1 w1"], "max_new_tokens": 4}),
    )
    assert done.exit_code == 3, done.output
    assert (
        "eval_prompts: chat template native and tokenizer took more than 0.5 s of computing"
        in done.stderr
    )


def test_a_template_bombs_at_a_row_of_python(config: Config, model: Path, small: None) -> None:
    (model / "chat_template.jinja").write_text(AT_A_PROMPT)
    feed = Feed(
        [ROW, {**ROW, "prompt": "w1 w1"}], load_config(config()), 8, load_tokenizer(str(model))
    )
    with pytest.raises(
        DataError, match=r"rows of text: chat template native .* took more than 0\.5 s"
    ):
        list(feed.micro_batches())


def test_the_child_that_renders_is_given_no_secret(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess

    given: list[dict[str, Any]] = []
    start = subprocess.Popen.__init__
    monkeypatch.setenv("MY_API_KEY", "canary-canary")
    monkeypatch.setattr(
        subprocess.Popen,
        "__init__",
        lambda *args, **kwargs: (given.append(kwargs), start(*args, **kwargs))[1],
    )
    assert (
        rather("data", config(actor_train__data_args__cache_dir=str(tmp_path / "cache"))).exit_code
        == 0
    )
    environments = [kwargs["env"] for kwargs in given if kwargs.get("env")]
    assert environments
    assert "canary-canary" not in str(environments)
