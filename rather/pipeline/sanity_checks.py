"""What would train to a wrong result, refused before it costs anything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rather.cluster.role import Role
from rather.config.schema import DPOConfig
from rather.data.batch import TokenPair
from rather.data.prepare import Prepared
from rather.errors import ConfigError, DataError
from rather.losses.objective import PairLoss
from rather.parallel.load import compute_dtype, same_weights
from rather.reference.logps import scored_lengths

log = logging.getLogger(__name__)

ROUNDING = {
    torch.float32: 1e-5,
    torch.float16: 0.01,
    torch.bfloat16: 0.05,
}  # of a log-prob, per token


def refuse_missing_columns(config: DPOConfig, objective: PairLoss, data: Prepared) -> None:
    """Of all pairs of a run."""
    for name, dataset in {"training": data.train, **data.evals}.items():
        refuse_columns(config, objective, name or "evaluation", dataset.column)


def refuse_columns(
    config: DPOConfig, objective: PairLoss, name: str, column: Callable[[str], NDArray[np.float64]]
) -> None:
    """A loss that reads a column needs it in every row; one that sorts pairs has no use for
    weights.
    """
    loss = f"loss '{' + '.join(config.loss_names)}'"
    if objective.whole_batch and (column("weight") != 1).any():
        raise DataError(
            f"{loss} sorts the pairs of a step: none has its own weight. "
            "Remove the column weight, or map it away with data_args.columns."
        )
    for read in sorted(objective.pair_columns):
        missing = np.isnan(column(read))
        if missing.any():
            raise DataError(
                f"{loss} reads the column {read}: {missing.sum()} of {len(missing)} {name} pairs have none."
            )


def refuse_foreign_tokens(config: DPOConfig, data: Prepared, worker: Role) -> None:
    """An id beyond a model's embeddings would be an index error at best."""
    largest = max(dataset.largest_id for dataset in (data.train, *data.evals.values()))
    if largest >= worker.embedding_rows():
        raise ConfigError(
            f"{worker.role}: the tokenizer {config.actor_train.tokenizer_path} gives ids up to {largest}, "
            f"the model {worker.embedding_rows()} embeddings; use the tokenizer that belongs to the model."
        )


def check_step_zero(
    config: DPOConfig,
    kind: str,
    pairs: Sequence[TokenPair],
    policy: Tensor,
    reference: Tensor,
    cache: Path | None,
) -> None:
    """Untrained, a policy that names the reference's weights must have its log-probs: sigmoid's
    loss is ln 2.

    `cache` is where log-probs of the reference came from.
    """
    roles = (config.actor_train, config.reference)
    dtypes = {compute_dtype(role.model_args, kind) for role in roles}
    revisions = {role.model_args.revision for role in roles}
    adapters = {role.model_args.adapter_name_or_path for role in roles}
    if not same_weights(*(role.model_path for role in roles)) or any(
        len(found) > 1 for found in (dtypes, revisions, adapters)
    ):
        names = ("revision", "dtype", "adapter_name_or_path")
        sources = [
            (role.model_path, *(getattr(role.model_args, name) for name in names)) for role in roles
        ]
        log.info("policy %s and reference %s differ by intent: no check at step 0", *sources)
        return
    lengths = torch.from_numpy(scored_lengths(pairs))
    worst = float(((policy.cpu() - reference.cpu()).abs() / lengths).max())
    if not worst <= ROUNDING[dtypes.pop()]:
        advice = f", or the cached log-probs are wrong: delete {cache}" if cache else ""
        raise ConfigError(
            "before any training, policy and reference log-probs of the same weights "
            f"({config.actor_train.model_path}) differ by {worst:.2g} per token: one of the two roles does not hold "
            f"those weights{advice}. Nothing was saved."
        )
