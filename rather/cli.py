"""The command line. A user error is one message on stderr and an exit code; any other is a bug."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from rather.commands.board import board_command
from rather.commands.compare_losses import compare_losses_command
from rather.commands.config import config_app
from rather.commands.control import save_now_command, stop_command
from rather.commands.data import data_command
from rather.commands.doctor import doctor_command
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
from rather.commands.sweep import sweep_command
from rather.commands.terminal import (
    ConfigPath,
    Imports,
    Overrides,
    command,
    print_json,
    settings,
)
from rather.commands.verify import verify_command
from rather.config.redaction import redact
from rather.run_folder.control import PATIENCE, StopRequest, leave_within


class CommandGroup(TyperGroup):
    """The commands, with a hint for config keys that were typed as options."""

    def invoke(self, ctx: Any) -> Any:
        arguments = list(ctx.args)
        try:
            return super().invoke(ctx)
        except Exception as error:
            # click.NoSuchOption, which Typer may bring along in its own copy of click.
            if option := getattr(error, "option_name", None):
                from rather.config.keys import nearest

                at = next((i for i, word in enumerate(arguments) if word.startswith(option)), -1)
                equals, rest = arguments[at].partition("=")[1:], arguments[at + 1 : at + 2]
                value = equals[1] if equals[0] else (rest or ["VALUE"])[0]
                if key := nearest(option.lstrip("-").replace("-", "_")):
                    error.message += f". To set a config key, write {key}={value}"  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    name="rather",
    help="Preference training for language models: a YAML and pairs in, a model out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    cls=CommandGroup,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rather {version('rather')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Preference training for language models: a YAML and pairs in, a model out."""


def train_from_config(path: Path, overrides: list[str], *, dry_run: bool = False) -> int:
    """Train as the YAML says and return the exit code."""
    with StopRequest() as stop:
        config = settings(path, overrides)
        from rather.commands.train import train_run
        from rather.data.show import print_report
        from rather.pipeline.pipeline import DPOPipeline

        if not dry_run:
            return train_run(config, stop)
        pipeline: Any = DPOPipeline(config)
        with closing(pipeline):
            print_report(pipeline.data.report, Console(stderr=True))
            pipeline.initialize()
            first = next(pipeline.steps())
            typer.echo(
                f"{len(pipeline.data.train)} pairs, {pipeline.total_steps} steps of "
                f"{pipeline.source.order.batch} pairs; the first packs {first.tokens} tokens into "
                f"{len(first.policy)} micro-batches. Nothing was trained; only the data cache was "
                "written."
            )
        return 0


@command
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run everything up to the first step, then exit.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing run of this name.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="Use a running Ray cluster: host:port or auto.")
    ] = None,
    imports: Imports = None,
) -> int:
    """Train the policy. Run the same command again to resume an interrupted run.

    With several devices, a local Ray is started, unless --address names a cluster or torchrun
    started this process.
    """
    changes = [*(overrides or []), *(["overwrite=true"] if overwrite else [])]
    changes += [f"ray.address='{address}'"] if address else []

    def work() -> int:
        return train_from_config(config, changes, dry_run=dry_run)

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return work()
    from rather.cluster.supervision import report_first_failure

    return report_first_failure(work)


@command
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Weights to evaluate; default: the run's own result.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Evaluate a model on the held-out pairs against the reference; print the metrics as JSON."""
    given = settings(config, overrides)
    from rather.errors import ConfigError
    from rather.pipeline.pipeline import DPOPipeline

    if not given.validation.data_args.given:
        raise ConfigError("validation.data_args: set file_name or split to have held-out pairs.")
    result = given.run_dir / "model"
    if model is None and not result.exists():
        raise ConfigError(f"{result}: does not exist. Train first, or pass weights with --model.")
    with closing(DPOPipeline(given)) as pipeline:
        pipeline.initialize(model=model or str(result))
        print_json(pipeline.evaluate())


@command
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo writes.")] = Path(
        "rather-demo"
    ),
) -> int:
    """Build a tiny model, train it, and show its answers before and after. Needs no network."""
    from rather.commands.demo.run import run_demo

    return run_demo(out, Console())


TRAIN, PREPARE, RUNS, MODELS = "Train", "Prepare", "Watch and manage runs", "Use models"
COMMANDS: tuple[tuple[str, Any, str, str], ...] = (
    (TRAIN, train, "train", "dpo.yaml beta=0.05 actor_train.training_args.learning_rate=1e-6"),
    (TRAIN, sweep_command, "sweep", "dpo.yaml beta=0.01,0.05,0.1"),
    (TRAIN, evaluate, "eval", "dpo.yaml --model output/dpo/model"),
    (TRAIN, demo, "demo", "--out rather-demo"),
    (PREPARE, data_command, "data", "dpo.yaml --html data.html"),
    (PREPARE, plan_command, "plan", "dpo.yaml --gpus 8 --gpu h100"),
    (PREPARE, doctor_command, "doctor", "dpo.yaml"),
    (PREPARE, migrate_command, "migrate", "trl.yaml --out dpo.yaml"),
    (RUNS, board_command, "board", "output"),
    (RUNS, health_command, "health", "output/dpo"),
    (RUNS, report_command, "report", "output/dpo"),
    (RUNS, compare_command, "compare", "output/a output/b"),
    (RUNS, stop_command, "stop", "output/dpo"),
    (RUNS, save_now_command, "save-now", "dpo.yaml"),
    (RUNS, verify_command, "verify", "output/dpo"),
    (MODELS, chat_command, "chat", "output/dpo --beside base"),
    (MODELS, score_command, "score", "output/dpo pairs.jsonl --reference base --by lang"),
    (MODELS, export_command, "export", "output/dpo out --dtype bf16 --shard-size 5GB"),
    (MODELS, merge_command, "merge", "output/lora/adapter --out merged"),
    (MODELS, compare_losses_command, "compare-losses", "dpo.yaml --plot a.html"),
)
for panel, function, name, example in COMMANDS:
    epilog = f"Example: `rather {name} {example}`"
    app.command(name, rich_help_panel=panel, epilog=epilog)(function)
app.add_typer(config_app, name="config", rich_help_panel=PREPARE)
app.add_typer(recipes_app, name="recipes", rich_help_panel=PREPARE)


def main() -> None:
    try:
        app()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > 128:
            leave_within(PATIENCE, end.code)  # after a signal, no library may delay the exit
        raise
    except Exception as error:  # a bug: print the traceback without the secrets it may contain
        print(redact("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        sys.exit(1)
