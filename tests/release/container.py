"""Run the steps of the Containerfile in a clean root folder, without an image or a container engine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from tests.house.source import ROOT

CONTAINERFILE = ROOT / "Containerfile"
# In a private mount namespace: nothing stays mounted when the command ends.
CHROOT = """
root=$1 binds=$2 user=$3 folder=$4 script=$5
shift 5
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
for bound in $binds; do mkdir -p "$root$bound" && mount --bind "$bound" "$root$bound"; done
exec chroot --userspec="$user" "$root" /usr/bin/env -i "$@" /bin/sh -c "cd '$folder' || exit 1
$script"
"""


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions with their arguments; continued lines are joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    split = [line.partition(" ") for line in joined.splitlines()]
    return [(name, rest.strip()) for name, _, rest in split]


@dataclass
class Container:
    """A root folder, and what earlier instructions set for later ones."""

    root: Path
    arguments: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    binds: list[Path] = field(default_factory=list)  # folders of this machine that steps may see
    user: str = "root"
    folder: str = "/"
    entry: list[str] = field(default_factory=list)

    def build(self, text: str, context: Path) -> None:
        self.variables["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        for name, rest in instructions(text):
            getattr(self, f"do_{name.lower()}")(rest, context)

    def do_from(self, rest: str, context: Path) -> None:
        """The root folder is the base image."""

    def do_volume(self, rest: str, context: Path) -> None:
        (self.root / rest.lstrip("/")).mkdir(exist_ok=True)

    def do_cmd(self, rest: str, context: Path) -> None:
        """The arguments of a container that is started without any."""

    def do_arg(self, rest: str, context: Path) -> None:
        name, _, default = rest.partition("=")
        self.arguments.setdefault(name, default)

    def do_env(self, rest: str, context: Path) -> None:
        before = dict(self.variables)
        for word in shlex.split(rest):
            name, _, text = word.partition("=")
            self.variables[name] = Template(text).safe_substitute(before)

    def do_user(self, rest: str, context: Path) -> None:
        self.user = rest

    def do_workdir(self, rest: str, context: Path) -> None:
        (self.root / rest.lstrip("/")).mkdir(exist_ok=True)
        self.folder = rest

    def do_entrypoint(self, rest: str, context: Path) -> None:
        self.entry = re.findall(r'"([^"]+)"', rest)

    def do_copy(self, rest: str, context: Path) -> None:
        *sources, target = rest.split()
        folder = self.root / target.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for source in sources:
            files = list(context.glob(source))
            assert files, f"COPY {source}: there is no such file"
            for file in files:
                shutil.copy(file, folder)

    def do_run(self, rest: str, context: Path) -> None:
        done = self.sh(rest, {**self.arguments, **self.variables})
        assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"

    def start(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the entry point with these words, as a container engine does."""
        return self.sh(shlex.join([*self.entry, *words]), self.variables)

    def sh(self, script: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        pairs = [f"{name}={text}" for name, text in variables.items()]
        binds = " ".join(map(str, self.binds))
        inside = [str(self.root), binds, f"{self.user}:{self.user}", self.folder, script, *pairs]
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "bash", "-ec", CHROOT, "chroot", *inside],
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=False,
        )
