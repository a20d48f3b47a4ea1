"""Runs that are refused: what would train to a wrong result, and checkpoints of another run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.launch import Role
from rather.config.run_config import DPOConfig
from rather.config.schema import ActorConfig, RoleConfig
from rather.config.strategies import layout
from rather.data.cache import Cache
from rather.data.prepare import Prepared
from rather.errors import CheckpointError, ConfigError, DataError
from rather.losses.objective import PairLoss
from rather.model.files import (
    BASE_WEIGHTS,
    config_digest,
    has_other_weights,
    model_digest,
    model_folder,
    tower_digest,
    weights_digest,
)
from rather.parallel.load import compute_dtype, same_weights

log = logging.getLogger(__name__)

# Of a log-prob, per token.
ROUNDING = {torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.05}


def refuse_other_bases(sections: Mapping[str, RoleConfig]) -> None:
    """Refuse an adapter to start from that was trained on other weights than the model has."""
    for role, section in sections.items():
        adapter, base = section.model_args.adapter_name_or_path, section.model_path
        if adapter is None:
            continue
        from rather.model.adapters import adapter_folder, base_of  # PEFT takes seconds to import

        trained_on = base_of(adapter_folder(adapter)).weights
        if has_other_weights(base, section.model_args.revision, trained_on):
            raise ConfigError(
                f"{role}.model_args.adapter_name_or_path: {adapter} was trained on other weights "
                f"than {base} has now; train on the base that it was made for, or merge it onto "
                f"this one (`rather merge {adapter} --base {base} --any-base --out MERGED`) and "
                "use MERGED as pretrain."
            )


def refuse_missing_columns(objective: PairLoss, data: Prepared) -> None:
    """Refuse a run whose loss needs columns that some pairs do not have, or without any weight."""
    for name, dataset in {"training": data.train, **data.evals}.items():
        refuse_columns(objective, name or "evaluation", dataset.column)
        if dataset.column("weight").any():
            continue
        if dataset is data.train:
            raise DataError("0 usable pairs: all training pairs have weight 0; raise the weights.")
        log.warning("%s pairs: all have weight 0, so they have no metrics", name or "held-out")


def refuse_columns(
    objective: PairLoss, name: str, column: Callable[[str], NDArray[np.float64]]
) -> None:
    """Refuse pairs without a column that the loss reads, or with weights if it sorts pairs."""
    loss = f"loss '{' + '.join(term.name for term in objective.terms)}'"
    sorts_pairs = any(term.rule.whole_batch for term in objective.terms)
    if sorts_pairs and (column("weight") != 1).any():
        raise DataError(
            f"{loss} sorts the pairs of a step: none has its own weight. "
            "Remove the column weight, or map it away with data_args.columns."
        )
    for read in sorted(objective.pair_columns):
        missing = np.isnan(column(read))
        if missing.any():
            raise DataError(
                f"{loss} reads the column {read}: {missing.sum()} of {len(missing)} {name} pairs "
                "have none."
            )


def refuse_foreign_tokens(data: Prepared, worker: Role) -> None:
    """Refuse token ids beyond a model's embeddings: an index error at best."""
    largest = max(dataset.largest_id for dataset in (data.train, *data.evals.values()))
    if largest >= worker.embedding_rows():
        raise ConfigError(
            f"{worker.role}: the tokenizer {data.report['tokenizer']} gives ids up to "
            f"{largest}, the model {worker.embedding_rows()} embeddings; use the tokenizer that "
            "belongs to the model."
        )


def check_step_zero(
    roles: Sequence[RoleConfig],
    kind: str,
    lengths: Tensor,
    policy: Tensor,
    reference: Tensor,
    cache: Path | None,
    *,
    routed: bool = False,
) -> None:
    """Untrained, a policy with the weights of the reference must have its log-probs.

    `roles` are policy and reference, `lengths` are the scored tokens, and `cache` is where
    log-probs of the reference came from. In a
    `routed` model of any dtype rounding can change the choice of an expert.
    """
    paths, args = [role.model_path for role in roles], [role.model_args for role in roles]
    loaded = [(compute_dtype(x, kind), x.revision, x.adapter_name_or_path) for x in args]
    if loaded[0] != loaded[1] or not same_weights(*paths):
        text = "policy %s %s and reference %s %s differ by intent: no check at step 0"
        log.info(text, paths[0], loaded[0], paths[1], loaded[1])
        return
    scored = lengths > 0  # single answers have one side
    worst = float(((policy.cpu() - reference.cpu()).abs() / lengths)[scored].max())
    if not worst <= ROUNDING[torch.bfloat16 if routed else loaded[0][0]]:
        advice = f", or the cached log-probs are wrong: delete {cache}" if cache else ""
        raise ConfigError(
            "before any training, policy and reference log-probs of the same weights "
            f"({paths[0]}) differ by {worst:.2g} per token: one of the two roles does not hold "
            f"those weights{advice}. Nothing was saved."
        )


# --- whose checkpoint is it? ---

# A word of resume.allow -> the fields that it lets change, and the keys that bring them back.
GUARDS: dict[str, tuple[tuple[str, ...], str]] = {
    "data": (
        ("data", "data commits"),
        "the files and settings of actor_train.data_args, sequence_length, a held-out split",
    ),
    "tokenizer": (
        ("tokenizer", "chat template"),
        "actor_train.model_args.tokenizer_name_or_path and its files, global_template",
    ),
    "model": (
        ("model", "model config", "model weights", "adapter", "rounding", "frozen parts", "tower"),
        "pretrain and its files, actor_train.model_args, rounding",
    ),
    "reference": (
        ("reference", "reference config", "reference weights", "synced reference"),
        "reference.model_args.model_name_or_path and its files, revision, sync_ref_model and its "
        "numbers",
    ),
    "loss": (("loss",), "pref_loss, beta and the other keys of the loss"),
    "seed": (("seed",), "seed, actor_train.training_args.data_seed"),
    "batch": (
        ("global batch", "grouped responses"),
        "train_batch_size, or actor_train.training_args.per_device_train_batch_size and "
        "gradient_accumulation_steps; group_responses",
    ),
    "engine": (("engine",), "actor_train.engine, its strategy_args and device_mapping"),
}
STATE_OF_A_RUN = {
    "identity": dict,
    "progress": dict,
    "schedule": dict,
    "trainer": dict,
    "metrics_bytes": int,
}


def identity_of(config: DPOConfig, objective: PairLoss, data: Prepared) -> dict[str, Any]:
    """Return what a checkpoint remembers of its run; what cannot be known here is left out."""
    actor, reference = config.actor_train, config.reference
    synced = [config.ref_model_mixup_alpha, config.ref_model_sync_steps]
    grouped = config.group_responses and data.train.groups is not None
    commits = data.report["train"]["commits"]
    sha = Cache(config.data_cache_dir(actor.data_args)).sha
    digests = _digests("model", actor, sha, is_frozen=actor.model_args.has_adapter)
    digests |= _digests("reference", reference, sha, is_frozen=objective.needs_reference)
    return {
        "data": {
            "pairs": data.train.fingerprint,
            "parts": [*map(list, data.train.parts)],
        },
        **({"data commits": [*commits.values()]} if commits else {}),
        "tokenizer": data.report["tokenizer_sha256"],
        "chat template": dict(data.report["train"]["template"]),
        "model": [actor.model_path, actor.model_args.revision],
        "reference": [reference.model_path, reference.model_args.revision],
        **digests,
        "loss": objective.description(),
        "synced reference": synced if config.sync_ref_model else None,
        "seed": [config.seed, config.data_seed],
        "global batch": config.global_batch(),
        "adapter": actor.model_args.adapter_settings,
        "grouped responses": True if grouped else None,
        "rounding": config.rounding,
        "engine": layout(actor).engine_identity,
        **(_frozen_parts(actor) if data.train.has_images else {}),
    }


def _digests(
    name: str, role: RoleConfig, sha: Callable[[Path], str], *, is_frozen: bool
) -> dict[str, str]:
    """Return the digests of a role's files, as far as they are known.

    Those of weights if they are read again at each start, because no checkpoint has them.
    """
    revision = role.model_args.revision
    digests = {f"{name} config": config_digest(role.config_path, revision)}
    folder = model_folder(role.model_path, revision) if is_frozen else None
    if folder:
        digests[f"{name} weights"] = model_digest(folder, sha)
        if name == "model":  # without the config: commands compare it with an adapter's base
            digests[BASE_WEIGHTS] = weights_digest(folder)
    return {key: digest for key, digest in digests.items() if digest}


def _frozen_parts(actor: ActorConfig) -> dict[str, Any]:
    """Return what a run on images does not train, and reads again at each start."""
    folder = model_folder(actor.model_path, actor.model_args.revision)
    return {
        "frozen parts": list(actor.model_args.frozen_parts),
        "tower": tower_digest(folder) if folder else None,
    }


def refuse_other_run(newest: Checkpoint, now: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse a checkpoint of another run; the error lists each field that differs."""
    for key, kind in STATE_OF_A_RUN.items():
        if not isinstance(newest.state.get(key), kind):
            raise CheckpointError(f"{newest.path}: its state has no {key}; no run has saved it.")
    # Older runs have neither.
    then, refused = {"rounding": "nearest", "engine": "torch", **newest.state["identity"]}, []
    for name, (fields, keys) in GUARDS.items():
        found = [line for field in fields for line in _changes(field, then, now)]
        if found and name in allowed:
            text = "resume.allow: %s has changed since %s: %s"
            log.warning(text, name, newest.path, "; ".join(found))
        elif found:
            refused += [*found, f"  set by {keys}; or allow it: resume.allow=[{name}]"]
    if refused:
        raise CheckpointError(
            f"{newest.path} belongs to another run:\n  " + "\n  ".join(refused) + "\n"
            "Set them back, choose another exp_name, or start from scratch with --overwrite."
        )


def _changes(field: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if (field in then) != (field in now):
        log.info("%s: unknown then or now, taken as unchanged", field)
    if field not in then or field not in now:
        return
    before, after = (dict(_leaves(field, side[field])) for side in (then, now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{key}: {_shown(before.get(key))} then, {_shown(after.get(key))} now"


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield single values by path; a loss, [name, weight, numbers], has its name as path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif name == "loss.losses":
        for loss, weight, numbers in value:
            yield from _leaves(f"loss.{loss}", {"weight": weight, **numbers})
    else:
        yield name, value


def _shown(value: Any) -> str:
    """Return a value for a message; of a digest the first letters."""
    text = "nothing" if value is None else str(value)
    return text[:12] if len(text) == 64 and text.isalnum() else text
