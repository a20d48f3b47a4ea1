"""A model that is read slice by slice, and exported from pieces, is the one that one process reads
and writes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, FalconConfig, FalconForCausalLM

from rather.checkpoint import sharded_tensors
from rather.config.schema import ModelArgs
from rather.config.strategies import Layout
from rather.data.pack import pack
from rather.losses.objective import configure
from rather.model import check, export
from rather.model.export import FileCast, export_model
from rather.model.files import ModelFiles, weight_files
from rather.model.policy import pair_columns
from rather.optim.adamw import local
from rather.optim.rounding import Rounding
from rather.parallel import load
from rather.parallel.load import load_divided, load_policy
from rather.parallel.mesh import Mesh, build_mesh
from rather.train.rank_trainer import RankTrainer
from tests.cells import cells
from tests.padded import random_pairs
from tests.same.against_whole import export_together, refusal
from tests.same.canonical import whole
from tests.same.cases import layout_of
from tests.same.pool import pool
from tests.tiny import make_model


def read(folder: Path, layout: Layout, dtype: str) -> dict[str, Any]:
    """The pieces of one rank, with whatever masters start from."""
    mesh = build_mesh(layout, "cpu")
    policy = load_divided(str(folder), ModelArgs(dtype=dtype), "cpu", mesh, layout, trains=True)
    assert not any(parameter.is_meta for parameter in policy.parameters())
    trainer = RankTrainer(policy, configure(["sigmoid"], {}), mesh=mesh)
    return trainer._pieces(
        {name: policy.exact.get(name, local(p.detach())) for name, p in policy.named_parameters()}
    )


@pytest.mark.parametrize(
    ("layout", "tied"),
    cells([(name, True) for name in ("dp2 zero3", "dp2", "tp2", "pp2")], [("pp2", False)]),
)
def test_ranks_read_together_what_one_process_reads(
    tmp_path: Path, layout: str, tied: bool
) -> None:
    folder = make_model(tmp_path / "base", tie_word_embeddings=tied)
    expected = dict(load_policy(str(folder), ModelArgs(dtype="fp32"), "cpu").named_parameters())
    for dtype in ("fp32", "bf16"):  # masters are exact in both
        got = whole(pool(2).run(read, folder, layout_of(layout), dtype))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], weight) for name, weight in expected.items())


@pytest.mark.defect("R8")
def test_masters_start_from_the_files_whatever_their_config_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 files whose config.json names bfloat16 are common on the hub."""
    folder = make_model(tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    monkeypatch.setattr(load, "cpu_has_bf16", lambda: True)
    expected = dict(load_policy(str(folder), ModelArgs(dtype="fp32"), "cpu").named_parameters())
    args, layout = ModelArgs(dtype="bf16"), Layout(1)  # as tp and pp: nothing is sharded
    divided = load_divided(str(folder), args, "cpu", Mesh(), layout, trains=True)
    assert divided.exact.keys() == expected.keys()
    assert all(torch.equal(divided.exact[name], weight) for name, weight in expected.items())
    assert divided.causal_lm.config.dtype == torch.bfloat16  # of an export


def load_refusal(folder: Path) -> str:
    layout = layout_of("dp2 zero3")
    mesh = build_mesh(layout, "cpu")
    return refusal(load_divided, str(folder), ModelArgs(), "cpu", mesh, layout, trains=False)


def test_weights_that_do_not_fill_the_model_are_named(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    for text in pool(2).run(load_refusal, folder):
        assert "do not fill the model; missing keys: model.layers.2" in text


def falcon(folder: Path) -> Path:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    FalconForCausalLM(FalconConfig(**sizes, bos_token_id=1, eos_token_id=2)).save_pretrained(folder)
    return folder


def load_on_one_rank(folder: Path, **changes: Any) -> Any:
    return load_divided(str(folder), ModelArgs(), "cpu", Mesh(), Layout(1, **changes), trains=True)


def test_a_family_that_cannot_be_trained_is_refused_however_it_is_loaded(tmp_path: Path) -> None:
    folder = falcon(tmp_path)
    for said in (
        refusal(load_policy, str(folder), ModelArgs(), "cpu"),
        refusal(load_on_one_rank, folder),
    ):
        assert re.search(r"'falcon' cannot be trained.*padded forward", said)


def test_a_family_that_only_whole_weights_can_prove_is_not_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "base")
    load_on_one_rank(folder)
    monkeypatch.setattr(check, "_families", {})
    monkeypatch.setattr(check, "twin_of", lambda _config: 1 / 0)
    load_policy(str(folder), ModelArgs(), "cpu")
    said = refusal(load_on_one_rank, folder)
    assert re.search(r"model family 'llama' cannot be divided.*train it on one device", said)


@pytest.mark.parametrize(("recompute", "runs"), [("none", 1), ("full", 2)])
def test_layers_are_recomputed_as_the_layout_says(
    tmp_path: Path, recompute: str, runs: int
) -> None:
    policy = load_on_one_rank(make_model(tmp_path / "base"), recompute=recompute)
    seen: list[int] = []
    policy.causal_lm.model.layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    (batch,) = pack(random_pairs(2, 60), budget=10**6)
    pair_columns(policy, batch)["sum"].sum().backward()
    assert len(seen) == runs


def write(folder: Path, layout: Layout, target: Path) -> None:
    mesh = build_mesh(layout, "cpu")
    policy = load_divided(str(folder), ModelArgs(), "cpu", mesh, layout, trains=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "LARGEST_FILE", 20_000)
        export_together(policy, mesh, folder, target, FileCast(torch.bfloat16, Rounding()))


@pytest.mark.parametrize("layout", cells(["dp2 zero3", "pp2"], ["dp2", "tp2"]))
def test_pieces_become_the_folder_that_one_process_writes(tmp_path: Path, layout: str) -> None:
    folder = make_model(tmp_path / "base", dtype=torch.bfloat16)
    pool(2).run(write, folder, layout_of(layout), tmp_path / "model")
    policy = load_policy(str(folder), ModelArgs(), "cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    export_model(policy, dict(policy.named_parameters()), tokenizer, tmp_path / "expected", "card")
    for name in ("config.json", "generation_config.json", "README.md", "tokenizer.json"):
        assert (tmp_path / "model" / name).read_bytes() == (
            tmp_path / "expected" / name
        ).read_bytes(), name
    files = list((tmp_path / "model").glob("model-*.safetensors"))
    assert len(files) > 1
    stored = {name: weight for file in files for name, weight in load_file(file).items()}
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], weight) for name, weight in expected.items())
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert opened.dtype == torch.bfloat16


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most memory of its own, in bytes, that this process had meanwhile beyond what it had
    before.

    Pages of files that are mapped are the kernel's, which takes them back when it needs them.
    """

    def held() -> int:
        line = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("RssAnon")
        )
        return int(line.split()[1]) * 1024

    before, most, done = held(), [0], threading.Event()

    def watch() -> None:
        ended = False
        while not ended:
            ended = done.wait(0.001)
            most[0] = max(most[0], held() - before)  # at the end, too

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def memory(folder: Path, small: Path, layout: Layout, target: Path) -> tuple[int, int, int]:
    """(bytes of this rank's shard, the most while it was loaded, the most while the model was
    exported)."""
    read(small, layout, "fp32")  # what is allocated once and for all
    mesh = build_mesh(layout, "cpu")
    with peak() as loading:
        policy = load_divided(
            str(folder), ModelArgs(dtype="fp32"), "cpu", mesh, layout, trains=True
        )
    shard = sum(local(parameter).nbytes for parameter in policy.parameters())
    cast = FileCast(torch.bfloat16, Rounding("dithered"), ModelFiles(weight_files(folder)))
    # A model is much larger than what is streamed at a time; here it would be as large as a shard.
    with pytest.MonkeyPatch.context() as patch, peak() as exporting:
        patch.setattr(sharded_tensors, "CHUNK", 2 << 20)
        export_together(policy, mesh, folder, target, cast)
    return shard, loading[0], shard + exporting[0]


def test_no_process_holds_more_than_two_shards(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "vocab_size": 8000,
    }
    folder = make_model(tmp_path / "base", **sizes)
    small = make_model(tmp_path / "small")
    pool(2).close()  # new processes: what earlier tests have given back would be taken uncounted
    told = pool(2).run(memory, folder, small, layout_of("dp2 zero3"), tmp_path / "model")
    for shard, loading, exporting in told:
        assert shard > 80 << 20
        assert shard <= loading < 2 * shard
        assert exporting < 2 * shard
