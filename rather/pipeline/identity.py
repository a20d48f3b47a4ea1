"""Whose checkpoint is it? What must not change until its continuation, and what may by
`resume.allow`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rather.checkpoint.checkpoint import Checkpoint
from rather.config.schema import DPOConfig
from rather.data.prepare import Prepared
from rather.errors import CheckpointError
from rather.losses.objective import PairLoss
from rather.model.files import config_digest

log = logging.getLogger(__name__)


class Guarded(NamedTuple):
    """Fields of the identity that one word of resume.allow lets change, and the keys that bring
    them back.
    """

    fields: tuple[str, ...]
    keys: str


GUARDS = {
    "data": Guarded(
        ("data",),
        "the files and settings of actor_train.data_args, sequence_length, a held-out split",
    ),
    "tokenizer": Guarded(
        ("tokenizer", "chat template"),
        "actor_train.model_args.tokenizer_name_or_path and its files, global_template",
    ),
    "model": Guarded(("model", "model config", "adapter"), "pretrain, actor_train.model_args"),
    "reference": Guarded(
        ("reference", "reference config", "synced reference"),
        "reference.model_args.model_name_or_path and revision, sync_ref_model and its numbers",
    ),
    "loss": Guarded(("loss",), "pref_loss, beta and the other keys of the loss"),
    "seed": Guarded(("seed",), "seed, actor_train.training_args.data_seed"),
    "batch": Guarded(
        ("global batch", "grouped responses"),
        "train_batch_size, or actor_train.training_args.per_device_train_batch_size and gradient_accumulation_steps; "
        "group_responses",
    ),
}
STATE_OF_A_RUN = {
    "identity": dict,
    "progress": dict,
    "schedule": dict,
    "trainer": dict,
    "metrics_bytes": int,
}


def identity_of(config: DPOConfig, objective: PairLoss, data: Prepared) -> dict[str, Any]:
    """What a checkpoint remembers of its run. What cannot be known here is left out."""
    synced = (
        [config.ref_model_mixup_alpha, config.ref_model_sync_steps]
        if config.sync_ref_model
        else None
    )
    roles = {"model": config.actor_train, "reference": config.reference}
    paths = {name: (role.model_path, role.model_args.revision) for name, role in roles.items()}
    digests = {f"{name} config": config_digest(*path) for name, path in paths.items()}
    return {
        "data": {
            "pairs": data.train.fingerprint,
            "parts": [list(part) for part in data.train.parts],
        },
        "tokenizer": data.report["tokenizer_sha256"],
        "chat template": dict(data.report["train"]["template"]),
        **{name: list(path) for name, path in paths.items()},
        **{name: digest for name, digest in digests.items() if digest},
        "loss": objective.description(),
        "synced reference": synced,
        "seed": [config.seed, config.data_seed],
        "global batch": config.global_batch(),
        "adapter": config.actor_train.model_args.adapter_settings,
        "grouped responses": True
        if config.group_responses and data.train.groups is not None
        else None,
    }


def refuse_other_run(newest: Checkpoint, now: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse a checkpoint of another run; the error lists each field that differs."""
    for key, kind in STATE_OF_A_RUN.items():
        if not isinstance(newest.state.get(key), kind):
            raise CheckpointError(f"{newest.path}: its state has no {key}; no run has saved it.")
    then = newest.state["identity"]
    unknown = [
        field
        for guard in GUARDS.values()
        for field in guard.fields
        if (field in then) != (field in now)
    ]
    if unknown:
        log.info(
            "%s: nothing is known of its %s, taken as unchanged", newest.path, ", ".join(unknown)
        )
    refused: list[str] = []
    for name, guard in GUARDS.items():
        found = [line for field in guard.fields for line in _changes(field, then, now)]
        if found and name in allowed:
            log.warning(
                "resume.allow: %s has changed since %s: %s", name, newest.path, "; ".join(found)
            )
        elif found:
            refused += [*found, f"  set by {guard.keys}; or allow it: resume.allow=[{name}]"]
    if refused:
        raise CheckpointError(
            f"{newest.path} belongs to another run:\n  " + "\n  ".join(refused) + "\n"
            "Set them back, choose another exp_name, or start from scratch with --overwrite."
        )


def _changes(field: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if field not in then or field not in now:
        return
    before, after = (dict(_leaves(field, side[field])) for side in (then, now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{key}: {_shown(before.get(key))} then, {_shown(after.get(key))} now"


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Return single values by path; a loss, [name, weight, numbers], has its name as path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif name == "loss.losses":
        for loss, weight, numbers in value:
            yield from _leaves(f"loss.{loss}", {"weight": weight, **numbers})
    else:
        yield name, value


def _shown(value: Any) -> str:
    """A digest by its first letters."""
    text = "nothing" if value is None else str(value)
    return text[:12] if len(text) == 64 and text.isalnum() else text
