"""Image pairs on a rank: what is refused, where pixels come from, and where features are kept."""

from __future__ import annotations

import os
from pathlib import Path

from rather.config.schema import ActorConfig, ModelArgs, RoleConfig
from rather.config.strategies import layout
from rather.data.pixel_loader import PixelLoader
from rather.data.pixels import PixelMaker
from rather.data.prepare import Prepared, images_of
from rather.data.shares import RunPairs
from rather.errors import ConfigError
from rather.files import make_folder
from rather.model.files import model_folder, tower_digest
from rather.model.image_features import FeatureStore
from rather.model.vision import PARTS
from rather.reference.logprob_cache import refuse_foreign

FEW = 256  # pairs whose pixels are made without processes, which take seconds to start
MOST_PROCESSES = 4  # for each rank

KEYS = ("freeze", "vision_cache", "vision_cache_gb")  # about images alone
UNDIVIDED = {
    "pp_size": "pipeline parallel",
    "cp_size": "context parallel",
    "ep_size": "expert parallel",
}


def has_images(pairs: RunPairs) -> bool:
    return any(dataset.has_images for dataset in pairs.sets.values())


def refuse_images(actor: ActorConfig, reference: RoleConfig, data: Prepared) -> None:
    """Refuse what a run on images cannot do, and keys about images in a run on text."""
    args = actor.model_args
    sees_images = any(dataset.has_images for dataset in (data.train, *data.evals.values()))
    if not sees_images:
        fields = type(args).model_fields
        changed = [key for key in KEYS if getattr(args, key) != fields[key].default]
        if changed:
            raise ConfigError(
                f"actor_train.model_args.{changed[0]}: no pair has images, and text never reaches "
                "a vision tower; remove the key."
            )
        return
    problems = []
    for name, role in (("actor_train", actor), ("reference", reference)):
        degrees = layout(role)
        for key, kind in UNDIVIDED.items():
            if getattr(degrees, key.removesuffix("_size")) > 1:
                problems.append(f"{name}.strategy_args.{key}: {kind} does not take images; set 1.")
        if degrees.engine != "torch":
            problems.append(f"{name}.engine: {degrees.engine} does not take images; set torch.")
        if degrees.sequence_parallel:
            problems.append(f"{name}.strategy_args.sequence_parallel: does not take images.")
        if role.model_args.quantization:
            problems.append(f"{name}.model_args.quantization: 4bit does not take images.")
    if args.has_adapter and set(args.frozen_parts) != set(PARTS):
        problems.append(
            "actor_train.model_args.freeze: an adapter is of the language model; leave the key out."
        )
    if problems:
        raise ConfigError(problems)


def make_loader(actor: ActorConfig, pairs: int) -> PixelLoader:
    """Return what makes the pixels of so many pairs."""
    revision = actor.model_args.revision
    recipe, problem = images_of(actor.model_path, revision, actor.data_args)
    if recipe is None:
        raise ConfigError(problem)
    spare_cores = max(0, (os.cpu_count() or 1) - 1)
    processes = min(MOST_PROCESSES, spare_cores) if pairs > FEW else 0
    return PixelLoader(PixelMaker(recipe), processes)


def open_store(
    root: Path, model: tuple[str, ModelArgs], precision: str, limit: float
) -> FeatureStore | None:
    """Return the features of a model; None if its files are not here."""
    name, args = model
    folder = model_folder(name, args.revision)
    digest = tower_digest(folder) if folder else None
    if digest is None:
        return None
    place = root / f"{digest[:24]}-{precision}"
    refuse_foreign(place)
    make_folder(place)
    return FeatureStore(place, limit)
