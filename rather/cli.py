"""The command line. A user error is one message on stderr and an exit code; any other is a bug."""

from __future__ import annotations

import os
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rather.commands import models, prepare, runs
from rather.commands.doctor import doctor_command
from rather.commands.terminal import (
    ConfigPath,
    Imports,
    Overrides,
    command,
    echo,
    heavy_imports,
    settings,
)
from rather.config.redaction import redact
from rather.errors import ConfigError, user_error
from rather.registry import tool
from rather.run_folder.control import PATIENCE, StopRequest, leave_within

REMOVED_COMMANDS = {
    "compare": "it was removed. `rather board output` shows the curves of runs, and the settings that "
    "differ, next to each other; `sha256sum A/model/*.safetensors B/model/*.safetensors` says "
    "whether weights are equal.",
    "compare-losses": "it was removed. To compare losses, train with each: `rather sweep dpo.yaml "
    "pref_loss=sigmoid,ipo`.",
}


class CommandGroup(TyperGroup):
    """The commands, with a hint for config keys that were typed as options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if reason := REMOVED_COMMANDS.get(args[0]):
            ctx.fail(f"No such command '{args[0]}': {reason}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        ctx_args = list(ctx.args)
        arguments = " ".join(ctx_args)
        try:
            return super().invoke(ctx)
        except Exception as error:
            # click.NoSuchOption, which Typer may bring along in its own copy of click.
            if option := getattr(error, "option_name", None):
                from rather.config.keys import nearest

                # Of -beta, click reports -b.
                option = next((word for word in ctx_args if word.startswith(option)), option)
                option = option.partition("=")[0]
                after = arguments.partition(option)[2].replace("=", " ").split()
                if key := nearest(option.lstrip("-").replace("-", "_")):
                    hint = f". To set a config key, write {key}={(after or ['VALUE'])[0]}"
                    error.message += hint  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    name="rather",
    help="Preference training for language models: a YAML and pairs in, a model out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
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
        config = settings(path, overrides, with_models=True)
        with heavy_imports():
            from rather.commands import train as training

        work = training.dry_run if dry_run else training.train_run
        return work(config, stop)


@command
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: bool = False,
    overwrite: bool = False,
    address: str | None = None,
    imports: Imports = None,
) -> int:
    """Train the policy. Run the same command again to resume an interrupted run.

    With several devices, a local Ray is started, unless --address names a cluster or torchrun
    started this process.

    dry_run: Run everything up to the first step, then exit.
    overwrite: Replace an existing run of this name.
    address: Use a running Ray cluster: host:port or auto.
    """
    changes = [*(overrides or []), *(["overwrite=true"] if overwrite else [])]
    changes += [f"ray.address='{address}'"] if address else []
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return train_from_config(config, changes, dry_run=dry_run)
    from rather.cluster.supervision import report_first_failure

    return report_first_failure(lambda: train_from_config(config, changes, dry_run=dry_run))


@command
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    model: str | None = None,
    imports: Imports = None,
) -> None:
    """Evaluate a model on the held-out pairs against the reference; print the metrics as JSON.

    model: Weights to evaluate; default: the run's own result.
    """
    given = settings(config, overrides)
    with heavy_imports():
        from rather.pipeline.pipeline import evaluate_rank

    if not given.validation.data_args.given:
        raise ConfigError("validation.data_args: set file_name or split to have held-out pairs.")
    result = given.run_dir / "model"
    if model is None and not result.exists():
        raise ConfigError(f"{result}: does not exist. Train first, or pass weights with --model.")
    evaluate_rank(given, StopRequest(), model=model or str(result))


COMMANDS: dict[str, tuple[tuple[str, Any, str], ...]] = {
    "Train": (
        ("train", train, "dpo.yaml beta=0.05 actor_train.training_args.learning_rate=1e-6"),
        ("sweep", tool("sweep"), "dpo.yaml beta=0.01,0.05,0.1"),
        ("rounds", tool("rounds"), "rounds.yaml rounds.count=3"),
        ("tune", tool("tune"), "dpo.yaml --budget 20m --out tuned.yaml"),
        ("eval", evaluate, "dpo.yaml --model output/dpo/model"),
        ("demo", tool("demo"), "--out rather-demo"),
    ),
    "Prepare": (
        ("init", tool("init"), "pairs.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --out dpo.yaml"),
        ("data", prepare.data_command, "dpo.yaml --html data.html"),
        ("plan", prepare.plan_command, "dpo.yaml --gpus 8 --gpu h100"),
        ("doctor", doctor_command, "dpo.yaml"),
        ("migrate", tool("migrate"), "trl.yaml --out dpo.yaml"),
    ),
    "Watch and manage runs": (
        ("board", tool("board"), "output"),
        ("pairs", tool("pairs"), "output/dpo --write corrections.jsonl"),
        ("health", runs.health_command, "output/dpo"),
        ("report", tool("report"), "output/dpo"),
        ("stop", runs.stop_command, "output/dpo"),
        ("save-now", runs.save_now_command, "dpo.yaml"),
        ("verify", runs.verify_command, "output/dpo"),
    ),
    "Use models": (
        ("chat", models.chat_command, "output/dpo --beside base"),
        ("generate", models.generate_command, "output/dpo prompts.jsonl --out answers.jsonl"),
        ("judge", models.judge_command, "base.jsonl trained.jsonl --with rule.py:score"),
        ("score", models.score_command, "output/dpo pairs.jsonl --reference base --by lang"),
        ("export", models.export_command, "output/dpo out --dtype bf16 --shard-size 5GB"),
        ("push", tool("push"), "output/dpo ORG/NAME --dry-run"),
        ("merge", models.merge_command, "output/lora/adapter --out merged"),
    ),
}
for panel, commands in COMMANDS.items():
    for name, function, example in commands:
        epilog = f"Example: `rather {name} {example}`"
        app.command(name, rich_help_panel=panel, epilog=epilog)(function)
app.add_typer(prepare.config_app, name="config", rich_help_panel="Prepare")
app.add_typer(prepare.recipes_app, name="recipes", rich_help_panel="Prepare")


def main() -> None:
    # huggingface_hub reads it when it is imported; without it, it asks for more than files.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        app()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > 128:
            leave_within(PATIENCE, end.code)  # after a signal, no library may delay the exit
        raise
    except Exception as error:
        if refused := user_error(error):  # before a command has begun
            echo(redact(f"rather: {refused}"), err=True)
            sys.exit(refused.exit_code)
        # A bug: print the traceback without the secrets it may contain.
        print(redact("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        sys.exit(1)
