"""Everything a user may write in the YAML: strict, frozen models with a meaning and a range at every field.

Sizes count pairs. Nothing here imports torch: what needs it (a loss's numbers, the device) is checked later.
A key left out takes its default, or follows another key: see follow.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PrivateAttr, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from rather.config import checks
from rather.config import inherit as follow
from rather.config.adapters import ADAPTER_SETTINGS
from rather.config.values import (
    Devices,
    Environment,
    Folder,
    HeldOut,
    Metric,
    NotNegative,
    OnOffAuto,
    Positive,
    RunName,
    Section,
    Text,
    WorkerClass,
    knob,
)

Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "inverse_sqrt",
    "wsd",
]
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]
Format = Literal[
    "auto",
    "ranked",
    "nemo",
    "swift",
    "instruction",
    "prompt",
    "messages",
    "llama_factory",
    "colossal",
    "conversation",
    "tokenised",
]


class ModelArgs(Section):
    """Which weights a role uses, and in which precision."""

    model_name_or_path: Text | None = knob(
        None, "Model folder or hub name of this role; else `pretrain`."
    )
    tokenizer_name_or_path: Text | None = knob(
        None,
        "Tokenizer folder or hub name; else the model's own. Both roles use this one tokenizer.",
    )
    revision: Text | None = knob(None, "Branch, tag or commit of a hub model.")
    dtype: Literal["bf16", "fp16", "fp32"] | None = knob(
        None, "Precision of the forward and backward pass; else bf16 on a GPU, fp32 on a CPU."
    )
    model_type: Literal["causal_lm"] | None = knob(
        None, "Kind of model; causal language models are the only one."
    )
    disable_gradient_checkpointing: bool | None = knob(
        None,
        "false recomputes activations in the backward pass to save memory, true keeps them; else they are kept as far "
        "as the GPU's memory allows.",
    )
    trust_remote_code: bool = knob(
        False, "Run Python code that comes with the model; only for models you know."
    )
    adapter_name_or_path: Text | None = knob(
        None,
        "PEFT adapter on the weights: the policy goes on training it, and as it is here it is the reference.",
    )
    quantization: Literal["4bit"] | None = knob(
        None,
        "Hold the frozen weights under an adapter in 4 bits (QLoRA); needs the extra `quantization`.",
    )

    @property
    def has_adapter(self) -> bool:
        return self.adapter_name_or_path is not None

    def of_other_weights(self) -> Self:
        """The same for weights that stand in for these: what belongs to these alone is left out."""
        own = {"revision", "adapter_name_or_path", "quantization", "lora_rank", "lora_target"}
        return self.model_copy(update=dict.fromkeys(own & type(self).model_fields.keys()))


class ActorModelArgs(ModelArgs):
    """The policy's weights, and the adapter that is trained instead of them, if there is one."""

    lora_rank: int | None = knob(
        None,
        "Train an adapter (LoRA) of this rank instead of the weights; 8 where only lora_target is given.",
        ge=1,
    )
    lora_alpha: float | None = knob(
        None,
        "Scale of the adapter: it is multiplied by lora_alpha / lora_rank; else twice the rank.",
        gt=0,
    )
    lora_target: Text | list[Text] | None = knob(
        None, "Linear layers that get an adapter, by their names (q_proj, v_proj); else all-linear."
    )
    lora_dropout: float = knob(0.0, "Only 0: dropout is off in preference training.", ge=0, lt=1)
    modules_to_save: Text | list[Text] | None = knob(
        None, "Modules that are trained whole beside it, by name."
    )
    additional_target: Text | list[Text] | None = knob(None, "ROLL's way to write modules_to_save.")
    use_rslora: bool = knob(
        False, "Scale by lora_alpha / sqrt(lora_rank) instead (rsLoRA), for large ranks."
    )
    use_dora: bool = knob(
        False, "Train the size of each row of a weight apart from its direction (DoRA)."
    )
    init_lora_weights: bool | Text = knob(
        True,
        "Start of the adapter: true (no effect at first), gaussian (the same, drawn otherwise), pissa or pissa_niter_4 "
        "(the largest singular vectors, which it takes out of the weights).",
    )
    lora_config: Text | None = knob(
        None, "JSON file of these settings, as ColossalChat's; keys given here win."
    )

    @property
    def has_adapter(self) -> bool:
        return any(
            value is not None
            for value in (self.lora_rank, self.lora_target, self.adapter_name_or_path)
        )

    @property
    def adapter_settings(self) -> dict[str, Any] | None:
        """All that decides which adapter is trained on what; None without one."""
        names = [*ADAPTER_SETTINGS, "adapter_name_or_path", "quantization"]
        return {name: getattr(self, name) for name in names} if self.has_adapter else None


class TrainingArgs(Section):
    """Optimizer, schedule and batch of the policy."""

    learning_rate: float = knob(1e-6, "Peak learning rate of AdamW.", ge=0)
    lr_scheduler_type: Schedule = knob(
        "linear",
        "Shape of the learning rate over the optimizer steps of the run; each may begin with a warm-up.",
    )
    lr_scheduler_kwargs: dict[str, NotNegative] = knob(
        dict,
        "Numbers of the schedule: min_lr or min_lr_rate (linear, cosine, wsd), num_cycles (cosine), "
        "timescale (inverse_sqrt), num_decay_steps (wsd).",
    )
    weight_decay: float = knob(0.0, "Decoupled weight decay of AdamW.", ge=0)
    adam_beta1: float = knob(0.9, "Decay of AdamW's first moment.", ge=0, lt=1)
    adam_beta2: float = knob(0.999, "Decay of AdamW's second moment.", ge=0, lt=1)
    adam_epsilon: float = knob(
        1e-8, "AdamW's epsilon.", gt=0, why="a weight without gradient would divide 0 by 0"
    )
    per_device_train_batch_size: int = knob(8, "Pairs per device and accumulation step.", ge=1)
    gradient_accumulation_steps: int = knob(
        1,
        "Batches per optimizer step, which holds dp x per_device_train_batch_size x this, in pairs.",
        ge=1,
    )
    warmup_steps: int = knob(
        0, "Optimizer steps in which the learning rate rises from 0; wins over warmup_ratio.", ge=0
    )
    warmup_ratio: float = knob(0.0, "Warm-up as a share of all optimizer steps.", ge=0, lt=1)
    num_train_epochs: float = knob(
        1.0,
        "Passes over the training pairs; may be a fraction. max_steps may end the run earlier.",
        gt=0,
    )
    max_grad_norm: float | None = knob(
        None, "The same as max_grad_norm at the top level, if given here.", ge=0
    )
    data_seed: int | None = knob(
        None, "Seed of the order of the pairs; else `seed`.", ge=0, lt=2**32
    )
    log_num_zeros_in_grad: bool = knob(
        False, "Log num_zeros_in_grad: gradient entries that are exactly 0."
    )


class DataArgs(Section):
    """Where pairs come from and how they become tokens."""

    dataset_dir: Text | None = knob(
        None, "Folder in which relative file names are looked up first."
    )
    template: Text | None = knob(
        None,
        "Chat template: a name (qwen2_5, chatml, llama3, native, ...) or a local Jinja file; "
        "else `global_template`, else the tokenizer's own.",
    )
    format: Format = knob("auto", "Shape of the rows; `auto` detects it.")
    columns: dict[str, str] = knob(
        dict, "Our column name -> its name in the file, such as {prompt: question}."
    )
    score: Literal["last", "assistant", "all"] = knob(
        "last", "Turns that are scored: the last, the assistant's, or all."
    )
    overlong: Literal["drop", "truncate_prompt", "truncate_response", "error"] = knob(
        "drop", "What happens to a pair longer than sequence_length."
    )
    max_prompt_length: int | None = knob(
        None,
        "Most tokens of a prompt; a longer one loses its beginning, but not its BOS.",
        ge=2,
        why="BOS and the last token stay",
    )
    separator: str = knob("", "Text between prompt and response where no chat template is used.")
    special_tokens: Literal["warn", "escape", "drop", "keep"] = knob(
        "warn",
        "What happens to special tokens written as text inside messages, which could forge turns.",
    )
    encoding: Text = knob("utf-8", "Text encoding of the files.")
    preprocessing_num_workers: int | None = knob(
        None, "Processes that tokenise; else automatic.", ge=1
    )
    cache_dir: Text | None = knob(None, "Folder of tokenised data; else <output_dir>/.cache/data.")

    def locate(self, name: str) -> Path:
        """A file as the user means it: relative names are tried in dataset_dir, then from here."""
        path = Path(name).expanduser()
        if not self.dataset_dir:
            return path
        folder = Path(self.dataset_dir).expanduser()
        typed_whole = path.exists() or path.is_relative_to(
            folder
        )  # `data/x.json` beside `dataset_dir: data`
        return path if typed_whole and not (folder / path).exists() else folder / path


class TrainDataArgs(DataArgs):
    """The training pairs."""

    file_name: str | list[str] | None = knob(
        None,
        "File or files of training pairs: JSON, JSONL, Parquet, Arrow, .gz; or folders of tokenised pairs.",
    )
    weights: list[Positive] | None = knob(None, "Mixing weights of the files, one number per file.")

    @property
    def files(self) -> list[Path]:
        return [self.locate(name) for name in as_list(self.file_name)]


class ValidationDataArgs(DataArgs):
    """The evaluation pairs; everything not given follows actor_train.data_args."""

    file_name: str | list[str] | dict[str, str | list[str]] | None = knob(
        None, "File or files of evaluation pairs, or several named sets: {name: file or files}."
    )
    split: HeldOut = knob(
        None, "Instead of files: share (0.05) or number (200) of training pairs to hold out."
    )

    @property
    def sets(self) -> dict[str, list[Path]]:
        """Evaluation sets by name; an unnamed one has the empty name."""
        return {name: [self.locate(file) for file in files] for name, files in self.names().items()}

    def names(self) -> dict[str, list[str]]:
        """Files of each evaluation set as they are written."""
        if isinstance(self.file_name, dict):
            return {name: as_list(files) for name, files in self.file_name.items()}
        return {"": as_list(self.file_name)} if self.file_name else {}

    @property
    def given(self) -> bool:
        return bool(self.file_name) or self.split is not None


def as_list(names: str | list[str] | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else names


class StrategyArgs(Section):
    """How a role is laid out on its devices."""

    strategy_name: str | None = knob(
        None,
        "ddp, zero1, zero2, zero3, hsdp, fsdp2_train, megatron_train, ...; else zero2 on several devices.",
    )
    strategy_config: dict[str, Any] = knob(
        dict, "Details of the strategy, with Megatron's key names."
    )
    tp_size: int | None = knob(None, "Tensor-parallel degree.", ge=1)
    pp_size: int | None = knob(None, "Pipeline-parallel degree.", ge=1)
    cp_size: int | None = knob(None, "Context-parallel degree.", ge=1)
    gpu_memory_utilization: float | None = knob(
        None, "Share of its GPU's memory this role may take.", gt=0, le=1
    )


class RoleConfig(Section):
    """What both roles have."""

    worker_cls: WorkerClass = knob(
        None, "Your own worker class or its dotted import path; else Rather's."
    )
    model_args: ModelArgs = knob(ModelArgs, "The weights.")
    strategy_args: StrategyArgs = knob(StrategyArgs, "The layout on devices.")
    device_mapping: Devices = knob(
        None,
        'Device numbers: [0, 1], "0-7", "0,2,4-6" or "list(range(0,8))"; else the first device.',
    )
    infer_batch_size: int | None = knob(
        None,
        "Most pairs in a micro-batch without gradients; else only the token budget counts.",
        ge=1,
    )
    max_tokens_per_microbatch_in_infer: int | None = knob(
        None,
        "Token budget of a micro-batch without gradients; else automatic. Changes speed, never results.",
        ge=1,
    )
    system_envs: Environment = knob(
        dict, "Environment variables of this role; win over those at the top level."
    )

    _canonical: bool = PrivateAttr(default=False)  # determinism, which the layout depends on

    @property
    def trains(self) -> bool:
        return False

    @property
    def is_canonical(self) -> bool:
        return self._canonical

    @property
    def model_path(self) -> str:
        """Folder or hub name of the weights, `pretrain` taken in."""
        assert self.model_args.model_name_or_path is not None, "checked when the config was made"
        return _at_home(self.model_args.model_name_or_path)

    @property
    def tokenizer_path(self) -> str:
        return _at_home(self.model_args.tokenizer_name_or_path or self.model_path)


def _at_home(name: str) -> str:
    return str(Path(name).expanduser()) if name.startswith("~") else name


class ActorConfig(RoleConfig):
    """The policy that is trained."""

    model_args: ActorModelArgs = knob(ActorModelArgs, "The weights, and an adapter on them.")
    training_args: TrainingArgs = knob(TrainingArgs, "Optimizer, schedule and batch.")
    data_args: TrainDataArgs = knob(TrainDataArgs, "The training pairs.")
    max_tokens_per_microbatch_in_train: int | None = knob(
        None,
        "Token budget of a training micro-batch; else automatic. Changes speed, never results.",
        ge=1,
    )

    @property
    def trains(self) -> bool:
        return True


class ReferenceCache(Section):
    """Log-probs of the frozen model, computed once for all runs over the same weights and tokens."""

    enabled: bool = knob(True, "Keep the reference's log-probs on disk and take them from there.")
    path: Folder | None = knob(None, "Folder of the log-probs; else <output_dir>/.cache/reference.")
    per_token: bool | None = knob(
        None,
        "Also keep each token's log-prob, for losses that read it; else only when the loss of this run does.",
    )
    recheck: int = knob(
        0,
        "So many cached pairs are computed again at the start and compared; any difference ends the run.",
        ge=0,
    )


class ReferenceConfig(RoleConfig):
    """The frozen model; what is not given follows actor_train."""

    cache: ReferenceCache = knob(ReferenceCache, "Its log-probs on disk.")
    offload: OnOffAuto = knob(
        "auto",
        "Keep the model on the host while the policy trains: on, off, or auto: where the GPU would otherwise have to "
        "recompute activations.",
    )


class ValidationConfig(Section):
    """The evaluation."""

    data_args: ValidationDataArgs = knob(ValidationDataArgs, "The evaluation pairs.")


class TrackerArgs(Section):
    """Settings of the trackers in track_with. Keys belong into the environment, or the tracker's own login."""

    log_dir: Folder | None = knob(
        None, "Folder of the files of TensorBoard, W&B and SwanLab; else <logging_dir>/<exp_name>."
    )
    project: Text | None = knob(
        None, "Project that the run is listed in (MLflow: experiment); else rather."
    )
    name: Text | None = knob(None, "Name of the run in the trackers; else exp_name.")
    tags: list[Text] = knob(list, "Words to find the run by: W&B, MLflow, SwanLab.")
    notes: Text | None = knob(None, "A description of the run: W&B, MLflow, SwanLab.")
    mode: Literal["online", "offline"] | None = knob(
        None,
        "Whether W&B and SwanLab send the run or keep it here; else WANDB_MODE or SWANLAB_MODE, else online.",
    )
    uri: Text | None = knob(
        None,
        "MLflow's server or database; else MLFLOW_TRACKING_URI, else an SQLite file, <logging_dir>/mlflow.db.",
    )


Guard = Literal["data", "tokenizer", "model", "reference", "loss", "seed", "batch"]


class CheckpointArgs(Section):
    """How checkpoints are written, copied and verified."""

    type: Literal["file_system"] = knob("file_system", "Kind of storage.")
    output_dir: Folder | None = knob(
        None, "Folder for a second copy of the checkpoints, which are in the run folder."
    )
    verify: Literal["full", "size"] = knob(
        "full",
        "What a resume compares with the manifest: every byte, or of tensors only the size of their files.",
    )
    async_save: OnOffAuto = knob(
        "auto",
        "Checkpoints are written beside training, from a copy in host memory: on, off, or auto: where it has room.",
    )
    max_missed_saves: int = knob(
        3,
        "Saves in a row that find no room on the disk before the run ends; the last one of a run must.",
        ge=1,
    )


class ResumeArgs(Section):
    """What may differ from the checkpoint that a run goes on from."""

    allow: list[Guard] = knob(
        list, "What may have changed: data, tokenizer, model, reference, loss, seed, batch."
    )


class RunKeys(Section):
    """The run"""

    exp_name: RunName = knob(
        "dpo", "Name of the run and of its folder; else the name of the YAML file."
    )
    seed: int = knob(42, "Seed of everything random.", ge=0, lt=2**32)
    output_dir: Folder = knob("./output", "Runs are written to <output_dir>/<exp_name>.")
    logging_dir: Folder = knob(
        "./output/logs", "Log and TensorBoard files are written to <logging_dir>/<exp_name>."
    )
    overwrite: bool = knob(False, "Start anew where a run of this name exists.")
    compile: OnOffAuto = knob(
        "auto",
        "torch.compile the layers on a GPU: on, off, or auto: where the run is long enough to pay for its start.",
    )
    deterministic: bool = knob(
        False, "Deterministic kernels on a GPU, slower; a CPU run repeats to the bit anyway."
    )
    determinism: Literal["canonical"] | None = knob(
        None,
        "canonical: the same bits on 1, 2 and 4 devices, for ddp and zero1 in fp32; takes memory for 4 gradients.",
    )


class SpikeArgs(Section):
    """Steps whose loss or gradient norm lies far above those before."""

    window: int = knob(
        128, "Steps before that they are compared with; half as many must be there.", ge=4
    )
    sigma: float = knob(
        6.0, "Standard deviations above their mean from which on a number is a spike.", gt=0
    )
    action: Literal["log", "skip", "rollback"] = knob(
        "log",
        "Only tell it; or do not take the step; or go back to the last checkpoint and leave the step out then.",
    )


class EvalPrompts(Section):
    """Prompts that policy and reference answer at each evaluation."""

    prompts: list[Text] | None = knob(None, "The prompts themselves.")
    file: Text | None = knob(
        None,
        "A file of prompts instead: text with one on each line, or .jsonl whose rows are texts or have `prompt`.",
    )
    max_new_tokens: int = knob(128, "Most tokens of an answer.", ge=1)


class StepKeys(Section):
    """Steps, evaluation and checkpoints"""

    max_steps: int | None = knob(None, "Most optimizer steps; else num_train_epochs decides.", ge=1)
    logging_steps: int = knob(1, "Steps between two lines of metrics.", ge=1)
    eval_steps: int | None = knob(
        None,
        "Steps between evaluations, beside those before the first step, after each epoch and at the end.",
        ge=1,
    )
    eval_prompts: EvalPrompts | None = knob(
        None,
        "Prompts that policy and reference answer at each evaluation, into answers.jsonl; null: none.",
    )
    save_steps: int | None = knob(
        100, "Steps between checkpoints, beside the last one; null: only that.", ge=1
    )
    max_ckpt_to_keep: int = knob(3, "Newest checkpoints to keep; 0 keeps all.", ge=0)
    resume_from_checkpoint: bool | Text = knob(
        "auto",
        "auto or true: go on from the newest good checkpoint of the run folder; false: never; or a path.",
    )
    resume: ResumeArgs = knob(
        ResumeArgs, "What may differ from the checkpoint that a run goes on from."
    )
    checkpoint_config: CheckpointArgs = knob(
        CheckpointArgs, "How checkpoints are written, copied and verified."
    )
    metric_for_best_model: Metric = knob(
        "eval/loss", "Evaluation metric that tells the best model."
    )
    save_best: bool = knob(False, "Also keep the model with the best metric_for_best_model.")
    early_stopping_patience: int | None = knob(
        None, "Stop after so many evaluations without a better metric_for_best_model.", ge=1
    )
    on_nonfinite: Literal["skip", "stop", "rollback"] = knob(
        "skip",
        "Where loss or gradient are no numbers: do not take the step; end the run; or go back to the last checkpoint "
        "and leave the step out then.",
    )
    max_nonfinite_steps: int = knob(5, "With skip, so many such steps in a row end the run.", ge=1)
    spike: SpikeArgs | None = knob(
        None, "Steps far above those before; null: nobody looks for them."
    )


LOSS_NUMBERS = (
    "beta",
    "label_smoothing",
    "gamma",
    "gamma_beta_ratio",
    "length_normalization",
    "cpo_alpha",
    "alphapo_alpha",
    "odpo_alpha",
    "discopop_tau",
)
LOSS_MODIFIERS = (
    "rpo_alpha",
    "pref_ftx",
    "f_divergence_type",
    "f_alpha_divergence_coef",
    "ld_alpha",
    "use_weighting",
    "soft_labels",
    "reference_free",
)


class LossKeys(Section):
    """Model, loss and step"""

    pretrain: Text | None = knob(None, "Model folder or hub name for every role that names none.")
    pref_loss: Text | list[Text] = knob(
        "sigmoid", "Name of the preference loss, or several that are added up."
    )
    loss_weights: list[Positive] | None = knob(
        None, "One weight for each loss in pref_loss; else 1 for each."
    )
    loss_type: Literal["dpo_loss", "simpo_loss"] | None = knob(
        None, "ColossalChat's way to write pref_loss: sigmoid or pref_loss: simpo."
    )
    beta: float | None = knob(
        None,
        "Strength of the pull towards the reference; else the loss's own default (0.1 for sigmoid).",
        gt=0,
        why="at 0 the preference has no effect, below it is reversed",
    )
    label_smoothing: float | None = knob(
        None,
        "Share of pairs assumed to be labelled the wrong way round; else the loss's own default (0 for sigmoid).",
        ge=0,
        lt=0.5,
        why="at 0.5 the labels say nothing, above it they are reversed",
    )
    parity: Literal["trl-1.x", "trl-0.2x"] | None = knob(
        None,
        "Tokens and loss as TRL makes them where ours differ: trl-1.x from 0.29 on, trl-0.2x before; what cannot be "
        "reproduced is an error. The order of the pairs stays ours.",
    )
    ipo: bool = knob(False, "Use the IPO loss; the same as pref_loss: ipo.")
    gamma: float | None = knob(
        None, "Target margin in units of reward (SimPO's gamma); sigmoid takes it too.", ge=0
    )
    gamma_beta_ratio: float | None = knob(
        None, "SimPO's margin as a multiple of beta, instead of gamma.", ge=0
    )
    length_normalization: bool | None = knob(
        None, "Log-probs per token instead of sums; else the loss's own default."
    )
    cpo_alpha: float | None = knob(None, "Weight of the likelihood term in cpo.", ge=0)
    alphapo_alpha: float | None = knob(None, "Shape of alphapo's reward; 0 is SimPO's.")
    odpo_alpha: float | None = knob(None, "Scale of the margin column in odpo.", ge=0)
    discopop_tau: float | None = knob(None, "Temperature of the blend in discopop.", gt=0)
    loss_args: dict[str, float | bool] = knob(
        dict, "Numbers of a loss of your own that have no key here, such as {my_margin: 0.5}."
    )
    rpo_alpha: float | None = knob(
        None, "Adds so much chosen NLL, a mean over the tokens of the step (RPO).", ge=0
    )
    pref_ftx: float | None = knob(
        None, "Adds so much chosen NLL, averaged within each answer first.", ge=0
    )
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js", "alpha"] | None = knob(
        None, "Divergence that holds the policy near the reference; else reverse_kl."
    )
    f_alpha_divergence_coef: float | None = knob(
        None, "Coefficient of f_divergence_type: alpha; else 0.5."
    )
    ld_alpha: float | None = knob(
        None,
        "Weight of log-probs past the length of the shorter answer (LD-DPO); 1 changes nothing.",
        ge=0,
        le=1,
    )
    use_weighting: bool | None = knob(
        None, "Weight pairs by how likely the policy is to write them (WPO)."
    )
    soft_labels: bool | None = knob(
        None, "Take the column soft_label: the chance that chosen is the better answer."
    )
    reference_free: bool | None = knob(
        None, "Compare with a uniform reference; no reference model is loaded."
    )
    use_ref_model: bool | None = knob(
        None, "States whether there is a reference model; the loss must agree."
    )
    disable_reference_model: bool | None = knob(None, "ColossalChat's opposite of use_ref_model.")
    sync_ref_model: bool = knob(
        False, "Move the reference towards the policy during training (TR-DPO)."
    )
    ref_model_mixup_alpha: float = knob(
        0.6, "Share of the policy in the new reference.", gt=0, le=1
    )
    ref_model_sync_steps: int = knob(512, "Steps between two moves of the reference.", ge=1)
    max_grad_norm: float = knob(1.0, "Gradients are scaled down to this norm; 0 never clips.", ge=0)
    precision: Literal["exact", "lean"] = knob(
        "exact",
        "exact: the optimizer loses nothing of float32 weights and moments. lean: a third of its memory, for bf16 "
        "only: weights rounded at random and moments of 8 bits.",
    )
    train_batch_size: int | None = knob(
        None,
        "Pairs of one optimizer step over all devices; sizes of actor_train.training_args must fit it.",
        ge=1,
    )
    val_batch_size: int | None = knob(
        None,
        "Of ROLL's older files, whose sizes per device count answers, two a pair: where both sizes together are twice "
        "train_batch_size, they are read so. Evaluation does not depend on its batches.",
        ge=1,
    )


class PairKeys(Section):
    """Pairs"""

    sequence_length: int = knob(
        1024,
        "Most tokens of prompt and one response together.",
        ge=2,
        why="prompt and response need a token each",
    )
    global_template: Text | None = knob(
        None, "Chat template wherever data_args.template is not given."
    )
    apply_loss_mask: bool = knob(
        True, "ColossalChat's switch: false scores every token, as data_args.score: all."
    )
    chosen_key: Text = knob("chosen", "Column of the preferred answer.")
    rejected_key: Text = knob("rejected", "Column of the other answer.")
    ranked_pairs: Literal["all", "best_vs_rest", "best_vs_worst"] = knob(
        "all", "Pairs that are made of several ranked answers to one prompt."
    )
    group_responses: bool = knob(
        True, "All pairs of one ranked row go into one step, so that each answer is computed once."
    )
    on_bad: Literal["drop", "error"] = knob(
        "drop", "Bad rows are dropped and counted, or end the run once all are counted."
    )
    max_bad_fraction: float = knob(
        0.05, "Largest share of bad rows that may be dropped; too long is not bad.", ge=0, le=1
    )


class TrackingKeys(Section):
    """Tracking"""

    track_with: Tracker | list[Tracker] | None = knob(
        "tensorboard",
        "One or several trackers beside metrics.jsonl, which is always written; null for none.",
    )
    tracker_kwargs: TrackerArgs = knob(TrackerArgs, "Settings of the trackers.")
    trace: bool = knob(
        False,
        "Draw the run's timeline into trace.json in the run folder, for chrome://tracing or ui.perfetto.dev.",
    )
    report_html: bool = knob(
        True,
        "Write report.html into the run folder: the run in one file of 5 MB that needs no network. Less than 1 % "
        "of the time of a long run; `rather report` writes it later, too.",
    )


class RayArgs(Section):
    """The Ray cluster that several devices are found through."""

    address: Text | None = knob(
        None,
        "Address of a Ray cluster that is already there (host:port or auto); else a local one is started.",
    )


class Timeouts(Section):
    """Seconds after which a silence of workers is a failure."""

    connect: float = knob(8.0, "The cluster must have the nodes and devices asked for.", gt=0)
    start: float = knob(1800.0, "Workers must have started and loaded their models.", gt=0)
    first_step: float = knob(
        3600.0, "The first step of a process, which compiles and fills caches.", gt=0
    )
    step: float = knob(
        1800.0, "A training step or the reference log-probs of one must be computed.", gt=0
    )
    eval: float = knob(
        1800.0, "The policy's log-probs of a part of an evaluation set must be computed.", gt=0
    )
    save: float = knob(3600.0, "States and models must be gathered, written or read.", gt=0)
    adaptive: bool = knob(
        True,
        "On Ray, steps and evaluations must end within ten times their usual time (at least a minute).",
    )

    @property
    def longest(self) -> float:
        """Of a call of workers."""
        return max(self.start, self.first_step, self.step, self.eval, self.save)


class MachineKeys(Section):
    """Machine"""

    platform: Literal["auto", "cpu", "cuda"] = knob(
        "auto", "Kind of devices: CPU workers, GPUs, or auto: GPUs where there are any."
    )
    ray: RayArgs = knob(RayArgs, "The Ray cluster, where a config asks for more than one device.")
    timeouts: Timeouts = knob(Timeouts, "Seconds after which a silence of workers is a failure.")
    max_failures: int = knob(
        3,
        "On Ray, times in a row without a new checkpoint that lost workers are replaced; 0 for never.",
        ge=0,
    )
    failure_backoff: float = knob(
        10.0,
        "Seconds to wait before lost workers are replaced, doubled with each time in a row.",
        ge=0,
    )
    ref_tp: int | None = knob(
        None, "ColossalChat's way to write reference.strategy_args.tp_size.", ge=1
    )

    system_envs: Environment = knob(dict, "Environment variables of every role.")
    num_nodes: int = knob(1, "Machines.", ge=1)
    num_gpus_per_node: int | None = knob(
        None,
        "Devices of each machine; device_mapping and the cluster are checked against it.",
        ge=1,
    )


class RoleKeys(Section):
    """Roles"""

    actor_train: ActorConfig = knob(ActorConfig, "The policy that is trained.")
    reference: ReferenceConfig = knob(
        ReferenceConfig, "The frozen model; follows actor_train where it says nothing."
    )
    validation: ValidationConfig = knob(
        ValidationConfig, "The evaluation; its data_args follow actor_train.data_args."
    )


FOR_A_RUN = {
    "named": ("model", "pairs")
}  # validated with this, a config must name what the Python API is handed over


class DPOConfig(RoleKeys, MachineKeys, TrackingKeys, PairKeys, LossKeys, StepKeys, RunKeys):
    """A whole run. (Python orders inherited fields from the last base to the first.)"""

    _followed: dict[str, str] = PrivateAttr(default_factory=dict)
    _unresolved: dict[str, Any] = PrivateAttr(default_factory=dict)
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _complete_and_check(self, info: ValidationInfo) -> DPOConfig:
        for role in (self.actor_train, self.reference):
            role._canonical = self.determinism == "canonical"
        self._followed.update(follow.complete(self))
        problems = [
            *checks.problems(self),
            *(checks.missing(self) if info.context is FOR_A_RUN else ()),
        ]
        if problems:
            text = "\n".join(f"{problem.key}: {problem.text}" for problem in problems)
            raise PydanticCustomError("cross_field", "{text}", {"text": text, "problems": problems})
        return self

    @property
    def followed(self) -> Mapping[str, str]:
        """Key path -> the key path it follows, for every key that took another's value."""
        return self._followed

    @property
    def unresolved(self) -> dict[str, Any]:
        """The values as they were written, before ${...} was filled in; empty unless loaded from a file."""
        return self._unresolved

    @property
    def sources(self) -> Mapping[str, str]:
        """Key path -> where its value came from; empty unless loaded from a file."""
        return self._sources

    @property
    def loss_names(self) -> list[str]:
        """The losses asked for, in whichever of the ways to write them."""
        if self.loss_type:
            return ["sigmoid" if self.loss_type == "dpo_loss" else "simpo"]
        named = ["ipo"] if self.ipo else as_list(self.pref_loss)
        return ["sigmoid" if name == "dpo" else name for name in named]

    @property
    def loss_numbers(self) -> dict[str, Any]:
        """What the user set for the losses; which of them one takes, its signature says."""
        own = {name: getattr(self, name) for name in LOSS_NUMBERS}
        return {name: value for name, value in own.items() if value is not None} | self.loss_args

    @property
    def loss_modifiers(self) -> dict[str, Any]:
        """What the user set that composes with losses."""
        return {
            name: getattr(self, name) for name in LOSS_MODIFIERS if getattr(self, name) is not None
        }

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir).expanduser() / self.exp_name

    @property
    def log_dir(self) -> Path:
        return Path(self.logging_dir).expanduser() / self.exp_name

    @property
    def checkpoint_copy_dir(self) -> Path:
        """Where checkpoints go a second time; the run folder itself when no other is given."""
        given = self.checkpoint_config.output_dir
        if not given:
            return self.run_dir
        folder = Path(given).expanduser()
        return (
            folder if folder.name == self.exp_name else folder / self.exp_name
        )  # runs never share one

    @property
    def tracker_dir(self) -> Path:
        given = self.tracker_kwargs.log_dir
        return Path(given).expanduser() if given else self.log_dir

    @property
    def trackers(self) -> list[str]:
        return (
            [self.track_with] if isinstance(self.track_with, str) else list(self.track_with or [])
        )

    @property
    def data_seed(self) -> int:
        given = self.actor_train.training_args.data_seed
        return self.seed if given is None else given

    def envs(self, role: RoleConfig) -> dict[str, str]:
        return self.system_envs | role.system_envs

    def data_cache_dir(self, data: DataArgs) -> Path:
        return Path(data.cache_dir or Path(self.output_dir) / ".cache" / "data").expanduser()

    @property
    def reference_cache_dir(self) -> Path:
        return Path(
            self.reference.cache.path or Path(self.output_dir) / ".cache" / "reference"
        ).expanduser()

    def global_batch(self, dp: int | None = None) -> int:
        """Pairs of one optimizer step, on as many data-parallel ranks as the policy's layout has unless told."""
        training = self.actor_train.training_args
        sizes = training.per_device_train_batch_size * training.gradient_accumulation_steps
        return self.train_batch_size or (dp or checks.data_parallel(self)) * sizes
