"""ColossalChat's DPOTrainer: its constructor, metric names and files, over Rather's pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from rather.api.in_memory import InMemorySteps, process_rank
from rather.api.trainer import DPOTrainer as Trainer
from rather.config.run_config import DPOConfig
from rather.config.schema import StrategyArgs, TrainingArgs
from rather.errors import ConfigError
from rather.pipeline.hook import Record
from rather.pipeline.steps import NO_LIMIT
from rather.tracking.trackers import is_installed

NAMES = {
    "loss": "loss",
    "rewards/chosen": "chosen_rewards",
    "rewards/rejected": "rejected_rewards",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "lr": "lr",
}
PLUGINS = {
    "ddp": "ddp",
    "zero2": "zero2",
    "zero2_cpu": "zero2_cpu",
    "gemini": "zero3",
    "gemini_auto": "gemini_auto",
}


@dataclass(frozen=True)
class Plugin:
    """A strategy and its degrees under ColossalChat's names."""

    name: str = "ddp"
    tp_size: int = 1
    pp_size: int = 1
    sp_size: int = 1
    zero_stage: int = 0

    def strategy(self) -> StrategyArgs:
        if self.name == "3d":
            return StrategyArgs(
                strategy_name=f"zero{self.zero_stage}" if self.zero_stage else "ddp",
                tp_size=self.tp_size,
                pp_size=self.pp_size,
                cp_size=self.sp_size,
            )
        if self.name not in PLUGINS:
            raise ConfigError(f"plugin: '{self.name}' is not one of {', '.join([*PLUGINS, '3d'])}.")
        if self != Plugin(self.name):
            raise ConfigError(f"plugin: '{self.name}' has no degrees of its own; '3d' has.")
        return StrategyArgs(strategy_name=PLUGINS[self.name])


@dataclass(frozen=True)
class Booster:
    """Holds a plugin."""

    plugin: Plugin = Plugin()


@dataclass
class DPOTrainer:
    """Trains `actor` against `ref_model`; without one, SimPO or reference-free DPO.

    It is SimPO if `length_normalization` is set. `gamma` is a target margin in units of reward.
    `coordinator` is an object with `is_master`; the default is the first rank. `save_dir` is for
    checkpoints and exported models: a second start with the same `save_dir` resumes.
    """

    actor: Any
    ref_model: Any = None
    booster: Booster | None = None
    actor_optim: torch.optim.Optimizer | None = None
    plugin: Plugin | None = None
    actor_lr_scheduler: Any = None
    tokenizer: Any = None
    max_epochs: int = 1
    beta: float = 0.1
    gamma: float = 0.0
    length_normalization: bool = False
    apply_loss_mask: bool = True
    accumulation_steps: int = 1
    start_epoch: int = 0
    save_interval: int = 0
    save_dir: str | Path | None = None
    coordinator: Any = None

    def __post_init__(self) -> None:
        given = self.booster.plugin if self.booster else None
        if given and self.plugin and given != self.plugin:
            raise ConfigError("plugin: differs from the booster's; give one of them.")
        if self.save_interval and not self.save_dir:
            raise ConfigError("save_interval: give save_dir too, the folder to save to.")
        if self.save_dir and self.tokenizer is None:
            raise ConfigError("save_dir: give the tokenizer too, which is saved with the model.")
        self.trainer = Trainer(
            model=self.actor,
            train_config=self._config(),
            ref_model=self.ref_model,
            args=TrainingArgs(lr_scheduler_type="constant"),
            optimizer=self.actor_optim,
            lr_scheduler=self.actor_lr_scheduler,
            tokenizer=self.tokenizer,
            strategy=(self.plugin or given or Plugin()).strategy(),
        )

    def _config(self) -> DPOConfig:
        numbers: dict[str, Any] = {"beta": self.beta, "sequence_length": NO_LIMIT}
        # ColossalChat writes TensorBoard files to log_dir.
        numbers["track_with"] = "tensorboard" if is_installed("tensorboard") else None
        if self.length_normalization and self.ref_model is None:
            return DPOConfig(pref_loss="simpo", gamma=self.gamma, **numbers)
        return DPOConfig(
            pref_loss="sigmoid",
            reference_free=self.ref_model is None or None,
            gamma=self.gamma or None,
            length_normalization=self.length_normalization or None,
            **numbers,
        )

    def fit(
        self,
        train_preference_dataloader: Iterable[Any],
        eval_preference_dataloader: Iterable[Any] | None = None,
        log_dir: str | Path | None = None,
        use_wandb: bool = False,
    ) -> list[dict[str, float]]:
        """Train from start_epoch to max_epochs, with an evaluation after each epoch.

        Returns the metrics of every step under ColossalChat's names.
        """
        trainer, epochs = self.trainer, range(self.start_epoch, self.max_epochs)
        feed = trainer._feed(train_preference_dataloader, self._batch)
        source = InMemorySteps(feed, epochs, self.accumulation_steps, None)
        now = datetime.now().strftime("%Y-%m-%d_%H:%M:%S")
        folder = Path(log_dir) / "DPO" / now if log_dir and self.is_master else None
        epoch = 0

        def on_record(record: Record) -> None:
            nonlocal epoch
            part = "train" if "lr" in record else "eval"
            named = {f"{part}/{name}": value for name, value in _renamed(record).items()}
            tracker.log({"step": record["step"], **named})
            if part == "train":
                epoch, step = source.epoch_and_step[record["step"]]
                if self.save_interval and step % self.save_interval == 0:
                    self._save(epoch, step)

        def evaluate() -> dict[str, float]:
            found = trainer.evaluate(eval_preference_dataloader or (), self._batch)
            if self.save_dir and self.is_master:
                file = Path(self.save_dir, f"eval_result_epoch{epoch}.txt")
                file.parent.mkdir(parents=True, exist_ok=True)
                lines = "".join(f"{name}: {value}\n" for name, value in _renamed(found).items())
                file.write_text(f"\nEvaluation Result:\n{lines}")
            return found

        with trainer.tracker_in(folder, use_wandb=use_wandb) as tracker:
            records = trainer._run(
                source, evaluate if eval_preference_dataloader is not None else None, on_record,
                self.save_dir, save_steps=self.save_interval or None,
            )  # fmt: skip
        history = [_renamed(record) for record in records if "lr" in record]
        if history:
            self._save(self.max_epochs - 1, len(history))
        return history

    @property
    def is_master(self) -> bool:
        if self.coordinator is not None:
            return bool(self.coordinator.is_master())
        return process_rank()[0] == 0

    def _batch(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a batch in which every real token is scored, if the loss mask is switched off."""
        if self.apply_loss_mask:
            return batch
        masks = [name for name in batch if name.endswith("loss_mask")]
        return {**batch, **{name: batch[name.replace("loss", "attention")] for name in masks}}

    def _save(self, epoch: int, step: int) -> None:
        if self.save_dir is None:
            return
        folder = Path(self.save_dir, f"epoch-{epoch}_step-{step}")
        self.trainer.save_model(folder / "modeling", merge=self.trainer.adapted is not None)
        if self.is_master:
            state = {"epoch": epoch, "step": step}
            (folder / "running_states.json").write_text(json.dumps(state, indent=1) + "\n")


def _renamed(record: Mapping[str, Any]) -> dict[str, float]:
    own = {name.removeprefix("eval/"): value for name, value in record.items()}
    return {theirs: own[ours] for ours, theirs in NAMES.items() if ours in own}
