"""Commands before a run: `data`, `config`, `recipes`, and the arguments of `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rather.commands.terminal import (
    AsJson,
    ConfigPath,
    Force,
    Imports,
    MaybeFile,
    OutFile,
    Overrides,
    command,
    echo,
    heavy_imports,
    print_json,
    print_table,
    settings,
)
from rather.recipes import copy_recipe, find_recipe, list_recipes
from rather.registry import tool

if TYPE_CHECKING:
    from rather.config.run_config import DPOConfig
    from rather.data.prepare import Prepared
    from rather.data.report import Json

PAIRS_ON_A_PAGE = 3

config_app = typer.Typer(
    help="Inspect a configuration: effective values, meanings, the schema.", no_args_is_help=True
)
recipes_app = typer.Typer(
    help="Ready-made configs with the settings of papers and their authors.", no_args_is_help=True
)
RecipeName = Annotated[str, typer.Argument(help="A name from `rather recipes list`.")]


@command
def data_command(
    config: ConfigPath,
    overrides: Overrides = None,
    show: Annotated[int, typer.Option(min=0)] = 0,
    save: Path | None = None,
    html: OutFile = None,
    overlap: list[Path] | None = None,
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """Prepare the pairs and show what the model will see: dropped rows with reasons, lengths,
    repeats, contradictions, evaluation prompts that are also in train, and prompts that differ at
    inference.

    save: Write the tokenised pairs to this new folder.
    show: Print this many pairs with their scored tokens.
    html: Write everything as one HTML file, with charts.
    overlap: Count training rows that share 13 words in a row with this file of rows, and with the
        held-out pairs; repeat it for more files.
    """
    run_config = settings(config, overrides)
    from rather.data.prepare import prepare
    from rather.data.save import save as save_pairs
    from rather.data.show import print_report, show_pairs, token_view
    from rather.data.template import tokenizer_of

    prepared = prepare(run_config)
    report, console = dict(prepared.report), Console(stderr=as_json)
    if show or html:
        tokenizer = tokenizer_of(run_config.actor_train)
        report["shown"] = token_view(prepared.train, tokenizer, show or PAIRS_ON_A_PAGE)
    if overlap:
        report["overlap"] = _overlap(run_config, prepared, overlap)
    if as_json:
        print_json(report)
    else:
        print_report(report, console)
        for name, entry in report["overlap"]["texts"].items() if overlap else ():
            first_rows = f" (first: {', '.join(entry['first'])})" if entry["first"] else ""
            total, words = report["overlap"]["train_rows"], report["overlap"]["words"]
            echo(f"{entry['rows']} of {total} training rows share {words} words in a row with "
                 f"{name}{first_rows}.")  # fmt: skip
        if show:
            show_pairs(prepared.train, tokenizer, show, console)
    for folder in save_pairs(prepared, save) if save else ():
        echo(f"tokenised pairs are in {folder}", err=as_json)
    if html:
        html.write_text(tool("data_page")(report, run_config.exp_name), encoding="utf-8")
        echo(f"the page is in {html}", err=as_json)


def _overlap(config: DPOConfig, prepared: Prepared, files: Sequence[Path]) -> Json:
    from rather.data.overlap import find_overlap

    data_args, held_out = config.actor_train.data_args, config.validation.data_args
    other_files = {f"eval {name}".strip(): paths for name, paths in held_out.sets.items()}
    other_files |= {str(file): [file] for file in files}
    split = set()
    if held_out.split is not None:
        columns = (prepared.evals[""].column(name).tolist() for name in ("source", "number"))
        split = set(zip(*columns, strict=True))
    return find_overlap(
        data_args.files, other_files, split, data_args.encoding, data_args.max_samples
    )


@command
def plan_command(
    config: ConfigPath,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1)] = None,
    gpu: str | None = None,
    methods: bool = False,
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """Forecast memory, time and disk of a run, and of other settings, before anything starts.

    Only config.json of the model is read. If the files of the pairs are here, they are tokenised as
    for training.

    gpu: GPU model, such as h100 or l4; default: this machine.
    gpus: Number of GPUs for both roles; default: the config.
    methods: The argument is a model: print which ways to train it fit one GPU.
    """
    with heavy_imports():
        from rather.commands.plan import plan, print_methods

    gpu = gpu.lower() if gpu else None
    if methods:
        return print_methods(str(config), overrides or [], gpus, gpu, as_json=as_json)
    plan(config, overrides or [], gpus, gpu, as_json=as_json)


@config_app.command("show", epilog="Example: `rather config show dpo.yaml beta=0.05`")
@command
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print every effective value and where it comes from."""
    from rather.config.load import load
    from rather.config.show import show

    echo(show(load(config, overrides or [])))


@config_app.command("explain", epilog="Example: `rather config explain beta dpo.yaml`")
@command
def config_explain(
    key: str,
    config: MaybeFile = None,
    overrides: Overrides = None,
) -> None:
    """Explain a key: meaning, type, range, default; with a YAML also its value and source.

    key: A key path, such as actor_train.training_args.learning_rate.
    config: Also show the value in this YAML.
    """
    from rather.config.load import load
    from rather.config.show import explain

    if config and key.endswith(".yaml"):  # both orders are accepted
        key, config = str(config), Path(key)
    echo(explain(load(config, overrides or []) if config else None, key))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the YAML, for editors."""
    from rather.config.show import json_schema

    print_json(json_schema())


@config_app.command("reference")
def config_reference() -> None:
    """Print the reference of all keys as Markdown (docs/config.md)."""
    from rather.config.show import reference_markdown

    echo(reference_markdown(), nl=False)


@recipes_app.command("list")
def recipes_list() -> None:
    """List all recipes."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in list_recipes().items()}
    rows = [(name, text.partition("\n")[0].strip("# ")) for name, text in texts.items()]
    print_table(("recipe", "what it is"), rows)


@recipes_app.command("show", epilog="Example: `rather recipes show simpo-llama3-instruct`")
@command
def recipes_show(name: RecipeName) -> None:
    """Print a recipe."""
    echo(find_recipe(name).read_text(encoding="utf-8"), nl=False)


@recipes_app.command("copy", epilog="Example: `rather recipes copy dpo my_run.yaml`")
@command
def recipes_copy(
    name: RecipeName,
    file: MaybeFile = None,
    force: Force = False,
) -> None:
    """Copy a recipe to a YAML file, in which you then set your model and your pairs.

    file: File or folder; default: NAME.yaml.
    """
    target = copy_recipe(name, file, force=force)
    echo(
        f"{target}: set `pretrain` and `actor_train.data_args.file_name`, then run "
        f"`rather train {target}`"
    )
