"""Arguments of the commands on models; the modules named after the commands import torch."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from rather.commands.terminal import (
    AsJson,
    Force,
    Imports,
    MaybeFile,
    OutFile,
    Overrides,
    TrustPaths,
    command,
    echo,
    heavy_imports,
    known_model,
    print_json,
    writable,
)
from rather.config import plugins
from rather.errors import ConfigError
from rather.files import JsonObject

Model = Annotated[
    str,
    typer.Argument(
        help="A model folder, hub name, adapter, run folder or checkpoint.", callback=known_model
    ),
]

DtypeOption = Annotated[
    Literal["bf16", "fp16", "fp32"] | None,
    typer.Option(help="Precision; default: that of the source."),
]
RoundingOption = Annotated[
    Literal["dithered", "nearest"] | None,
    typer.Option(help="Rounding to bf16; default: that of the run, else dithered."),
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the Python files that come with the model."),
]
AnyBase = Annotated[
    bool,
    typer.Option(
        "--any-base", help="Accept a base with other weights than an adapter was trained on."
    ),
]


@command
def score_command(
    model: Model,
    pairs: Path,
    overrides: Overrides = None,
    reference: str | None = None,
    by: list[str] | None = None,
    as_json: AsJson = False,
    out: OutFile = None,
    trust_code: TrustCode = False,
    trust_paths: TrustPaths = False,
    any_base: AnyBase = False,
) -> None:
    """Score pairs with a model: how often, and by how much, it prefers the chosen answers.

    With --reference by implicit rewards, as in an evaluation during training; otherwise by
    log-probs, summed and per token. Data and loss settings are overrides, such as
    sequence_length=2048 or beta=0.05.

    pairs: A file of pairs in any supported format.
    reference: Reference model for rewards; without it: log-probs.
    by: Also score by values of this column; repeatable.
    out: Also write the numbers of each pair to this JSONL file.
    """
    with heavy_imports():
        from rather.commands.score import print_scores, score
    from rather.config.found import Trust

    trust = Trust(trust_code, trust_paths, any_base)
    numbers = score(model, pairs, overrides or [], reference, by or [], out, trust=trust)
    print_json(numbers) if as_json else print_scores(numbers)


@command
def chat_command(
    model: Model,
    beside: str | None = None,
    prompt: str | None = None,
    system: str | None = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_p: Annotated[float | None, typer.Option(min=0.01, max=1.0)] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1)] = None,
    trust_code: TrustCode = False,
    trust_paths: TrustPaths = False,
    any_base: AnyBase = False,
) -> None:
    """Chat with a model in the terminal, with its chat template. Greedy without a temperature.

    /reset starts a new conversation, /system TEXT sets the system message, /quit exits.

    beside: A second model that answers the same questions.
    prompt: Print the answer to this prompt and exit.
    system: The system message.
    max_new_tokens: Longest answer in tokens.
    temperature: 0: greedy; from 0.01: sample.
    top_p: Sample from the likeliest tokens of this share.
    seed: Seed for sampling; default: 0.
    """
    if temperature == 0 and (top_p is not None or seed is not None):
        raise ConfigError("--top-p and --seed need sampling: set --temperature as well.")
    temperature = _temperature_of(temperature, 1, top_p)
    with heavy_imports():
        from rather.commands.chat import chat
        from rather.model.generate import Decoding
    from rather.config.found import Trust

    decoding = Decoding(max_new_tokens, temperature, top_p or 1.0)
    names = [model, beside] if beside else [model]
    trust = Trust(trust_code, trust_paths, any_base)
    chat(names, prompt, system, decoding, seed or 0, trust=trust)


@command
def generate_command(
    model: Model,
    prompts: Path,
    out: Annotated[Path, typer.Option(callback=writable)],
    answers: Annotated[int, typer.Option(min=1)] = 1,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.01, max=1.0)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 512,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    stop: list[str] | None = None,
    system: str | None = None,
    batch: Annotated[int | None, typer.Option(min=1)] = None,
    server: str | None = None,
    served_name: str | None = None,
    concurrency: Annotated[int | None, typer.Option(min=1)] = None,
    max_tokens_spent: Annotated[int | None, typer.Option(min=1)] = None,
    timeout: Annotated[float | None, typer.Option(min=0.1)] = None,
    dry_run: bool = False,
    force: Force = False,
    as_json: AsJson = False,
    imports: Imports = None,
    trust_code: TrustCode = False,
    trust_paths: TrustPaths = False,
    any_base: AnyBase = False,
) -> None:
    """Write the answers of a model to the prompts of a file, and OUT.meta.json about them.

    Run the same command again to continue after an interruption; the file is the same as without.

    prompts: A file of prompts: any shape that training takes, with or without answers.
    out: The JSONL file of prompts and answers to write.
    answers: Answers to each prompt.
    temperature: 0: greedy; from 0.01: sample. Default: 0 for one answer, 1 for several.
    top_p: Sample from the likeliest tokens of this share.
    max_new_tokens: Longest answer in tokens.
    seed: Seed for sampling.
    stop: End an answer before this text; repeatable.
    system: The system message of prompts that have none.
    batch: Answers generated at a time; default: as many as fit in memory.
    server: Ask a server (vLLM, SGLang, llama.cpp, ...) that runs MODEL, such as http://127.0.0.1:8000.
    served_name: Name of the model on the server; default: the only one that it lists, else MODEL.
    concurrency: Requests to the server at a time; default: 16.
    max_tokens_spent: Stop before the server has read and written more tokens than this.
    timeout: Seconds until a request to the server is repeated; default: 120.
    dry_run: Print the number of tokens and the first prompt, then exit.
    """
    temperature = _temperature_of(temperature, answers, top_p)
    if any(not text for text in stop or ()):
        raise ConfigError("--stop must not be empty.")
    with heavy_imports():
        from rather.commands.generate import AnswerRequest, generate_answers
        from rather.model.generate import Decoding
    from rather.config.found import Trust

    plugins.load_requested()
    decoding = Decoding(max_new_tokens, temperature, top_p or 1.0, tuple(stop or ()))
    request = AnswerRequest(answers, decoding, seed, system)
    trust = Trust(trust_code, trust_paths, any_base)
    options: JsonObject = {"trust": trust, "force": force, "dry_run": dry_run}
    if server:
        from rather.commands.generate_by_server import ServerOptions, generate_by_server

        if batch:
            raise ConfigError("--batch: a server chooses its own; leave it out.")
        limits = concurrency or 16, max_tokens_spent, timeout or 120.0
        server_settings = ServerOptions(server, served_name, *limits)
        meta = generate_by_server(model, prompts, out, request, server_settings, **options)
    else:
        server_options = (served_name, concurrency, max_tokens_spent, timeout)
        if any(option is not None for option in server_options):
            raise ConfigError(
                "--served-name, --concurrency, --max-tokens-spent and --timeout need --server."
            )
        meta = generate_answers(model, prompts, out, request, batch=batch, **options)
    if as_json:
        print_json(meta)
    elif meta:
        tokens = meta["tokens"]["answers"]
        length = "" if tokens is None else f", {tokens} tokens"
        echo(f"{out}: {meta['rows']} prompts, {meta['rows'] * answers} answers{length}")


def _temperature_of(temperature: float | None, answers: int, top_p: float | None) -> float:
    """Return the temperature of --answers answers; refuse what would sample nothing."""
    if temperature is None:
        temperature = 1.0 if answers > 1 else 0.0
    if not (temperature == 0 or 0.01 <= temperature < math.inf):
        raise ConfigError(f"--temperature must be 0 or at least 0.01 (got {temperature}).")
    if temperature == 0 and answers > 1:
        raise ConfigError(
            "--answers: several answers with --temperature 0 would be equal; raise the temperature."
        )
    if temperature == 0 and top_p is not None:
        raise ConfigError("--top-p needs sampling: set --temperature as well.")
    return temperature


@command
def judge_command(
    answers: Path,
    other: MaybeFile = None,
    judge: Annotated[str, typer.Option("--with")] = ...,  # type: ignore[assignment]
    judge_model: str | None = None,
    judge_template: Path | None = None,
    column: list[str] | None = None,
    rule_timeout: Annotated[float | None, typer.Option(min=0.001)] = None,
    judge_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    concurrency: Annotated[int, typer.Option(min=1)] = 16,
    out: OutFile = None,
    dry_run: bool = False,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
    trust_paths: TrustPaths = False,
    any_base: AnyBase = False,
) -> None:
    """Judge answers: how often those of a second file are better, or the score of each of one file.

    A server compares in both orders; a verdict that changes with the order is a tie.

    answers: File A, as `rather generate` writes it.
    other: File B: answers to the same prompts.
    judge: A rule (rule.py:score), a reward model, a server (http://...), or a judge by its word.
    judge_model: Name of the model on the server.
    judge_template: Jinja file of the question: prompt, answer_a, answer_b, row and its columns.
    judge_tokens: Token limit of a verdict.
    column: NAME=COLUMN, the column for a parameter of a rule or name in a template; repeatable.
    rule_timeout: Seconds that a rule may take for one answer; default: 10.
    concurrency: Requests at a time.
    out: Write the rows of a single file with their scores to this JSONL file.
    dry_run: Print how many requests and tokens a server would get, then exit.
    """
    from rather.commands.judge import columns_of, judge_files, print_verdict, score_file
    from rather.config.found import Trust
    from rather.judges.judge import ForecastOnly, JudgeOptions, make_judge

    options = JudgeOptions(
        model=judge_model, template=judge_template, max_tokens=judge_tokens,
        concurrency=concurrency, dry_run=dry_run,
        trust=Trust(trust_code, trust_paths, any_base),
        columns=columns_of(column or ()), rule_timeout=rule_timeout,
        report=partial(echo, err=True),
    )  # fmt: skip
    if other and out:
        raise ConfigError("--out: scores are written for a single file; leave out the second one.")
    try:  # the judge ends with what it has started before anything is printed
        if other:
            verdict = judge_files(answers, other, make_judge(judge, options))
        else:
            verdict = score_file(answers, make_judge(judge, options), out)
    except ForecastOnly:
        raise typer.Exit from None
    print_json(verdict) if as_json else print_verdict(verdict)


@command
def export_command(
    source: Model,
    out: Path,
    adapter: bool = False,
    dtype: DtypeOption = None,
    shard_size: str | None = None,
    rounding: RoundingOption = None,
    file_format: Annotated[str, typer.Option("--format")] = "hf",
    trust_code: TrustCode = False,
    trust_paths: TrustPaths = False,
    any_base: AnyBase = False,
) -> None:
    """Write a model to a new folder, after comparing its log-probs with those of the source.

    out: The new folder to write; with --format gguf, the file.
    adapter: Export the adapter alone, not merged.
    shard_size: Largest file, such as 500MB; default: 4GB.
    file_format: hf, a folder for transformers; gguf, a file for llama.cpp; or megatron, a
    torch_dist checkpoint.
    """
    if file_format not in ("hf", "gguf", "megatron"):
        raise ConfigError(f"--format {file_format}: write hf, gguf or megatron.")
    if file_format != "hf" and (adapter or shard_size):
        raise ConfigError(f"--adapter and --shard-size do not apply to --format {file_format}.")
    with heavy_imports():
        from rather.commands.export import export, export_as
    from rather.config.found import Trust
    from rather.optim.rounding import Rounding

    options: JsonObject = {"adapter": adapter, "dtype": dtype, "size": shard_size}
    options["trust"] = Trust(trust_code, trust_paths, any_base)
    options["rounding"] = Rounding(rounding) if rounding else None
    write = export if file_format == "hf" else partial(export_as, file_format)
    echo(f"{out}: {write(source, out, **options)}")


@command
def merge_command(
    adapter: str,
    out: Annotated[Path, typer.Option(help="Folder for the merged model.")],
    base: str | None = None,
    dtype: DtypeOption = None,
    rounding: RoundingOption = None,
    trust_code: TrustCode = False,
    any_base: AnyBase = False,
) -> None:
    """Merge an adapter into its base model, after comparing log-probs before and after.

    adapter: Folder or hub name of a PEFT adapter.
    base: Base model, if not the one that the adapter names.
    """
    with heavy_imports():
        from rather.commands.export import merge
    from rather.config.found import Trust
    from rather.optim.rounding import Rounding

    trust = Trust(trust_code, any_base=any_base)
    options: JsonObject = {"dtype": dtype, "trust": trust}
    options["rounding"] = Rounding(rounding) if rounding else None
    echo(f"{out}: {merge(adapter, out, base, **options)}")
