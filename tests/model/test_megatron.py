"""Megatron checkpoints: read bit for bit with torch alone, in slices; damaged ones are refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import zipfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from transformers import AutoConfig, AutoModelForCausalLM

from rather import child
from rather.checkpoint import dist_metadata
from rather.checkpoint.sharded_tensors import ShardSpec
from rather.checkpoint.torch_dist import TorchDistFiles
from rather.config.paths import check_paths
from rather.config.schema import ModelArgs
from rather.errors import ConfigError
from rather.model.files import ModelFiles, weight_files
from rather.model.megatron import MegatronFiles, checkpoint_folder
from rather.model.sizes import sizes_of
from rather.parallel.load import load_policy
from rather.pipeline.pipeline import DPOPipeline
from rather.tools.megatron_file import megatron_tensors, write_megatron
from tests.security.conftest import Bait
from tests.tiny import SIZES, make_config, make_model, metrics

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def write_chunks(folder: Path, tensors: dict[str, Tensor], tp: int = 1) -> None:
    """Write what megatron-core's `torch_dist` writes on tp ranks: a chunk per layer and rank."""
    folder.mkdir(parents=True)
    entries: dict[str, Any] = {"decoder.layers.mlp._extra_state/shard_0_1": BytesStorageMetadata()}
    storage: dict[Any, Any] = {}
    with open(folder / "__0_0.distcp", "wb") as file:
        for key, tensor in tensors.items():
            chunks = []
            for offsets, sizes in cuts(key, tensor, tp):
                spec = ShardSpec(tuple(tensor.shape), offsets, sizes)
                start = file.tell()
                torch.save(tensor[spec.slices].clone(), file)
                info = _StorageInfo("__0_0.distcp", start, file.tell() - start)
                storage[MetadataIndex(key, torch.Size(offsets))] = info
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            properties = TensorProperties(dtype=tensor.dtype)
            entries[key] = TensorStorageMetadata(properties, tensor.size(), chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, None, storage)))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))


def cuts(key: str, tensor: Tensor, tp: int) -> list[tuple[Any, Any]]:
    layers = range(tensor.shape[0]) if re.search(r"\.layers\.\D", key) else [None]
    rows_dim = 0 if layers == [None] else 1
    parts = 2 * tp if "fc1.weight" in key else tp
    parts = parts if tensor.ndim > rows_dim + 1 else 1
    if tensor.shape[rows_dim] % parts:
        parts = 1
    size = tensor.shape[rows_dim] // parts
    found = []
    for layer in layers:
        for part in range(parts):
            offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
            if layer is not None:
                offsets[0], sizes[0] = layer, 1
            offsets[rows_dim], sizes[rows_dim] = part * size, size
            found.append((tuple(offsets), tuple(sizes)))
    return found


def make_family(folder: Path, family: str, *, tied: bool) -> tuple[Any, ModelFiles]:
    sizes = {**SIZES, "vocab_size": 64, "head_dim": 8, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return AutoConfig.from_pretrained(folder), ModelFiles(weight_files(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_read_bit_for_bit(tmp_path: Path, family: str) -> None:
    """Whole, and in slices that cut heads and both halves of an MLP; the vocabulary is padded."""
    config, files = make_family(tmp_path / "hf", family, tied=family == "llama")
    tensors = megatron_tensors(files, config)
    key = "embedding.word_embeddings.weight"
    tensors[key] = torch.cat([tensors[key], torch.zeros(64, tensors[key].shape[1])])
    write_chunks(tmp_path / "ck" / "iter_0000007", tensors, tp=2)
    (tmp_path / "ck" / "latest_checkpointed_iteration.txt").write_text("7")
    place = checkpoint_folder(tmp_path / "ck")
    assert place == tmp_path / "ck" / "iter_0000007"
    read = MegatronFiles(place, config)
    assert set(read) == set(files)
    for name in files:
        weight = files[name]
        assert torch.equal(read[name], weight), name
        rows = ShardSpec.full(weight.shape).narrow(0, 3, len(weight) - 5)
        block = rows.narrow(1, 1, 7) if weight.ndim > 1 else rows
        assert torch.equal(read.read(name, block), weight[block.slices]), name


def test_only_the_chunks_of_a_slice_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, files = make_family(tmp_path / "hf", "llama", tied=True)
    write_chunks(tmp_path / "ck", megatron_tensors(files, config), tp=2)
    read = MegatronFiles(tmp_path / "ck", config)
    loaded: list[Any] = []
    load = zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda *a, **k: loaded.append(a) or load(*a, **k))
    name = "model.layers.1.self_attn.q_proj.weight"
    half = ShardSpec.full(read.shape(name)).narrow(0, 0, read.shape(name)[0] // 2)
    assert torch.equal(read.read(name, half), files[name][half.slices])
    assert len(loaded) == 1, "one chunk of 20"


@pytest.mark.parametrize("prefix", ["module.", "by layer"])
def test_other_writers_have_other_names(tmp_path: Path, prefix: str) -> None:
    """NeMo puts a prefix first; layers that differ are not stacked."""
    config, files = make_family(tmp_path / "hf", "qwen3", tied=False)
    tensors: dict[str, Tensor] = {}
    for key, tensor in megatron_tensors(files, config).items():
        if prefix == "module.":
            tensors[prefix + key] = tensor
        elif ".layers." in key:
            tensors |= {key.replace("s.", f"s.{i}.", 1): t for i, t in enumerate(tensor)}
        else:
            tensors[key] = tensor
    write_chunks(tmp_path / "ck" / "weights", {k: t.clone() for k, t in tensors.items()})
    place = checkpoint_folder(tmp_path / "ck")
    assert place is not None
    read = MegatronFiles(place, config)
    assert all(torch.equal(read[name], files[name]) for name in files)


def test_an_exported_checkpoint_trains_as_its_model(tmp_path: Path) -> None:
    """The same losses to the last bit, policy and reference from a Megatron checkpoint."""
    own = make_config(tmp_path, exp_name="own", max_steps=2, forgetting="off")
    write_megatron(Path(own.actor_train.model_path), tmp_path / "megatron", "")
    changes: dict[str, Any] = {
        "pretrain": str(tmp_path / "megatron"),
        "actor_train__model_args__config_from": own.actor_train.model_path,
    }
    theirs = make_config(tmp_path, exp_name="theirs", max_steps=2, forgetting="off", **changes)
    results = []
    for config in (own, theirs):
        assert DPOPipeline(config).run() == 0
        results.append([line["loss"] for line in metrics(config) if "loss" in line])
    assert results[0] == results[1]
    exported = [ModelFiles(weight_files(config.run_dir / "model")) for config in (own, theirs)]
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])


def test_a_checkpoint_needs_no_files_of_a_model(good: Path, tmp_path: Path) -> None:
    """Megatron-LM writes no config.json; it was taken for a wrong model folder."""
    config = make_config(
        tmp_path, pretrain=str(good / "ck"), actor_train__model_args__config_from=str(good / "hf")
    )
    check_paths(config)
    actor = config.actor_train
    assert sizes_of(actor.model_path, actor.model_args) == sizes_of(str(good / "hf"), ModelArgs())
    changes = {"pretrain": str(good / "hf"), "actor_train__model_args__config_from": str(tmp_path)}
    with pytest.raises(ConfigError, match="hf is not a Megatron checkpoint folder") as error:
        check_paths(make_config(tmp_path, **changes))
    assert "config_from: " in str(error.value)


# --- damaged and hostile checkpoints ---


# A bytearray of 1.5 GiB; a key whose hash takes 2^60 steps; a list for 2^28 and 2^27 objects; 10^6 tuples in a key.
GIGABYTES = b"\x80\x02cbuiltins\nbytearray\n\x8a\x04\x00\x00\x00\x60\x85R."
NO_END = b"\x80\x04}K\x01\x94%bK\x01s." % b"".join(b"0h%ch%c\x86\x94" % (i, i) for i in range(60))
MEMO = b"\x80\x04Nr%b."
DEEP = b"\x80\x04}K\x01" + b"\x85" * 10**6 + b"K\x01s."
TOO_MUCH = "takes too much memory or computing for its [0-9,]+ bytes"

Damage = Callable[[Path, Path], object]


def changed(change: Callable[[Metadata], object]) -> Damage:
    def damage(folder: Path, _marker: Path) -> None:
        file = folder / ".metadata"
        whole = pickle.loads(file.read_bytes())
        change(whole)
        file.write_bytes(pickle.dumps(whole))

    return damage


def stored(whole: Metadata, word: str = "proj.weight") -> Any:
    return next(info for index, info in whole.storage_data.items() if word in index.fqn)


def entry(whole: Metadata, word: str = "proj.weight") -> Any:
    return next(tensor for key, tensor in whole.state_dict_metadata.items() if word in key)


def write(name: str, content: bytes) -> Damage:
    return lambda folder, _: (folder / name).write_bytes(content)


def replace_blob(make: Callable[[Path], bytes]) -> Damage:
    def damage(folder: Path, marker: Path) -> None:
        blob = make(marker)
        (folder / "evil.distcp").write_bytes(blob)
        is_there = {"relative_path": "evil.distcp", "offset": 0, "length": len(blob)}
        changed(lambda whole: vars(stored(whole)).update(is_there))(folder, marker)

    return damage


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def bomb(_marker: Path) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000_000)
    return file.getvalue()


def add_tensor(key: str) -> Damage:
    def add(whole: Metadata) -> None:
        whole.state_dict_metadata[key] = entry(whole)
        for index, info in list(whole.storage_data.items()):
            if "proj.weight" in index.fqn:
                whole.storage_data[MetadataIndex(key, index.offset)] = info

    return changed(add)


def link_out(folder: Path, marker: Path) -> None:
    target = marker.with_name("elsewhere")
    shutil.move(folder / "__0_0.distcp", target)
    (folder / "__0_0.distcp").symlink_to(target)


def cut_file(folder: Path, _marker: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 2000)


def pickled_bait(folder: Path, marker: Path) -> None:
    changed(lambda whole: setattr(whole, "planner_data", Bait(marker)))(folder, marker)


def set_(thing: str, field: str, value: Any) -> Damage:
    return changed(lambda whole: setattr(globals()[thing](whole), field, value))


def drop_chunk(whole: Metadata) -> None:
    del entry(whole).chunks[0]


def overlap(whole: Metadata) -> None:
    chunks = entry(whole).chunks
    chunks[1] = ChunkStorageMetadata(chunks[0].offsets, chunks[0].sizes)


def archive_with(name: str, content: bytes) -> Callable[[Path], bytes]:
    """A tensor's archive, one file of it replaced."""

    def archive(_: Path) -> bytes:
        file = io.BytesIO()
        with (
            zipfile.ZipFile(file, "w") as new,
            zipfile.ZipFile(io.BytesIO(saved(torch.ones(1, 16, 32)))) as old,
        ):
            for entry in old.namelist():
                new.writestr(entry, content if entry == f"archive/{name}" else old.read(entry))
        return file.getvalue()

    return archive


def doubling() -> Any:
    """Tuples inside each other whose text would fill every memory."""
    value: Any = (1,)
    for _ in range(60):
        value = (value, value)
    return value


HOSTILE: dict[str, tuple[Damage, str]] = {
    "no metadata": (lambda f, _: (f / ".metadata").unlink(), "is not one"),
    "empty metadata": (write(".metadata", b""), "EOFError"),
    "cut metadata": (
        lambda f, _: os.truncate(f / ".metadata", 700),
        "cannot be read|can be read: ",
    ),
    "noise": (write(".metadata", bytes(range(256))), "can be read: "),
    "a call in the metadata": (pickled_bait, r"it names posix\.system, which is not data"),
    "eval": (write(".metadata", b"cbuiltins\neval\n(S'1'\ntR."), r"it names builtins\.eval"),
    "a function of torch": (write(".metadata", b"ctorch\nload\n(S'x'\ntR."), r"names torch\.load"),
    "another class of the module": (
        write(".metadata", b"ctorch.distributed.checkpoint.filesystem\nos\n."),
        r"filesystem\.os, which is not data",
    ),
    "a number instead of metadata": (write(".metadata", pickle.dumps(7)), "no attribute 'state'"),
    "a memo of 4 GB": (write(".metadata", MEMO % (1 << 28).to_bytes(4, "little")), TOO_MUCH),
    "a memo of 2 GB": (write(".metadata", MEMO % (1 << 27).to_bytes(4, "little")), TOO_MUCH),
    "deep tuples": (write(".metadata", DEEP), TOO_MUCH),
    "no format": (lambda f, _: (f / "metadata.json").unlink(), "metadata.json"),
    "zarr": (write("metadata.json", b'{"sharded_backend": "zarr"}'), "only torch_dist is read"),
    "a path above": (set_("stored", "relative_path", "../x.distcp"), r"only \.distcp files next"),
    "an absolute path": (set_("stored", "relative_path", "/etc/passwd"), r"only \.distcp files"),
    "a link": (link_out, "is a link to"),
    "no file": (lambda f, _: (f / "__0_0.distcp").unlink(), "No such file"),
    "a cut file": (cut_file, "the tensor at byte .* cannot be read"),
    "noise in a file": (
        replace_blob(lambda _: b"PK" * 900),
        "cannot be read: BadZipFile: File is not",
    ),
    "a call in a tensor": (replace_blob(lambda m: saved(Bait(m))), "it is not a plain tensor"),
    "a list in a tensor": (replace_blob(lambda _: saved([1])), "it is not a plain tensor"),
    "gigabytes in a tensor": (
        replace_blob(archive_with("data.pkl", GIGABYTES)),
        "it is not a plain tensor",
    ),
    "no end in a tensor": (
        replace_blob(archive_with("data.pkl", NO_END)),
        "it is not a plain tensor",
    ),
    "another byte order": (replace_blob(archive_with("byteorder", b"big")), "not a plain tensor"),
    "fewer numbers": (replace_blob(archive_with("data/0", bytes(60))), "out of bounds"),
    "another shape": (replace_blob(lambda _: saved(torch.ones(3))), "not the tensor that the meta"),
    "a bomb": (replace_blob(bomb), "it is compressed"),
    "a huge length": (set_("stored", "length", 1 << 40), "is not plain"),
    "a negative offset": (set_("stored", "offset", -1), "are not sizes"),
    "tuples that double": (
        changed(lambda w: setattr(entry(w).chunks[0], "offsets", doubling())),
        "are not sizes",
    ),
    "a path of a megabyte": (set_("stored", "relative_path", "x" * 2**20), r"it names the file"),
    "a path of two lines": (set_("stored", "relative_path", "a\nb.distcp"), r"'a\\nb.distcp'"),
    "a name of a megabyte": (add_tensor("x" * 2**20), "a tensor is named 'xxx"),
    "a tensor without numbers": (
        replace_blob(lambda _: saved(torch.ones(1, 16, 32, device="meta"))),
        "it is not a plain tensor",
    ),
    "a format of two lines": (
        write("metadata.json", b'{"sharded_backend": "a\\n\\u001b[2Jb"}'),
        "only torch_dist is read",
    ),
    "a missing chunk": (changed(drop_chunk), "do not make up its shape"),
    "two chunks in one place": (changed(overlap), "do not make up its shape"),
    "a huge tensor": (set_("entry", "size", torch.Size([1 << 40, 64, 64])), "do not make up"),
    "whole numbers": (
        changed(lambda w: setattr(entry(w), "properties", TensorProperties(dtype=torch.int64))),
        r"a tensor of torch\.int64 is not a weight",
    ),
    "optimizer state": (add_tensor("optimizer.state.exp_avg.output"), "has optimizer state"),
    "an unknown tensor": (add_tensor("mtp.layers.0.weight"), "have no place .* mtp.layers.0"),
    "letters that move the cursor": (add_tensor("a\x1b[2J"), "a tensor is named"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    make_model(folder / "hf")
    files = ModelFiles(weight_files(folder / "hf"))
    tensors = megatron_tensors(files, AutoConfig.from_pretrained(folder / "hf"))
    write_chunks(folder / "ck", tensors, tp=2)
    return folder


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_or_hostile_checkpoint(
    good: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says what is wrong; nothing in the files runs."""
    for name in ("check_family", "check_model"):
        monkeypatch.setattr(f"rather.parallel.load.{name}", lambda _: None)
    shutil.copytree(good / "ck", tmp_path / "ck")
    marker = tmp_path / "marker"
    damage, sentence = HOSTILE[case]
    damage(tmp_path / "ck", marker)
    with pytest.raises(ConfigError, match=sentence) as error:
        load_policy(str(tmp_path / "ck"), ModelArgs(config_from=str(good / "hf")), "cpu")
    assert "\n" not in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000
    assert not marker.exists()


def test_what_belongs_together_is_asked_for(good: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a Megatron checkpoint; set model_args\.config_from"):
        load_policy(str(good / "ck"), ModelArgs(), "cpu")
    with pytest.raises(
        ConfigError, match=r"config_from is for Megatron checkpoints, and .* is not"
    ):
        load_policy(str(good / "hf"), ModelArgs(config_from=str(good / "hf")), "cpu")
    with pytest.raises(ConfigError, match="'gpt2'"):
        MegatronFiles(good / "ck", AutoConfig.for_model("gpt2"))
    for changes, rows in (
        ({"num_key_value_heads": 4}, r"linear_qkv\.weight has 128 rows, .* has 192"),
        ({"num_hidden_layers": 1}, "has 64 rows, .* has 32"),
        ({"vocab_size": 80}, r"word_embeddings\.weight has 63 rows, .* has 80"),
    ):
        with pytest.raises(ConfigError, match=rows):
            MegatronFiles(good / "ck", AutoConfig.from_pretrained(good / "hf", **changes))


@pytest.mark.defect("A6")
@pytest.mark.parametrize("ends_by", ["its limit", "Ctrl-C"])
def test_a_hash_without_end(ends_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child ends at its limit of computing; the parent can be interrupted before."""
    assert dist_metadata.SECONDS == 5
    quick = "child = import_module(sys.argv[2]); child.SECONDS = 0.2; child.main"
    if ends_by == "its limit":
        start = child._START.replace("import_module(sys.argv[2]).main", quick)
        monkeypatch.setattr(child, "_START", start)
    else:
        receive = Connection.recv_bytes

        def interrupted(connection: Connection, *most: int) -> bytes:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return receive(connection, *most)

        monkeypatch.setattr(Connection, "recv_bytes", interrupted)
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    (tmp_path / ".metadata").write_bytes(NO_END)
    expected = ValueError if ends_by == "its limit" else KeyboardInterrupt
    try:
        with pytest.raises(expected, match=TOO_MUCH if expected is ValueError else None):
            dist_metadata.read_metadata(tmp_path / ".metadata")
    finally:
        if ends_by == "Ctrl-C":
            signal.signal(signal.SIGALRM, previous)


@pytest.mark.defect("A6")
def test_an_answer_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist_metadata, "ANSWER", 4)
    (tmp_path / ".metadata").write_bytes(b"N.")
    with pytest.raises(ValueError, match=TOO_MUCH):
        dist_metadata.read_metadata(tmp_path / ".metadata")


@pytest.mark.defect("A6")
def test_a_flipped_bit_of_a_weight_is_refused(good: Path, tmp_path: Path) -> None:
    """A bit of the padding between the files of an archive changes nothing."""
    shutil.copytree(good / "ck", tmp_path / "ck")
    key, path = "decoder.layers.mlp.linear_fc1.weight", tmp_path / "ck" / "__0_0.distcp"
    chunk = next(iter(TorchDistFiles(tmp_path / "ck")._shards[key].values()))[0]
    whole = chunk[(slice(None),) * 3]
    clean = path.read_bytes()
    first = clean.index(whole.numpy().tobytes())
    weights = range(first, first + whole.nbytes)
    others = range(chunk.offset, chunk.offset + chunk.length)
    rng = random.Random(0)
    refused = set()
    for place in rng.sample(weights, 40) + rng.sample(others, 200):
        flipped = bytearray(clean)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            values = chunk[(slice(None),) * 3]
        except ConfigError:
            refused.add(place)
        else:
            assert torch.equal(values, whole), place
    assert len(refused.intersection(weights)) >= 40
    assert len(refused) < 240, "padding counts"
