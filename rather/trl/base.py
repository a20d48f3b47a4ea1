"""What the trainers have in common: transformers' Trainer over packed pairs.

transformers' Trainer keeps its loop, as under TRL: order of the rows, optimizer, schedule,
callbacks, checkpoints and log_history are its own. Rather's part is a micro-batch: rows become
packed pairs, in which no token is computed twice, and Rather's forward, head and losses run on
them.
"""

from __future__ import annotations

import logging
from collections import ChainMap, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, set_seed

from rather.config.redaction import looks_secret
from rather.data.batch import PairBatch, PairFacts, PairLogps, TokenPair
from rather.errors import ConfigError, DataError
from rather.files import yaml_text
from rather.losses.objective import PairLoss
from rather.model.check import check_length
from rather.model.policy import head_of
from rather.registry import tool
from rather.trl.configs import NO_LOGITS, TrlConfig, changed_arguments
from rather.trl.forward import PackedForward
from rather.trl.tokens import Packer, Recipe, Row

log = logging.getLogger(__name__)

OWN_LOSS = (
    "write the loss as a function with @rather.losses.losses.loss() and name it in loss_type; the "
    "page 'Coming from TRL' shows one"
)
# Methods of transformers' and TRL's trainers that would change what is computed.
NOT_CALLED = (
    "compute_loss", "training_step", "prediction_step", "_compute_loss", "dpo_loss", "kto_loss",
    "get_batch_loss_metrics", "concatenated_forward", "get_batch_logps", "tokenize_row",
    "_prepare_dataset", "compute_ref_log_probs", "odds_ratio_loss", "cpo_loss",
    "_precompute_ref_logps", "_compute_kl_logps", "build_tokenized_answer", "concatenated_inputs",
    "store_metrics", "generate_from_model",
)  # fmt: skip
# Arguments of a trainer that only their default is accepted for -> why.
NOT_TAKEN = {
    "data_collator": "rows are packed, not padded; remove it",
    "compute_metrics": NO_LOGITS,
    "preprocess_logits_for_metrics": NO_LOGITS,
    "compute_loss_func": OWN_LOSS,
    "model_init": "pass the model, or its name",
}


class PackedTrainer(Trainer):
    """A trainer of TRL over packed pairs. Subclasses say what rows and losses are."""

    config_class: type[TrlConfig]
    positions: str  # TRL's arguments, in order
    args: Any
    model: Any
    train_dataset: Any
    _signature_columns: Any
    at_end = False  # the last token of an answer is scored, by a reward model
    by_side = False  # both answers of a pair are computed apart
    has_reference = False
    counts_tokens = True  # log_history has num_tokens
    default_dtype = "float32"
    disables_lora_dropout = True  # by disable_dropout; else lora_dropout must be set to 0
    loss_is_scaled_for_ga = False  # each micro-batch has its own mean, as in TRL
    prepared_sets: Sequence[Any] = ()  # the rows of train_dataset and eval_dataset as tokens

    def __init__(self, *positional: Any, **named: Any) -> None:
        """Take the arguments of TRL's trainer, in its order."""
        arguments = {**dict(zip(self.positions.split(), positional, strict=False)), **named}
        self.arguments = arguments
        self._refuse(arguments)
        model, ref_model = arguments.get("model"), arguments.get("ref_model")
        args = arguments.get("args") or self._default_args(model)
        self._refuse_args(args)
        args.accelerator_config.dispatch_batches = False  # of a stream: packed batches stay whole
        if arguments.get("train_dataset") is None or model is None:
            raise ConfigError("model, train_dataset: are required.")
        set_seed(args.seed)
        self._metrics: dict[str, dict[str, list[float]]] = {
            "train": defaultdict(list),
            "eval": defaultdict(list),
        }
        self._noted = self._metrics["train"]  # or those of evaluation, while it runs
        self._tokens_seen = 0
        self._numbered_rows = 0  # of all data sets
        model = self._load(model, args, arguments.get("quantization_config"))
        self.tokenizer = self._tokenizer(model, args, arguments.get("processing_class"))
        model = self._with_adapter(model, arguments.get("peft_config"), ref_model)
        self._refuse_model(model, args)
        self.args, self.loss = args, self._loss(args)
        self.recipe = Recipe(self.tokenizer, args.max_length, args.dataset_num_proc)
        rows = self._prepared(arguments["train_dataset"], "train")
        held_out = self._prepared(arguments.get("eval_dataset"), "eval")
        sets = held_out.values() if isinstance(held_out, dict) else [held_out]
        self.prepared_sets = [
            rows_of_set for rows_of_set in (rows, *sets) if rows_of_set is not None
        ]
        if args.device.type == "cpu":
            args.gradient_checkpointing = False  # memory is not short, and no number changes
        elif hasattr(model, "peft_config") and args.gradient_checkpointing:
            model.enable_input_require_grads()
        super().__init__(
            model=model,
            args=args,
            data_collator=Packer(self.token_pairs, at_end=self.at_end, by_side=self.by_side),
            train_dataset=rows,
            eval_dataset=held_out,
            processing_class=self.tokenizer,
            callbacks=arguments.get("callbacks"),
            optimizers=arguments.get("optimizers") or (None, None),
            optimizer_cls_and_kwargs=arguments.get("optimizer_cls_and_kwargs"),
        )
        if args.n_gpu > 1:
            raise ConfigError(
                "this process sees several GPUs: start it with torchrun or accelerate launch, or "
                "set CUDA_VISIBLE_DEVICES."
            )
        self.can_return_loss, self.label_names = True, []
        self._add_reference(ref_model)
        self.packed = PackedForward(self.model, self.loss.token_columns)
        self.model.add_model_tags(["rather", self.name.lower()])

    # --- what a subclass defines ---

    @property
    def name(self) -> str:
        """ "DPO" for a DPOTrainer."""
        return self.config_class.__name__.removesuffix("Config")

    def _loss(self, args: Any) -> PairLoss:
        """Return Rather's objective for TRL's arguments."""
        raise NotImplementedError

    def _rows(self, dataset: Any, name: str) -> Any:
        """Return a dataset of token ids in TRL's columns."""
        raise NotImplementedError

    def token_pairs(self, row: Row) -> list[TokenPair]:
        """Return the pairs of one row."""
        raise NotImplementedError

    def _add_reference(self, ref_model: Any) -> None:
        """Keep the reference, if there is one, before the model learns to take pairs."""

    def _micro_batch_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return the loss of a micro-batch; store its metrics."""
        raise NotImplementedError

    # --- before training ---

    def _refuse(self, given: Mapping[str, Any]) -> None:
        """Refuse arguments and overridden methods that would have no effect."""
        for name, value in given.items():
            if name in NOT_TAKEN and value is not None:
                raise ConfigError(f"{name}: {NOT_TAKEN[name]}.")
            if name not in self.positions.split():
                raise ConfigError(
                    f"{type(self).__name__}: {name}: not an argument in TRL 1.16. Rename or "
                    "remove it (docs/coming_from/trl.md lists the arguments)."
                )
        ours = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("rather.trl"))
        for name in NOT_CALLED:
            if getattr(type(self), name, None) is not getattr(ours, name, None):
                raise ConfigError(
                    f"{type(self).__name__}.{name}: it would not be used; {OWN_LOSS}."
                )

    def _default_args(self, model: Any) -> Any:
        name = model if isinstance(model, str) else model.config._name_or_path
        return self.config_class(f"{name.split('/')[-1]}-{self.name}")

    def _refuse_args(self, args: Any) -> None:
        if not isinstance(args, self.config_class):
            mine = f"rather.trl.{self.config_class.__name__}"
            raise ConfigError(
                f"args: must be a {mine} (got {type(args).__module__}.{type(args).__name__})."
            )
        args.refuse_changes()
        batches: Any = args.accelerator_config
        if batches.split_batches or batches.dispatch_batches:
            raise ConfigError(
                "accelerator_config: split_batches, dispatch_batches: packed batches are not "
                "divided; remove them."
            )

    def _load(self, model: Any, args: Any, quantization_config: Any) -> Any:
        """Return the model; a name is loaded as TRL loads it, in float32 by default."""
        if not isinstance(model, str):
            if quantization_config is not None or args.model_init_kwargs:
                raise ConfigError(
                    "quantization_config, model_init_kwargs: they belong to a model that is given "
                    "by its name; this one is loaded."
                )
            return model
        options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
        options.setdefault("dtype", self.default_dtype)
        if quantization_config is not None:
            options["quantization_config"] = quantization_config
        if args.device.type == "cuda":
            options.setdefault("device_map", {"": args.device})
        return self._model_class(model, options).from_pretrained(model, **options)

    def _model_class(self, name: str, options: dict[str, Any]) -> Any:
        loading_options = {
            key: options[key] for key in ("revision", "trust_remote_code") if key in options
        }
        # The revision is in the options.
        config = AutoConfig.from_pretrained(name, **loading_options)  # nosec B615
        return getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)

    def _tokenizer(self, model: Any, args: Any, tokenizer: Any) -> Any:
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(  # with a revision  # nosec B615
                model.config._name_or_path,
                revision=(args.model_init_kwargs or {}).get("revision"),
                trust_remote_code=args.trust_remote_code,
            )
        if hasattr(tokenizer, "image_processor") or not hasattr(tokenizer, "eos_token"):
            raise ConfigError(
                "processing_class: only tokenizers of text; images are not trained on here."
            )
        text = model.config.get_text_config()
        if end := getattr(args, "eos_token", None):
            if end not in tokenizer.get_vocab():
                raise ConfigError(f"eos_token: '{end}' is not in the tokenizer's vocabulary.")
            tokenizer.eos_token = end
            text.eos_token_id = tokenizer.eos_token_id
        if path := getattr(args, "chat_template_path", None):
            if not str(path).endswith((".jinja", ".j2")):
                raise ConfigError("chat_template_path: name a Jinja file (.jinja or .j2).")
            tokenizer.chat_template = yaml_text(Path(path))
        padding = getattr(args, "pad_token", None) or tokenizer.pad_token or tokenizer.eos_token
        if padding not in tokenizer.get_vocab():
            raise ConfigError(f"pad_token: '{padding}' is not in the tokenizer's vocabulary.")
        tokenizer.pad_token = padding
        text.pad_token_id = tokenizer.pad_token_id
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.pad_token_id = tokenizer.pad_token_id
        return tokenizer

    def _with_adapter(self, model: Any, peft_config: Any, ref_model: Any) -> Any:
        """Return the model with its adapter; a given adapter's start is kept as the reference."""
        is_adapted = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
        if peft_config is not None:
            from peft import get_peft_model

            if is_adapted:
                raise ConfigError(
                    "peft_config: the model has an adapter already; pass one of them."
                )
            return get_peft_model(model, peft_config)
        if is_adapted and self.has_reference and ref_model is None:
            model.add_adapter("ref", model.peft_config["default"])
            for name, weight in model.named_parameters():
                if ".default." in name:
                    model.get_parameter(name.replace(".default.", ".ref.")).data.copy_(weight.data)
        return model

    def _refuse_model(self, model: Any, args: Any) -> None:
        """Refuse what a packed forward cannot reproduce: random dropout, losses of routers, ..."""
        if hasattr(model, "peft_config"):
            _refuse_adapter(model)
        if not any(weight.requires_grad for weight in model.parameters()):
            raise ConfigError(
                "model: every weight is frozen, as merge_and_unload() leaves them; call "
                "model.requires_grad_(True), or pass a peft_config."
            )
        text = model.config.get_text_config()
        coefficient = getattr(args, "router_aux_loss_coef", None)
        routes = hasattr(text, "output_router_logits")
        if coefficient if not routes else coefficient != 0.0:
            raise ConfigError(
                "router_aux_loss_coef: set it to 0.0 to train a mixture of experts without its "
                "router loss, or use `rather train` with model_args.moe_aux_loss_coef."
            )
        layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Dropout) and module.p
        }
        of_adapter = any("lora_dropout" in name for name in layers)
        dropout_name = "lora_dropout" if of_adapter else "dropout"
        is_off = getattr(args, "disable_dropout", False)
        if layers and (not is_off or (of_adapter and not self.disables_lora_dropout)):
            raise ConfigError(f"{dropout_name}: random dropout is not supported here; set it to 0.")
        for layer in layers.values():
            layer.p = 0.0
        if layers:
            log.info("%s: disable_dropout sets it to 0, as in TRL", dropout_name)
        if getattr(text, "attention_dropout", 0):
            raise ConfigError("attention_dropout: the model's config has it; set it to 0.")
        if args.max_length:
            check_length(model.config, args.max_length)

    def _prepared(self, dataset: Any, name: str) -> Any:
        """Return the rows of one data set, or of each in a mapping, as tokens."""
        if isinstance(dataset, dict):
            return {key: self._prepared(rows_of_set, key) for key, rows_of_set in dataset.items()}
        is_ready = any(dataset is rows_of_set for rows_of_set in self.prepared_sets)
        if is_ready or dataset is None or isinstance(dataset, str):
            return dataset
        first = next(iter(dataset))
        if "image" in first or "images" in first:
            raise ConfigError(
                "train_dataset: images are not trained on here; use a YAML with `rather train`."
            )
        with self.args.main_process_first(desc=f"tokenising {name}"):
            dataset = self._rows(dataset, name)
        if next(iter(dataset), None) is None:
            raise DataError(
                f"{name} data: no row is left after tokenising: all are longer than max_length "
                f"({self.args.max_length}), or nothing in them is scored."
            )
        if self.has_reference and hasattr(dataset, "num_rows"):
            first_row = self._numbered_rows
            self._numbered_rows += len(dataset)
            dataset = dataset.add_column("row", list(range(first_row, self._numbered_rows)))
        return dataset

    def _set_signature_columns_if_needed(self) -> None:
        """Keep all columns: a row of tokens has nothing else."""
        self._signature_columns = list(next(iter(self.train_dataset)))

    # --- a micro-batch ---

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of packed pairs."""
        mode = "train" if self.model.training else "eval"
        if mode == "train":
            self._tokens_seen += int(self.accelerator.gather(inputs["tokens"]).sum())
        self._noted = self._metrics[mode]
        if self.counts_tokens:
            self._noted["num_tokens"] = [self._tokens_seen]
        self._items = num_items_in_batch
        loss = self._micro_batch_loss(model, inputs)
        return (loss, {}) if return_outputs else loss

    def training_step(self, *args: Any, **named: Any) -> Tensor:
        with self.packed.attention():  # backward may compute layers again
            return super().training_step(*args, **named)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager(), self.packed.attention():
            return self.compute_loss(model, inputs), None, None

    def logps(self, batch: PairBatch, policy: Any, reference: Any = None) -> PairLogps:
        """Return what a loss may know about a micro-batch."""
        facts = PairFacts.of(batch)
        return facts.with_logps(policy, reference, facts.mean_chosen_length)

    def note(self, **metrics: Tensor | float) -> None:
        """Add metrics of a micro-batch: means over the ranks, as log_history shows them."""
        for name, metric in metrics.items():
            mean = torch.as_tensor(metric, device=self.args.device).double().detach()
            self._noted[name].append(float(self.accelerator.gather(mean).mean()))

    def note_ratio(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add a mean over the tokens of all ranks."""
        total_and_count = torch.stack([total.detach().double(), count.double()])
        total, count = self.accelerator.gather(total_and_count).view(-1, 2).sum(0)
        self._noted[name].append(float(total / count) if count else 0.0)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the means of the micro-batches since the last time, with TRL's names."""
        mode = "train" if self.model.training else "eval"
        prefix = "" if mode == "train" else "eval_"
        for name, values in self._metrics[mode].items():
            logs[prefix + name] = sum(values) / len(values)
        self._metrics[mode].clear()
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate; rows that are given here are tokenised first."""
        if not isinstance(eval_dataset, dict):  # else this is called for each of them
            eval_dataset = self._prepared(eval_dataset, "eval")
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return an estimate: 6 per weight and token, embeddings left out."""
        weights = int(self.packed.base.num_parameters(exclude_embeddings=True))
        return 6 * int(inputs["tokens"]) * weights

    def _get_num_items_in_batch(self, batch_samples: Sequence[Any], device: Any) -> Any:
        return None

    # --- the hub ---

    def _save_checkpoint(self, *args: Any, **named: Any) -> None:
        """Save a checkpoint; as in TRL, the model card next to it is of this step."""
        self.create_model_card()
        super()._save_checkpoint(*args, **named)

    def create_model_card(  # type: ignore[override]  # the arguments are TRL's
        self, model_name: str | None = None, dataset_name: Any = None, tags: Any = None
    ) -> None:
        """Write README.md: base and licence, the data as it was named, settings, last metrics."""
        if not self.is_world_process_zero():
            return
        base = self.packed.base.config._name_or_path
        datasets = [dataset_name] if isinstance(dataset_name, str) else dataset_name or []
        more_tags = [tags] if isinstance(tags, str) else tags or []
        top = {"library_name": "transformers", "tags": ["rather", self.name.lower(), *more_tags]}
        data_names = ", ".join(map(str, datasets)) or "not named"
        place = Path(self.args.hub_model_id or self.args.output_dir)
        lines = [
            f"# {model_name or place.absolute().name}",
            f"Trained by rather.trl.{self.name}Trainer for {self.state.global_step} steps.",
            f"Data: {data_names}.",
            _table("setting", _public_settings(self.args)),
            _table("last metric", _last_numbers(self.state.log_history)),
        ]
        text = tool("upload_card")("\n\n".join(lines), base, None, top, datasets)
        (Path(self.args.output_dir) / "README.md").write_text(text, encoding="utf-8")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> Any:
        """Upload model and card as `rather push` does; no pickle, which may hold a token.

        hub_model_id, hub_private_repo and hub_revision mean what they mean in TRL.
        """
        if not blocking:
            raise ConfigError("blocking: uploads are not done in the background; remove it.")
        args = self.args
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        repo = args.hub_model_id or Path(args.output_dir).absolute().name
        self.create_model_card(**card)
        folder = Path(args.output_dir)
        files = {**tool("upload_files")(folder), "README.md": folder / "README.md"}
        return tool("upload")(
            repo, files, private=args.hub_private_repo,
            token=token or args.hub_token, message=commit_message or "End of training",
            revision=revision or args.hub_revision,
        )  # fmt: skip


def _refuse_adapter(model: Any) -> None:
    """Refuse adapters that a packed forward would not train."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(config.is_prompt_learning for config in model.peft_config.values()):
        raise ConfigError(
            "peft_config: packed rows have no place for virtual tokens; take an adapter of layers, "
            "such as LoraConfig."
        )
    if isinstance(head_of(model.get_base_model()), BaseTunerLayer):
        raise ConfigError(
            "peft_config: an adapter on the head would not be trained, as in TRL; leave it out of "
            "target_modules, or name it in modules_to_save."
        )


def _public_settings(args: Any) -> dict[str, Any]:
    """Return the arguments that differ from TRL's defaults, without places and secrets."""
    return {
        name: getattr(args, name)
        for name in changed_arguments(args)
        if not looks_secret(name) and not name.startswith("hub_") and not name.endswith("_dir")
    }


def _last_numbers(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the newest value of each metric."""
    newest = ChainMap(*map(dict, reversed(history)))
    return {name: f"{number:.6g}" for name, number in newest.items() if isinstance(number, float)}


def _table(title: str, values: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {cell} |" for name, cell in values.items()]
    return "\n".join([f"| {title} | |", "|---|---|", *rows])
