#!/usr/bin/env python3
"""Build and check a release; `make release` calls it.

    make release VERSION=0.2.0   write the version and date the changelog; look at both, then commit
    make release                 check the commit, build wheel and sdist, check them, print the command that tags
    make release TAG=1           the same, and create the tag
    make release DRAFT=1         build and check what is tracked now, whatever the state of commit and changelog

Every file is built twice, and both builds must have the same bytes. SOURCE_DATE_EPOCH is the time of the commit.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from email.parser import BytesParser
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
VERSION_FILE = "rather/__init__.py"
LICENSE = "Apache-2.0"
LEAST_SETUPTOOLS = 77  # the first with license expressions
OF_A_WHEEL = {
    "METADATA",
    "WHEEL",
    "RECORD",
    "entry_points.txt",
    "top_level.txt",
    "licenses/LICENSE",
}
OF_AN_SDIST = {
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
}
MADE_FOR_AN_SDIST = {"PKG-INFO", "setup.cfg"}
BACKEND = """
import os, sys
from setuptools import build_meta
out, *kinds = sys.argv[1:]  # setuptools changes sys.argv
os.umask(0o022)
for kind in kinds:
    getattr(build_meta, "build_" + kind)(out)
"""


class Refused(Exception):
    """What is wrong, one line for each problem."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--version", help="write this version, and today as its date")
    parser.add_argument("--tag", action="store_true", help="create the tag")
    parser.add_argument("--draft", action="store_true", help="do not check commit and changelog")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    try:
        if args.version:
            prepare(ROOT, args.version, time.strftime("%Y-%m-%d", time.gmtime()))
            print(f"Wrote version {args.version} to {VERSION_FILE} and CHANGELOG.md. Next:")
            print(f'  git commit -am "release: {args.version}" && make release')
            return 0
        release(ROOT, args.out, draft=args.draft, tag=args.tag)
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 1
    return 0


def release(root: Path, out: Path, *, draft: bool, tag: bool) -> None:
    refuse(missing_tools())
    version = read_version(root)
    if not draft:
        refuse(problems_of_commit(root, version))
    wheel, sdist = build_and_check(root, out)
    files = [wheel, sdist]
    digests = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (out / "SHA256SUMS").write_text("".join(digests), encoding="utf-8")
    for file in files:
        print(f"{file}: {file.stat().st_size:,} bytes, two builds with the same bytes")
    if draft:
        print("A draft: neither commit nor changelog were checked.")
        return
    command = ["git", "tag", "-a", f"v{version}", "-m", f"Rather {version}"]
    if tag:
        subprocess.run(command, cwd=root, check=True)
        print(f"Created the tag v{version}. Next: git push origin v{version}")
    else:
        print(f'Next: git tag -a v{version} -m "Rather {version}" && git push origin v{version}')
    print(f"Then: python -m pip install twine && python -m twine upload {wheel} {sdist}")


def refuse(problems: list[str]) -> None:
    if problems:
        raise Refused("\n".join(problems))


def missing_tools() -> list[str]:
    """Say which tools this Python and this machine do not have."""
    problems = []
    if not shutil.which("git"):
        problems.append("git is missing: install it.")
    try:
        import setuptools
    except ImportError:
        installed = "none"
    else:
        installed = setuptools.__version__
    if installed == "none" or int(installed.split(".")[0]) < LEAST_SETUPTOOLS:
        problems.append(
            f"setuptools {LEAST_SETUPTOOLS} or newer is missing (installed: {installed}): run `make "
            "install` first, whose environment has it, or only "
            f"{sys.executable} -m pip install 'setuptools>={LEAST_SETUPTOOLS}'. Without a network, "
            "copy its wheel here and install that file. Nothing else is needed."
        )
    return problems


def read_version(root: Path) -> str:
    """Return the version, which is written in one place."""
    for node in ast.parse((root / VERSION_FILE).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise Refused(f"{VERSION_FILE}: there is no line `__version__ = ...`.")


def prepare(root: Path, version: str, date: str) -> None:
    """Write the version, and make what is unreleased its dated section of the changelog."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise Refused(f"VERSION must be like 0.2.0 or 0.2.0rc1 (got {version}).")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    if re.search(rf"^## {re.escape(version)}\b", text, re.MULTILINE):
        raise Refused(f"CHANGELOG.md already has a section {version}: choose the next version.")
    if not unreleased(text):
        raise Refused("CHANGELOG.md: there is nothing under '## Unreleased' to release.")
    text = text.replace("## Unreleased\n", f"## Unreleased\n\n## {version} - {date}\n", 1)
    source = root / VERSION_FILE
    line = f'__version__ = "{read_version(root)}"'
    code = source.read_text(encoding="utf-8")
    source.write_text(code.replace(line, f'__version__ = "{version}"', 1), encoding="utf-8")
    changelog.write_text(text, encoding="utf-8")


def unreleased(changelog: str) -> str:
    """Return what is written under the heading of the next release."""
    section = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return section[1].strip() if section else ""


def problems_of_commit(root: Path, version: str) -> list[str]:
    """Say why this commit is not a release of this version."""
    problems = []
    if changed := git(root, "status", "--porcelain", "--untracked-files=no"):
        problems.append(f"Commit these changes first, or use DRAFT=1:\n{changed}")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if unreleased(changelog):
        problems.append(
            "CHANGELOG.md has changes under '## Unreleased': give them a version with "
            "`make release VERSION=...`, or build a draft with DRAFT=1."
        )
    elif not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        problems.append(f"CHANGELOG.md: the section of {version} must be '## {version} - DATE'.")
    tagged = git(root, "rev-parse", "--verify", "--quiet", f"v{version}^{{commit}}")
    if tagged and tagged != git(root, "rev-parse", "HEAD"):
        problems.append(f"The tag v{version} is on another commit: choose the next version.")
    return problems


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.rstrip()


def tracked_files(root: Path) -> list[str]:
    names = [name for name in git(root, "ls-files", "-z").split("\0") if name]
    if not names:
        raise Refused(
            f"{root} is not a checkout: a release is built from the files that git tracks."
        )
    return [name for name in names if (root / name).is_file()]


def build_and_check(root: Path, out: Path) -> tuple[Path, Path]:
    """Build wheel and sdist into `out`, and raise if anything about them is wrong."""
    tracked = tracked_files(root)
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or git(root, "log", "-1", "--format=%ct")
    with TemporaryDirectory() as folder:
        first = build(root, tracked, Path(folder, "a"), int(epoch))
        again = build(root, tracked, Path(folder, "b"), int(epoch))
        unpacked = Path(folder, "unpacked")
        with tarfile.open(first["sdist"]) as archive:
            archive.extractall(unpacked, filter="data")
        (source,) = unpacked.iterdir()
        from_sdist = run_backend(source, Path(folder, "c"), int(epoch), "wheel")["wheel"]
        problems = check_wheel(root, first["wheel"], tracked)
        problems += check_sdist(first["sdist"], tracked)
        for kind, other in [*again.items(), ("wheel", from_sdist)]:
            if first[kind].read_bytes() != other.read_bytes():
                problems.append(f"{first[kind].name}: two builds differ ({other.parent.name}).")
        refuse(problems)
        out.mkdir(parents=True, exist_ok=True)
        wheel, sdist = (Path(shutil.copy(first[kind], out)) for kind in ("wheel", "sdist"))
    return wheel, sdist


def build(root: Path, tracked: list[str], folder: Path, epoch: int) -> dict[str, Path]:
    """Build wheel and sdist from a copy of the tracked files: nothing else can get into them."""
    source = folder / "source"
    copy_files(root, tracked, source)
    built = run_backend(source, folder, epoch, "wheel", "sdist")
    normalise(built["sdist"], epoch)
    return built


def copy_files(root: Path, names: list[str], folder: Path) -> None:
    for name in names:
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, copy)
        copy.chmod(0o644)


def run_backend(source: Path, out: Path, epoch: int, *kinds: str) -> dict[str, Path]:
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BACKEND, str(out), *kinds]
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"setuptools failed:\n{done.stderr[-3000:]}")
    endings = {"wheel": "*.whl", "sdist": "*.tar.gz"}
    return {kind: next(out.glob(endings[kind])) for kind in kinds}


def normalise(sdist: Path, epoch: int) -> None:
    """Write the archive again without what depends on the machine: times, owners, order."""
    with tarfile.open(sdist) as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        contents = {member.name: archive.extractfile(member).read() for member in files}
    unpacked = io.BytesIO()
    with tarfile.open(fileobj=unpacked, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in sorted(contents.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mtime = epoch
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(content))
    with (
        sdist.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as packed,
    ):
        packed.write(unpacked.getvalue())


def check_wheel(root: Path, wheel: Path, tracked: list[str]) -> list[str]:
    """Compare the wheel with the package's files, its metadata and the license."""
    version = read_version(root)
    dist_info = f"rather-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    package = {name for name in tracked if name.startswith("rather/")}
    problems = compare(
        wheel.name, set(packed), package | {f"{dist_info}/{name}" for name in OF_A_WHEEL}
    )
    problems += [
        f"{wheel.name}: {name} differs from the repository's."
        for name in package & set(packed)
        if packed[name] != (root / name).read_bytes()
    ]
    if packed.get(f"{dist_info}/licenses/LICENSE") != (root / "LICENSE").read_bytes():
        problems.append(f"{wheel.name}: its LICENSE is not the repository's.")
    headers, _, description = packed[f"{dist_info}/METADATA"].partition(b"\n\n")
    metadata = BytesParser().parsebytes(headers)
    expected = {
        "Name": "rather",
        "Version": version,
        "License-Expression": LICENSE,
        "Requires-Python": ">=3.11",
        "Description-Content-Type": "text/markdown",
    }
    problems += [
        f"{wheel.name}: {field} is {metadata[field]}, not {text}."
        for field, text in expected.items()
        if metadata[field] != text
    ]
    if description != (root / "README.md").read_bytes():
        problems.append(f"{wheel.name}: its description is not README.md.")
    if b"rather = rather.cli:main" not in packed[f"{dist_info}/entry_points.txt"]:
        problems.append(f"{wheel.name}: it does not install the command `rather`.")
    return problems


def check_sdist(sdist: Path, tracked: list[str]) -> list[str]:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    names = {name for name in names if not name.startswith("rather.egg-info/")}
    package = {name for name in tracked if name.startswith("rather/")}
    return compare(sdist.name, names, package | OF_AN_SDIST | MADE_FOR_AN_SDIST)


def compare(archive: str, names: set[str], expected: set[str]) -> list[str]:
    missing = [
        f"{archive}: {name} is missing; see [tool.setuptools.package-data] and MANIFEST.in."
        for name in sorted(expected - names)
    ]
    return missing + [
        f"{archive}: {name} does not belong in it." for name in sorted(names - expected)
    ]


if __name__ == "__main__":
    sys.exit(main())
