"""The commands. Every error a user can cause is one message on stderr and an exit code; anything else is our bug."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rather.commands.board import board_command
from rather.commands.compare_losses import compare_losses_command
from rather.commands.data import data_command
from rather.commands.doctor import doctor_command
from rather.commands.folders import save_now_command, stop_command, verify_command
from rather.commands.health import health_command
from rather.commands.migrate import migrate_command
from rather.commands.models import (
    chat_command,
    compare_command,
    export_command,
    merge_command,
    score_command,
)
from rather.commands.plan import plan_command
from rather.commands.recipes import recipes_app
from rather.commands.report import report_command
from rather.commands.sweep.command import sweep_command
from rather.commands.terminal import ConfigPath, Imports, Overrides, guarded, print_json
from rather.commands.terminal import settings as settings_of
from rather.config.redaction import redact
from rather.run_folder.signals import PATIENCE, StopRequest, leave_within

_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ

app = typer.Typer(
    name="rather",
    help="Align language models with preference pairs: one YAML and prompt/chosen/rejected data in, a model out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
config_app = typer.Typer(
    help="Look at a configuration: effective values, meanings, the schema.", no_args_is_help=True
)
app.add_typer(config_app, name="config")
app.add_typer(recipes_app, name="recipes")
app.command("data", epilog="Example: `rather data dpo.yaml --html data.html`")(data_command)
app.command("plan", epilog="Example: `rather plan dpo.yaml --gpus 8 --gpu h100`")(plan_command)
app.command("doctor", epilog="Example: `rather doctor dpo.yaml`")(doctor_command)
app.command("verify", epilog="Example: `rather verify output/dpo`")(verify_command)
app.command("stop", epilog="Example: `rather stop output/dpo`")(stop_command)
app.command("save-now", epilog="Example: `rather save-now dpo.yaml`")(save_now_command)
app.command("health", epilog="Example: `rather health output/dpo`")(health_command)
app.command("report", epilog="Example: `rather report output/dpo`")(report_command)
app.command("board", epilog="Example: `rather board output`")(board_command)
app.command("compare-losses", epilog="Example: `rather compare-losses dpo.yaml --plot a.html`")(
    compare_losses_command
)
app.command("migrate", epilog="Example: `rather migrate trl.yaml --out dpo.yaml`")(migrate_command)
app.command(
    "score", epilog="Example: `rather score output/dpo pairs.jsonl --reference base --by lang`"
)(score_command)
app.command("chat", epilog="Example: `rather chat output/dpo --beside base`")(chat_command)
app.command(
    "export", epilog="Example: `rather export output/dpo out --dtype bf16 --shard-size 5GB`"
)(export_command)
app.command("merge", epilog="Example: `rather merge output/lora/adapter --out merged`")(
    merge_command
)
app.command("compare", epilog="Example: `rather compare output/a output/b`")(compare_command)
app.command("sweep", epilog="Example: `rather sweep dpo.yaml beta=0.01,0.05,0.1`")(sweep_command)


def train_from_config(path: Path, overrides: list[str], *, dry_run: bool = False) -> int:
    """Trains what the YAML says and returns the exit code."""
    from rather.data.show import print_report
    from rather.tracking import close_logging, setup_logging, worker_log

    with StopRequest() as stop:
        config = settings_of(path, overrides)
        from rather.data.prepare import BadRows
        from rather.pipeline.pipeline import DPOPipeline
        from rather.run_folder.layout import write_data_report
        from rather.run_folder.lock import locked

        if dry_run:
            with closing(DPOPipeline(config)) as pipeline:
                return _dry_run(pipeline)
        rank = int(os.environ["RANK"]) if _UNDER_TORCHRUN else 0
        with locked(config, is_main=rank == 0):
            if rank == 0:
                setup_logging(config.log_dir)
            try:
                for role in ("actor_train", "reference"):
                    worker_log(config.log_dir, role, rank)
                pipeline = DPOPipeline(config)
                pipeline.roles.watch()
                if rank == 0:
                    print_report(pipeline.data.report, Console(stderr=True))
                return pipeline.run(stop)
            except BadRows as refused:
                write_data_report(config.run_dir, refused.report)
                raise
            finally:
                close_logging()


@app.command(
    epilog="Example: `rather train dpo.yaml beta=0.05 actor_train.training_args.learning_rate=1e-6`"
)
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Do all but the first step; train nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew where a run of this name exists.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="A Ray cluster that is already there: host:port or auto.", show_default=False
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Train the policy. The same command goes on where an interrupted run stopped.

    Where the config names several devices, a local Ray is started, unless --address names one or torchrun runs this.
    """
    given = [*(overrides or []), *(["overwrite=true"] if overwrite else [])]
    given += [f"ray.address='{address}'"] if address else []
    raise typer.Exit(
        guarded(lambda: _report_first_failure(lambda: train_from_config(config, given, dry_run=dry_run)))
    )


@app.command("eval", epilog="Example: `rather eval dpo.yaml --model output/dpo/model`")
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Weights to evaluate; the run's own result when not given.", show_default=False
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Evaluate a model on the held-out pairs against the reference, and print the metrics as JSON."""

    def work() -> int:
        settings = settings_of(config, overrides or [])
        from rather.errors import ConfigError
        from rather.pipeline.pipeline import DPOPipeline

        if not settings.validation.data_args.given:
            raise ConfigError(
                "validation.data_args: name a held-out file_name or a split to evaluate on."
            )
        result = settings.run_dir / "model"
        if model is None and not result.exists():
            raise ConfigError(
                f"{result}: the run has no model yet; train first, or name weights with --model."
            )
        with closing(DPOPipeline(settings)) as pipeline:
            pipeline.initialize(model=model or str(result))
            print_json(pipeline.evaluate())
        return 0

    raise typer.Exit(guarded(work))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = Path(
        "rather-demo"
    ),
) -> None:
    """Make a small undecided model, train it with `rather train`, show its answers before and after. No network."""

    def work() -> int:
        from rather.commands.demo import run_demo

        return run_demo(out, Console())

    raise typer.Exit(guarded(work))


@config_app.command("show", epilog="Example: `rather config show dpo.yaml beta=0.05`")
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print every effective value and where it came from."""

    def work() -> int:
        from rather.config.load import load
        from rather.config.show import show

        typer.echo(show(load(config, overrides or [])))
        return 0

    raise typer.Exit(guarded(work))


@config_app.command("explain", epilog="Example: `rather config explain beta dpo.yaml`")
def config_explain(
    key: Annotated[
        str, typer.Argument(help="A key path, such as actor_train.training_args.learning_rate.")
    ],
    config: Annotated[
        Path | None, typer.Argument(help="Also tell the value in this YAML.", show_default=False)
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Explain one key: meaning, type, range, default and, given a file, its value and source."""

    def work() -> int:
        from rather.config.load import load
        from rather.config.show import explain

        file, wanted = (
            (Path(key), str(config)) if config and key.endswith(".yaml") else (config, key)
        )  # either order
        typer.echo(explain(load(file, overrides or []) if file else None, wanted))
        return 0

    raise typer.Exit(guarded(work))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the YAML, for editors."""
    from rather.config.show import json_schema

    print_json(json_schema())


@config_app.command("reference")
def config_reference() -> None:
    """Print the reference of all keys as Markdown (docs/config.md)."""
    from rather.config.show import reference_markdown

    typer.echo(reference_markdown(), nl=False)


def _report_first_failure(work: Callable[[], int]) -> int:
    """Of the processes that torchrun started only one tells what went wrong."""
    if not _UNDER_TORCHRUN:
        return work()
    from rather.cluster.supervision import report_first_failure

    return report_first_failure(work)


def _dry_run(pipeline: Any) -> int:
    """Loads data and models as a run would, then tells what it would do."""
    from rather.data.show import print_report

    print_report(pipeline.data.report, Console(stderr=True))
    pipeline.initialize()
    first = next(pipeline.steps())
    typer.echo(
        f"{len(pipeline.data.train)} pairs, {pipeline.total_steps} steps of {pipeline.source.order.batch} pairs; the first "
        f"packs {first.tokens} tokens into {len(first.policy)} micro-batches. "
        "Nothing was trained; only the data cache was written."
    )
    return 0


def main() -> None:
    try:
        app()
    except SystemExit as end:
        if (
            isinstance(end.code, int) and end.code > 128
        ):  # by a signal: no library may hold the exit up
            leave_within(PATIENCE, end.code)
        raise
    except Exception as error:  # a bug of ours, told without the secrets that its trace may hold
        print(redact("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        sys.exit(1)
