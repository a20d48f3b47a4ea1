"""Hooks for mkdocs: files outside this folder that pages link to, and redirects of old addresses."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s#]+)")

MOVED = {  # old page -> page and heading that hold its text now
    "losses/{name}.html": "losses/{task}.html#{name}",  # each loss
    "losses/results.html": "losses/index.html#every-loss-on-the-demos-task",
    "unpaired.html": "tasks.html#thumbs-up-and-down",
    "reward.html": "tasks.html#reward-models",
    "sft.html": "tasks.html#sft",
    "never_run.html": "limits.html#what-has-never-been-run",
    "bad_inputs.html": "promises.html#bad-inputs-and-faults",
    "to_a_cluster.html": "clusters.html#checklist",
    "checkpoints.html": "reliability.html#checkpoints",
    "strategies.html": "clusters.html#choosing-a-strategy",
    "coming_from/llama-factory.html": "coming_from/index.html#llama-factory",
    "coming_from/roll.html": "coming_from/index.html#roll",
    "coming_from/colossalchat.html": "coming_from/index.html#other-tools",
    "coming_from/axolotl.html": "coming_from/index.html#axolotl",
    "coming_from/openrlhf.html": "coming_from/index.html#other-tools",
    "coming_from/nemo-rl.html": "coming_from/index.html#other-tools",
    "coming_from/keys.html": "coming_from/index.html#other-tools",
    "coming_from/swift.html": "coming_from/index.html#other-tools",
}


def redirects() -> dict[str, str]:
    """Return old address -> new address, both within the site."""
    from rather.losses.losses import LOSSES

    addresses = {}
    for old, new in MOVED.items():
        if "{name}" not in old:
            addresses[old] = new
            continue
        for name, rule in LOSSES.items():
            addresses[old.format(name=name)] = new.format(name=name, task=rule.task)
    return addresses


def on_post_build(config: Any) -> None:
    """Write a small page at each old address that sends readers to the new one."""
    site = Path(config["site_dir"])
    for old, new in redirects().items():
        page = site / old
        page.parent.mkdir(parents=True, exist_ok=True)
        address = os.path.relpath(new, Path(old).parent)
        text = f'<meta http-equiv="refresh" content="0; url={address}">'
        page.write_text(
            f'<!doctype html><title>Moved</title>{text}<a href="{address}">Moved here</a>\n',
            encoding="utf-8",
        )


def site_path(file: Path) -> str:
    """Return the path of a repository file within the site."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    return f"project/{file.relative_to(ROOT).as_posix()}"


def linked_files(page: Path) -> list[Path]:
    """Return the files that a page links to."""
    found = LINK.findall(page.read_text(encoding="utf-8"))
    return [file for _, target in found if (file := (page.parent / target).resolve()).is_file()]


def on_files(files: Files, config: Any) -> Files:
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    for page in pages:  # the list grows: an added page has links of its own
        for file in linked_files(page):
            if files.get_file_from_path(site_path(file)) is None and not file.is_relative_to(DOCS):
                files.append(File.generated(config, site_path(file), abs_src_path=str(file)))
                pages += [file] if file.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = Path(page.file.abs_src_path or "")
    here = Path(page.file.src_uri).parent

    def with_site_path(match: re.Match[str]) -> str:
        file = (source.parent / match[2]).resolve()
        return f"{match[1]}{os.path.relpath(site_path(file), here)}" if file.is_file() else match[0]

    return LINK.sub(with_site_path, markdown)
