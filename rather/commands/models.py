"""Commands on finished work: `score`, `chat`, `export`, `merge` and `compare`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import Overrides, guarded, print_json
from rather.tracking.json_lines import strict_json

Model = Annotated[
    str,
    typer.Argument(
        help="A model folder, hub name, adapter, run folder or checkpoint.", show_default=False
    ),
]
MOST_SLICES = 40  # in the terminal; --json has all
SHOWN = 12  # differing metrics in the terminal


# --- score ---


def score_command(
    model: Model,
    pairs: Annotated[
        Path, typer.Argument(help="A file of pairs, in any shape that trains.", show_default=False)
    ],
    overrides: Overrides = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Model that rewards are measured against; else log-probs.", show_default=False
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Also by the values of this column; may be repeated.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write the numbers of each pair to this JSONL file.", show_default=False
        ),
    ] = None,
) -> None:
    """Score pairs under a model: how often, and by how much, it prefers the chosen answers.

    With --reference by implicit rewards, as an evaluation during training does; else by log-probs, summed and per
    token. Settings of the data and of the loss are overrides, such as sequence_length=2048 or beta=0.05.
    """
    raise typer.Exit(
        guarded(partial(_score, model, pairs, overrides or [], reference, by or [], as_json, out))
    )


def _score(
    model: str,
    pairs: Path,
    overrides: list[str],
    reference: str | None,
    by: list[str],
    as_json: bool,
    out: Path | None,
) -> int:
    from rather.commands.score import score, written
    from rather.run_folder.model_source import weights_of

    with written(out) as file:
        other = weights_of(reference) if reference else None
        scores = score(weights_of(model), other, pairs, overrides, by)
        if file is not None:
            file.writelines(strict_json(line) + "\n" for line in scores.lines())
    told = {"model": model, "reference": reference, "file": str(pairs), **scores.everything}
    if as_json:
        print_json(told)
    else:
        _print_scores(told, Console())
    if out and not as_json:
        typer.echo(f"each pair: {out}")
    return 0


def _print_scores(told: Mapping[str, Any], console: Console) -> None:
    rewarded = "rewards/margins" in told
    kinds = (
        {"rewards": "reward"}
        if rewarded
        else {"logps": "log-prob", "logps_per_token": "log-prob per token"}
    )
    for kind, title in kinds.items():
        against = f" against {told['reference']}" if told["reference"] else ""
        table = Table(
            title=f"{told['model']}{against}: {title}", title_justify="left", header_style="bold"
        )
        table.add_column("slice")
        for name in ("pairs", "accuracy (95 %)", "ties", "margin (95 %)", "chosen", "rejected"):
            table.add_column(name, justify="right")
        table.add_row("all", *_cells(told, kind), style="bold", end_section=True)
        for column, values in told["by"].items():
            for value, numbers in list(values.items())[:MOST_SLICES]:
                table.add_row(Text(f"{column}: {value}"), *_cells(numbers, kind))
            if (more := len(values) - MOST_SLICES) > 0:
                table.add_row(f"{column}: {more} more values, with --json")
        console.print(table)


def _cells(numbers: Mapping[str, Any], kind: str) -> list[str]:
    (low, high), (least, most) = (
        numbers[f"{kind}/{name}_interval"] for name in ("accuracies", "margins")
    )
    return [
        str(numbers["pairs"]),
        f"{numbers[f'{kind}/accuracies']:.1%} ({low:.1%} to {high:.1%})",
        f"{numbers[f'{kind}/ties']:.1%}",
        f"{numbers[f'{kind}/margins']:.4g} ({least:.4g} to {most:.4g})",
        f"{numbers[f'{kind}/chosen']:.4g}",
        f"{numbers[f'{kind}/rejected']:.4g}",
    ]


# --- chat ---


def chat_command(
    model: Model,
    beside: Annotated[
        str | None, typer.Option(help="A second model, which answers the same.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Print the answer to this, and end.", show_default=False)
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="The system message.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 512,
    temperature: Annotated[
        float,
        typer.Option(
            help="0: always the likeliest token; from 0.01 on, tokens are drawn.", min=0.0
        ),
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw among the likeliest tokens of this share.",
            min=0.01,
            max=1.0,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the drawing; else 0.", min=0, max=2**32 - 1, show_default=False),
    ] = None,
) -> None:
    """Talk with a model, by its chat template, in the terminal. Greedy unless a temperature is given.

    /reset begins anew, /system TEXT sets the system message, /quit ends.
    """

    def work() -> int:
        from rather.errors import ConfigError

        if not (temperature == 0 or 0.01 <= temperature < math.inf):
            raise ConfigError(
                f"--temperature: {temperature} is neither 0 nor a number from 0.01 on"
            )
        if temperature == 0 and (top_p is not None or seed is not None):
            raise ConfigError(
                "--top-p, --seed: nothing is drawn at temperature 0; set --temperature as well"
            )
        from rather.commands.chat import Chat
        from rather.model.generate import Decoding
        from rather.run_folder.model_source import weights_of

        models = [weights_of(name) for name in (model, beside) if name is not None]
        decoding = Decoding(max_new_tokens, temperature, top_p or 1.0)
        chat = Chat.with_models(models, system, decoding, seed, Console(highlight=False))
        chat.talk() if prompt is None else chat.ask(prompt)
        return 0

    raise typer.Exit(guarded(work))


# --- export ---


def export_command(
    source: Annotated[
        str,
        typer.Argument(
            help="A run folder, checkpoint, model, hub name or adapter.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(help="The folder to write, which is not there yet.", show_default=False),
    ],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapter alone, instead of merged into its base.")
    ] = False,
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(help="Precision; else the source's.", show_default=False),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(help="Most bytes of a file, such as 500MB; else 4GB.", show_default=False),
    ] = None,
) -> None:
    """Write a model as a folder of its own, and compare its log-probs with the source's before it gets its name."""

    def work() -> int:
        from rather.commands.export import Wanted, bytes_of, export

        wanted = Wanted(adapter, dtype, bytes_of(shard_size) if shard_size else None)
        typer.echo(f"{out}: {export(source, out, wanted)}")
        return 0

    raise typer.Exit(guarded(work))


# --- merge ---


def merge_command(
    adapter: Annotated[
        str, typer.Argument(help="Folder or hub name of a PEFT adapter.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the merged model.", show_default=False)],
    base: Annotated[
        str | None, typer.Option(help="Its base, where it is not as it says.", show_default=False)
    ] = None,
) -> None:
    """Merge an adapter into its base, after comparing log-probs before and after."""

    def work() -> int:
        from rather.commands.merge import merge

        typer.echo(f"{out}: {merge(adapter, out, base)}")
        return 0

    raise typer.Exit(guarded(work))


# --- compare ---


def compare_command(
    run_a: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    run_b: Annotated[Path, typer.Argument(help="The folder of another.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Compare two runs: settings, environment, metrics, weights, and the first step at which they differ."""

    def work() -> int:
        from rather.commands.compare import compare

        found = compare(run_a, run_b)
        if as_json:
            print_json(found)
        else:
            _print_comparison(found, Console())
        return 0

    raise typer.Exit(guarded(work))


def _print_comparison(found: Mapping[str, Any], console: Console) -> None:
    a, b = (Path(name).name for name in found["runs"])
    for title in ("config", "environment"):
        rows = [[key, *map(str, pair)] for key, pair in found[title].items()]
        _print_table(console, f"{title}: {len(rows)} differences", [title, a, b], rows)
    curves = sorted(found["curves"].items(), key=lambda item: -(item[1]["largest"] or 0))
    rows = []
    for name, curve in curves[:SHOWN]:
        if curve["largest"]:
            ends = found["metrics"][name]
            tops = (
                [f"{value:.4g} at {step}" for value, step in ends["best"]]
                if "best" in ends
                else ["", ""]
            )
            apart = f"{curve['largest']:.3g} at step {curve['at']}, {curve['rms']:.3g} rms"
            rows.append([name, *(f"{value:.6g}" for value in ends["final"]), *tops, apart])
    differing = sum(bool(curve["largest"]) for _, curve in curves)
    title = f"metrics: {differing} of {len(curves)} differ"
    _print_table(
        console, title, ["metric", f"{a}, final", f"{b}, final", "best", "best", "apart"], rows
    )
    for sentence in _sentences(found):
        typer.echo(sentence)


def _print_table(console: Console, title: str, headings: list[str], rows: list[list[str]]) -> None:
    table = Table(*headings, title=title, title_justify="left", header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table if rows else Text(title))


def _sentences(found: Mapping[str, Any]) -> list[str]:
    first, weights = found["first_difference"], found["weights"]
    a, b = found["steps"]
    said = [f"steps: {a} and {b}"] if a != b else [f"both have {a} steps"]
    if first:
        then, now = first["values"]
        said.append(
            f"they differ from step {first['step']} on: {first['metric']} is {then!r} and {now!r}"
        )
    else:
        said.append("no number differs at any step that both have")
    if weights is None:
        said.append("weights are not compared: one of them has no exported model")
    elif weights["equal"]:
        said.append(f"all {weights['tensors']} tensors of the models are equal to the bit")
    else:
        said.append(f"{weights['differing']} of {weights['tensors']} tensors of the models differ")
    return [*said, "the runs are equal to the bit" if found["equal"] else "the runs are not equal"]
