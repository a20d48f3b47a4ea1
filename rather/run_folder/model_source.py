"""Find what a name on the command line means: a model, an adapter, a run or a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from rather.checkpoint import checkpoint
from rather.checkpoint.checkpoint import Checkpoint
from rather.checkpoint.manifest import MANIFEST
from rather.config.found import NO_TRUST, OF_A_CHECKPOINT, OF_A_RESULT, Trust
from rather.config.load import load_found
from rather.config.paths import is_local
from rather.config.schema import ActorConfig, ActorModelArgs, ModelArgs
from rather.data.hub import refuse_unknown_model
from rather.data.template import load_tokenizer, tokenizer_of
from rather.errors import CheckpointError, ConfigError
from rather.files import file_sha, read_json, refuse_outside, text_sha
from rather.model.files import BASE_WEIGHTS, model_folder, refuse_other_base, weights_digest
from rather.model.policy import PolicyModel
from rather.model.reward import is_reward_model
from rather.model.vision import PARTS, part_of
from rather.optim.rounding import Rounding
from rather.parallel.load import Start, load_policy
from rather.run_folder.layout import RESULTS

DITHERED = Rounding("dithered")
NO_START = Start()


@dataclass(frozen=True)
class Weights:
    """The files that make up a model, and what is known about the run that trained it."""

    name: str  # as it was typed
    model: str  # folder or hub name of the weights, or of an adapter's base
    tokenizer_path: str
    args: ModelArgs = field(default_factory=ActorModelArgs)
    checkpoint: Checkpoint | None = None
    actor: ActorConfig | None = None  # as the run of a checkpoint configured it
    start: Start = NO_START
    trains_reward: bool | None = None  # the run's task is reward; None: its files say it
    group: str = "model"  # of the checkpoint; `reference` for one that followed the policy
    rounding: Rounding = DITHERED  # as in the run
    trained_on: str | None = None  # the digest of an adapter's base in training, if it is known

    def load(self, device: str, dtype: Any = None, *, sees_images: bool = False) -> PolicyModel:
        """Load the frozen model, with the checks that a run does; a tower only to see images."""
        args = self.args.model_copy(update={"dtype": dtype}) if dtype else self.args
        options: dict[str, Any] = {"start": self.start, "rounding": self.rounding}
        options["frozen"] = PARTS if sees_images else None
        if self.checkpoint and (frozen := frozen_in(self.checkpoint, self.group)) is not None:
            options["frozen"] = frozen
        policy = load_policy(self.model, args, device, **options, reward=self.is_reward)
        if self.checkpoint:
            load_weights(policy, self.checkpoint, self.group)
        return policy.requires_grad_(False)

    @property
    def is_reward(self) -> bool:
        """Return whether it is a reward model."""
        if self.trains_reward is not None:
            return self.trains_reward
        if adapter := self.args.adapter_name_or_path:
            return is_reward_model(read_json(Path(adapter) / "adapter_config.json"))
        folder = model_folder(self.model, self.args.revision)
        if folder is None:
            return False
        refuse_outside(folder, folder / "config.json")
        with suppress(OSError, ValueError, AttributeError):  # loading it reports why
            return is_reward_model(read_json(folder / "config.json"))
        return False

    def digest(self) -> str:
        """Return a digest of all weights: of the model, an adapter and a checkpoint."""
        folder = model_folder(self.model, self.args.revision)
        found = weights_digest(folder) if folder else None
        if found is None:
            raise ConfigError(f"{self.name}: {self.model} has no weights that can be read")
        if adapter := self.args.adapter_name_or_path:
            from rather.model.adapters import adapter_digest

            found = text_sha(found + adapter_digest(Path(adapter)))
        if self.checkpoint:
            found = text_sha(found + file_sha(self.checkpoint.path / MANIFEST))
        return found

    def tokenizer(self) -> Any:
        """Load the tokenizer, with the chat template of the training if it is known."""
        if self.actor:
            return tokenizer_of(self.actor)
        return load_tokenizer(self.tokenizer_path, trust_remote_code=self.args.trust_remote_code)


def weights_of(name: str, trust: Trust = NO_TRUST) -> Weights:
    """Resolve a name; a run folder means its result, or its newest checkpoint without one.

    What a run folder says about `trust_remote_code` never counts.
    """
    own_args = ActorModelArgs(trust_remote_code=trust.remote_code)
    refuse_unknown_model(name)
    if not is_local(name):
        return Weights(name, name, name, own_args)
    folder = Path(name).expanduser()
    if checkpoint.has_checkpoint_name(folder):
        return _of_checkpoint(name, checkpoint.open_checkpoint(folder), trust)
    if (folder / "adapter_config.json").is_file():
        return _of_adapter(name, folder, trust)
    for model in (folder, folder / "model"):
        if (model / "config.json").is_file():
            refuse_outside(folder, model)
            dtype, rounding = _precision_of_run(model)
            args = own_args.model_copy(update={"dtype": dtype})
            return Weights(name, str(model), str(model), args, rounding=rounding)
    if newest := checkpoint.newest_good(folder):
        return _of_checkpoint(name, newest, trust)
    raise ConfigError(
        f"{name}: contains neither a model (config.json), an adapter (adapter_config.json) nor a "
        "run with a checkpoint; use such a folder, or a hub model"
    )


def here() -> str:
    """Return the first device of this machine."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _of_adapter(name: str, folder: Path, trust: Trust) -> Weights:
    from rather.model.adapters import base_of  # PEFT takes seconds to import

    if (folder / "config.json").is_file():
        raise ConfigError(
            f"{name}: contains a model and an adapter; move adapter_* into a separate folder "
            "and choose one of the two"
        )
    base, revision, _, trained_on = base_of(folder)
    found = model_folder(base, revision) if base else None
    if base is None or found is None or not found.exists():
        raise ConfigError(
            f"{name}: its base model {base} was not found; run `rather merge --base` first"
        )
    if not trust.any_base:
        refuse_other_base(name, base, revision, trained_on)
    tokenizer = folder if (folder / "tokenizer_config.json").is_file() else found
    dtype, rounding = _precision_of_run(folder)
    own = {"adapter_name_or_path": str(folder), "revision": revision, "dtype": dtype}
    args = ActorModelArgs(trust_remote_code=trust.remote_code).model_copy(update=own)
    options: Any = {"rounding": rounding, "trained_on": trained_on}
    return Weights(name, base, str(tokenizer), args, **options)


def _precision_of_run(result: Path) -> tuple[Literal["bf16", "fp16", "fp32"] | None, Rounding]:
    """Return the precision of the run that made a result: it then scores as it was evaluated."""
    run = result.parent
    files = all((run / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    if result.name not in RESULTS or not files:
        return None, DITHERED
    config = load_found(run / "config.yaml", keys=OF_A_RESULT)
    return config.actor_train.model_args.dtype, Rounding(config.rounding_in_file)


def _of_checkpoint(name: str, found: Checkpoint, trust: Trust) -> Weights:
    file = found.path.parent / "config.yaml"
    if not file.is_file():
        raise CheckpointError(
            f"{name}: {file} is missing; it says which model the checkpoint belongs to."
        )
    run = load_found(file, trust, OF_A_CHECKPOINT)
    actor = run.actor_train
    if actor.model_args.model_name_or_path is None:
        raise ConfigError(f"{file}: names no model that the checkpoint belongs to.")
    source = (actor.model_path, actor.tokenizer_path, actor.model_args)
    trained_on = base_of_checkpoint(found)
    if actor.model_args.has_adapter and not trust.any_base:
        refuse_other_base(name, actor.model_path, actor.model_args.revision, trained_on)
    options: Any = {"rounding": Rounding(run.rounding_in_file), "trained_on": trained_on}
    start, trains_reward = Start(run.seed, run.keeps_start), run.task == "reward"
    return Weights(name, *source, found, actor, start, trains_reward, **options)


def base_of_checkpoint(found: Checkpoint) -> str | None:
    """Return the digest of the weights under an adapter when it was saved, if it is known."""
    identity = found.state.get("identity")
    digest = identity.get(BASE_WEIGHTS) if isinstance(identity, dict) else None
    return digest if isinstance(digest, str) else None


def frozen_in(found: Checkpoint, group: str) -> list[str] | None:
    """Return which parts outside the language model a run on images kept as they were.

    None if it trained none of them: they are not in the checkpoint, and can be left out.
    """
    parts = {part_of(name) for name in found.stored(group)} - {None}
    return [part for part in PARTS if part not in parts] if parts else None


def load_weights(policy: PolicyModel, found: Checkpoint, group: str = "model") -> None:
    """Load the trained weights of a checkpoint into a policy, or those of a synced reference."""
    parameters, saved = dict(policy.named_parameters()), found.stored(group)
    for name in sorted({name for name, p in parameters.items() if p.requires_grad}.union(saved)):
        if (
            name not in saved
            or name not in parameters
            or parameters[name].shape != saved.shape(name)
        ):
            raise CheckpointError(
                f"{found.path}: its weights do not fit its model, such as {name}."
            )
    with torch.no_grad():
        for name in saved:
            policy.rounding.fill(name, parameters[name], saved[name])
