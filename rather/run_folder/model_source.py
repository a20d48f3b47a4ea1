"""What a name on the command line means: a model folder or hub name, a PEFT adapter, a run folder or a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from rather.checkpoint import checkpoint
from rather.checkpoint.checkpoint import Checkpoint
from rather.config.adapters import keeps_start
from rather.config.load import load
from rather.config.paths import is_local, nearest_names
from rather.config.schema import ActorModelArgs, DPOConfig
from rather.data.template import load_tokenizer, tokenizer_of
from rather.errors import CheckpointError, ConfigError
from rather.model.digest import model_folder
from rather.model.policy import PolicyModel
from rather.parallel.load import Start, freeze, load_policy

RESULTS = ("model", "best_model", "adapter", "best_adapter")


@dataclass(frozen=True)
class Weights:
    """Which files make up a model. Of a checkpoint, `run` is the config it was saved under."""

    name: str  # as it was typed
    model: str  # folder or hub name of the weights, or of those that an adapter lies on
    tokenizer_path: str
    args: ActorModelArgs = field(default_factory=ActorModelArgs)
    checkpoint: Checkpoint | None = None
    run: DPOConfig | None = None

    def load(self, device: str, dtype: Any = None) -> PolicyModel:
        """The frozen model, proven as a run proves its own."""
        args = self.args.model_copy(update={"dtype": dtype}) if dtype else self.args
        start = Start(self.run.seed, keeps_start(self.run)) if self.run else Start()
        policy = load_policy(self.model, args, device, start=start)
        if self.checkpoint:
            put(policy, self.checkpoint)
        return freeze(policy)

    def tokenizer(self) -> Any:
        """With the chat template that the model was trained with, where that is known."""
        return (
            tokenizer_of(self.run.actor_train) if self.run else load_tokenizer(self.tokenizer_path)
        )


def weights_of(name: str) -> Weights:
    """A run folder stands for its result, or for its newest checkpoint as long as there is none."""
    if not is_local(name):
        return Weights(name, name, name)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{name}: there is no such folder{nearest_names(folder)}")
    if checkpoint.has_checkpoint_name(folder):
        return _of_checkpoint(name, checkpoint.open_checkpoint(folder))
    if (folder / "adapter_config.json").is_file():
        if (folder / "config.json").is_file():
            raise ConfigError(
                f"{name}: holds a model and an adapter; move adapter_* into a folder of its own, and name one of them"
            )
        return _of_adapter(name, folder)
    for model in (folder, folder / "model"):
        if (model / "config.json").is_file():
            return Weights(name, str(model), str(model), ActorModelArgs(dtype=_dtype_of_run(model)))
    if newest := checkpoint.newest_good(folder):
        return _of_checkpoint(name, newest)
    raise ConfigError(
        f"{name}: holds neither a model (config.json), an adapter (adapter_config.json) nor a run with a checkpoint; "
        "name such a folder, or a hub model"
    )


def here() -> str:
    """The first device of this machine."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _of_adapter(name: str, folder: Path) -> Weights:
    from rather.model.adapters import base_of  # PEFT takes seconds to import

    base, revision = base_of(folder)
    found = model_folder(base, revision) if base else None
    if base is None or found is None or not found.exists():
        raise ConfigError(
            f"{name}: its base is {base}, which is not here; merge it with `rather merge --base` first"
        )
    own = (folder / "tokenizer_config.json").is_file()
    args = ActorModelArgs(
        adapter_name_or_path=str(folder), revision=revision, dtype=_dtype_of_run(folder)
    )
    return Weights(name, base, str(folder if own else found), args)


def _dtype_of_run(result: Path) -> Literal["bf16", "fp16", "fp32"] | None:
    """A run's result is computed with as the run did: it scores what it was evaluated with."""
    run = result.parent
    is_one = (
        result.name in RESULTS
        and (run / "config.yaml").is_file()
        and (run / "metrics.jsonl").is_file()
    )
    return load(run / "config.yaml").config.actor_train.model_args.dtype if is_one else None


def _of_checkpoint(name: str, found: Checkpoint) -> Weights:
    file = found.path.parent / "config.yaml"
    if not file.is_file():
        raise CheckpointError(
            f"{name}: {file} is not there, which says what the checkpoint was trained on."
        )
    run = load(file).config
    actor = run.actor_train
    return Weights(name, actor.model_path, actor.tokenizer_path, actor.model_args, found, run)


def put(policy: PolicyModel, found: Checkpoint, group: str = "model") -> None:
    """What was trained, in place of what the training began with. `reference`: of one that moved."""
    held, saved = dict(policy.named_parameters()), found.stored(group)
    strange = [
        name for name in saved if name not in held or saved.shape(name) != tuple(held[name].shape)
    ]
    unsaved = [
        name for name, parameter in held.items() if parameter.requires_grad and name not in saved
    ]
    if strange or unsaved:
        raise CheckpointError(
            f"{found.path}: its weights do not fit its model, first {(strange + unsaved)[0]}."
        )
    with torch.no_grad():
        for name in saved:
            held[name].copy_(saved[name])
