"""The data report in the terminal, and real pairs with their scored tokens marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich import markup
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text

from rather.config.redaction import printable
from rather.data.findings import sets_of
from rather.data.pairs import PairDataset
from rather.data.report import MEANINGS, Json
from rather.errors import counted

if TYPE_CHECKING:
    from rather.data.batch import PromptImage, TokenPair

GROUPS = {"dropped": "red", "changed": "yellow", "warned": "yellow"}
SEVERITIES = {"serious": "bold red", "warning": "yellow", "info": "dim"}
COLOURS = {"chosen": "green", "rejected": "red", "desirable": "green", "undesirable": "red",
           "answer": "green"}  # fmt: skip
SIDES = ("chosen", "rejected")
LABELS = {1.0: "desirable", 0.0: "undesirable"}
MOST_TOKENS = 1000  # shown of each side on a page
MOST_PLACES = 3
WINDOW = 32  # tokens that are decoded together


def escape(text: str) -> str:
    """Return a text whose brackets and control characters are shown, not obeyed."""
    return markup.escape(printable(text))


@contextmanager
def bar(console: Console, what: str, total: float) -> Iterator[Callable[[float, str], None]]:
    """Show a bar on a terminal, and print a line every ten seconds elsewhere.

    Yield a function that takes how much is done, and a word about it.
    """
    started = printed = monotonic()
    shown = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = shown.add_task(what, total=max(1, total))

    def advance(done: float, detail: str) -> None:
        nonlocal printed
        text = escape(f"{what}: {detail}")
        shown.update(task, completed=done, description=text)
        if not console.is_terminal and monotonic() - printed >= 10:
            printed = monotonic()
            console.print(f"{text}, {printed - started:.0f} s", highlight=False)

    with shown:
        yield advance


def print_report(report: Json, console: Console) -> None:
    """Print rows read, dropped and changed of every set; then all warnings and findings."""
    table = Table("set", "what", Column("count", justify="right"), "first places", title="Data")
    before = ""
    for name, event, count, detail, style in report_rows(report):
        if name != before:
            table.add_section()
        shown = escape(name) if name != before else ""
        table.add_row(shown, event, count, escape(detail), style=style)
        before = name
    console.print(table)
    for warning in report["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    for finding in report["look"]["findings"]:
        severity = finding["severity"]
        text = escape(finding["text"])
        advice = escape(finding["advice"])
        console.print(f"[{SEVERITIES[severity]}]{severity}:[/] {text} [dim]{advice}[/]")


def report_rows(report: Json) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield set, event, count, detail and style of each row, for the terminal and the page."""
    analysed = report.get("look", {"sets": {}})["sets"]
    unit = unit_of(report)
    for name, entry in sets_of(report).items():
        if "rows" in entry:
            files = ", ".join(short(file["path"]) for file in entry["files"])
            yield name, "rows read", f"{entry['rows']:,}", files, ""
        for address, commit in entry.get("commits", {}).items():
            yield name, "from the hub", "", f"{address} at commit {commit}", ""
        if "held_out_of" in entry:
            detail = f"held out of {entry['held_out_of']}"
        else:
            detail = f"template {entry['template']['name']}"
        yield name, f"{unit} kept", f"{entry['pairs']:,}", detail, "bold"
        if entry.get("used", entry["pairs"]) != entry["pairs"]:
            yield name, f"{unit} to train on", f"{entry['used']:,}", "the rest is held out", ""
        for group, style in GROUPS.items():
            for kind, events in entry.get(group, {}).items():
                file, numbers = next(iter(events["places"].items()))
                first = ", ".join(map(str, numbers[:MOST_PLACES]))
                ellipsis = ", ..." if events["count"] > MOST_PLACES else ""
                detail = f"{MEANINGS[kind]}: {short(file)}:{first}{ellipsis}"
                yield name, f"{group}: {kind}", f"{events['count']:,}", detail, style
        ignored = entry.get("ignored_columns")
        if ignored:
            yield name, "ignored columns", str(len(ignored)), ", ".join(ignored), ""
        for column, spread in analysed.get(name, {"lengths": {}})["lengths"].items():
            detail = f"median; 95 % up to {spread['p95']:.0f}, longest {spread['longest']}"
            median = f"{spread['median']:.0f}"
            yield name, f"tokens of {side_name(column, unit)}", median, detail, ""


def unit_of(report: Json) -> str:
    """Return what the rows of a data report became."""
    return "pairs" if report.get("rows", "pairs") == "pairs" else "answers"


def side_name(part: str, unit: str) -> str:
    return "answers" if part == "chosen" and unit == "answers" else part


def short(place: str) -> str:
    """Return the file name, and the line, of a path with a line."""
    return place.rsplit("/", 1)[-1]


def show_pairs(pairs: PairDataset, tokenizer: Any, n: int, console: Console) -> None:
    """Print the first pairs: scored tokens are coloured, or in [[ ]] without colours."""
    plain = console.color_system is None
    for pair in token_view(pairs, tokenizer, n, most=None):
        console.rule(escape(pair["name"]), align="left")
        for side, answer in pair["sides"].items():
            style = f"bold {COLOURS[side]}"
            console.print(
                f"[{style}]{side}[/] ({answer['tokens']} tokens, {answer['scored']} scored)",
                highlight=False,
            )
            text = Text()
            for scored, tokens in groupby(answer["shown"], key=lambda token: token[1]):
                piece = "".join(token for token, _ in tokens)
                piece = f"[[{piece}]]" if scored and plain else piece
                text.append(printable(piece), style=style if scored else "dim")
            console.print(text, soft_wrap=True)


def token_view(
    pairs: PairDataset, tokenizer: Any, n: int, most: int | None = MOST_TOKENS
) -> list[Json]:
    """Return the first pairs token by token; each token as [text, whether it is scored]."""
    view = []
    for number, pair in enumerate(pairs.take(range(min(n, len(pairs)))), 1):
        sides = {}
        is_pair = len(pair.rejected)
        label = LABELS.get(pair.label, "answer")
        for side in SIDES if is_pair else SIDES[:1]:
            ids, scored = pair.sequence(side)
            texts = pair_texts(pair, ids, pairs.image_token, tokenizer, most)
            shown = [
                [text, bool(mark)]
                for text, mark in zip(texts, scored, strict=False)
                if text or not pair.images
            ]
            sides[side if is_pair else label] = {
                "tokens": len(ids),
                "scored": sum(scored),
                "shown": shown,
            }
        name = f"{'pair' if is_pair else 'answer'} {number}"
        if pair.id:
            name += f" · id {pair.id}"
        view.append({"name": name, "sides": sides})
    return view


def pair_texts(
    pair: TokenPair, ids: Sequence[int], image_token: int | None, tokenizer: Any, most: int | None
) -> list[str]:
    """Return the text of each token of a side, as `token_texts`; an image is its name.

    The first token of an image, or of one of its tiles, has the name, the others have no text. At
    most `most` tokens besides those of images are shown.
    """
    if not pair.images:
        return token_texts(ids[:most], tokenizer)
    names = [name for image in pair.images for name in [image_name(image)] * image.tokens]
    remaining = iter(names)
    texts: list[str] = []
    left = len(ids) if most is None else most
    for is_image, run in groupby(ids, key=image_token.__eq__):
        run_ids = list(run)
        if is_image:
            [name, *_] = [next(remaining) for _ in run_ids]
            texts += [f"[{name}: {counted(len(run_ids), 'tokens')}]", *[""] * (len(run_ids) - 1)]
        else:
            texts += token_texts(run_ids[:left], tokenizer)
            left -= len(run_ids)
        if left <= 0:
            break
    return texts


def image_name(image: PromptImage) -> str:
    """Return 'image cat.png', or the digest of an image that is inside its row."""
    is_file = isinstance(image.source, str)
    return f"image {short(str(image.source)) if is_file else image.digest[:8]}"


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds; a character of several tokens is the last one's."""
    texts: list[str] = []
    start = 0
    done = ""
    for end in range(1, len(ids) + 1):
        decoded = str(tokenizer.decode(list(ids[start:end]), skip_special_tokens=False))
        if decoded.endswith("\ufffd") and end < len(ids):  # half a character
            texts.append("")
            continue
        texts.append(decoded[len(done) :])
        done = decoded
        # Decoding everything from the start again for each token would take quadratic time.
        if end - start > WINDOW:
            start = end - 1
            done = str(tokenizer.decode(list(ids[start:end]), skip_special_tokens=False))
    return texts
