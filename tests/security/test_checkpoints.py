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
from tests.commands.conftest import exits
from tests.security.conftest import Bait, Config

Resume = Callable[[int, Path], str]


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


@pytest.fixture
def resume(config: Config, marker: Path) -> Resume:
    """Resume a run from a folder, which must end with this exit code and without the marker."""
    return lambda code, folder: exits(
        code, "train", config(track_with=None), f"resume_from_checkpoint={folder}"
    )


def test_the_copy_is_good_and_can_be_hashed_again(resume: Resume, copy: Path) -> None:
    resume(0, hashed(copy))


def test_pickles_in_the_place_of_tensors(resume: Resume, copy: Path, pickled: bytes) -> None:
    for file in copy.glob("*.safetensors"):
        file.write_bytes(pickled)
    resume(4, hashed(copy))


def test_files_of_torch_in_the_place_of_tensors(resume: Resume, copy: Path, marker: Path) -> None:
    for file in copy.glob("*.safetensors"):
        torch.save({"x": Bait(marker)}, file)
    resume(4, hashed(copy))


@pytest.mark.parametrize(
    "name", [".metadata", "__0_0.distcp", "optimizer.pt", "rng_state.pth", "state.pkl"]
)
def test_files_that_others_would_unpickle(
    resume: Resume, copy: Path, pickled: bytes, name: str
) -> None:
    (copy / name).write_bytes(pickled)
    resume(4, copy)  # the manifest does not name it
    resume(4, hashed(copy))


@pytest.mark.parametrize(
    "name", ["../state.json", "/etc/passwd", "a/../../model-00001.safetensors", "..", "", "\0"]
)
def test_a_manifest_cannot_lead_out(resume: Resume, copy: Path, name: str) -> None:
    resume(4, hashed(copy, name))


def test_a_gigantic_manifest(resume: Resume, copy: Path) -> None:
    with open(copy / MANIFEST, "wb") as file:
        file.truncate(1 << 40)
    resume(4, copy)
    exits(4, "verify", copy)


def test_links_are_not_followed(resume: Resume, copy: Path, tmp_path: Path) -> None:
    shard = next(copy.glob("*.safetensors"))
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    resume(4, hashed(copy))
    (tmp_path / "linked").symlink_to(copy)
    resume(4, tmp_path / "linked")


STATES = {
    "code": {"_target_": "os.system", "progress": "__import__('os').system('touch code-ran-here')"},
    "another shape": {"progress": [1, 2], "identity": 3},
    "nothing": {},
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_of_another_shape(resume: Resume, copy: Path, case: str) -> None:
    (copy / STATE).write_text(json.dumps(STATES[case]))
    resume(4, hashed(copy))
