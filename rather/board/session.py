"""The data and models of one run, opened to inspect its pairs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
from rich.console import Console

from rather.checkpoint import checkpoint
from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.preflight import free_memory
from rather.config.load import load
from rather.config.redaction import hide
from rather.config.schema import ModelArgs
from rather.config.show import secret_values
from rather.data.batch import Columns, PairBatch, PairFacts, TokenPair
from rather.data.pack import pack
from rather.data.pairs import PairDataset
from rather.data.prepare import Prepared, prepare
from rather.data.show import SIDES, token_texts
from rather.data.template import load_tokenizer
from rather.errors import ConfigError, DataError
from rather.losses.objective import PairLoss, from_config
from rather.model.policy import PolicyModel
from rather.parallel.load import Start, compute_dtype, load_policy, same_weights
from rather.plan.state import stored_weights
from rather.report.folder import CONFIG, FINISHED, Record
from rather.run_folder.model_source import load_weights

HITS = 20  # pairs listed at a time
SEARCH_SECONDS = 1.5  # then the hits so far are returned, and the search can continue from there
IDLE = 0.9  # share of a GPU's memory that is free when nobody uses it
ROOM = 0.8  # share of the free host memory that models may take


class Models(NamedTuple):
    """`initial` is None if the policy started as the reference itself."""

    reference: PolicyModel
    initial: PolicyModel | None
    trained: PolicyModel
    names: dict[str, str]


class Session:
    """Loads everything when it is first needed; `progress` is called with what takes time."""

    def __init__(self, run_dir: Path, progress: Callable[[str], None]) -> None:
        self.run_dir, self.progress = run_dir, progress
        if not (run_dir / CONFIG).is_file():
            raise ConfigError(f"{run_dir}: has no {CONFIG}, so its data and models are unknown.")
        self.config = load(run_dir / CONFIG)
        hide(secret_values(self.config.model_dump()))
        for name in ("actor_train", "reference"):
            if getattr(self.config, name).model_args.trust_remote_code:
                raise ConfigError(
                    f"{name}.model_args.trust_remote_code: the board does not run code that came "
                    "with a model, so "
                    "the pairs of this run cannot be shown."
                )

    def close(self) -> None:
        """Free the memory of the models."""
        vars(self).pop("models", None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- pairs ---

    @cached_property
    def data(self) -> Prepared:
        self.progress("opening the pairs")
        return prepare(self.config, console=Console(quiet=True))

    @cached_property
    def tokenizer(self) -> Any:
        actor = self.config.actor_train
        return load_tokenizer(actor.tokenizer_path, actor.model_args.revision, False)

    @property
    def sets(self) -> dict[str, PairDataset]:
        held_out = {f"held-out {name}".strip(): pairs for name, pairs in self.data.evals.items()}
        return {"train": self.data.train, **held_out}

    def dataset(self, name: str) -> PairDataset:
        if name not in self.sets:
            raise DataError(f"the run has no set '{name}'; it has {', '.join(self.sets)}.")
        return self.sets[name]

    def search(self, name: str, text: str, start: int) -> Record:
        """Return pairs from number `start` on that contain the text, ignoring case, or have it as
        their id.
        """
        pairs, wanted, hits = self.dataset(name), text.casefold(), list[Record]()
        until, place = monotonic() + SEARCH_SECONDS, max(0, start)
        self.progress("searching")
        while place < len(pairs) and len(hits) < HITS and (monotonic() < until or place == start):
            (pair,) = pairs.take([place])
            prompt, chosen, rejected = map(self.decode, (pair.prompt, pair.chosen, pair.rejected))
            whole = f"{prompt}{chosen}\n{prompt}{rejected}".casefold()
            if wanted in whole or (text and text == pair.id):
                shown = {"prompt": prompt[-160:], "chosen": chosen[:120]}
                hits.append({"index": place, "id": pair.id, **shown})
            place += 1
        following = place if place < len(pairs) else None
        return {"sets": self._sizes(), "hits": hits, "next": following}

    def decode(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def _sizes(self) -> dict[str, int]:
        return {name: len(pairs) for name, pairs in self.sets.items()}

    # --- models ---

    @cached_property
    def objective(self) -> PairLoss:
        return from_config(self.config)

    @cached_property
    def device(self) -> str:
        """An idle GPU, else the CPU: looking at a run must not take memory from one that trains."""
        if self.config.platform == "cpu" or not torch.cuda.is_available():
            return "cpu"
        free, total = torch.cuda.mem_get_info(0)
        return "cuda:0" if free > IDLE * total else "cpu"

    @cached_property
    def models(self) -> Models:
        actor, source, moved = self.config.actor_train, trained_weights(self.run_dir), None
        if self.config.sync_ref_model:
            moved = source if isinstance(source, Checkpoint) else newest_checkpoint(self.run_dir)
            if moved is None:
                raise ConfigError(
                    f"{self.run_dir}: sync_ref_model moved the reference, and no checkpoint has it."
                )
        frozen = self.config.reference if self.objective.needs_reference else actor
        # A new adapter changes nothing before it is trained.
        same_start = moved is None and (
            same_weights(actor.model_path, frozen.model_path)
            and actor.model_args.revision == frozen.model_args.revision
            and actor.model_args.adapter_name_or_path == frozen.model_args.adapter_name_or_path
        )
        self._check_memory(2 if same_start else 3, frozen.model_path, frozen.model_args)
        reference = self._load("the reference", frozen.model_path, frozen.model_args)
        if moved:
            load_weights(reference, moved, "reference")
        initial = None
        if not same_start:
            initial = self._load("the initial policy", actor.model_path, actor.model_args)
        names = {
            "reference": frozen.model_path + (f", moved up to step {moved.step}" if moved else ""),
            "before": "the reference itself" if same_start else actor.model_path,
        }
        if isinstance(source, Path):
            step = (self.run_dir / FINISHED).read_text(encoding="utf-8", errors="replace")
            args = actor.model_args.of_other_weights()
            trained, names["after"] = (
                self._load("the trained model", str(source), args),
                f"model/ of step {step.strip()[:20]}",
            )
        else:
            trained = self._load(source.path.name, actor.model_path, actor.model_args)
            load_weights(trained, source)
            names["after"] = source.path.name
        return Models(reference, initial, trained, names)

    def _load(self, what: str, path: str, args: ModelArgs) -> PolicyModel:
        self.progress(f"loading {what}, {path}")
        own = args is self.config.actor_train.model_args
        start = Start(self.config.seed, self.config.keeps_start and own)
        return load_policy(path, args, self.device, start=start)

    def _check_memory(self, models: int, name: str, args: ModelArgs) -> None:
        weights = stored_weights(name, args.revision)
        if weights is None or self.device != "cpu":
            return
        needed, free = models * weights * compute_dtype(args, "cpu").itemsize, free_memory()
        if needed > ROOM * free:
            raise ConfigError(
                f"{models} models of {name} need {needed / 2**30:.1f} GiB of memory and "
                f"{free / 2**30:.1f} GiB are "
                "free; close other programs, or start the board on a machine with more."
            )

    # --- one pair ---

    def pair(self, name: str, index: int) -> Record:
        """Return a pair with the log-probs of its scored tokens, their sums and its rewards,
        before and after.
        """
        pairs = self.dataset(name)
        if not 0 <= index < len(pairs):
            raise DataError(f"pair {index}: '{name}' has {len(pairs)} pairs, counted from 0.")
        (pair,) = pairs.take([index])
        (batch,) = pack([pair], budget=pair.tokens)
        models = self.models
        self.progress("computing log-probs")
        reference = token_logps(models.reference, batch, self.device)
        initial = token_logps(models.initial, batch, self.device) if models.initial else reference
        trained = token_logps(models.trained, batch, self.device)
        by_model = {"reference": reference, "before": initial, "after": trained}
        return {
            "index": index,
            "pairs": len(pairs),
            "id": pair.id,
            "sets": self._sizes(),
            "models": models.names,
            "prompt_tokens": len(pair.prompt),
            "sides": {side: self._side(pair, side, by_model) for side in SIDES},
            "rewards": {
                when: self._rewards(batch, by_model[when], reference)
                for when in ("before", "after")
            },
        }

    def _side(self, pair: TokenPair, side: str, by_model: dict[str, TokenLogps]) -> Record:
        spans, place = getattr(pair, f"{side}_scored"), SIDES.index(side)
        ids = [*pair.prompt.tolist(), *getattr(pair, side).tolist()]
        sums = {model: float(each.columns["sum"][0, place]) for model, each in by_model.items()}
        return {
            "texts": token_texts(ids, self.tokenizer),
            "scored": [token for span in spans for token in range(*span)],
            "logps": {model: each.tokens[place] for model, each in by_model.items()},
            "sums": sums,
        }

    def _rewards(self, batch: PairBatch, policy: TokenLogps, reference: TokenLogps) -> list[float]:
        """Return the implicit rewards of chosen and rejected, as the run's loss defines them."""
        facts = PairFacts.of(batch)
        x = facts.with_logps(policy.columns, reference.columns, facts.mean_chosen_length)
        return [float(reward) for reward in self.objective.rewards(x)[0]]


class TokenLogps(NamedTuple):
    tokens: list[list[float]]  # log-probs of the scored tokens of chosen and rejected
    columns: Columns


@torch.no_grad()
def token_logps(policy: PolicyModel, batch: PairBatch, device: str) -> TokenLogps:
    """Return what a model says about the one pair of a batch."""
    own = batch.to(device)
    logps_U, squared_U = policy(own, squares=True)
    columns = policy.pair_sums(logps_U, squared_U, own, ("shared", "squares"))
    counted = logps_U[own.token_T].double().cpu()
    return TokenLogps(
        [counted[batch.cell_T == side].tolist() for side in (0, 1)],
        {name: column.cpu() for name, column in columns.items()},
    )


def trained_weights(run_dir: Path) -> Path | Checkpoint:
    """Return the exported model of a run that has ended, else its newest checkpoint."""
    if (run_dir / FINISHED).exists() and (run_dir / "model").is_dir():
        return run_dir / "model"
    if newest := newest_checkpoint(run_dir):
        return newest
    raise ConfigError(
        f"{run_dir}: has no trained weights yet, neither a checkpoint nor model/; try again after "
        "it has saved "
        "(save_steps, or `rather save-now`)."
    )


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    return checkpoint.newest_good(run_dir, full=False)
