"""ColossalChat's DPOTrainer as a thin door: its constructor, its metric names and its files; the step is ours."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rather.api.trainer import DPOTrainer as Trainer
from rather.api.trainer import tracker_in
from rather.config.schema import DPOConfig, StrategyArgs, TrainingArgs
from rather.data.feed import begin_epoch
from rather.errors import ConfigError, DataError

NAMES = {
    "loss": "loss",
    "rewards/chosen": "chosen_rewards",
    "rewards/rejected": "rejected_rewards",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
}
LONGEST = 1 << 40  # tokens: the collator has cut the sequences
PLUGINS = {
    "ddp": "ddp",
    "zero2": "zero2",
    "zero2_cpu": "zero2_cpu",
    "gemini": "zero3",
    "gemini_auto": "gemini_auto",
}


@dataclass(frozen=True)
class Plugin:
    """A strategy and its degrees, by ColossalChat's names: ddp, zero2, zero2_cpu, gemini, gemini_auto, 3d."""

    name: str = "ddp"
    tp_size: int = 1
    pp_size: int = 1
    sp_size: int = 1
    zero_stage: int = 0

    def strategy(self) -> StrategyArgs:
        if self.name == "3d":
            stage = f"zero{self.zero_stage}" if self.zero_stage else "ddp"
            return StrategyArgs(
                strategy_name=stage,
                tp_size=self.tp_size,
                pp_size=self.pp_size,
                cp_size=self.sp_size,
            )
        if self.name not in PLUGINS:
            raise ConfigError(f"plugin: '{self.name}' is none of {', '.join([*PLUGINS, '3d'])}.")
        if (self.tp_size, self.pp_size, self.sp_size, self.zero_stage) != (1, 1, 1, 0):
            raise ConfigError(f"plugin: '{self.name}' has no degrees of its own; '3d' has.")
        return StrategyArgs(strategy_name=PLUGINS[self.name])


@dataclass(frozen=True)
class Booster:
    """Carries its plugin."""

    plugin: Plugin = Plugin()


class DPOTrainer:
    """Trains `actor` against `ref_model`; without one it is SimPO with length_normalization, else reference-free DPO.

    `gamma` is a target margin in units of reward. `coordinator` is whoever has `is_master`; without one the first rank.
    """

    def __init__(
        self,
        actor: Any,
        ref_model: Any = None,
        booster: Booster | None = None,
        actor_optim: torch.optim.Optimizer | None = None,
        plugin: Plugin | None = None,
        actor_lr_scheduler: Any = None,
        tokenizer: Any = None,
        max_epochs: int = 1,
        beta: float = 0.1,
        gamma: float = 0.0,
        length_normalization: bool = False,
        apply_loss_mask: bool = True,
        accumulation_steps: int = 1,
        start_epoch: int = 0,
        save_interval: int = 0,
        save_dir: str | Path | None = None,
        coordinator: Any = None,
    ) -> None:
        if booster and plugin and booster.plugin != plugin:
            raise ConfigError("plugin: another one than the booster's; give one of them.")
        if save_interval and not save_dir:
            raise ConfigError(
                "save_interval: says how often to save; give save_dir too, which says where."
            )
        if save_dir and tokenizer is None:
            raise ConfigError(
                "save_dir: give the tokenizer too; it belongs into the folders that are saved."
            )
        self.tokenizer, self.coordinator = tokenizer, coordinator
        self.max_epochs, self.start_epoch = max_epochs, start_epoch
        self.save_interval, self.save_dir = save_interval, Path(save_dir) if save_dir else None
        self.apply_loss_mask = apply_loss_mask
        carried = plugin or (booster.plugin if booster else Plugin())
        self.trainer = Trainer(
            model=actor,
            train_config=_config(ref_model is not None, beta, gamma, length_normalization),
            ref_model=ref_model,
            args=TrainingArgs(
                gradient_accumulation_steps=accumulation_steps, lr_scheduler_type="constant"
            ),
            optimizer=actor_optim,
            lr_scheduler=actor_lr_scheduler,
            tokenizer=tokenizer,
            strategy=carried.strategy(),
        )

    def fit(
        self,
        train_preference_dataloader: Iterable[Any],
        eval_preference_dataloader: Iterable[Any] | None = None,
        log_dir: str | Path | None = None,
        use_wandb: bool = False,
    ) -> list[dict[str, float]]:
        """All epochs from start_epoch on; an evaluation after each. Metrics of every step, by their names here."""
        history: list[dict[str, float]] = []
        folder = (
            Path(log_dir) / "DPO" / datetime.now().strftime("%Y-%m-%d_%H:%M:%S")
            if log_dir
            else None
        )
        with tracker_in(
            folder, self.trainer.config, use_wandb=use_wandb, leads=self.is_master
        ) as tracker:
            for epoch in range(self.start_epoch, self.max_epochs):
                begin_epoch(train_preference_dataloader, epoch)
                begun = len(history)
                for step, record in enumerate(self._steps(train_preference_dataloader), start=1):
                    history.append(record)
                    tracker.log(
                        {
                            "step": len(history),
                            **{f"train/{name}": value for name, value in record.items()},
                        }
                    )
                    if self.save_interval and step % self.save_interval == 0:
                        self._save(epoch, step)
                if len(history) == begun:
                    raise DataError(
                        f"0 pairs in epoch {epoch}; give a loader that can be gone through once an epoch."
                    )
                if eval_preference_dataloader is not None:
                    found = self._evaluate(eval_preference_dataloader, epoch)
                    tracker.log(
                        {
                            "step": len(history),
                            **{f"eval/{name}": value for name, value in found.items()},
                        }
                    )
        if history:
            self._save(self.max_epochs - 1, len(history))
        return history

    @property
    def is_master(self) -> bool:
        if self.coordinator is not None:
            return bool(self.coordinator.is_master())
        return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0

    def _steps(self, loader: Iterable[Any]) -> Iterator[dict[str, float]]:
        batches = (self._scored(batch) for batch in loader)
        trainer = self.trainer
        for first in batches:
            trainer.training_step(trainer.policy.policy, chain([first], batches), LONGEST)
            yield {**{ours: trainer.means[name] for name, ours in NAMES.items()}, "lr": trainer.lr}

    def _scored(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without the loss mask every real token counts."""
        if self.apply_loss_mask:
            return batch
        masks = [name for name in batch if name.endswith("loss_mask")]
        return {**batch, **{name: batch[name.replace("loss", "attention")] for name in masks}}

    def _evaluate(self, loader: Iterable[Any], epoch: int) -> dict[str, float]:
        found = self.trainer.evaluate(self._scored(batch) for batch in loader)
        named = {ours: found[name] for name, ours in NAMES.items()}
        if self.save_dir and self.is_master:
            self.save_dir.mkdir(parents=True, exist_ok=True)
            lines = "".join(f"{name}: {value}\n" for name, value in named.items())
            (self.save_dir / f"eval_result_epoch{epoch}.txt").write_text(
                f"\nEvaluation Result:\n{lines}"
            )
        return named

    def _save(self, epoch: int, step: int) -> None:
        if self.save_dir is None:
            return
        folder = self.save_dir / f"epoch-{epoch}_step-{step}"
        self.trainer.save_model(folder / "modeling")
        if self.is_master:
            state = {"epoch": epoch, "step": step}
            (folder / "running_states.json").write_text(json.dumps(state, indent=1) + "\n")


def _config(with_reference: bool, beta: float, gamma: float, normalized: bool) -> DPOConfig:
    numbers: dict[str, Any] = {"beta": beta, "sequence_length": LONGEST}
    if normalized and not with_reference:
        return DPOConfig(pref_loss="simpo", gamma=gamma, **numbers)
    numbers |= {"gamma": gamma or None, "length_normalization": normalized or None}
    return DPOConfig(
        pref_loss="sigmoid", reference_free=None if with_reference else True, **numbers
    )
