"""The key `rounds` of a training YAML, and the config of the training in each round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from rather.config.found import is_found
from rather.config.inherit import set_at
from rather.config.load import composed_values, config_from_dict
from rather.config.run_config import DPOConfig
from rather.config.schema import AnswerJudge, as_list
from rather.config.values import Count, Positive, Section, Share, Text, TwoOrMore
from rather.errors import ConfigError
from rather.files import JsonObject
from rather.judges.judge import JudgeOptions, judge_class
from rather.pipeline.forgetting import Limits

OWN_PLACES = ("actor_train.data_args.file_name", "overwrite", "resume_from_checkpoint")


class ServerKeys(Section):
    """A server with OpenAI's interface that writes the answers."""

    url: Text | None = None
    """Address of your own server. It must run the model of each round; see docs/rounds.md."""
    start: Text | None = None
    """Command that starts a server on this machine, with {model} and {port}."""
    concurrency: Count = 16
    """Requests at a time."""
    timeout: Positive = 120.0
    """Seconds for one request."""
    start_timeout: Positive = 900.0
    """Seconds until a started server must have given its first completion."""


class RoundsKeys(Section):
    """What happens before and after the training of each round."""

    count: Count = 3
    """Rounds."""
    prompts: Text | list[Text]
    """File of prompts, or one file per round."""
    held_out_prompts: Text
    """File of prompts on which every round is evaluated."""
    answers: TwoOrMore = 4
    """Answers to each prompt."""
    temperature: Positive = 1.0
    """Of sampling; above 0, since greedy answers to one prompt are all equal."""
    top_p: Share = 1.0
    """Sample from the most likely tokens that have this probability together."""
    max_new_tokens: Count = 256
    """Longest answer; one that is cut there makes no pair."""
    judge: Text | AnswerJudge | None = None
    """A rule (rule.py:score) or a reward model; a server as `{with: URL, model: NAME, template:
    FILE}`; without one, set `pool`."""
    reference: Literal["first", "previous"] = "first"
    """The reference of a round: the model before the first round, or before this one."""
    start_from: Literal["previous", "base"] = "previous"
    """Train the model of the previous round further, or the base again on the new answers."""
    keep_pairs: bool = False
    """Train on the pairs of all rounds so far."""
    server: ServerKeys | None = None
    """Where answers come from; default: the model in this process."""
    pool: Text | list[Text] | None = None
    """Other models whose answers are added to each prompt; without a judge, they are rejected."""


@dataclass(frozen=True)
class Plan:
    """A YAML with rounds."""

    rounds: RoundsKeys
    values: JsonObject  # the training part
    base: DPOConfig  # the config of a training on the base

    @property
    def folder(self) -> Path:
        return self.base.run_dir

    @property
    def first_model(self) -> str:
        return self.base.actor_train.model_path

    @property
    def pool(self) -> list[str]:
        return as_list(self.rounds.pool)

    @property
    def judge(self) -> AnswerJudge | None:
        judge = self.rounds.judge
        return AnswerJudge.model_validate({"with": judge}) if isinstance(judge, str) else judge

    @property
    def limits(self) -> Limits:
        """Return what the best round must keep, compared with the first model."""
        is_off = self.base.forgetting == "off"
        return Limits(self.base.drift_limit, math.inf if is_off else self.base.forgetting_limit)

    def prompts(self, number: int) -> Path:
        """Return the prompts of a round."""
        files = as_list(self.rounds.prompts)
        return self.locate(files[number - 1] if len(files) > 1 else files[0])

    def locate(self, name: str) -> Path:
        return self.base.actor_train.data_args.locate(name)

    def round_folder(self, number: int) -> Path:
        return self.folder / f"round-{number}"

    def model(self, number: int) -> str:
        """Return the model that a round made; that of round 0 is the base."""
        return str(self.round_folder(number) / "train" / "model") if number else self.first_model

    def training(self, number: int, *, overwrite: bool = False) -> DPOConfig:
        """Return the config of the training in a round."""
        rounds = self.rounds
        first = 1 if rounds.keep_pairs else number
        files = [str(self.round_folder(i) / "scored.jsonl") for i in range(first, number + 1)]
        before = self.model(number - 1)
        values = deepcopy(self.values)
        data_args = self.base.actor_train.data_args
        changes = {
            "exp_name": "train",
            "output_dir": str(self.round_folder(number)),
            "logging_dir": str(self.base.log_dir / f"round-{number}"),
            "overwrite": overwrite,
            "actor_train.data_args.file_name": files,
            "actor_train.data_args.cache_dir": str(self.base.data_cache_dir(data_args)),
            "actor_train.model_args.model_name_or_path": (
                before if rounds.start_from == "previous" else self.first_model
            ),
            "actor_train.model_args.tokenizer_name_or_path": self.base.actor_train.tokenizer_path,
            "reference.model_args.model_name_or_path": (
                self.first_model if rounds.reference == "first" else before
            ),
            "reference.cache.path": str(self.base.reference_cache_dir),
        }
        for path, setting in changes.items():
            set_at(values, path, setting)
        return config_from_dict(values)


def load_plan(file: Path, overrides: Sequence[str] = ()) -> Plan:
    """Read a YAML with rounds, or raise a ConfigError with all problems of its key `rounds`."""
    if is_found(file):
        raise ConfigError(f"{file}: came with a run folder; copy it if you trust what it starts.")
    values = composed_values(file, overrides)
    if not isinstance(values.get("rounds"), dict):
        raise ConfigError(f"{file.name}: has no key rounds; train with `rather train {file}`.")
    rounds_keys = values.pop("rounds")
    values.setdefault("exp_name", file.stem)
    try:
        rounds = RoundsKeys.model_validate(rounds_keys)
    except ValidationError as error:
        problems: dict[str, str] = {}  # of a union, the first reason is enough
        for problem in error.errors():
            # After the key, pydantic names the member of a union that it tried.
            names = [str(name) for name in problem["loc"] if str(name).islower() and name != "str"]
            problems.setdefault(
                ".".join(names), f"{problem['msg'][:1].lower()}{problem['msg'][1:]}"
            )
        raise ConfigError(
            [f"rounds.{name} ({file.name}): {text}." for name, text in problems.items()]
        ) from None
    for path in OWN_PLACES:
        top, _, keys = path.partition(".")
        section = values.get(top)
        for name in keys.split(".") if keys else ():
            section = section.get(name) if isinstance(section, dict) else None
        if section:
            raise ConfigError(f"{path} ({file.name}): every round sets it itself; remove it.")
    with_data = deepcopy(values)
    set_at(with_data, "actor_train.data_args.file_name", str(file))
    plan = Plan(rounds, values, config_from_dict(with_data))
    check(plan)
    return plan


def judge_problems(plan: Plan) -> list[str]:
    judge = plan.judge
    if judge is None and plan.pool:
        return []
    if judge is None or not getattr(judge, "with"):
        return ["rounds.judge: name a rule, a reward model or a server, or set rounds.pool."]
    try:
        judge_class(judge.name, JudgeOptions.of(judge, "rounds.judge"))
    except ConfigError as error:
        return error.problems
    return []


def check(plan: Plan) -> None:
    """Refuse what cannot work, before the first answer is generated."""
    rounds, base = plan.rounds, plan.base
    files = as_list(rounds.prompts)
    problems: list[str] = []
    if len(files) not in (1, rounds.count):
        problems.append(f"rounds.prompts: {len(files)} files for {rounds.count} rounds.")
    problems += judge_problems(plan)
    if rounds.server and (rounds.server.url is None) == (rounds.server.start is None):
        problems.append("rounds.server: set either url or start.")
    if rounds.server and rounds.server.start and "{port}" not in rounds.server.start:
        problems.append("rounds.server.start: has no {port}; a free one is chosen for it.")
    if base.task not in ("preference", "scored"):
        problems.append(f"task: rounds make pairs or scored answers, and task is {base.task}.")
    if base.actor_train.model_args.adapter_name_or_path:
        problems.append(
            "actor_train.model_args.adapter_name_or_path: every round begins with a new adapter on "
            "the merged weights of the round before; merge this one first (`rather merge`)."
        )
    is_first = rounds.reference == "first" and rounds.count > 1
    if "advantage" in base.loss_names and is_first and rounds.start_from == "previous":
        problems.append(
            "rounds.reference: loss 'advantage' clips the ratio to the model that wrote the "
            "answers; set previous."
        )
    for name in (*files, rounds.held_out_prompts):
        if not plan.locate(name).is_file():
            problems.append(f"rounds: {plan.locate(name)} is not a file with prompts.")
    if problems:
        raise ConfigError(problems)
