"""The report as one table, and real pairs with their scored tokens marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rather.data.pairs import PairDataset
from rather.data.report import MEANINGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rather.batch import Span

STYLES = {"dropped": "red", "changed": "yellow", "warned": "yellow"}


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """One table with every set: what was read, dropped and changed, and what is worth knowing."""
    table = Table(title="Data", title_justify="left", header_style="bold")
    table.add_column("set")
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_column("first places")
    sets = {
        "train": report["train"],
        **{f"eval {name}".strip(): told for name, told in report["evals"].items()},
    }
    for name, told in sets.items():
        for i, (what, count, places, style) in enumerate(_rows(told)):
            table.add_row(escape(name) if i == 0 else "", what, count, escape(places), style=style)
        table.add_section()
    console.print(table)
    for warning in report["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(warning)}")


def _rows(told: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    template = told.get("template", {}).get("name", "")
    if "rows" in told:
        files = ", ".join(entry["path"].rsplit("/", 1)[-1] for entry in told["files"])
        yield "rows read", f"{told['rows']:,}", files, ""
    yield (
        "pairs kept",
        f"{told['pairs']:,}",
        f"template {template}" if template else "held out of train",
        "bold",
    )
    if told.get("used", told["pairs"]) != told["pairs"]:
        yield "pairs to train on", f"{told['used']:,}", "the rest is held out", ""
    for group in ("dropped", "changed", "warned"):
        for kind, entry in told.get(group, {}).items():
            yield (
                f"{group}: {kind}",
                f"{entry['count']:,}",
                f"{MEANINGS[kind]}: {_first(entry)}",
                STYLES[group],
            )
    if told.get("ignored_columns"):
        yield "ignored columns", str(len(told["ignored_columns"])), ", ".join(told["ignored_columns"]), ""
    for part, n in told.get("tokens", {}).items():
        yield (
            f"tokens of {part}",
            f"{n['median']:.0f}",
            f"median; 95 % up to {n['p95']:.0f}, longest {n['max']}",
            "",
        )
    if "chosen_longer" in told:
        style = "yellow" if max(told["chosen_longer"], told["rejected_longer"]) >= 0.9 else ""
        yield (
            "chosen is longer",
            f"{told['chosen_longer']:.0%}",
            f"rejected is longer in {told['rejected_longer']:.0%}",
            style,
        )


def _first(entry: Mapping[str, Any], most: int = 3) -> str:
    """The first places: file:7, 11, 12, ..."""
    file, numbers = next(iter(entry["places"].items()))
    shown = ", ".join(map(str, numbers[:most]))
    return f"{file.rsplit('/', 1)[-1]}:{shown}" + (", ..." if entry["count"] > min(most, len(numbers)) else "")


def show_pairs(pairs: PairDataset, tokenizer: PreTrainedTokenizerBase, n: int, console: Console) -> None:
    """The first pairs as the model will see them; scored tokens in colour, or in [[ ]] where there are no colours."""
    count = min(n, len(pairs))
    for number, pair in enumerate(pairs.take(range(count)), 1):
        about = f"pair {number}" + (f" · id {pair.id}" if pair.id else "")
        about += f" · weight {pair.weight:g}" if pair.weight != 1 else ""
        about += f" · margin {pair.margin:g}" if pair.margin == pair.margin else ""
        console.rule(escape(about), align="left")
        for side, answer, spans, colour in (
            ("chosen", pair.chosen, pair.chosen_scored, "green"),
            ("rejected", pair.rejected, pair.rejected_scored, "red"),
        ):
            ids = [*pair.prompt.tolist(), *answer.tolist()]
            scored = sum(b - a for a, b in spans)
            console.print(f"[bold {colour}]{side}[/] ({len(ids)} tokens, {scored} scored)", highlight=False)
            console.print(_marked(ids, spans, tokenizer, colour, console), soft_wrap=True)


def _marked(
    ids: Sequence[int],
    spans: Sequence[Span],
    tokenizer: PreTrainedTokenizerBase,
    colour: str,
    console: Console,
) -> Text:
    plain = console.color_system is None
    text = Text()
    for piece, scored in _pieces(ids, spans, tokenizer):
        if scored:
            text.append(f"[[{piece}]]" if plain else piece, style=f"bold {colour}")
        else:
            text.append(piece, style="dim")
    return text


def _pieces(
    ids: Sequence[int], spans: Sequence[Span], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, bool]]:
    """Text between the ends of the spans, always decoded from the start: decoders treat a first token differently."""
    cuts = sorted({0, len(ids), *(place for span in spans for place in span)})
    done = ""
    for start, stop in pairwise(cuts):
        whole = str(tokenizer.decode(list(ids[:stop]), skip_special_tokens=False))
        yield whole[len(done) :], any(a <= start < b for a, b in spans)
        done = whole
