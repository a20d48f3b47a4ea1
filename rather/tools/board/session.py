"""The data and models of one run, opened to inspect its pairs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from rich.console import Console

from rather.checkpoint import checkpoint
from rather.cluster.memory import free_memory
from rather.config.found import NO_TRUST, Trust
from rather.config.load import load_found
from rather.config.redaction import hide
from rather.config.show import secret_values
from rather.data.batch import PairFacts
from rather.data.pack import pack
from rather.data.pairs import PairDataset, hex_id
from rather.data.prepare import prepare
from rather.data.show import LABELS, SIDES, pair_texts
from rather.data.template import load_tokenizer
from rather.errors import ConfigError, DataError
from rather.files import JsonObject, own, read_bytes, refuse_outside
from rather.losses.objective import from_config
from rather.model.files import refuse_other_base
from rather.model.policy import PolicyModel
from rather.optim.rounding import Rounding
from rather.parallel.load import Start, same_weights, stored_dtype
from rather.plan.memory import known_shapes
from rather.run_folder.model_source import Weights, base_of_checkpoint
from rather.run_folder.names import CONFIG, FINISHED
from rather.tools.report.pairs import MEANINGS, Doctor

HITS = 20  # pairs listed at a time
SEARCH_SECONDS = 1.5  # then the hits so far are returned, and the search can continue from there
IDLE = 0.9  # a GPU with this share of its memory free is idle
ROOM = 0.8  # share of the free host memory that models may take


class Session:
    """Loads everything when it is first needed; `doing` says what takes time."""

    def __init__(self, run_dir: Path, trust: Trust = NO_TRUST) -> None:
        self.run_dir, self.doing = run_dir, "opening the run"
        if not (run_dir / CONFIG).is_file():
            raise ConfigError(f"{run_dir}: has no {CONFIG}, so its data and models are unknown.")
        self.config = load_found(run_dir / CONFIG, trust)
        hide(secret_values(self.config.model_dump()))
        self.objective = from_config(self.config)

    def close(self) -> None:
        """Free the memory of the models."""
        vars(self).pop("models", None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @cached_property
    def sets(self) -> dict[str, PairDataset]:
        self.doing = "opening the pairs"
        prepared = prepare(self.config, console=Console(quiet=True))
        held_out = {f"held-out {name}".strip(): pairs for name, pairs in prepared.evals.items()}
        return {"train": prepared.train, **held_out}

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(pairs) for name, pairs in self.sets.items()}

    @cached_property
    def tokenizer(self) -> Any:
        actor = self.config.actor_train
        return load_tokenizer(actor.tokenizer_path, actor.model_args.revision, False)

    def dataset(self, name: str) -> PairDataset:
        if name not in self.sets:
            raise DataError(f"the run has no set '{name}'; it has {', '.join(self.sets)}.")
        return self.sets[name]

    def search(self, name: str, text: str, start: int) -> JsonObject:
        """Return pairs from `start` on that contain the text, ignoring case, or have it as id.

        A finding of `rather pairs`, such as likely_flipped, lists its pairs, the worst first.
        """
        pairs, folded, hits = self.dataset(name), text.casefold(), list[JsonObject]()
        until, index = monotonic() + SEARCH_SECONDS, max(0, start)
        self.doing = "searching"
        order: Sequence[int] = range(len(pairs))
        if is_finding := name == "train" and text in MEANINGS:
            order = self._pairs_of(text, pairs)
        while index < len(order) and len(hits) < HITS and (monotonic() < until or index == start):
            (pair,) = pairs.take([order[index]])
            prompt, chosen, rejected = map(self.decode, (pair.prompt, pair.chosen, pair.rejected))
            pair_text = f"{prompt}{chosen}\n{prompt}{rejected}".casefold()
            has_id = text and text in (pair.id, hex_id(pair.digest))
            if is_finding or has_id or folded in pair_text:
                shown = {"prompt": prompt[-160:], "chosen": chosen[:120]}
                hits.append({"index": order[index], "id": pair.id, **shown})
            index += 1
        following = index if index < len(order) else None
        total = len(order) if is_finding else None  # a search counts what it has passed
        return {"sets": self.sizes, "hits": hits, "next": following, "total": total}

    def _pairs_of(self, finding: str, pairs: PairDataset) -> list[int]:
        index_of = {digest: i for i, digest in enumerate(pairs.column("pair_hash").tolist())}
        digests = Doctor.of(self.run_dir).ids_of(finding)
        return [index_of[digest] for digest in digests if digest in index_of]

    def decode(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    @cached_property
    def device(self) -> str:
        """An idle GPU, else the CPU: looking at a run must not take memory from one that trains."""
        if self.config.platform == "cpu" or not torch.cuda.is_available():
            return "cpu"
        free, total = torch.cuda.mem_get_info(0)
        return "cuda:0" if free > IDLE * total else "cpu"

    def sources(self) -> dict[str, Weights]:
        """Return the files of the reference, and of the policy before and after training.

        There is no "before" if the policy started as the reference itself.
        """
        actor, reference = self.config.actor_train, self.config.reference
        path, args = actor.model_path, actor.model_args
        newest = checkpoint.newest_good(self.run_dir, full=False)
        rounds: Any = {"rounding": Rounding(self.config.rounding_in_file)}
        run: Any = {
            "actor": actor,
            "start": Start(self.config.seed, self.config.keeps_start),
            "trains_reward": self.config.task == "reward",
        }
        before = Weights(path, path, actor.tokenizer_path, args, **run, **rounds)
        frozen = before
        if self.objective.needs_reference:
            name = reference.model_path
            frozen = Weights(name, name, "", reference.model_args, **rounds)
        if self.config.sync_ref_model:
            if newest is None:
                raise ConfigError(
                    f"{self.run_dir}: sync_ref_model moved the reference, and no checkpoint has it."
                )
            name = f"{frozen.model}, moved up to step {newest.step}"
            frozen = replace(frozen, name=name, checkpoint=newest, group="reference")
        folder, finished = self.run_dir / "model", self.run_dir / FINISHED
        refuse_outside(self.run_dir, folder)
        if finished.exists() and folder.is_dir():
            step = read_bytes(finished, 20, own).decode("utf-8", "replace").strip()
            exported_args = args.of_other_weights()
            after = Weights(f"model/ of step {step}", str(folder), "", exported_args, **rounds)
        elif newest:
            if args.has_adapter:
                refuse_other_base(newest.path, path, args.revision, base_of_checkpoint(newest))
            after = replace(before, name=newest.path.name, checkpoint=newest)
        else:
            raise ConfigError(
                f"{self.run_dir}: has no trained weights yet, neither a checkpoint nor model/; try "
                "again after it has saved (save_steps, or `rather save-now`)."
            )
        # A new adapter changes nothing before it is trained.
        keys = ("revision", "adapter_name_or_path")
        same_start = frozen.checkpoint is None and same_weights(path, frozen.model)
        if same_start and all(getattr(args, key) == getattr(frozen.args, key) for key in keys):
            return {"reference": frozen, "after": after}
        return {"reference": frozen, "before": before, "after": after}

    @cached_property
    def models(self) -> dict[str, tuple[str, PolicyModel]]:
        """The models by role, each with its name."""
        sources, models, free = self.sources(), {}, free_memory()
        source, count = sources["reference"], len(sources)
        shapes = known_shapes(source.model, source.args) or {}
        weights = sum(map(prod, shapes.values()))
        needed = count * weights * stored_dtype(source.args, "cpu").itemsize
        if self.device == "cpu" and needed > ROOM * free:
            raise ConfigError(
                f"{count} models of {source.model} need {needed / 2**30:.1f} GiB of memory and "
                f"{free / 2**30:.1f} GiB are free; close other programs, or start the board on a "
                "machine with more."
            )
        for role, source in sources.items():
            self.doing = f"loading {source.name}"
            models[role] = source.name, source.load(self.device)
        return models

    @torch.no_grad()
    def pair(self, name: str, index: int) -> JsonObject:
        """Return a pair with its token log-probs, their sums and rewards, before and after."""
        pairs = self.dataset(name)
        if self.config.task == "reward":
            raise ConfigError(
                "a reward model has no log-probs; see its scores with `rather score`."
            )
        if not 0 <= index < len(pairs):
            raise DataError(f"pair {index}: '{name}' has {len(pairs)} pairs, counted from 0.")
        (pair,) = pairs.take([index])
        (batch,) = pack([pair], budget=pair.tokens)
        models, device_batch = self.models, batch.to(self.device)
        self.doing = "computing log-probs"
        tokens, columns = {}, {}
        for role, (_, policy) in models.items():
            logps_U, squared_U = policy(device_batch, squares=True)
            sums = policy.pair_sums(logps_U, squared_U, device_batch, ("shared", "squares"))
            columns[role] = {column: values.cpu() for column, values in sums.items()}
            tokens[role] = logps_U[device_batch.token_T].double().cpu()
        names = {"before": "the reference itself"} | {
            role: model_name for role, (model_name, _) in models.items()
        }
        tokens.setdefault("before", tokens["reference"])
        columns.setdefault("before", columns["reference"])
        sides, facts = {}, PairFacts.of(batch)
        names_of = SIDES if len(pair.rejected) else (LABELS.get(pair.label, "trained"),)
        for side_index, (side, shown) in enumerate(zip(SIDES, names_of, strict=False)):
            ids = [*pair.prompt.tolist(), *getattr(pair, side).tolist()]
            spans, counted = getattr(pair, f"{side}_scored"), batch.cell_T == side_index
            sides[shown] = {
                "texts": pair_texts(pair, ids, pairs.image_token, self.tokenizer, None),
                "scored": [token for span in spans for token in range(*span)],
                "logps": {role: logps[counted].tolist() for role, logps in tokens.items()},
                "sums": {role: float(x["sum"][0, side_index]) for role, x in columns.items()},
            }
        rewards = {}
        for when in ("before", "after"):
            length = facts.mean_chosen_length
            x = facts.with_logps(columns[when], columns["reference"], length)
            rewards[when] = self.objective.rewards(x)[0].tolist()[: len(sides)]
        return {
            "index": index,
            "pairs": len(pairs),
            "id": pair.id,
            "sets": self.sizes,
            "models": names,
            "prompt_tokens": len(pair.prompt),
            "sides": sides,
            "rewards": rewards,
        }
