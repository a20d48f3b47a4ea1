"""The data and models of one run, opened to look at its pairs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from rather.checkpoint import checkpoint
from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.preflight import free_memory
from rather.config.adapters import keeps_start
from rather.config.load import load
from rather.config.masking import secret_values
from rather.config.redaction import hide
from rather.config.schema import DPOConfig, ModelArgs
from rather.data.batch import Columns, PairBatch, PairFacts, Span, TokenPair
from rather.data.pack import pack
from rather.data.pairs import PairDataset
from rather.data.prepare import Prepared, prepare
from rather.data.template import load_tokenizer
from rather.errors import ConfigError, DataError
from rather.losses.objective import PairLoss, from_config
from rather.model.policy import PolicyModel
from rather.parallel.load import Start, compute_dtype, load_policy, same_weights
from rather.plan.state import stored_weights
from rather.run_folder.layout import FINISHED
from rather.run_folder.model_source import put

HITS = 20  # pairs listed at a time
SEARCH_SECONDS = 1.5  # then what was found is told, and the search can go on from there
CONTEXT = (
    6  # tokens before one that are decoded with it: a decoder treats a first token differently
)
IDLE = 0.9  # share of a GPU's memory that is free when nobody uses it
ROOM = 0.8  # share of the free host memory that models may take


class Models(NamedTuple):
    """`began` is None where the policy began as the reference itself."""

    reference: PolicyModel
    began: PolicyModel | None
    trained: PolicyModel
    told: dict[str, str]  # what each of them is


class Session:
    """Everything is loaded when it is first needed; `tell` is told what takes time."""

    def __init__(self, run_dir: Path, tell: Callable[[str], None]) -> None:
        self.run_dir, self.tell = run_dir, tell
        if not (run_dir / "config.yaml").is_file():
            raise ConfigError(
                f"{run_dir}: has no config.yaml, so its data and models are not known."
            )
        self.config: DPOConfig = load(run_dir / "config.yaml").config
        hide(secret_values(self.config.model_dump()))
        for name, role in (
            ("actor_train", self.config.actor_train),
            ("reference", self.config.reference),
        ):
            if role.model_args.trust_remote_code:
                raise ConfigError(
                    f"{name}.model_args.trust_remote_code: to look at a run, no code that came with a model is run; "
                    "its pairs cannot be shown here."
                )

    def close(self) -> None:
        """Gives the memory of the models back."""
        vars(self).pop("models", None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- pairs ---

    @cached_property
    def data(self) -> Prepared:
        self.tell("opening the pairs")
        return prepare(self.config, console=Console(quiet=True))

    @cached_property
    def tokenizer(self) -> Any:
        actor = self.config.actor_train
        return load_tokenizer(actor.tokenizer_path, actor.model_args.revision, False)

    @property
    def sets(self) -> dict[str, PairDataset]:
        held_out = {f"held-out {name}".strip(): pairs for name, pairs in self.data.evals.items()}
        return {"train": self.data.train, **held_out}

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(pairs) for name, pairs in self.sets.items()}

    def dataset(self, name: str) -> PairDataset:
        if name not in self.sets:
            raise DataError(f"the run has no set '{name}'; it has {', '.join(self.sets)}.")
        return self.sets[name]

    def search(self, name: str, text: str, start: int) -> dict[str, Any]:
        """Pairs from number `start` on that hold the text, in any case, or have it as their id."""
        pairs, wanted = self.dataset(name), text.casefold()
        hits: list[dict[str, Any]] = []
        until, place = monotonic() + SEARCH_SECONDS, max(0, start)
        self.tell("searching")
        while place < len(pairs) and len(hits) < HITS and (monotonic() < until or place == start):
            (pair,) = pairs.take([place])
            prompt, chosen, rejected = map(self._decoded, (pair.prompt, pair.chosen, pair.rejected))
            if wanted in f"{prompt}{chosen}\n{prompt}{rejected}".casefold() or (
                text and text == pair.id
            ):
                hits.append(
                    {"index": place, "id": pair.id, "prompt": prompt[-160:], "chosen": chosen[:120]}
                )
            place += 1
        return {"sets": self.sizes, "hits": hits, "next": place if place < len(pairs) else None}

    def _decoded(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    # --- models ---

    @cached_property
    def objective(self) -> PairLoss:
        return from_config(self.config)

    @cached_property
    def device(self) -> str:
        """A GPU that nobody uses, else the CPU: looking at a run must not take memory from one that trains."""
        if self.config.platform == "cpu" or not torch.cuda.is_available():
            return "cpu"
        free, total = torch.cuda.mem_get_info(0)
        return "cuda:0" if free > IDLE * total else "cpu"

    @cached_property
    def models(self) -> Models:
        config = self.config
        actor, reference, moved = config.actor_train, config.reference, None
        source = trained_weights(self.run_dir)
        if config.sync_ref_model:
            moved = source if isinstance(source, Checkpoint) else newest_checkpoint(self.run_dir)
            if moved is None:
                raise ConfigError(
                    f"{self.run_dir}: sync_ref_model moved the reference, and no checkpoint has it."
                )
        frozen = actor if not self.objective.needs_reference else reference
        began_alike = moved is None and (frozen is actor or starts_as_reference(config))
        self._refuse_without_room(3 - began_alike, frozen.model_path, frozen.model_args)
        self.tell(f"loading the reference {frozen.model_path}")
        first = self._loaded(frozen.model_path, frozen.model_args)
        if moved:
            put(first, moved, "reference")
        began = None
        if not began_alike:
            self.tell(f"loading the policy as it began, {actor.model_path}")
            began = self._loaded(actor.model_path, actor.model_args)
        trained, weights = self._trained(source)
        told = {
            "reference": frozen.model_path + (f", moved up to step {moved.step}" if moved else ""),
            "before": "the reference itself" if began is None else actor.model_path,
            "after": weights,
        }
        return Models(first, began, trained, told)

    def _trained(self, source: Path | Checkpoint) -> tuple[PolicyModel, str]:
        actor = self.config.actor_train
        if isinstance(source, Path):
            self.tell(f"loading the trained model {source}")
            step = (
                (self.run_dir / FINISHED).read_text(encoding="utf-8", errors="replace").strip()[:20]
            )
            return self._loaded(
                str(source), actor.model_args.of_other_weights()
            ), f"model/ of step {step}"
        self.tell(f"loading {source.path.name}")
        policy = self._loaded(actor.model_path, actor.model_args)
        put(policy, source)
        return policy, source.path.name

    def _loaded(self, name: str, args: ModelArgs) -> PolicyModel:
        start = Start(
            self.config.seed,
            keeps_start(self.config) and args is self.config.actor_train.model_args,
        )
        return load_policy(name, args, self.device, start=start)

    def _refuse_without_room(self, models: int, name: str, args: ModelArgs) -> None:
        weights = stored_weights(name, args.revision)
        if weights is None or self.device != "cpu":
            return
        needed, free = models * weights * compute_dtype(args, "cpu").itemsize, free_memory()
        if needed > ROOM * free:
            raise ConfigError(
                f"{models} models of {name} need {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are "
                "free; close other programs, or open the board on a machine with more."
            )

    # --- one pair ---

    def pair(self, name: str, index: int) -> dict[str, Any]:
        """The pair with the log-probs of its scored tokens, their sums and the rewards, before and after."""
        pairs = self.dataset(name)
        if not 0 <= index < len(pairs):
            raise DataError(f"pair {index}: '{name}' has {len(pairs)} pairs, counted from 0.")
        (pair,) = pairs.take([index])
        (batch,) = pack([pair], budget=pair.tokens)
        models = self.models
        self.tell("computing log-probs")
        reference, began, trained = (
            None if model is None else token_logps(model, batch, self.device)
            for model in (models.reference, models.began, models.trained)
        )
        assert reference is not None
        assert trained is not None
        by_model = {"reference": reference, "before": began or reference, "after": trained}
        return {
            "index": index,
            "pairs": len(pairs),
            "id": pair.id,
            "sets": self.sizes,
            "models": models.told,
            "prompt_tokens": len(pair.prompt),
            "sides": {side: self._side(pair, side, by_model) for side in ("chosen", "rejected")},
            "rewards": {
                when: self._rewards(batch, by_model[when], reference)
                for when in ("before", "after")
            },
        }

    def _side(self, pair: TokenPair, side: str, by_model: dict[str, Scored]) -> dict[str, Any]:
        ids = [*pair.prompt.tolist(), *getattr(pair, side).tolist()]
        spans: Sequence[Span] = getattr(pair, f"{side}_scored")
        place = ("chosen", "rejected").index(side)
        return {
            "texts": list(pieces(ids, self._decoded_list)),
            "scored": list(chain.from_iterable(range(*span) for span in spans)),
            "logps": {model: scored.tokens[place] for model, scored in by_model.items()},
            "sums": {
                model: float(scored.columns["sum"][0, place]) for model, scored in by_model.items()
            },
        }

    def _decoded_list(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _rewards(self, batch: PairBatch, policy: Scored, reference: Scored) -> list[float]:
        """Implicit rewards of chosen and rejected, as the run's loss defines them."""
        facts = PairFacts.of(batch)
        x = facts.seen_by_a_loss(policy.columns, reference.columns, facts.mean_chosen_length)
        return [float(reward) for reward in self.objective.rewards(x)[0]]


class Scored(NamedTuple):
    tokens: tuple[list[float], list[float]]  # log-probs of the scored tokens of chosen and rejected
    columns: Columns


@torch.no_grad()
def token_logps(policy: PolicyModel, batch: PairBatch, device: str) -> Scored:
    """What a model says of the one pair of a batch."""
    own = batch.to(device)
    logps_U, squared_U = policy(own, squares=True)
    columns = policy.pair_sums(logps_U, squared_U, own, ("shared", "squares"))
    counted: Tensor = logps_U[own.token_T].double().cpu()
    cells = batch.cell_T
    return Scored(
        (counted[cells == 0].tolist(), counted[cells == 1].tolist()),
        {name: column.cpu() for name, column in columns.items()},
    )


def trained_weights(run_dir: Path) -> Path | Checkpoint:
    """The exported model of a run that has ended, else its newest checkpoint."""
    if (run_dir / FINISHED).exists() and (run_dir / "model").is_dir():
        return run_dir / "model"
    if newest := newest_checkpoint(run_dir):
        return newest
    raise ConfigError(
        f"{run_dir}: has no trained weights yet, neither a checkpoint nor model/; look again once it has saved "
        "(save_steps), or ask it to with `rather save-now`."
    )


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    return checkpoint.newest_good(run_dir, full=False)


def starts_as_reference(config: DPOConfig) -> bool:
    """Whether the policy begins with the reference's weights. A new adapter changes nothing before it is trained."""
    own, other = config.actor_train, config.reference
    return (
        same_weights(own.model_path, other.model_path)
        and own.model_args.revision == other.model_args.revision
        and own.model_args.adapter_name_or_path == other.model_args.adapter_name_or_path
    )


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """The text that each token adds. One that ends inside a character adds none: the next ones complete it."""
    for place in range(len(ids)):
        start = max(0, place - CONTEXT)
        before, now = decode(ids[start:place]).rstrip("�"), decode(ids[start : place + 1])
        yield (
            now[len(before) :] if now.startswith(before) else now[_common(before, now) :]
        ).rstrip("�")


def _common(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    different = np.flatnonzero([x != y for x, y in zip(a, b, strict=False)])
    return int(different[0]) if len(different) else min(len(a), len(b))
