"""The report in the terminal, and real pairs with their scored tokens marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rather.data.finding_texts import by_set
from rather.data.pairs import PairDataset
from rather.data.report import MEANINGS
from rather.data.statistics import bar_labels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rather.data.batch import Span, TokenPair

STYLES = {"dropped": "red", "changed": "yellow", "warned": "yellow"}
SEVERITIES = {"serious": "bold red", "warning": "yellow", "info": "dim"}
BAR = 40  # characters of the longest
MOST_TOKENS = 1000  # of a side, on a page
WINDOW = 32  # tokens that are decoded together


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
    for one in report["look"]["findings"]:
        style = SEVERITIES[one["severity"]]
        console.print(
            f"[{style}]{one['severity']}:[/] {escape(one['text'])} [dim]{escape(one['advice'])}[/]"
        )


def print_look(look: Mapping[str, Any], console: Console) -> None:
    """Bars of lengths, numbers of each set, and prompts that are others at inference."""
    lengths = look["sets"]["train"]["lengths"]
    _print_bars("prompts of train by tokens", {"prompt": lengths["prompt"]}, console)
    _print_bars(
        "answers of train by tokens",
        {side: lengths[side] for side in ("chosen", "rejected")},
        console,
    )
    table = Table(title="Look", title_justify="left", header_style="bold")
    table.add_column("what")
    for name in look["sets"]:
        table.add_column(escape(name), justify="right")
    for what, *numbers in by_set(look):
        table.add_row(what, *numbers)
    console.print(table)
    _print_inference(look["inference"], console)


def _print_bars(title: str, spreads: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    longest = max(spreads.values(), key=lambda spread: len(spread["edges"]))
    most = max(max(spread["counts"]) for spread in spreads.values())
    width = BAR // len(spreads)
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("tokens", justify="right", style="dim", no_wrap=True)
    for name in spreads:
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", width=width)
    for i, label in enumerate(bar_labels(longest)):
        cells: list[str | Text] = []
        for name, spread in spreads.items():
            count = spread["counts"][i] if i < len(spread["counts"]) else 0
            colour = {"chosen": "green", "rejected": "red"}.get(name, "cyan")
            cells += [f"{count:,}", Text("█" * -(-count * width // most), style=colour)]
        table.add_row(label, *cells)
    console.print(table)


def _print_inference(told: Mapping[str, Any], console: Console) -> None:
    """Where the prompt of training is not the one at inference: the tokens that differ."""
    if told["compared"]:
        same = told["compared"] - told["different"]
        console.print(
            f"{same} of {told['compared']} prompts begin as {told['by']} writes them at inference."
        )
    for one in told["examples"]:
        console.print(f"  {one['place'].rsplit('/', 1)[-1]}", highlight=False, markup=False)
        for side, style in (("training", "red"), ("inference", "green")):
            text = Text(f"    {side:<10}")
            for tokens, marked in (
                (one["before"], False),
                (one[side], True),
                (one["after"], False),
            ):
                text.append(
                    "".join(f" {token!r}" for token in tokens), style=style if marked else "dim"
                )
            console.print(text, soft_wrap=True)


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
        yield (
            "ignored columns",
            str(len(told["ignored_columns"])),
            ", ".join(told["ignored_columns"]),
            "",
        )
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
    return f"{file.rsplit('/', 1)[-1]}:{shown}" + (
        ", ..." if entry["count"] > min(most, len(numbers)) else ""
    )


def show_pairs(
    pairs: PairDataset, tokenizer: PreTrainedTokenizerBase, n: int, console: Console
) -> None:
    """The first pairs as the model will see them; scored tokens in colour, or in [[ ]] where there are no colours."""
    count = min(n, len(pairs))
    for number, pair in enumerate(pairs.take(range(count)), 1):
        console.rule(escape(_about(number, pair)), align="left")
        for side, answer, spans, colour in (
            ("chosen", pair.chosen, pair.chosen_scored, "green"),
            ("rejected", pair.rejected, pair.rejected_scored, "red"),
        ):
            ids = [*pair.prompt.tolist(), *answer.tolist()]
            scored = sum(b - a for a, b in spans)
            console.print(
                f"[bold {colour}]{side}[/] ({len(ids)} tokens, {scored} scored)", highlight=False
            )
            console.print(_marked(ids, spans, tokenizer, colour, console), soft_wrap=True)


def token_view(
    pairs: PairDataset, tokenizer: PreTrainedTokenizerBase, n: int
) -> list[dict[str, Any]]:
    """The first pairs token by token, for a page: [text, whether it is scored]."""
    view = []
    for number, pair in enumerate(pairs.take(range(min(n, len(pairs)))), 1):
        sides = {}
        for side, answer, spans in (
            ("chosen", pair.chosen, pair.chosen_scored),
            ("rejected", pair.rejected, pair.rejected_scored),
        ):
            ids = [*pair.prompt.tolist(), *answer.tolist()]
            scored = [any(a <= i < b for a, b in spans) for i in range(len(ids))]
            texts = token_texts(ids[:MOST_TOKENS], tokenizer)
            shown = [[text, mark] for text, mark in zip(texts, scored, strict=False)]
            sides[side] = {"tokens": len(ids), "scored": sum(scored), "shown": shown}
        view.append({"name": _about(number, pair), "sides": sides})
    return view


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text that each token adds. Of a character that several tokens make, the last has it."""
    texts: list[str] = []
    start, done = 0, ""
    for i in range(len(ids)):
        whole = str(tokenizer.decode(list(ids[start : i + 1]), skip_special_tokens=False))
        unfinished = whole.endswith("\ufffd") and i + 1 < len(ids)
        texts.append("" if unfinished else whole[len(done) :])
        done = done if unfinished else whole
        if (
            i - start >= WINDOW and not unfinished
        ):  # decoding all from the start would take quadratic time
            start, done = i, str(tokenizer.decode(list(ids[i : i + 1]), skip_special_tokens=False))
    return texts


def _about(number: int, pair: TokenPair) -> str:
    about = f"pair {number}" + (f" · id {pair.id}" if pair.id else "")
    about += f" · weight {pair.weight:g}" if pair.weight != 1 else ""
    return about + (f" · margin {pair.margin:g}" if pair.margin == pair.margin else "")


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
