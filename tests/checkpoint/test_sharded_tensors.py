"""Any block of a tensor can be read from any layout of its shards; missing shards are an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import LocalShards, Shard, ShardedFiles, ShardSpec
from rather.errors import CheckpointError
from rather.model.export import FileCast
from rather.optim.rounding import Rounding

WHOLE = torch.arange(7 * 6, dtype=torch.float32).view(7, 6)


def grid(rows: list[int], columns: list[int]) -> list[ShardSpec]:
    """Return the blocks of WHOLE between these cuts."""
    spans = [
        list(zip([0, *cuts], [*cuts, end], strict=True)) for cuts, end in ((rows, 7), (columns, 6))
    ]
    return [ShardSpec((7, 6), (a, c), (b - a, d - c)) for a, b in spans[0] for c, d in spans[1]]


def stored(folder: Path, specs: list[ShardSpec], **further: Tensor) -> ShardedFiles:
    files: dict[str, tuple[int, str]] = {}
    for rank, spec in enumerate(specs):
        groups = {
            "model": {"weight": Shard(WHOLE[spec.slices], spec), **(further if rank == 0 else {})}
        }
        files |= checkpoint.write_groups(folder, groups, rank=rank)
    return ShardedFiles(folder / name for name in files)


CUTS = {"whole": ([], []), "rows": ([4], []), "columns": ([], [1, 4]), "both": ([2, 5], [3])}


@pytest.mark.parametrize("written", CUTS)
@pytest.mark.parametrize("wanted", CUTS)
def test_any_block_is_read_from_any_layout(tmp_path: Path, written: str, wanted: str) -> None:
    found = stored(tmp_path, grid(*CUTS[written]), step=torch.tensor(3), half=WHOLE.bfloat16())
    assert set(found) == {"weight", "step", "half"}
    assert torch.equal(found["weight"], WHOLE)
    assert found["step"] == 3
    assert found["half"].dtype == torch.bfloat16
    for spec in grid(*CUTS[wanted]):
        assert torch.equal(found.read("weight", spec), WHOLE[spec.slices])
        local = LocalShards(found, {"weight": spec, "half": spec})
        assert torch.equal(
            local["weight"], LocalShards({"weight": WHOLE}, {"weight": spec})["weight"]
        )
        assert torch.equal(local["half"], WHOLE[spec.slices].bfloat16())


def test_an_empty_block_has_the_shape_and_dtype(tmp_path: Path) -> None:
    empty = stored(tmp_path, grid([4], [])).read("weight", ShardSpec((7, 6), (7, 0), (0, 6)))
    assert (empty.shape, empty.dtype) == ((0, 6), torch.float32)


def test_a_tensor_is_not_a_view_of_the_file(tmp_path: Path) -> None:
    """The file may be overwritten or truncated while the tensor is in use."""
    found = stored(tmp_path, grid([], []))
    tensor = found["weight"]
    file = next(tmp_path.iterdir())
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(tensor, WHOLE)


def test_missing_shards_and_other_shapes_are_refused(tmp_path: Path) -> None:
    found = stored(tmp_path, grid([4], [])[:1])
    assert torch.equal(found.read("weight", ShardSpec((7, 6), (0, 0), (4, 6))), WHOLE[:4])
    with pytest.raises(
        CheckpointError, match=r"weight: some of its shards are missing from the files"
    ):
        found["weight"]
    with pytest.raises(
        CheckpointError, match=r"weight: has the shape \(7, 6\) in the files, expected \(8, 6\)"
    ):
        found.read("weight", ShardSpec.full((8, 6)))


def test_a_stream_is_the_whole_tensor_in_another_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rather.checkpoint.sharded_tensors.CHUNK", 50)  # two rows at a time
    cast = FileCast(torch.bfloat16, Rounding())
    stream = stored(tmp_path, grid([2, 5], [3])).stream("weight", cast)
    parts = list(stream.parts())
    assert [len(part) for part in parts] == [2, 2, 2, 1]
    assert torch.equal(torch.cat(parts), WHOLE.bfloat16())
    assert stream.nbytes == WHOLE.numel() * 2
