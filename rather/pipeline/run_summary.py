"""Reports in the run folder: the forecast, some pairs, how the run was started, what it took.

No run depends on them: if one cannot be written, a warning is logged and the run continues.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from rather.cluster.launch import Roles
from rather.cluster.memory import free_memory
from rather.config.load import dump_yaml
from rather.config.redaction import redact
from rather.config.run_config import DPOConfig
from rather.config.strategies import layout
from rather.data.findings import beyond_positions, by_severity
from rather.data.show import token_view
from rather.errors import HangError, RayGone, WorkerLost
from rather.model.files import model_folder
from rather.model.sizes import sizes_of
from rather.pipeline.forgetting import why_left_out
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.starts import record_start
from rather.pipeline.steps import PreparedSteps
from rather.pipeline.timeline import Timeline
from rather.plan.forecast import SAMPLE, Forecast, PairSample, compiles
from rather.plan.memory import Device
from rather.plan.speed import GPUS, listed_speed
from rather.run_folder.layout import RunFolder, write_run_report
from rather.run_folder.names import DATA_REPORT, PLAN, RUN_REPORT
from rather.tracking.health import counts
from rather.tracking.json_lines import read_object

log = logging.getLogger(__name__)

PAIRS_SHOWN = 3  # in data_report.json, token by token


@dataclass
class RunSummary:
    """Writes the reports of a run, on the main driver only."""

    config: DPOConfig
    roles: Roles
    source: PreparedSteps
    plan: dict[str, Any] | None = None  # the forecast, as plan.json contains it
    peak: int = 0  # bytes, before the export

    def __post_init__(self) -> None:
        self.run_dir = self.config.run_dir

    def forecast(self, *, reference: bool) -> None:
        """Log what the run will take; `reference`: whether that model is loaded.

        If it may not fit this only warns: workers try it out.
        """
        config, roles = self.config, self.roles
        if not roles.is_main:
            return
        with _failure_logged("the forecast"):
            pairs, speed = pairs_of(self.source), None
            sizes = sizes_of(config.actor_train.model_path, config.actor_train.model_args)
            devices = layout(config.actor_train).devices
            device = device_here(roles.kind, devices, config.num_gpus_per_node)
            if name := gpu_here(device.kind):
                compiled = compiles(config, sizes, device.kind, pairs.steps)
                speed = listed_speed(name, sizes.active, compiled=compiled)
            plan = Forecast(config, sizes, device, pairs, speed, reference=reference)
            self.plan = plan.as_json()
            log.log(logging.INFO if plan.fits else logging.WARNING, "%s", plan.line())

    def begin(self, tokenizer: Any, step: int) -> None:
        """Write the config, which a resume needs, and what is known before the first step."""
        if not self.roles.is_main:
            return
        data = self._data_report()
        with _failure_logged("the look at the first pairs"):
            data["shown"] = token_view(self.source.data.train, tokenizer, PAIRS_SHOWN)
        resumable = self.config.model_copy(update={"overwrite": False})  # the file resumes
        RunFolder.of(self.config).write_config(dump_yaml(resumable))
        write_run_report(self.run_dir, data, DATA_REPORT)
        if self.plan:
            write_run_report(self.run_dir, self.plan, PLAN)
        record_start(self.config, self.roles.kind, step, self.source.total_steps)

    def _data_report(self) -> dict[str, Any]:
        """Return the report of the pairs, with what only the model's config can tell about them."""
        prepared, role = self.source.data, self.config.actor_train
        left_out = why_left_out(self.config, self.roles.kind, self.source)
        data = {**prepared.report, "forgetting_left_out": left_out,
                "drift_limit": self.config.drift_limit}  # fmt: skip
        with _failure_logged("the look at the model's positions"):
            folder = model_folder(role.config_path, role.model_args.revision)
            config = read_object(folder / "config.json") if folder else {}
            positions = config.get("text_config", config).get("max_position_embeddings")
            if positions:
                evals = {f"eval {name}".strip(): pairs for name, pairs in prepared.evals.items()}
                found = beyond_positions({"train": prepared.train, **evals}, positions)
                look = data["look"]
                data["look"] = {**look, "findings": by_severity([*look["findings"], *found])}
        return data

    def report(
        self, outcome: Mapping[str, Any], timeline: Timeline, stream: ReferenceStream
    ) -> None:
        """Write what the run has changed, what this start took, and how wrong the forecast was."""
        if not self.roles.is_main:
            return
        with _failure_logged(RUN_REPORT):
            times, logps = timeline.total.report(in_turn=timeline.in_turn), stream.logps
            report = {**outcome, **times, "reference": logps and logps.report()}
            write_run_report(self.run_dir, {**report, "health": counts(self.run_dir)})
            if not (plan := self.plan):
                return
            if "changed_file" not in outcome:  # the export is not part of the forecast
                self.peak = self.roles.actor_train.peak_memory()
            peak, planned = self.peak, plan["memory_bytes"]["total"]
            speed = times["pairs_per_second"]
            seconds = plan["pairs_per_step"] / speed if speed else None
            measured = {"memory_bytes": peak, "seconds_per_step": seconds}
            error = {"memory": planned / peak - 1 if peak else None, "time": None}
            if plan["seconds"] and seconds:
                error["time"] = plan["seconds_per_step"] / seconds - 1
            write_run_report(self.run_dir, {**plan, "measured": measured, "error": error}, PLAN)

    def model_card(self, step: int, pairs: int, *, with_reference: bool, result: str = "") -> str:
        """Return Markdown with the front matter that model hubs read."""
        config, actor = self.config, self.config.actor_train
        training, settings = actor.training_args, config.loss_numbers | config.loss_modifiers
        numbers = ", ".join(f"{key} {value}" for key, value in settings.items())
        reference = f"`{config.reference.model_path}`" if with_reference else "none"
        adapter = actor.model_args.adapter_settings or {}
        adapter_text = ", ".join(f"{key} {value}" for key, value in adapter.items() if value)
        row = f"\n| adapter | {adapter_text} |" if adapter_text else ""
        separator = "\n\n" if result else ""
        kind = "text-classification" if config.task == "reward" else "text-generation"
        task = "preference-alignment" if config.task == "preference" else config.task
        tags = ["rather", task, *config.loss_names]
        card = f"""---
library_name: transformers
pipeline_tag: {kind}
tags: [{", ".join(tags)}]
---

# {config.exp_name}

{result}{separator}`{actor.model_path}` trained by Rather (task: {config.task}).

| | |
|---|---|
| loss | {" + ".join(config.loss_names)}{f" ({numbers})" if numbers else ""} |
| reference | {reference} |{row}
| {config.unit} | {pairs} in training, {config.global_batch()} per step, {step} steps |
| learning rate | {training.learning_rate} ({training.lr_scheduler_type}) |
| sequence length | {config.sequence_length} |
| engine | {layout(actor).engine} |
| seed | {config.seed} |
"""
        return redact(card)  # a URL of a model may contain a password


@contextmanager
def _failure_logged(name: str) -> Iterator[None]:
    """Log every failure except those of workers, which the pipeline must see."""
    try:
        yield
    except (WorkerLost, RayGone, HangError):
        raise
    except Exception as error:
        log.warning("%s failed; the run continues (%s: %s)", name, type(error).__name__, error)


def pairs_of(source: PreparedSteps) -> PairSample:
    """Return a sample of the pairs, those of the first steps."""
    train, evals = source.data.train, source.data.evals
    files = {dataset.file.path for dataset in (train, *evals.values())}
    steps = range(min(SAMPLE, source.total_steps))
    image_tokens = {
        image.digest: image.tokens for each in (train, *evals.values()) for image in each.images()
    }
    return PairSample(
        count=len(train),
        held_out=sum(map(len, evals.values())),
        steps=source.total_steps,
        epochs=source.epoch_at(source.total_steps),
        sample=[source.step_pairs(1 + step) for step in steps],
        largest=int(train.tokens.max()),
        data_bytes=sum(path.stat().st_size for path in files),
        image_tokens=sum(image_tokens.values()),
    )


def device_here(kind: str, ranks: int = 1, of_machine: int | None = None) -> Device:
    """Return what one of the ranks has here: a GPU, and its share of the machine's free memory.

    `of_machine`: how many ranks a machine has; default: all.
    """
    host = free_memory() / min(ranks, of_machine or ranks)
    if kind == "cuda":
        return Device("cuda", torch.cuda.get_device_properties(0).total_memory, host)
    return Device("cpu", host)


def gpu_here(kind: str) -> str | None:
    """Return the name of the GPU in the table of data sheets; None if it is not listed."""
    if kind == "cpu" or not torch.cuda.is_available():
        return None
    words = re.split(r"[^a-z0-9]+", torch.cuda.get_device_name(0).lower())
    # One word as in NVIDIA H200, or two as in GeForce RTX 4090.
    names = {*words, *(one + other for one, other in pairwise(words))}
    return next((name for name in GPUS if name in names), None)
