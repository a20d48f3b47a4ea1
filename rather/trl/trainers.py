"""DPO, KTO, reward, SFT, ORPO and CPO trainers: TRL's arguments, Rather's losses, TRL's metrics."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, TrainerCallback

from rather.data.batch import PairBatch, TokenPair
from rather.errors import ConfigError
from rather.losses.losses import LOSSES, gap, log_odds_ratio, log_ratios
from rather.losses.objective import PairLoss, configure
from rather.trl.base import PackedTrainer
from rather.trl.configs import (
    CPOConfig,
    DPOConfig,
    KTOConfig,
    ORPOConfig,
    RewardConfig,
    SFTConfig,
    TrlConfig,
)
from rather.trl.forward import PackedForward, as_reference
from rather.trl.tokens import Row, as_partner, cut_answer, token_pair

DIVERGENCES = {"js_divergence": "js", "alpha_divergence": "alpha"}
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")  # TRL ignores label_smoothing elsewhere
Reference = dict[str, Tensor]
log = logging.getLogger(__name__)


class ReferenceMover(TrainerCallback):
    """TR-DPO: moves the reference towards the policy every few steps."""

    def __init__(self, trainer: WithReference) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % args.ref_model_sync_steps:
            return
        trainer = self.trainer
        pairs = zip(trainer.model.parameters(), trainer.ref_model.parameters(), strict=True)
        with torch.no_grad():
            for policy, reference in pairs:
                reference.lerp_(policy.to(reference.dtype), args.ref_model_mixup_alpha)
        trainer.known.clear()


class Pairwise(PackedTrainer):
    """Metrics of chosen and rejected answers."""

    def _note_logits(self, policy: Mapping[str, Tensor], length: Tensor) -> None:
        for side, name in enumerate(("logits/chosen", "logits/rejected")):
            self.note_ratio(name, policy["logits"][:, side].sum(), length[:, side].sum())

    def _note_rewards(self, rewards: Tensor, logps: Tensor) -> None:
        chosen, rejected = rewards.unbind(1)
        self.note(**{
            "rewards/chosen": chosen.mean(),
            "rewards/rejected": rejected.mean(),
            "rewards/accuracies": (chosen > rejected).double().mean(),
            "rewards/margins": (chosen - rejected).mean(),
            "logps/chosen": logps[:, 0].mean(),
            "logps/rejected": logps[:, 1].mean(),
        })  # fmt: skip


class WithReference(PackedTrainer):
    """A trainer whose loss compares with a reference, which sees each row once."""

    has_reference = True

    positions = (
        "model ref_model args data_collator train_dataset eval_dataset processing_class "
        "compute_metrics callbacks optimizers quantization_config peft_config"
    )

    def __init__(self, *positional: Any, **named: Any) -> None:
        self.known: dict[int, Tensor] = {}  # reference log-probs of a row
        super().__init__(*positional, **named)
        if self.args.sync_ref_model:
            if self.ref_model is None:
                raise ConfigError(
                    "sync_ref_model: not with an adapter or precompute_ref_log_probs."
                )
            self.add_callback(ReferenceMover(self))
        if self.args.precompute_ref_log_probs:
            self._precompute()

    def train(self, *positional: Any, **named: Any) -> Any:
        """Train; the reference may move only where its known log-probs are forgotten."""
        if "SyncRefModelCallback" in self.callback_handler.callback_list:
            raise ConfigError("SyncRefModelCallback: set sync_ref_model in the config instead.")
        return super().train(*positional, **named)

    def _add_reference(self, ref_model: Any) -> None:
        if ref_model is self.model:
            raise ConfigError("ref_model: is the model itself; leave it out.")
        self.ref_model = ref_model
        is_adapted = hasattr(self.model, "peft_config")
        if ref_model is None and not is_adapted and not self.args.precompute_ref_log_probs:
            self.ref_model = self._model_as_loaded()
        if self.ref_model is None:
            return
        self.ref_model = self.ref_model.to(self.args.device).eval().requires_grad_(False)
        self.packed_reference = PackedForward(self.ref_model, self.loss.token_columns)
        self.accelerator.prepare_model(self.ref_model, evaluation_mode=True)

    def _model_as_loaded(self) -> Any:
        """Return the reference of a model that has none: as in TRL, what its name loads."""
        name = self.model.config._name_or_path
        if isinstance(self.arguments["model"], str) or not name:
            return copy.deepcopy(self.model)
        options = {
            "trust_remote_code": self.args.trust_remote_code,
            "dtype": self.model.dtype,
            "attn_implementation": self.model.config._attn_implementation,
        }
        try:
            loaded = self._model_class(name, options).from_pretrained(name, **options)
        except OSError:  # nothing is there any more; TRL does not train such a model
            return copy.deepcopy(self.model)
        own_weights, weights = self.model.state_dict(), loaded.state_dict()
        if any(
            weight.shape != own_weights[key].shape
            or not torch.equal(weight, own_weights[key].cpu())
            for key, weight in weights.items()
        ):
            log.warning(
                "ref_model: the model was changed after it was loaded. As in TRL, the reference is "
                "%s without these changes; pass ref_model=copy.deepcopy(model) to include them.",
                name,
            )
        return loaded

    def _precompute(self) -> None:
        """Compute the reference log-probs of all rows now, while the policy is the reference."""
        size = self.args.precompute_ref_batch_size or self.args.per_device_train_batch_size
        for dataset in self.prepared_sets:
            if not hasattr(dataset, "num_rows"):
                raise ConfigError(
                    "precompute_ref_log_probs: not with a streamed dataset; remove it."
                )
            for inputs in DataLoader(dataset, batch_size=size, collate_fn=self.data_collator):
                batch = inputs["pairs"].to(str(self.args.device))
                self.reference(batch, inputs["rows"].tolist())

    @torch.no_grad()
    def reference(self, batch: PairBatch, rows: Sequence[int]) -> Reference:
        """Return the reference's columns of a micro-batch: known ones, or those of its model."""
        names = ["sum", *sorted(self.loss.token_columns & {"shared"})]
        own_rows = [rows[index] for index in batch.pair_P.tolist()]
        if not all(row in self.known for row in own_rows):
            columns = self._ask_reference(batch)
            if -1 in own_rows:  # streamed rows have no number
                return columns
            table = torch.stack([columns[name] for name in names], 1).cpu()
            self.known.update(zip(own_rows, table, strict=True))
        table = torch.stack([self.known[row] for row in own_rows]).to(self.args.device)
        return dict(zip(names, table.unbind(1), strict=True))

    def _ask_reference(self, batch: PairBatch) -> Reference:
        with self.accelerator.autocast():
            if self.ref_model is not None:
                with self.packed_reference.attention():
                    return dict(self.ref_model(pairs=batch, statistics=False))
            if self.state.global_step and not hasattr(self.model, "peft_config"):
                raise ConfigError(
                    "precompute_ref_log_probs: rows that are new after training began have no "
                    "reference; give them as eval_dataset."
                )
            model = self.accelerator.unwrap_model(self.model)
            with self.packed.attention(), as_reference(model):
                return dict(self.model(pairs=batch, statistics=False))


def dpo_loss(args: Any) -> PairLoss:
    """Return Rather's objective of a DPOConfig."""
    if args.label_smoothing and not all(name in SMOOTHED for name in args.loss_type):
        raise ConfigError(
            f"label_smoothing: TRL 1.16 ignores it for {', '.join(args.loss_type)}; remove it, or "
            f"take one of {', '.join(SMOOTHED)}."
        )
    numbers_of_loss = {
        key for name in args.loss_type for key in LOSSES.find(name, "loss_type").numbers
    }
    names = {"beta", "discopop_tau", "label_smoothing"} & numbers_of_loss
    numbers = {name: getattr(args, name) for name in names}
    kind = DIVERGENCES.get(args.f_divergence_type, args.f_divergence_type)
    modifiers = {"ld_alpha": args.ld_alpha, "use_weighting": args.use_weighting or None}
    if kind != "reverse_kl":
        modifiers["f_divergence_type"] = kind
    if kind == "alpha":
        modifiers["f_alpha_divergence_coef"] = args.f_alpha_divergence_coef
    return configure(args.loss_type, numbers, args.loss_weights, modifiers)


class DPOTrainer(WithReference, Pairwise):
    """TRL's DPOTrainer."""

    config_class: type[TrlConfig] = DPOConfig

    def _loss(self, args: Any) -> PairLoss:
        return dpo_loss(args)

    def _rows(self, dataset: Any, name: str) -> Any:
        return self.recipe.preference(dataset, drops=self.args.truncation_mode == "keep_start")

    def token_pairs(self, row: Row) -> list[TokenPair]:
        prompt, kept_tokens = row["prompt_ids"], self.recipe.kept_part(self.args.truncation_mode)
        sides = [
            cut_answer(prompt, row[f"{side}_ids"], kept_tokens) for side in ("chosen", "rejected")
        ]
        return [token_pair(sides, len(prompt))]

    def _micro_batch_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        batch = inputs["pairs"]
        policy = model(pairs=batch)
        rows = inputs["rows"].tolist()
        reference = self.reference(batch, rows) if self.loss.needs_reference else None
        x = self.logps(batch, policy, reference)
        loss = self.loss(x).mean()
        effective = self.loss.effective(x)
        rewards = (
            self.args.beta * (log_ratios(effective) if reference else effective.policy).detach()
        )
        self.note_ratio("entropy", policy["entropy"].sum(), x.length.sum())
        self._note_logits(policy, x.length)
        self.note_ratio("mean_token_accuracy", policy["top1"][:, 0].sum(), x.length[:, 0].sum())
        self._note_rewards(rewards, effective.policy)
        return loss


class KTOTrainer(WithReference):
    """TRL's KTOTrainer: the KL of a micro-batch comes from answers of neighbouring rows."""

    config_class: type[TrlConfig] = KTOConfig
    by_side = True

    def _loss(self, args: Any) -> PairLoss:
        self.with_kl = args.loss_type != "apo_zero_unpaired"
        if args.loss_type not in ("kto", "apo_zero_unpaired"):
            raise ConfigError(
                f"loss_type: '{args.loss_type}' is neither kto nor apo_zero_unpaired."
            )
        if self.with_kl and args.train_sampling_strategy != "sequential":
            raise ConfigError("train_sampling_strategy: kto needs 'sequential', as in TRL.")
        if self.with_kl and args.per_device_train_batch_size < 2:
            raise ConfigError("per_device_train_batch_size: kto needs at least 2 rows, as in TRL.")
        names = ("beta", "desirable_weight", "undesirable_weight")
        return configure([args.loss_type], {name: getattr(args, name) for name in names})

    def _rows(self, dataset: Any, name: str) -> Any:
        size = self.args.per_device_train_batch_size
        return self.recipe.unpaired(dataset, size if self.with_kl else None)

    def token_pairs(self, row: Row) -> list[TokenPair]:
        prompt, kept_tokens = row["prompt_ids"], self.recipe.kept_part("keep_start")
        names = ("completion_ids", "KL_completion_ids") if self.with_kl else ("completion_ids",)
        sides = [cut_answer(prompt, row[name], kept_tokens) for name in names]
        return [as_partner(token_pair(sides, len(prompt), label=float(row["label"])))]

    def _micro_batch_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        reference = self.reference(inputs["pairs"], inputs["rows"].tolist())
        kl = torch.zeros((), dtype=torch.float64, device=self.args.device)
        if self.with_kl:
            with torch.no_grad():
                neighbours = model(pairs=inputs["rejected"], statistics=False)["sum"][:, 1]
            kl = (neighbours - reference["sum"][:, 1]).mean()
            kl = self.accelerator.gather(kl).mean().clamp(min=0)
        batch = inputs["chosen"]
        policy = model(pairs=batch)
        baseline = kl.expand_as(reference["sum"])
        x = self.logps(batch, policy, {**reference, "baseline": baseline})
        self._note(x, policy, kl)
        return self.loss(x).mean()

    def _note(self, x: Any, policy: Mapping[str, Tensor], kl: Tensor) -> None:
        self.note(kl=kl)
        length, label = x.length[:, 0], x.extra["label"]
        self.note_ratio("entropy", policy["entropy"][:, 0].sum(), length.sum())
        rewards = self.args.beta * log_ratios(x)[:, 0]
        mean_rewards = []
        for side, mask in (("chosen", label), ("rejected", 1 - label)):
            if not self.accelerator.gather(mask.sum()).any():
                continue
            logits = (policy["logits"][:, 0] * mask).sum()
            self.note_ratio(f"logits/{side}", logits, (length * mask).sum())
            self.note_ratio(f"logps/{side}", (x.policy[:, 0] * mask).sum(), mask.sum())
            self.note_ratio(f"rewards/{side}", (rewards * mask).sum(), mask.sum())
            mean_rewards.append(self._noted[f"rewards/{side}"][-1])
        if len(mean_rewards) == 2:
            self._noted["rewards/margins"].append(mean_rewards[0] - mean_rewards[1])


class RewardTrainer(PackedTrainer):
    """TRL's RewardTrainer."""

    config_class: type[TrlConfig] = RewardConfig
    at_end = True
    disables_lora_dropout = False

    positions = (
        "model args data_collator train_dataset eval_dataset processing_class compute_metrics "
        "callbacks optimizers optimizer_cls_and_kwargs preprocess_logits_for_metrics "
        "quantization_config peft_config"
    )

    def _model_class(self, name: str, options: dict[str, Any]) -> Any:
        options["num_labels"] = 1
        return AutoModelForSequenceClassification

    def _refuse_model(self, model: Any, args: Any) -> None:
        labels = model.config.num_labels
        if labels != 1 or not hasattr(model, "score"):
            raise ConfigError(
                f"model: {type(model).__name__} with num_labels={labels} is not a reward model; load "
                "AutoModelForSequenceClassification with num_labels=1, or pass the model's name."
            )
        super()._refuse_model(model, args)

    def _loss(self, args: Any) -> PairLoss:
        return configure(
            ["bradley_terry"], {"center_rewards_coefficient": args.center_rewards_coefficient}
        )

    def _rows(self, dataset: Any, name: str) -> Any:
        return self.recipe.reward(dataset)

    def token_pairs(self, row: Row) -> list[TokenPair]:
        sides = []
        for side in ("chosen", "rejected"):
            ids = list(row[f"{side}_ids"])
            while len(ids) > 1 and ids[-1] == self.tokenizer.pad_token_id:
                ids.pop()  # as in transformers, the last token that does not pad is scored
            sides.append((ids, [1] * len(ids)))
        shorter = min(len(ids) for ids, _ in sides) - 1  # each side has a token of its own
        facts = {"margin": float(row["margin"])} if row.get("margin") is not None else {}
        return [token_pair(sides, shorter, **facts)]

    def _micro_batch_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        x = self.logps(inputs["pairs"], model(pairs=inputs["pairs"]))
        scores = self.accelerator.gather(x.policy.detach())
        margin = gap(x.policy)
        self.note(min_reward=scores.min(), mean_reward=scores.mean(), max_reward=scores.max(),
            accuracy=(margin > 0).double().mean(), margin=margin.mean(),
        )  # fmt: skip
        return self.loss(x).mean()


class SFTTrainer(PackedTrainer):
    """TRL's SFTTrainer: a mean over the scored tokens of the whole step."""

    config_class: type[TrlConfig] = SFTConfig
    loss_is_scaled_for_ga = True

    positions = (
        "model args data_collator train_dataset eval_dataset processing_class compute_loss_func "
        "compute_metrics callbacks optimizers optimizer_cls_and_kwargs "
        "preprocess_logits_for_metrics quantization_config peft_config formatting_func"
    )

    def _loss(self, args: Any) -> PairLoss:
        if args.loss_type != "nll":
            raise ConfigError(f"loss_type: '{args.loss_type}' is not supported; take nll.")
        if args.padding_free and args.max_length:
            raise ConfigError(
                "padding_free: not with max_length, as in TRL; nothing is padded: remove it."
            )
        return replace(configure(["sft"], {}), task="sft")

    def _rows(self, dataset: Any, name: str) -> Any:
        args, template = self.args, str(self.tokenizer.chat_template)
        if args.assistant_only_loss and "{% generation %}" not in template.replace("{%-", "{%"):
            raise ConfigError(
                "assistant_only_loss: the chat template does not mark the assistant's turns with "
                "{% generation %}; add it, or set data_args.score: assistant in a YAML."
            )
        first = next(iter(dataset))
        only = args.completion_only_loss
        only = "prompt" in first and "completion" in first if only is None else only
        if formatted := self.arguments.get("formatting_func"):
            if only or "input_ids" in first:
                raise ConfigError(
                    "formatting_func: makes plain text, of which every token is scored: not with "
                    "completion_only_loss, or rows that have input_ids."
                )
            dataset = self.recipe.map(dataset, lambda row: {"text": formatted(row)})
        dataset = self.recipe.language_modelling(dataset, args, completion_only=only)
        return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset

    def token_pairs(self, row: Row) -> list[TokenPair]:
        scored = [int(label != -100) for label in row["labels"]]
        return [token_pair([(row["input_ids"], scored)])]

    def _get_num_items_in_batch(self, batch_samples: Sequence[Any], device: Any) -> Any:
        count = sum(batch["pairs"].length_P2.sum() for batch in batch_samples)
        count = torch.as_tensor(count, device=device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return count

    def _micro_batch_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        batch = inputs["pairs"]
        policy = model(pairs=batch)
        tokens = batch.length_P2[:, 0].sum()
        items = tokens if self._items is None else self._items
        loss: Tensor = -policy["sum"][:, 0].sum() / items
        if self.args.average_tokens_across_devices and self._items is not None:
            loss = loss * self.accelerator.num_processes
        self.note_ratio("entropy", policy["entropy"].sum(), tokens)
        self.note_ratio("mean_token_accuracy", policy["top1"].sum(), tokens)
        return loss


class WithoutReference(Pairwise):
    """The pairwise trainers of trl.experimental that have no reference."""

    counts_tokens = False
    default_dtype = "auto"

    positions = (
        "model args data_collator train_dataset eval_dataset processing_class model_init callbacks "
        "optimizers preprocess_logits_for_metrics peft_config compute_metrics"
    )

    def _rows(self, dataset: Any, name: str) -> Any:
        return self.recipe.concatenated(dataset)

    def token_pairs(self, row: Row) -> list[TokenPair]:
        sides = [
            (row[f"{side}_input_ids"], row[f"{side}_scored"]) for side in ("chosen", "rejected")
        ]
        shared = min(scored.index(1) for _, scored in sides)
        return [token_pair(sides, shared)]

    def _note_pairs(self, x: Any, policy: Mapping[str, Tensor], averages: bool) -> None:
        """Add TRL's metrics; its logits are means over padding, too, here over scored tokens."""
        logps = (x.policy / x.length if averages else x.policy).detach()
        # Like TRL's, it leaves out rows of the last micro-batches of an epoch.
        logps = self.accelerator.gather_for_metrics(logps)
        alpha = getattr(self.args, "alpha", 0.0)  # of AlphaPO
        rewards = -torch.expm1(-alpha * logps) / alpha if alpha else logps
        self._note_rewards(self.args.beta * rewards, logps)
        self._note_logits(policy, x.length)


class ORPOTrainer(WithoutReference):
    """TRL's ORPOTrainer: its NLL is a mean over the tokens of prompt and chosen answer."""

    config_class: type[TrlConfig] = ORPOConfig

    def _loss(self, args: Any) -> PairLoss:
        return configure(["orpo"], {"beta": args.beta})

    def token_pairs(self, row: Row) -> list[TokenPair]:
        """Return the pair, and its chosen sequence with every token scored."""
        (pair,) = super().token_pairs(row)
        ids = row["chosen_input_ids"]
        return [pair, token_pair([(ids, [1] * len(ids))], len(pair.prompt))]

    def _micro_batch_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        batch = inputs["pairs"]
        columns = model(pairs=batch)
        every = self.logps(batch, columns)
        is_pair = batch.pair_P % 2 == 0
        nll = -every.policy[~is_pair, 0].sum() / every.length[~is_pair, 0].sum()
        x = every._replace(policy=every.policy[is_pair], length=every.length[is_pair])
        policy = {name: column[is_pair] for name, column in columns.items()}
        log_odds = log_odds_ratio(x)
        ratio = logsigmoid(log_odds).mean()
        self._note_pairs(x, policy, averages=True)
        self.note(nll_loss=nll, log_odds_ratio=ratio, log_odds_chosen=log_odds.mean())
        loss: Tensor = nll - self.args.beta * ratio
        return loss


class CPOTrainer(WithoutReference):
    """TRL's CPOTrainer, with SimPO and AlphaPO."""

    config_class: type[TrlConfig] = CPOConfig

    def _loss(self, args: Any) -> PairLoss:
        numbers = {"beta": args.beta, "label_smoothing": args.label_smoothing or None}
        modifiers: dict[str, Any] = {"rpo_alpha": args.cpo_alpha}
        if args.loss_type == "sigmoid":
            return configure(["cpo"], {**numbers, "cpo_alpha": args.cpo_alpha})
        if args.loss_type == "simpo":
            numbers["gamma"] = args.simpo_gamma
            if not args.alpha:
                return configure(["simpo"], numbers, None, modifiers)
            return configure(["alphapo"], {**numbers, "alphapo_alpha": args.alpha}, None, modifiers)
        if args.loss_type in ("hinge", "ipo"):
            return configure([args.loss_type], numbers, None, {**modifiers, "reference_free": True})
        raise ConfigError(f"loss_type: '{args.loss_type}' is not sigmoid, hinge, ipo or simpo.")

    def _micro_batch_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        batch = inputs["pairs"]
        policy = model(pairs=batch)
        x = self.logps(batch, policy)
        self._note_pairs(x, policy, averages=self.args.loss_type in ("ipo", "simpo"))
        tokens = x.length[:, 0].sum()
        nll = -x.policy[:, 0].sum() / tokens if self.args.cpo_alpha else 0.0
        self.note(nll_loss=nll)
        return self.loss(x).mean()
