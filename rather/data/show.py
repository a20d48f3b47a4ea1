"""The data report in the terminal, and real pairs with their scored tokens marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rather.data.findings import Json, number_rows, sets_of
from rather.data.pairs import PairDataset
from rather.data.report import MEANINGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUPS = {"dropped": "red", "changed": "yellow", "warned": "yellow"}
SEVERITIES = {"serious": "bold red", "warning": "yellow", "info": "dim"}
COLOURS = {"chosen": "green", "rejected": "red"}
SIDES = ("chosen", "rejected")
MOST_TOKENS = 1000  # shown of each side on a page
WINDOW = 32  # tokens that are decoded together


def print_report(report: Json, console: Console) -> None:
    """Print one table with every set: rows read, dropped and changed; then all warnings and
    findings.
    """
    table = _table("Data", "set", "what", "count", "first places")
    for name in sets_of(report):
        rows = [row for row in report_rows(report) if row[0] == name]
        for i, (_, what, count, detail, style) in enumerate(rows):
            table.add_row(escape(name) if i == 0 else "", what, count, escape(detail), style=style)
        table.add_section()
    console.print(table)
    for warning in report["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    for one in report["look"]["findings"]:
        severity, text, advice = one["severity"], escape(one["text"]), escape(one["advice"])
        console.print(f"[{SEVERITIES[severity]}]{severity}:[/] {text} [dim]{advice}[/]")


def report_rows(report: Json) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield set, what, count, detail and style of each row of the table, for the terminal and the
    page.
    """
    for name, entry in sets_of(report).items():
        if "rows" in entry:
            files = ", ".join(short(file["path"]) for file in entry.get("files", ()))
            yield name, "rows read", f"{entry['rows']:,}", files, ""
        template = entry.get("template", {}).get("name", "")
        detail = f"template {template}" if template else ""
        if "held_out_of" in entry:
            detail = f"held out of {entry['held_out_of']}"
        yield name, "pairs kept", f"{entry['pairs']:,}", detail, "bold"
        if entry.get("used", entry["pairs"]) != entry["pairs"]:
            yield name, "pairs to train on", f"{entry['used']:,}", "the rest is held out", ""
        for group, style in GROUPS.items():
            for kind, each in entry.get(group, {}).items():
                detail = f"{MEANINGS[kind]}{_first_places(each)}"
                yield name, f"{group}: {kind}", f"{each['count']:,}", detail, style
        if ignored := entry.get("ignored_columns"):
            yield name, "ignored columns", str(len(ignored)), ", ".join(ignored), ""
        for part, n in entry.get("tokens", {}).items():
            detail = f"median; 95 % up to {n['p95']:.0f}, longest {n['max']}"
            yield name, f"tokens of {part}", f"{n['median']:.0f}", detail, ""


def short(place: str) -> str:
    """Return the file name, and the line, of a path with a line."""
    return place.rsplit("/", 1)[-1]


def _first_places(entry: Json, most: int = 3) -> str:
    """Return the first places, such as ': file:7, 11, 12, ...'."""
    for file, numbers in entry["places"].items():
        more = ", ..." if entry["count"] > min(most, len(numbers)) else ""
        return f": {short(file)}:{', '.join(map(str, numbers[:most]))}{more}"
    return ""


def print_look(look: Json, console: Console) -> None:
    """Print the numbers of each set, and prompts that differ at inference."""
    table = _table("Numbers", "what", *map(escape, look["sets"]))
    for row in number_rows(look):
        table.add_row(*row)
    console.print(table)
    check = look["inference"]
    if check["compared"]:
        console.print(inference_line(check))
    for one in check["examples"]:
        console.print(f"  {short(one['place'])}", highlight=False, markup=False)
        for side, style in (("training", "red"), ("inference", "green")):
            text = Text(f"    {side:<10}")
            for part, own in (("before", "dim"), (side, style), ("after", "dim")):
                text.append("".join(f" {token!r}" for token in one[part]), style=own)
            console.print(text, soft_wrap=True)


def inference_line(check: Json) -> str:
    same = check["compared"] - check["different"]
    start = f"{same} of {check['compared']} compared prompts begin"
    return f"{start} as {check['by']} writes them at inference."


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name in ("what", "first places") else "right")
    return table


def show_pairs(
    pairs: PairDataset, tokenizer: PreTrainedTokenizerBase, n: int, console: Console
) -> None:
    """Print the first pairs as the model will see them: scored tokens coloured, or in [[ ]]
    without colours.
    """
    plain = console.color_system is None
    for pair in token_view(pairs, tokenizer, n, most=None):
        console.rule(escape(pair["name"]), align="left")
        for side, one in pair["sides"].items():
            about = (
                f"[bold {COLOURS[side]}]{side}[/] ({one['tokens']} tokens, {one['scored']} scored)"
            )
            console.print(about, highlight=False)
            text = Text()
            for scored, tokens in groupby(one["shown"], key=lambda token: token[1]):
                piece = "".join(token for token, _ in tokens)
                piece = f"[[{piece}]]" if scored and plain else piece
                text.append(piece, style=f"bold {COLOURS[side]}" if scored else "dim")
            console.print(text, soft_wrap=True)


def token_view(
    pairs: PairDataset, tokenizer: PreTrainedTokenizerBase, n: int, most: int | None = MOST_TOKENS
) -> list[Json]:
    """Return the first pairs token by token; each token as [text, whether it is scored]."""
    view = []
    for number, pair in enumerate(pairs.take(range(min(n, len(pairs)))), 1):
        sides = {}
        for side in SIDES:
            ids = [*pair.prompt.tolist(), *getattr(pair, side).tolist()]
            spans = getattr(pair, f"{side}_scored")
            scored = [any(a <= i < b for a, b in spans) for i in range(len(ids))]
            texts = token_texts(ids[:most], tokenizer)
            shown = [[text, mark] for text, mark in zip(texts, scored, strict=False)]
            sides[side] = {"tokens": len(ids), "scored": sum(scored), "shown": shown}
        name = f"pair {number}" + (f" · id {pair.id}" if pair.id else "")
        name += f" · weight {pair.weight:g}" if pair.weight != 1 else ""
        name += f" · margin {pair.margin:g}" if pair.margin == pair.margin else ""
        view.append({"name": name, "sides": sides})
    return view


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds.

    A character that several tokens make belongs to the last of them.
    """
    texts: list[str] = []
    start, done = 0, ""
    for i in range(len(ids)):
        whole = str(tokenizer.decode(list(ids[start : i + 1]), skip_special_tokens=False))
        unfinished = whole.endswith("\ufffd") and i + 1 < len(ids)
        texts.append("" if unfinished else whole[len(done) :])
        done = done if unfinished else whole
        # Decoding everything from the start again for each token would take quadratic time.
        if i - start >= WINDOW and not unfinished:
            start, done = i, str(tokenizer.decode(list(ids[i : i + 1]), skip_special_tokens=False))
    return texts
