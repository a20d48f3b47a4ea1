"""For mkdocs: what pages link to outside this folder (README, LOG, examples, results) becomes part of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s#]+)")


def place(file: Path) -> str:
    """Where a file of the repository lies in the site."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    return f"project/{file.relative_to(ROOT).as_posix()}"


def linked(page: Path) -> list[Path]:
    """The files that a page links to."""
    found = LINK.findall(page.read_text(encoding="utf-8"))
    return [file for _, target in found if (file := (page.parent / target).resolve()).is_file()]


def on_files(files: Files, config: Any) -> Files:
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    for page in pages:  # grows while it is read: a page that was added brings its own links
        for file in linked(page):
            if files.get_file_from_path(place(file)) is None and not file.is_relative_to(DOCS):
                files.append(File.generated(config, place(file), abs_src_path=str(file)))
                pages += [file] if file.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = Path(page.file.abs_src_path or "")
    here = Path(page.file.src_uri).parent

    def moved(match: re.Match[str]) -> str:
        file = (source.parent / match[2]).resolve()
        return f"{match[1]}{os.path.relpath(place(file), here)}" if file.is_file() else match[0]

    return LINK.sub(moved, markdown)
