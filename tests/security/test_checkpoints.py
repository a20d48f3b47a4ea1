"""A checkpoint is untrusted, and so are its hashes: an attacker can write a fitting manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from rather.checkpoint.manifest import MANIFEST, STATE, manifest_bytes
from tests.security.conftest import Bait, rather

Config = Callable[..., Path]


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished / "checkpoint-1", tmp_path / "given" / "checkpoint-1"))


def hashed(folder: Path, *more: str) -> Path:
    """Writes a manifest that fits what lies in the folder, as an attacker would; `more` are names without a file."""
    files = {
        file.name: (file.stat().st_size, sha256(file.read_bytes()).hexdigest())
        for file in sorted(folder.iterdir())
        if file.name != MANIFEST and file.is_file()
    }
    files |= dict.fromkeys(more, (0, ""))
    (folder / MANIFEST).write_bytes(manifest_bytes(1, files))
    return folder


def resume(config: Config, folder: Path) -> int:
    done = rather("train", config(track_with=None), f"resume_from_checkpoint={folder}")
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code


def test_the_copy_is_good_and_can_be_hashed_again(config: Config, copy: Path, marker: Path) -> None:
    assert resume(config, hashed(copy)) == 0


def test_pickles_in_the_place_of_tensors(
    config: Config, copy: Path, marker: Path, pickled: bytes
) -> None:
    for file in copy.glob("*.safetensors"):
        file.write_bytes(pickled)
    assert resume(config, hashed(copy)) == 4


def test_files_of_torch_in_the_place_of_tensors(config: Config, copy: Path, marker: Path) -> None:
    for file in copy.glob("*.safetensors"):
        torch.save({"x": Bait(marker)}, file)
    assert resume(config, hashed(copy)) == 4


@pytest.mark.parametrize(
    "name", [".metadata", "__0_0.distcp", "optimizer.pt", "rng_state.pth", "state.pkl"]
)
def test_files_that_others_would_unpickle(
    config: Config, copy: Path, marker: Path, pickled: bytes, name: str
) -> None:
    (copy / name).write_bytes(pickled)
    assert resume(config, copy) == 4  # the manifest does not name it
    assert resume(config, hashed(copy)) == 4


@pytest.mark.parametrize(
    "name", ["../state.json", "/etc/passwd", "a/../../model-00001.safetensors", "..", "", "\0"]
)
def test_a_manifest_cannot_lead_out(config: Config, copy: Path, marker: Path, name: str) -> None:
    assert resume(config, hashed(copy, name)) == 4


def test_a_gigantic_manifest(config: Config, copy: Path) -> None:
    with open(copy / MANIFEST, "wb") as file:
        file.truncate(1 << 40)
    assert resume(config, copy) == 4
    assert rather("verify", copy).exit_code == 4


def test_links_are_not_followed(config: Config, copy: Path, tmp_path: Path, marker: Path) -> None:
    shard = next(copy.glob("*.safetensors"))
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    assert resume(config, hashed(copy)) == 4
    (tmp_path / "linked").symlink_to(copy)
    assert resume(config, tmp_path / "linked") == 4


STATES = {
    "code": {"_target_": "os.system", "progress": "__import__('os').system('touch code-ran-here')"},
    "another shape": {"progress": [1, 2], "identity": 3},
    "nothing": {},
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_of_another_shape(config: Config, copy: Path, marker: Path, case: str) -> None:
    (copy / STATE).write_text(json.dumps(STATES[case]))
    assert resume(config, hashed(copy)) == 4
