"""Any part of a tensor is read from any layout of its pieces, and what is missing is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import Here, Piece, Place, Stored
from rather.errors import CheckpointError

WHOLE = torch.arange(7 * 6, dtype=torch.float32).view(7, 6)


def grid(rows: list[int], columns: list[int]) -> list[Place]:
    """The parts of WHOLE that these cuts make."""
    spans = [
        list(zip([0, *cuts], [*cuts, end], strict=True)) for cuts, end in ((rows, 7), (columns, 6))
    ]
    return [Place((7, 6), (a, c), (b - a, d - c)) for a, b in spans[0] for c, d in spans[1]]


def stored(folder: Path, places: list[Place], **further: Tensor) -> Stored:
    files: dict[str, tuple[int, str]] = {}
    for rank, place in enumerate(places):
        groups = {
            "model": {"weight": Piece(WHOLE[place.slices], place), **(further if rank == 0 else {})}
        }
        files |= checkpoint.write_groups(folder, groups, rank=rank)
    return Stored(folder / name for name in files)


CUTS = {"whole": ([], []), "rows": ([4], []), "columns": ([], [1, 4]), "both": ([2, 5], [3])}


@pytest.mark.parametrize("written", CUTS)
@pytest.mark.parametrize("wanted", CUTS)
def test_every_part_of_every_layout(tmp_path: Path, written: str, wanted: str) -> None:
    found = stored(tmp_path, grid(*CUTS[written]), step=torch.tensor(3), half=WHOLE.bfloat16())
    assert set(found) == {"weight", "step", "half"}
    assert torch.equal(found["weight"], WHOLE)
    assert found["step"] == 3
    assert found["half"].dtype == torch.bfloat16
    for place in grid(*CUTS[wanted]):
        assert torch.equal(found.read("weight", place), WHOLE[place.slices])
        here = Here(found, {"weight": place, "half": place})
        assert torch.equal(here["weight"], Here({"weight": WHOLE}, {"weight": place})["weight"])
        assert torch.equal(here["half"], WHOLE[place.slices].bfloat16())


def test_a_rank_without_rows_reads_nothing(tmp_path: Path) -> None:
    empty = stored(tmp_path, grid([4], [])).read("weight", Place((7, 6), (7, 0), (0, 6)))
    assert (empty.shape, empty.dtype) == ((0, 6), torch.float32)


def test_what_is_read_is_no_view_of_the_file(tmp_path: Path) -> None:
    """Somebody may write to the file, or cut it off, while the tensor is in use."""
    found = stored(tmp_path, grid([], []))
    tensor = found["weight"]
    file = next(tmp_path.iterdir())
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(tensor, WHOLE)


def test_missing_parts_and_other_shapes_are_named(tmp_path: Path) -> None:
    found = stored(tmp_path, grid([4], [])[:1])
    assert torch.equal(found.read("weight", Place((7, 6), (0, 0), (4, 6))), WHOLE[:4])
    with pytest.raises(CheckpointError, match=r"weight: parts of it are in none of the files"):
        found["weight"]
    with pytest.raises(
        CheckpointError, match=r"weight: is stored as \(7, 6\), but \(8, 6\) is asked for"
    ):
        found.read("weight", Place.all_of((8, 6)))


def test_streams_are_the_whole_in_another_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rather.checkpoint.sharded_tensors.CHUNK", 50)  # two rows at a time
    stream = stored(tmp_path, grid([2, 5], [3])).streamed("weight", torch.bfloat16)
    parts = list(stream.parts())
    assert [len(part) for part in parts] == [2, 2, 2, 1]
    assert torch.equal(torch.cat(parts), WHOLE.bfloat16())
    assert stream.nbytes == WHOLE.numel() * 2
