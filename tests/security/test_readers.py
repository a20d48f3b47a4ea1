"""Files are read within limits: by one reader per kind, whose use the syntax tree proves, and before a
library opens a folder by one inspection of it."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rather.errors import ConfigError
from rather.files import MOST_DEPTH, inspect_folder, parse_json, parse_yaml, read_bytes, read_json
from tests.commands.conftest import exits
from tests.house.source import nodes, python_files, where
from tests.security.conftest import Config

# --- which code may read without the readers ---

READS = {
    "open", "read_text", "read_bytes", "loads", "load", "safe_load", "compose", "parse",
    "memory_map", "open_file", "open_stream", "ParquetFile", "safe_open", "GzipFile",
}  # fmt: skip
OWNERS = {  # of names that other objects have too
    "load": ("json", "yaml", "pickle", "torch", "OmegaConf"),
    "loads": ("json", "pickle"),
    "parse": ("yaml",),
    "compose": ("yaml",),
    "open": (None, "Path", "io", "gzip", "os"),
}
# The readers, then what this process, its children or the user's shell wrote.
ALLOWED = """
    rather/files.py: os.open - regular, bounded
    rather/files.py: open - writes the file that the user named
    rather/files.py: json.loads - depth is checked
    rather/data/images.py: open - bytes in memory, by Pillow's decoders of five formats
    rather/data/read.py: GzipFile - bounded by json_rows.MOST_UNPACKED
    rather/data/read.py: memory_map - every batch is validated
    rather/data/read.py: open_file - every batch is validated
    rather/data/read.py: open_stream - every batch is validated
    rather/data/read.py: ParquetFile - every batch is validated
    rather/tracking/ledger.py: memory_map - a regular file, validated
    rather/tracking/ledger.py: open_stream - a regular file, validated
    rather/checkpoint/sharded_tensors.py: safe_open - the library limits the header
    rather/checkpoint/dist_metadata.py: open - the file that the parent opened

    rather/data/pairs.py: memory_map - the cache, by its SHA-256
    rather/data/pairs.py: open_file - the cache, by its SHA-256
    rather/data/pixel_loader.py: json.loads - a message of the parent
    rather/data/pool.py: json.loads - a message of a child process
    rather/judges/rule_process.py: json.loads - a message of the parent
    rather/data/pool.py: open_stream - a message of a child process
    rather/data/cache.py: json.loads - JSON that this process has just made
    rather/data/cache.py: open - writes the cache
    rather/data/save.py: open - writes a new folder
    rather/data/save.py: memory_map - counts the rows of a folder that it has written
    rather/data/save.py: open_stream - counts the rows of a folder that it has written
    rather/data/prepare.py: json.loads - the tokenizer, by the library that read it
    rather/data/tokens.py: json.loads - the tokenizer, by the library that read it
    rather/checkpoint/checkpoint.py: open - writes new files only (xb)
    rather/model/export.py: open - writes new files only (xb)
    rather/model/export.py: json.loads - the config.json that it has just written
    rather/model/export.py: read_text - the config.json that it has just written
    rather/model/adapters.py: open - writes new files only (xb)
    rather/tools/gguf_file.py: json.loads - the tokenizer, by the library that read it
    rather/cluster/supervision.py: json.loads - a message of a rank
    rather/cluster/bridge.py: loads - a message of a rank
    rather/cluster/ray_ranks.py: json.loads - a message of a rank
    rather/cluster/rank_output.py: json.loads - a message of a rank
    rather/cluster/rank_warnings.py: json.loads - a message of a rank
    rather/tools/demo.py: json.loads - its own run
    rather/tools/demo.py: read_text - its own run
    rather/config/plugins.py: read_text - the user's --import
    rather/config/values.py: json.loads - a word of the config
    rather/config/load.py: json.loads - JSON that this process has just made
    rather/config/found.py: os.open - writes the user's key, a new file
    rather/tracking/json_lines.py: json.loads - JSON that this process has just made
    rather/config/show.py: json.loads - JSON that this process has just made
    rather/tools/report/page.py: json.loads - JSON that this process has just made
    rather/api/torch_optimizer.py: json.loads - JSON that this process has just made
    rather/commands/terminal.py: os.open - a file of the kernel
    rather/pipeline/starts.py: read_text - a file of the kernel
    rather/parallel/load.py: read_text - a file of the kernel
    rather/run_folder/layout.py: read_text - a file of the kernel
    rather/cluster/process.py: read_text - a file of the kernel
    rather/cluster/cleanup.py: read_text - a file of the kernel
    rather/cluster/cleanup.py: read_bytes - a file of the kernel
    rather/cluster/memory.py: read_text - a file of the kernel
    rather/tools/board/serve.py: read_bytes - a file of the package
    rather/tools/migrate/engine.py: read_text - a file of the package
    rather/tools/migrate/engine.py: json.loads - a file of the package
    rather/tools/migrate/peers/trl_versions.py: read_text - a file of the package
    rather/tools/report/page.py: read_text - a file of the package
    rather/recipes/__init__.py: read_text - a file of the package
    rather/commands/prepare.py: read_text - a file of the package
"""


def reads(code: Iterable[ast.AST]) -> set[str]:
    """Calls that open or parse a file, except with the openers of rather.files."""
    found = set()
    for node in code:
        if not isinstance(node, ast.Call):
            continue
        owner = None
        if isinstance(node.func, ast.Name):
            name = node.func.id
        elif isinstance(node.func, ast.Attribute):
            name = node.func.attr
            value = node.func.value
            owner = getattr(value, "id", None) or getattr(value, "attr", "Path")
        else:
            continue
        bounded = any(word.arg == "opener" for word in node.keywords)
        if name not in READS or bounded or (name == "read_bytes" and owner is None):
            continue  # rather.files.read_bytes is a name
        known = OWNERS.get(name)
        if known is None or owner in known or (name == "open" and owner not in UNRELATED):
            found.add(f"{owner}.{name}" if owner in ("json", "yaml", "os") else name)
    return found


UNRELATED = {"webbrowser", "self", "known", "stream"}  # their `open` opens no file


def test_every_read_is_bounded_or_on_the_list() -> None:
    found = {
        f"{where(file)}: {call}" for file in python_files("rather") for call in reads(nodes(file))
    }
    allowed = {line.strip().partition(" - ")[0] for line in ALLOWED.split("\n") if line.strip()}
    assert sorted(found - allowed) == [], "use rather.files"
    assert sorted(allowed - found) == [], "no longer there"


@pytest.mark.parametrize(
    "line",
    ["open(p)", "p.open()", "p.read_text()", "p.read_bytes()", "json.load(f)", "json.loads(t)",
     "yaml.safe_load(t)", "pa.ipc.open_file(f)", "pq.ParquetFile(f)", "os.open(p, 0)"],
)  # fmt: skip
def test_the_rule_can_fail(line: str) -> None:
    assert reads(ast.walk(ast.parse(line)))


# --- limits ---


def test_only_regular_files_within_their_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="is not a regular file"):
            read_bytes(path)
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_bytes(tmp_path / "large", 10)
    assert len(read_bytes(tmp_path / "large", 11)) == 11


NESTED = MOST_DEPTH + 1
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
MERGED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)
)
YAMLS = {
    "deep lists": "a: " + "[" * 5_000,
    "deep blocks": "- " * 5_000,
    "aliases": LAUGHS,
    "merged aliases": MERGED,
    "an alias of itself": "a: &a [*a]\n",
    "digits": "a: " + "9" * 200_000,
    "minutes": "a: 1" + ":59" * 100_000,
    "values": "a: [" + "x," * 30_000 + "]",
}


@pytest.mark.parametrize("case", YAMLS)
def test_a_yaml_bomb_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match="line"):
        parse_yaml(YAMLS[case])


@pytest.mark.parametrize("case", ["deep lists", "aliases"])
def test_every_command_reads_yaml_within_limits(tmp_path: Path, case: str) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text(YAMLS[case])
    for command in (
        ("migrate", file, "--from", "trl", "--out", tmp_path / "new.yaml"),
        ("train", file),
        ("sweep", file, "beta=0.1,0.2"),
    ):
        said = exits(2, *command)
        assert len(said) < 1_000


@pytest.mark.parametrize("text", ["[" * NESTED + "]" * NESTED, "[" * 100_000, "9" * 5_000])
def test_a_json_bomb_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"inside each other|digits"):
        parse_json(text)
    file = tmp_path / "trl.json"
    file.write_text(f'{{"a": {text}}}')
    exits(2, "migrate", file, "--from", "trl", "--out", tmp_path / "new.yaml")


def test_values_that_insert_one_another(config: Config, tmp_path: Path) -> None:
    file = config()
    lines = [f"b{i}: ${{b{i - 1}}}${{b{i - 1}}}\n" for i in range(1, 60)]
    file.write_text(file.read_text() + "b0: " + "x" * 100 + "\n" + "".join(lines))
    assert "its ${...} insert too much text" in exits(2, "config", "show", file)
    lists = [f"b{i}: ['${{b{i - 1}}}', '${{b{i - 1}}}']\n" for i in range(1, 60)]
    file.write_text(file.read_text().partition("b0: ")[0] + "b0: x\n" + "".join(lists))
    exits(2, "config", "show", file)


def test_a_bomb_in_a_defaults_list(config: Config, tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(LAUGHS)
    file = config()
    file.write_text("defaults: [more, _self_]\n" + file.read_text())
    said = exits(2, "config", "show", file)
    assert "more.yaml:" in said
    assert "unfold to more than 20,000 values" in said


def test_devices_and_pipes_are_no_configs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe.yaml", tmp_path / "zero.yaml"):
        exits(2, "train", path)
        exits(2, "migrate", path, "--from", "trl", "--out", tmp_path / "new.yaml")


# --- folders that libraries open ---


def test_a_pipe_in_the_place_of_weights(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (run / "model" / "model.safetensors").unlink()
    os.mkfifo(run / "model" / "model.safetensors")
    assert "not a regular file" in exits((2, 9), "chat", run, "--prompt", "w1")


def change(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(read_json(file) | values))


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (lambda folder: os.mkfifo(folder / "added_tokens.json"), "not a regular file"),
    "a device": (lambda folder: (folder / "x.json").symlink_to("/dev/zero"), "outside of its folder"),
    "a link": (lambda folder: (folder / "x.txt").symlink_to("/etc/hostname"), "outside of its folder"),
    "a linked template": (lambda folder: linked_templates(folder), "outside of its folder"),
    "many layers": (lambda folder: change(folder, num_hidden_layers=10**7), "num_hidden_layers: 10000000"),
    "many layers inside": (lambda folder: change(folder, text_config={"n_layer": 10**7}), "n_layer: 10000000"),
    "width": (lambda folder: change(folder, hidden_size=10**6), "hidden_size: 1000000 is too large"),
    "width without weights": (lambda folder: [(folder / "model.safetensors").unlink(), change(folder, d_ff=10**9)], "d_ff: 1000000000"),
    "heads": (lambda folder: change(folder, head_dim=64, num_key_value_heads=10**5), "num_key_value_heads: 100000"),
    "depth": (lambda folder: (folder / "config.json").write_text("[" * 5000), "inside each other"),
    "digits": (lambda folder: (folder / "config.json").write_text('{"a": ' + "9" * 5000 + "}"), "digits"),
    "no json": (lambda folder: (folder / "generation_config.json").write_text("{"), "cannot be read"),
    "loop": (lambda folder: (folder / "x.json").symlink_to("x.json"), "Too many levels of symbolic links"),
}  # fmt: skip


def linked_templates(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "x.jinja").symlink_to("/etc/hostname")


@pytest.mark.parametrize("case", SPOILT)
def test_a_folder_is_inspected_before_a_library_opens_it(
    config: Config, good: Path, model: Path, case: str
) -> None:
    inspect_folder(model)
    spoil, reason = SPOILT[case]
    spoil(model)
    with pytest.raises(ConfigError, match=reason):
        inspect_folder(model)
    score = ("score", model, good / "pairs.jsonl")
    for command in (
        ("train", config()),
        ("chat", model, "--prompt", "w1"),
        ("plan", config()),
        score,
    ):
        said = exits(2, *command)
        assert reason in said.replace("\n", " ")


@pytest.mark.parametrize("case", ["pipe", "depth", "width"])
def test_the_hub_cache_is_inspected_as_well(
    config: Config, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A hub name stands for its snapshot, whose files are links to blobs."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    for folder in ("refs", "blobs", "snapshots/abc123"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    for file in model.iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (repository / "snapshots" / "abc123" / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    inspect_folder("someone/tiny")
    blob = repository / "blobs" / ("generation_config.json" if case == "pipe" else "config.json")
    if case == "pipe":
        blob.unlink()
        os.mkfifo(blob)
    elif case == "depth":
        blob.write_text("[" * 5000)
    else:
        change(repository / "blobs", hidden_size=10**6)
    for command in (
        ("train", config(), "pretrain=someone/tiny"),
        ("chat", "someone/tiny", "--prompt", "w1"),
    ):
        said = exits(2, *command)
        assert f"snapshots/abc123/{blob.name}: cannot be read" in said.replace("\n", "")
