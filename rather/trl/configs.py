"""TRL 1.16's configs, and what becomes of each of their arguments.

A config is a dataclass over transformers' TrainingArguments, as in TRL, so that TrlParser takes it.
An argument either means what it means in TRL, or a value other than the default is refused. None is
ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from transformers import TrainingArguments

from rather.errors import ConfigError

SHARDING = "set strategy_args.strategy_name in a YAML and use `rather train`"
COMPILED = "set compile: on in a YAML and use `rather train`"
NO_LOGITS = (
    "logits are never kept; use a metric of rather.losses.own or TrainerCallback.on_evaluate"
)
# Arguments of which only the default is accepted -> why, and what to do instead.
REFUSED = {
    "deepspeed": f"no DeepSpeed here; for ZeRO {SHARDING}: zero2 or zero3",
    "fsdp": f"for sharded models {SHARDING}: fsdp2_train",
    "fsdp_config": f"for sharded models {SHARDING}: fsdp2_train",
    "parallelism_config": f"for tensor and context parallelism {SHARDING}",
    "torch_compile": COMPILED,
    "torch_compile_backend": COMPILED,
    "torch_compile_mode": COMPILED,
    "use_liger_kernel": "Rather's own kernels are always on; remove it",
    "liger_kernel_config": "Rather's own kernels are always on; remove it",
    "neftune_noise_alpha": "noise on embeddings is not supported; remove it",
    "label_smoothing_factor": "preference losses have label_smoothing; remove it",
    "label_names": "batches have no labels; remove it",
    "include_num_input_tokens_seen": "num_tokens in log_history counts them; remove it",
    "include_for_metrics": NO_LOGITS,
    "batch_eval_metrics": NO_LOGITS,
    "eval_do_concat_batches": NO_LOGITS,
    "eval_use_gather_object": NO_LOGITS,
    "activation_offloading": f"to offload activations {SHARDING} with offload",
    "packing": "a step counts answers, not sequences; raise per_device_train_batch_size",
    "packing_strategy": "belongs to packing, which is refused; remove it",
    "eval_packing": "belongs to packing, which is refused; remove it",
    "dataset_kwargs": "prepared rows are recognised by their column input_ids; remove it",
    "max_completion_length": "TRL uses it for encoder-decoder models only; remove it",
    "generate_during_eval": "set eval_prompts in a YAML and use `rather train`",
    "is_encoder_decoder": "only decoders are trained; remove it",
    "padding_value": "nothing is padded; remove it",
}  # fmt: skip
# Arguments that only count with another one -> that one, and its value.
NEEDS = {
    "discopop_tau": ("loss_type", "discopop"),
    "f_alpha_divergence_coef": ("f_divergence_type", "alpha_divergence"),
    "simpo_gamma": ("loss_type", "simpo"),
    "alpha": ("loss_type", "simpo"),
    "ref_model_mixup_alpha": ("sync_ref_model", True),
    "ref_model_sync_steps": ("sync_ref_model", True),
    "precompute_ref_batch_size": ("precompute_ref_log_probs", True),
}
# What `accelerate launch` sets for a config file with one of these -> its key in the file.
LAUNCHED = {
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_config",
    "ACCELERATE_USE_FSDP": "fsdp_config",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_config",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}


def default_of(argument: Field[Any]) -> Any:
    """Return the default of a dataclass field."""
    factory = argument.default_factory
    return argument.default if factory is MISSING else factory()


def changed_arguments(settings: Any) -> Iterator[str]:
    """Yield the names of the arguments that differ from their defaults."""
    for argument in fields(settings):
        setting, default = getattr(settings, argument.name), default_of(argument)
        is_off = setting is False and default == "no"  # how a parser reads "no"
        if setting != default and not is_off:
            yield argument.name


def refuse_launcher() -> None:
    """Refuse what a config file of accelerate asks for and this process would not do."""
    for variable, key in LAUNCHED.items():
        if os.environ.get(variable, "false").lower() in ("true", "1"):
            raise ConfigError(f"accelerate's config file: {key}: {SHARDING}, started by torchrun.")
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise ConfigError(f"accelerate's config file: dynamo_config: {COMPILED}.")


@dataclass
class TrlConfig(TrainingArguments):
    """What the configs have in common. Defaults are TRL's."""

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]  # noqa: RUF012

    learning_rate: float = 1e-6
    logging_steps: float = 10
    gradient_checkpointing: bool = True
    bf16: bool | None = None  # type: ignore[assignment]
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    dataset_num_proc: int | None = None
    max_length: int | None = 1024

    def __new__(cls, *_: Any, **named: Any) -> Any:
        """Name unknown arguments: those of other versions of TRL, or misspelt ones."""
        if unknown := sorted(set(named) - {argument.name for argument in fields(cls)}):
            raise ConfigError(
                f"{cls.__name__}: {', '.join(unknown)}: not an argument in TRL 1.16. "
                "Rename or remove it (docs/coming_from/trl.md lists the arguments)."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        refuse_launcher()
        if problems := list(self._problems(changed_arguments(self))):
            raise ConfigError(problems)
        if self.bf16 is None:
            self.bf16 = not self.fp16
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.checked = {name: getattr(self, name, None) for name in (*REFUSED, *NEEDS)}

    def refuse_changes(self) -> None:
        """Refuse what was set after the config was made, and so was not checked then."""
        changed = {
            name for name, value in self.checked.items() if getattr(self, name, None) != value
        }
        if problems := list(self._problems(changed)):
            raise ConfigError(problems)

    def _problems(self, names: Iterable[str]) -> Iterator[str]:
        """Yield which of these arguments would not be obeyed, or would have no effect."""
        for name in names:
            if name in REFUSED:
                yield f"{name}: {REFUSED[name]}."
            if name in NEEDS:
                needed, needed_value = NEEDS[name]
                values = getattr(self, needed)
                if needed_value not in (values if isinstance(values, list) else [values]):
                    yield f"{name}: is read only with {needed}: {needed_value}; remove it."


@dataclass
class ReferencedConfig(TrlConfig):
    """A policy that is compared with a reference."""

    router_aux_loss_coef: float | None = None
    disable_dropout: bool = True
    pad_to_multiple_of: int | str | None = "auto"
    precompute_ref_log_probs: bool = False
    precompute_ref_batch_size: int | None = None
    beta: float = 0.1
    activation_offloading: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512


@dataclass
class DPOConfig(ReferencedConfig):
    """TRL's DPOConfig."""

    truncation_mode: str = "keep_start"
    padding_free: bool = False
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])
    loss_weights: list[float] | None = None
    ld_alpha: float | None = None
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    label_smoothing: float = 0.0
    use_weighting: bool = False
    discopop_tau: float = 0.05
    pad_token: str | None = None

    def __post_init__(self) -> None:
        names: Any = self.loss_type
        self.loss_type = [names] if isinstance(names, str) else list(names)
        super().__post_init__()


@dataclass
class KTOConfig(ReferencedConfig):
    """TRL's KTOConfig."""

    train_sampling_strategy: str = "sequential"
    loss_type: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass
class RewardConfig(TrlConfig):
    """TRL's RewardConfig."""

    learning_rate: float = 1e-4
    chat_template_path: str | None = None
    disable_dropout: bool = True
    eos_token: str | None = None
    pad_to_multiple_of: int | str | None = "auto"
    center_rewards_coefficient: float | None = None
    activation_offloading: bool = False
    pad_token: str | None = None


@dataclass
class SFTConfig(TrlConfig):
    """TRL's SFTConfig."""

    _VALID_DICT_FIELDS = [*TrlConfig._VALID_DICT_FIELDS, "dataset_kwargs"]  # noqa: RUF012

    learning_rate: float = 2e-5
    router_aux_loss_coef: float | None = None
    chat_template_path: str | None = None
    dataset_text_field: str = "text"
    dataset_kwargs: dict[str, Any] | str | None = None
    eos_token: str | None = None
    truncation_mode: str = "keep_start"
    shuffle_dataset: bool = False
    packing: bool = False
    packing_strategy: str = "bfd"
    padding_free: bool = False
    pad_to_multiple_of: int | str | None = "auto"
    eval_packing: bool | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    loss_type: str = "nll"
    activation_offloading: bool = False
    pad_token: str | None = None


@dataclass
class ReferenceFreeConfig(TrlConfig):
    """The pairwise losses of trl.experimental that have no reference."""

    max_completion_length: int | None = None
    beta: float = 0.1
    disable_dropout: bool = True
    generate_during_eval: bool = False
    is_encoder_decoder: bool | None = None


@dataclass
class ORPOConfig(ReferenceFreeConfig):
    """TRL's ORPOConfig."""

    padding_value: int | None = None


@dataclass
class CPOConfig(ReferenceFreeConfig):
    """TRL's CPOConfig."""

    label_smoothing: float = 0.0
    loss_type: str = "sigmoid"
    cpo_alpha: float = 1.0
    simpo_gamma: float = 0.5
    alpha: float = 0.0


CONFIGS = (DPOConfig, KTOConfig, RewardConfig, SFTConfig, ORPOConfig, CPOConfig)
