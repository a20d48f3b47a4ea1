"""Commands on models and finished runs: `score`, `chat`, `export`, `merge` and `compare`.

Arguments and printing only: the modules named after the commands import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import AsJson, Overrides, RunFolder, command, make_table, print_json
from rather.errors import ConfigError

Model = Annotated[
    str, typer.Argument(help="A model folder, hub name, adapter, run folder or checkpoint.")
]
MOST_SLICES = 40  # printed; --json has all
MOST_METRICS = 12  # differing metrics that are printed


@command
def score_command(
    model: Model,
    pairs: Annotated[Path, typer.Argument(help="A file of pairs in any supported format.")],
    overrides: Overrides = None,
    reference: Annotated[
        str | None, typer.Option(help="Reference model for rewards; without it: log-probs.")
    ] = None,
    by: Annotated[
        list[str] | None, typer.Option(help="Also score by values of this column; repeatable.")
    ] = None,
    as_json: AsJson = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write the numbers of each pair to this JSONL file.")
    ] = None,
) -> None:
    """Score pairs with a model: how often, and by how much, it prefers the chosen answers.

    With --reference by implicit rewards, as in an evaluation during training; otherwise by
    log-probs, summed and per token. Data and loss settings are overrides, such as
    sequence_length=2048 or beta=0.05.
    """
    from rather.commands.score import open_output, score
    from rather.run_folder.model_source import weights_of
    from rather.tracking.json_lines import strict_json

    with open_output(out) as file:
        other = weights_of(reference) if reference else None
        scores = score(weights_of(model), other, pairs, overrides or [], by or [])
        if file is not None:
            file.writelines(strict_json(line) + "\n" for line in scores.lines())
    numbers = {"model": model, "reference": reference, "file": str(pairs), **scores.everything}
    if as_json:
        print_json(numbers)
        return
    _print_scores(numbers, Console())
    if out:
        typer.echo(f"The numbers of each pair are in {out}")


def _print_scores(scores: Mapping[str, Any], console: Console) -> None:
    against = f" against {scores['reference']}" if scores["reference"] else ""
    kinds = {"logps": "log-prob", "logps_per_token": "log-prob per token"}
    for kind, name in ({"rewards": "reward"} if "rewards/margins" in scores else kinds).items():
        columns = ("pairs", "accuracy (95 %)", "ties", "margin (95 %)", "chosen", "rejected")
        table = make_table(f"{scores['model']}{against}: {name}", "slice", *columns)
        table.add_row("all", *_cells(scores, kind), style="bold", end_section=True)
        for column, values in scores["by"].items():
            for value, numbers in list(values.items())[:MOST_SLICES]:
                table.add_row(Text(f"{column}: {value}"), *_cells(numbers, kind))
            if (more := len(values) - MOST_SLICES) > 0:
                table.add_row(f"{column}: {more} more values with --json")
        console.print(table)


def _cells(numbers: Mapping[str, Any], kind: str) -> list[str]:
    accuracy, margin, ties, chosen, rejected = (
        numbers[f"{kind}/{name}"]
        for name in ("accuracies", "margins", "ties", "chosen", "rejected")
    )
    (low, high), (least, most) = (
        numbers[f"{kind}/{name}_interval"] for name in ("accuracies", "margins")
    )
    return [
        str(numbers["pairs"]),
        f"{accuracy:.1%} ({low:.1%} to {high:.1%})",
        f"{ties:.1%}",
        f"{margin:.4g} ({least:.4g} to {most:.4g})",
        f"{chosen:.4g}",
        f"{rejected:.4g}",
    ]


@command
def chat_command(
    model: Model,
    beside: Annotated[
        str | None, typer.Option(help="A second model that answers the same questions.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Print the answer to this prompt and exit.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = 512,
    temperature: Annotated[
        float, typer.Option(help="0: greedy; from 0.01: sample.", min=0.0)
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the likeliest tokens of this share.", min=0.01, max=1.0),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed for sampling; default: 0.", min=0, max=2**32 - 1)
    ] = None,
) -> None:
    """Chat with a model in the terminal, with its chat template. Greedy without a temperature.

    /reset starts a new conversation, /system TEXT sets the system message, /quit exits.
    """
    if not (temperature == 0 or 0.01 <= temperature < math.inf):
        raise ConfigError(f"--temperature must be 0 or at least 0.01 (got {temperature}).")
    if temperature == 0 and (top_p is not None or seed is not None):
        raise ConfigError("--top-p and --seed need sampling: set --temperature as well.")
    from rather.commands.chat import Chat, Speaker, seed_sampling
    from rather.model.generate import Decoding
    from rather.run_folder.model_source import weights_of

    models = [weights_of(name) for name in (model, beside) if name is not None]
    seed_sampling(seed or 0)
    speakers = [Speaker.load(weights, system) for weights in models]
    decoding = Decoding(max_new_tokens, temperature, top_p or 1.0)
    chat = Chat(speakers, decoding, Console(highlight=False))
    chat.talk() if prompt is None else chat.ask(prompt)


@command
def export_command(
    source: Model,
    out: Annotated[Path, typer.Argument(help="The new folder to write.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export the adapter alone, not merged.")
    ] = False,
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(help="Precision; default: that of the source."),
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Largest file, such as 500MB; default: 4GB.")
    ] = None,
) -> None:
    """Write a model to a new folder, after comparing its log-probs with those of the source."""
    from rather.commands.export import export, parse_size

    largest = parse_size(shard_size) if shard_size else None
    typer.echo(f"{out}: {export(source, out, adapter=adapter, dtype=dtype, largest=largest)}")


@command
def merge_command(
    adapter: Annotated[str, typer.Argument(help="Folder or hub name of a PEFT adapter.")],
    out: Annotated[Path, typer.Option(help="Folder for the merged model.")],
    base: Annotated[
        str | None, typer.Option(help="Base model, if not the one that the adapter names.")
    ] = None,
) -> None:
    """Merge an adapter into its base model, after comparing log-probs before and after."""
    from rather.commands.export import merge

    typer.echo(f"{out}: {merge(adapter, out, base)}")


@command
def compare_command(run_a: RunFolder, run_b: RunFolder, as_json: AsJson = False) -> None:
    """Compare two runs: settings, environment, metrics, weights, and the first differing step."""
    from rather.commands.compare import compare

    found = compare(run_a, run_b)
    print_json(found) if as_json else _print_comparison(found, Console())


def _print_comparison(found: Mapping[str, Any], console: Console) -> None:
    a, b = (Path(name).name for name in found["runs"])
    for title in ("config", "environment"):
        rows = [[key, *map(str, pair)] for key, pair in found[title].items()]
        _print_rows(console, f"{title}: {len(rows)} differences", [title, a, b], rows)
    curves = {name: curve for name, curve in found["curves"].items() if curve["largest"]}
    rows = []
    for name in sorted(curves, key=lambda name: -curves[name]["largest"])[:MOST_METRICS]:
        curve, ends = curves[name], found["metrics"][name]
        tops = [f"{value:.4g} at {step}" for value, step in ends.get("best", [])] or ["", ""]
        apart = f"{curve['largest']:.3g} at step {curve['at']}, {curve['rms']:.3g} rms"
        rows.append([name, *(f"{value:.6g}" for value in ends["final"]), *tops, apart])
    title = f"metrics: {len(curves)} of {len(found['curves'])} differ"
    names = ["metric", f"{a}, final", f"{b}, final", f"{a}, best", f"{b}, best", "largest gap"]
    _print_rows(console, title, names, rows)
    typer.echo("\n".join(_sentences(found)))


def _print_rows(console: Console, title: str, headings: list[str], rows: list[list[str]]) -> None:
    table = Table(*headings, title=title, title_justify="left", header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table if rows else Text(title))


def _sentences(found: Mapping[str, Any]) -> list[str]:
    first, weights, (a, b) = found["first_difference"], found["weights"], found["steps"]
    said = [f"Steps: {a} and {b}." if a != b else f"Both have {a} steps."]
    if first:
        before, now = first["values"]
        said.append(
            f"They differ from step {first['step']}: {first['metric']} is {before!r} and {now!r}."
        )
    else:
        said.append("No metric differs at a common step.")
    if weights is None:
        said.append("Weights were not compared: a run has no exported model.")
    elif weights["equal"]:
        said.append(f"All {weights['tensors']} tensors of the models are bit-identical.")
    else:
        said.append(f"{weights['differing']} of {weights['tensors']} tensors of the models differ.")
    said.append("The runs are bit-identical." if found["equal"] else "The runs are not equal.")
    return said
