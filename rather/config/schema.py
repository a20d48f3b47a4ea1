"""All keys of the YAML. The docstring of a field is its meaning in docs/config.md.

Sizes count pairs. Nothing here imports torch: what needs it (the parameters of a loss, the device)
is checked later. An unset key has its default, or inherits from another key: see inherit.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr

from rather.config.values import (
    PISSA,
    REMOTE,
    STORE,
    BelowHalf,
    BelowOne,
    Count,
    Devices,
    EngineName,
    Environment,
    Folder,
    FolderOrStore,
    ForgettingTexts,
    FourOrMore,
    HeldOut,
    Initialization,
    Interval,
    Metric,
    NotNegative,
    NotNegativeInt,
    OnOffAuto,
    Positive,
    RunName,
    Section,
    Seed,
    Share,
    SystemMessage,
    TemplateKwargs,
    Text,
    TwoOrMore,
    UpToOne,
    WorkerClass,
    Zero,
)
from rather.errors import ConfigError
from rather.files import JsonObject

Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "inverse_sqrt",
    "wsd",
]
DETAILS_OF_ADAPTER = (  # with lora_rank and lora_target the settings of a new adapter
    "lora_alpha", "modules_to_save", "use_rslora", "use_dora", "init_lora_weights",
)  # fmt: skip
Task = Literal["preference", "unpaired", "reward", "scored", "sft"]
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]


class ModelArgs(Section):
    """Which weights a role uses, and in which precision."""

    model_name_or_path: Text | None = None
    """Model folder or hub name of this role; default: `pretrain`."""
    tokenizer_name_or_path: Text | None = None
    """Tokenizer folder or hub name; default: the model's own. Both roles use the same tokenizer."""
    revision: Text | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Precision of the forward and backward pass; default: bf16 on a GPU, fp32 on a CPU."""
    config_from: Text | None = None
    """Folder or hub name with config.json and tokenizer, for weights in a Megatron checkpoint
    (torch_dist). See docs/engines.md."""
    model_type: Literal["causal_lm"] | None = None
    """Kind of model. Only causal language models are supported."""
    disable_gradient_checkpointing: bool | None = None
    """false recomputes activations in the backward pass to save memory, true keeps them; default:
    recompute only as much as the GPU's memory requires."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models you trust."""
    adapter_name_or_path: Text | None = None
    """PEFT adapter to continue training. Its initial state is also the reference."""
    quantization: Literal["4bit"] | None = None
    """Store the frozen weights under an adapter in 4 bits (QLoRA). Needs the extra
    `quantization`."""

    @property
    def has_adapter(self) -> bool:
        return self.adapter_name_or_path is not None

    def of_other_weights(self) -> Self:
        """Return a copy for other weights, without settings that belong to these weights."""
        of_these = {"revision", "adapter_name_or_path", "quantization", "lora_rank", "lora_target"}
        of_these.add("config_from")
        return self.model_copy(update=dict.fromkeys(of_these & type(self).model_fields.keys()))


class ActorModelArgs(ModelArgs):
    """The policy's weights, and the adapter that is trained instead of them, if there is one."""

    lora_rank: Count | None = None
    """Train a LoRA adapter of this rank instead of the weights; default: 8 if lora_target is
    set."""
    lora_alpha: Positive | None = None
    """Scale of the adapter, which is multiplied by lora_alpha / lora_rank; default: twice the
    rank."""
    lora_target: Text | list[Text] | None = None
    """Names of the linear layers that get an adapter, such as q_proj, and of stacked experts, such
    as experts.down_proj; default: all-linear."""
    lora_dropout: Zero = 0.0
    """Dropout of the adapter. Range: both answers of a pair must see the same weights."""
    modules_to_save: Text | list[Text] | None = None
    """Names of modules that are trained in full next to the adapter."""
    additional_target: Text | list[Text] | None = None
    """ROLL's name for modules_to_save."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(lora_rank) (rsLoRA), for large ranks."""
    use_dora: bool = False
    """Train the magnitude of each weight row separately from its direction (DoRA)."""
    init_lora_weights: Initialization = True
    """Initialization of the adapter: true (no effect at first), gaussian (no effect, other random
    numbers), pissa or pissa_niter_4 (the largest singular vectors, which are removed from the
    base weights)."""
    lora_config: Text | None = None
    """JSON file with these settings, as in ColossalChat; keys set here take precedence."""
    moe_aux_loss_coef: NotNegative | None = None
    """Weight of the router loss of a mixture of experts; default: router_aux_loss_coef of the
    model's config.json, or 0 if it has none."""

    freeze: list[Literal["vision", "projector"]] | None = None
    """Parts of a vision model that do not train on pairs with images; default: [vision,
    projector]; [] trains all."""
    vision_cache: Literal["auto", "off"] = "auto"
    """Keep the features of images on disk if vision and projector are frozen: each image is then
    computed once for all epochs and runs. off computes it in each step."""
    vision_cache_gb: NotNegative = 50.0
    """Size up to which features are kept, in GB; further images are computed in each step."""

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        """The parts of a vision model that do not train on images."""
        return ("vision", "projector") if self.freeze is None else tuple(self.freeze)

    @property
    def has_adapter(self) -> bool:
        return bool(self.lora_rank or self.lora_target or self.adapter_name_or_path)

    @property
    def changes_base(self) -> bool:
        """Whether the adapter's initialization takes a part out of the base weights."""
        return bool(PISSA.fullmatch(str(self.init_lora_weights)))

    @property
    def adapter_settings(self) -> JsonObject | None:
        """Return everything that defines the trained adapter; None without one."""
        names = ["lora_rank", "lora_alpha", "lora_target", *DETAILS_OF_ADAPTER[1:]]
        names += ["additional_target", "adapter_name_or_path", "quantization"]
        settings = {name: getattr(self, name) for name in names}
        if self.additional_target:  # as the checkpoints of runs that were written with it
            settings["modules_to_save"] = None
        return settings if self.has_adapter else None


class TrainingArgs(Section):
    """Optimizer, schedule and batch of the policy."""

    learning_rate: NotNegative = 1e-06
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Schedule = "linear"
    """Learning-rate schedule over the optimizer steps of the run; each can start with a warm-up."""
    lr_scheduler_kwargs: dict[str, NotNegative] = {}
    """Parameters of the schedule: min_lr or min_lr_rate (linear, cosine, wsd), num_cycles (cosine),
    timescale (inverse_sqrt), num_decay_steps (wsd)."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay of AdamW."""
    adam_beta1: BelowOne = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: BelowOne = 0.999
    """Decay of AdamW's second moment."""
    adam_epsilon: Positive = 1e-08
    """AdamW's epsilon. Range: a weight without gradient would divide 0 by 0."""
    per_device_train_batch_size: Count = 8
    """Pairs per device and accumulation step."""
    gradient_accumulation_steps: Count = 1
    """Batches per optimizer step. A step has dp x per_device_train_batch_size x this many pairs."""
    warmup_steps: NotNegativeInt = 0
    """Optimizer steps in which the learning rate rises from 0; takes precedence over
    warmup_ratio. A run with fewer steps warms up for a tenth of them."""
    warmup_ratio: BelowOne = 0.0
    """Warm-up as a fraction of all optimizer steps."""
    num_train_epochs: Positive = 1.0
    """Passes over the training pairs; can be a fraction. max_steps can end the run earlier."""
    max_grad_norm: NotNegative | None = None
    """Same as max_grad_norm at the top level."""
    data_seed: Seed | None = None
    """Seed of the order of the pairs; default: `seed`."""
    log_num_zeros_in_grad: bool = False
    """Log num_zeros_in_grad: the number of gradient entries that are exactly 0."""


class DataArgs(Section):
    """Where pairs come from and how they become tokens."""

    dataset_dir: Text | None = None
    """Folder in which relative file names are looked up first."""
    template: Text | None = None
    """Chat template: a name (qwen2_5, chatml, llama3, native, ...) or a local Jinja file; default:
    `global_template`, otherwise the tokenizer's own."""
    chat_template_kwargs: TemplateKwargs = {}
    """Variables of the chat template, such as {enable_thinking: false}; a row's own column of this
    name goes first."""
    default_system: SystemMessage | None = None
    """System message of rows that have none; needs a chat template and is not empty. Default: what
    the template does without one."""
    format: Text = "auto"
    """Format of the rows, see docs/data.md; `auto` detects it."""
    columns: dict[str, str] = {}
    """Rather's column name -> its name in the file, such as {prompt: question}."""
    label_threshold: float | None = None
    """task: unpaired: the column label holds scores, and those from this number on are desirable;
    default: labels are true or false."""
    score: Literal["last", "assistant", "all"] = "last"
    """Turns that are scored: the last one, the assistant's, or all."""
    overlong: Literal["drop", "truncate_prompt", "truncate_response", "error"] = "drop"
    """What to do with a pair longer than sequence_length."""
    max_samples: Count | None = None
    """Use only the first so many rows of each entry of file_name, in the order of the file; rows
    that give no pair count too. Default: all rows."""
    max_prompt_length: TwoOrMore | None = None
    """Maximum tokens of a prompt; a longer one is cut at the start, after its BOS. Range: BOS and
    the last token stay."""
    separator: str = ""
    """Text between prompt and response if no chat template is used."""
    special_tokens: Literal["warn", "escape", "drop", "keep"] = "warn"
    """What to do with special tokens written as text inside messages, which could forge turns."""
    image_dir: Text | None = None
    """Folder that the images of rows are in; default: the folder of each data file. A path that
    leaves it drops its row."""
    image_max_pixels: Count | None = None
    """Larger images are scaled down to this number of pixels; default: the processor's own. Only
    for Qwen's families."""
    image_min_pixels: Count | None = None
    """Smaller images are scaled up to this number of pixels; default: the processor's own. Only for
    Qwen's families."""
    encoding: Text = "utf-8"
    """Text encoding of the files."""
    preprocessing_num_workers: Count | None = None
    """Tokenising processes; default: automatic."""
    cache_dir: Text | None = None
    """Folder of tokenised data; default: <output_dir>/.cache/data."""

    def locate(self, name: str) -> Path:
        """Return the path of a file: relative names are tried in dataset_dir, then here."""
        path = Path(name).expanduser()
        if not self.dataset_dir or name.startswith(REMOTE):
            return path
        folder = Path(self.dataset_dir).expanduser()
        # `file_name: data/x.json` next to `dataset_dir: data` names the folder twice.
        is_whole = path.exists() or path.is_relative_to(folder)
        return path if is_whole and not (folder / path).exists() else folder / path


class TrainDataArgs(DataArgs):
    """The training pairs."""

    file_name: str | list[str] | None = None
    """File or files of training pairs: JSON, JSONL, CSV, TSV, Parquet, Arrow, .gz; folders of
    tokenised pairs; or addresses s3://bucket/name and hf://datasets/ORG/NAME[@revision][:split]."""
    weights: list[Positive] | None = None
    """Mixing weights of the files, one number per file."""
    corrections: Text | list[Text] | None = None
    """JSONL file or files of {id, weight, flip} as `rather pairs --write` makes them: drops,
    weights or flips training pairs. Flipping a pair twice restores it."""

    @property
    def files(self) -> list[Path]:
        return [self.locate(name) for name in as_list(self.file_name)]


class ValidationDataArgs(DataArgs):
    """The evaluation pairs; unset keys inherit from actor_train.data_args."""

    file_name: str | list[str] | dict[str, str | list[str]] | None = None
    """File or files of evaluation pairs, or several named sets: {name: file or files}."""
    split: HeldOut = None
    """Instead of files: the fraction (0.05) or number (200) of training pairs to hold out."""

    @property
    def sets(self) -> dict[str, list[Path]]:
        """Return the evaluation sets by name; an unnamed set has the empty name."""
        return {name: [self.locate(file) for file in files] for name, files in self.names().items()}

    def names(self) -> dict[str, list[str]]:
        """Return the files of each evaluation set as they are written."""
        if isinstance(self.file_name, dict):
            return {name: as_list(files) for name, files in self.file_name.items()}
        return {"": as_list(self.file_name)} if self.file_name else {}

    @property
    def given(self) -> bool:
        return bool(self.file_name) or self.split is not None


def split_names(names: str | list[str]) -> list[str]:
    """Return the names of modules; a text may have several, with commas between them."""
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names


def as_list(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or [])


class StrategyArgs(Section):
    """How a role is laid out on its devices."""

    strategy_name: str | None = None
    """ddp, zero1, zero2, zero3, hsdp, fsdp2_train, megatron_train, ...; default: zero2 on several
    devices."""
    strategy_config: JsonObject = {}
    """Details of the strategy, with Megatron's key names."""
    tp_size: Count | None = None
    """Tensor-parallel degree."""
    pp_size: Count | None = None
    """Pipeline-parallel degree."""
    cp_size: Count | None = None
    """Context-parallel degree."""
    ep_size: Count | None = None
    """Expert-parallel degree of a mixture of experts; divides the data-parallel ranks."""
    gpu_memory_utilization: Share | None = None
    """Fraction of the GPU memory that this role may use."""


class RoleConfig(Section):
    """The keys that both roles have."""

    trains: ClassVar[bool] = False
    worker_cls: WorkerClass = None
    """Your own worker class or its dotted import path; default: Rather's."""
    model_args: ModelArgs = ModelArgs()
    """The weights."""
    strategy_args: StrategyArgs = StrategyArgs()
    """The layout on devices."""
    device_mapping: Devices = None
    """Device numbers: [0, 1], "0-7", "0,2,4-6" or "list(range(0,8))"; default: the first device."""
    infer_batch_size: Count | None = None
    """Maximum pairs in a micro-batch without gradients; default: only the token budget limits
    it."""
    max_tokens_per_microbatch_in_infer: Count | None = None
    """Token budget of a micro-batch without gradients; default: automatic. Changes speed, never
    results."""
    system_envs: Environment = {}
    """Environment variables of this role; take precedence over the top level."""

    @property
    def devices(self) -> list[int]:
        return self.device_mapping or [0]

    @property
    def model_path(self) -> str:
        """Return the folder or hub name of the weights."""
        assert self.model_args.model_name_or_path is not None, "checked when the config was made"
        return expanduser(self.model_args.model_name_or_path)

    @property
    def config_path(self) -> str:
        """Return the folder or hub name of config.json."""
        return expanduser(self.model_args.config_from or self.model_path)

    @property
    def tokenizer_path(self) -> str:
        return expanduser(self.model_args.tokenizer_name_or_path or self.config_path)


class ActorConfig(RoleConfig):
    """The policy that is trained."""

    trains: ClassVar[bool] = True
    model_args: ActorModelArgs = ActorModelArgs()
    """The weights, and an adapter on them."""
    training_args: TrainingArgs = TrainingArgs()
    """Optimizer, schedule and batch."""
    data_args: TrainDataArgs = TrainDataArgs()
    """The training pairs."""
    engine: EngineName = "torch"
    """What runs the training steps: torch, or experimental engines of your own: FILE.py:Class, or
    the name of an installed one. It is code, and a run folder cannot set it. See
    docs/engines.md."""
    max_tokens_per_microbatch_in_train: Count | None = None
    """Token budget of a training micro-batch; default: automatic. Changes speed, never results."""


class ReferenceCache(Section):
    """The reference's log-probs on disk, computed once for all runs with the same weights and
    tokens."""

    enabled: bool = True
    """Store the reference's log-probs on disk and reuse them."""
    path: Folder | None = None
    """Folder of the log-probs; default: <output_dir>/.cache/reference."""


class ReferenceConfig(RoleConfig):
    """The frozen model; unset keys inherit from actor_train."""

    cache: ReferenceCache = ReferenceCache()
    """The cache of its log-probs."""
    offload: OnOffAuto = "auto"
    """Keep the model in host memory while the policy trains: on, off, or auto: if the GPU would
    otherwise have to recompute activations."""


class ValidationConfig(Section):
    """The evaluation."""

    data_args: ValidationDataArgs = ValidationDataArgs()
    """The evaluation pairs."""


class TrackerArgs(Section):
    """Settings of the trackers in track_with. Set API keys in the environment or with the
    tracker's login."""

    log_dir: Folder | None = None
    """Folder of the files of TensorBoard, W&B and SwanLab; default: <logging_dir>/<exp_name>."""
    project: Text | None = None
    """Project that the run is listed in (MLflow: experiment); default: rather."""
    name: Text | None = None
    """Name of the run in the trackers; default: exp_name."""
    tags: list[Text] = []
    """Tags of the run: W&B, MLflow, SwanLab."""
    notes: Text | None = None
    """Description of the run: W&B, MLflow, SwanLab."""
    mode: Literal["online", "offline"] | None = None
    """Whether W&B and SwanLab upload the run or store it locally; default: WANDB_MODE or
    SWANLAB_MODE, otherwise online."""
    uri: Text | None = None
    """MLflow's server or database; default: MLFLOW_TRACKING_URI, otherwise the SQLite file
    <logging_dir>/mlflow.db."""


Guard = Literal["data", "tokenizer", "model", "reference", "loss", "seed", "batch", "engine"]


class CheckpointArgs(Section):
    """How checkpoints are written, copied and verified."""

    type: Literal["file_system"] = "file_system"
    """Kind of storage."""
    output_dir: FolderOrStore | None = None
    """Folder for a second copy of the checkpoints, or an object store (s3://bucket/name) that also
    gets exports and run files, and from which another machine resumes."""
    verify: Literal["full", "size"] = "full"
    """What a resume compares with the manifest: every byte, or only the file sizes of tensors."""
    async_save: OnOffAuto = "auto"
    """Write checkpoints in the background, from a copy in host memory: on, off, or auto: if there
    is room."""
    max_missed_saves: Count = 3
    """Consecutive saves that may fail because the disk is full before the run ends; the final save
    must succeed."""


class ResumeArgs(Section):
    """What may differ from the checkpoint that a run resumes from."""

    allow: list[Guard] = []
    """What may have changed: data, tokenizer, model, reference, loss, seed, batch, engine."""


class RunKeys(Section):
    """The run"""

    exp_name: RunName = "dpo"
    """Name of the run and of its folder; default: the name of the YAML file."""
    seed: Seed = 42
    """Seed of everything random."""
    output_dir: Folder = "./output"
    """Runs are written to <output_dir>/<exp_name>."""
    logging_dir: Folder = "./output/logs"
    """Log and TensorBoard files are written to <logging_dir>/<exp_name>."""
    overwrite: bool = False
    """Start from scratch if a run of this name exists."""
    compile: OnOffAuto = "auto"
    """torch.compile the layers on a GPU: on, off, or auto: if the run is long enough to pay for
    it."""
    deterministic: bool = False
    """Use deterministic kernels on a GPU, which are slower. CPU runs are always deterministic."""


class SpikeArgs(Section):
    """Steps whose loss or gradient norm is far above that of the preceding steps."""

    window: FourOrMore = 128
    """Number of preceding steps to compare with; at least half of them must exist."""
    sigma: Positive = 6.0
    """Number of standard deviations above the mean at which a value is a spike."""
    action: Literal["log", "skip", "rollback"] = "log"
    """log it; skip the step; or rollback to the last checkpoint and skip the step from there."""


class AnswerJudge(Section):
    """Who compares the policy's answers with the reference's."""

    # `with` is a word of Python, so it cannot be written as a field.
    __annotations__["with"] = (
        "Annotated[Text | None, Field(default=None, description='A rule (rule.py:score), a reward "
        "model, or a server (http://...), as in `rather judge --with`.')]"
    )
    model: Text | None = None
    """Name of the model on the server."""
    template: Text | None = None
    """Jinja file of the question to the server, with prompt, answer_a and answer_b."""
    max_tokens: Count = 1024
    """Token limit of a verdict of the server."""
    columns: dict[str, Text] | None = None
    """Columns for parameters of the rule, or names in the template, as in `{gold: answer}`."""
    rule_timeout: Positive | None = None
    """Seconds that a rule may take for one answer; default: 10."""

    @property
    def name(self) -> str:
        return str(getattr(self, "with"))


class EvalPrompts(Section):
    """Prompts that policy and reference answer at each evaluation."""

    prompts: Annotated[list[Text], Field(min_length=1)] | None = None
    """The prompts, at least one."""
    file: Text | None = None
    """A file of prompts instead: text with one per line, or .jsonl whose rows are strings or have
    `prompt`."""
    max_new_tokens: Count = 128
    """Maximum tokens of an answer."""
    judge: AnswerJudge | None = None
    """Compare the answers with the reference's: eval/win_rate, at the end, and at every evaluation
    with save_best; null: do not."""


class StepKeys(Section):
    """Steps, evaluation and checkpoints"""

    max_steps: Count | None = None
    """Maximum optimizer steps; default: num_train_epochs decides."""
    logging_steps: Count = 1
    """Steps between two lines of metrics."""
    eval_steps: Interval = None
    """Steps between evaluations, or a fraction of the run's steps, in addition to those before the
    first step, after each epoch and at the end."""
    eval_prompts: EvalPrompts | None = None
    """Prompts that policy and reference answer at each evaluation, written to answers.jsonl; null:
    none."""
    forgetting: ForgettingTexts = "auto"
    """Measure what the model forgets, on texts and questions of Rather's own, before the first step
    and at the end, and at every evaluation with save_best; auto: except in short runs, where it
    would take more than 5 % of the time; off: never; or a JSONL file with your own."""
    forgetting_limit: NotNegative = 0.05
    """Share that a model may lose at most to be the best: of the answers it knew, and by which its
    loss per token on the texts may rise."""
    save_steps: Interval = 100
    """Steps between checkpoints, or a fraction of the run's steps, in addition to the final one;
    null: only the final one."""
    max_ckpt_to_keep: NotNegativeInt = 3
    """Number of newest checkpoints to keep; 0 keeps all."""
    resume_from_checkpoint: bool | Text = "auto"
    """auto or true: resume from the newest intact checkpoint of the run folder; false: never; or a
    path."""
    resume: ResumeArgs = ResumeArgs()
    """What may differ from the checkpoint that a run resumes from."""
    checkpoint_config: CheckpointArgs = CheckpointArgs()
    """How checkpoints are written, copied and verified."""
    metric_for_best_model: Metric = "eval/loss"
    """Evaluation metric that selects the best model."""
    save_best: bool = False
    """Also keep the model with the best metric_for_best_model: the lowest if the name ends with
    loss, drift or error, else the highest; of equal ones the earliest. With eval/win_rate it must
    be better beyond its interval. A model beyond forgetting_limit or drift_limit is never the
    best."""
    early_stopping_patience: Count | None = None
    """Stop after this many evaluations without a better metric_for_best_model."""
    on_nonfinite: Literal["skip", "stop", "rollback"] = "skip"
    """On NaN or Inf in loss or gradient: skip the step, stop the run, or rollback to the last
    checkpoint and skip the step from there."""
    max_nonfinite_steps: Count = 5
    """With skip, this many such steps in a row end the run."""
    spike: SpikeArgs | None = None
    """Detect loss and gradient spikes; null disables it."""

    @property
    def selects_a_step(self) -> bool:
        """Whether evaluations decide which model is the best, or when to stop."""
        return self.save_best or self.early_stopping_patience is not None

    def selects_by(self, beginning: str) -> bool:
        """Whether a step is selected by a metric whose name begins like this."""
        return self.selects_a_step and self.metric_for_best_model.startswith(beginning)

    def interval(self, key: str, total_steps: int | None) -> int | None:
        """Return eval_steps or save_steps as a number of steps; a fraction is rounded up."""
        every: float | int | None = getattr(self, key)
        if every is None or every >= 1:
            return None if every is None else int(every)
        if total_steps is None:
            raise ConfigError(
                f"{key}: {every} is a fraction of the run, whose length is not known beforehand; "
                "set a number of steps."
            )
        return max(1, math.ceil(every * total_steps - 1e-9))  # 0.1 * 30 is a little more than 3


class LossKeys(Section):
    """Model, loss and step"""

    pretrain: Text | None = None
    """Model folder or hub name for every role that names none."""
    task: Task = "preference"
    """What is trained on: preference (pairs), unpaired (single answers with a label), reward (a
    reward model, on pairs or scores), scored (several scored answers to each prompt) or sft
    (answers to imitate). Range: losses such as kto and bco (task: unpaired) are named by pref_loss."""
    pref_loss: Text | list[Text] = "sigmoid"
    """Name of the loss, or several preference losses that are added up; default by task: sigmoid,
    kto, bradley_terry, listwise, sft. See docs/losses/index.md."""
    loss_weights: list[Positive] | None = None
    """One weight per loss in pref_loss; default: 1 each."""
    loss_type: Literal["dpo_loss", "simpo_loss"] | None = None
    """ColossalChat's name for pref_loss: sigmoid or pref_loss: simpo."""
    ipo: bool = False
    """Use the IPO loss; same as pref_loss: ipo."""
    loss_args: dict[str, float | bool] = {}
    """Parameters of your own loss that have no key here, such as {my_margin: 0.5}."""
    use_ref_model: bool | None = None
    """States whether there is a reference model; must agree with the loss."""
    disable_reference_model: bool | None = None
    """ColossalChat's opposite of use_ref_model."""
    drift_limit: Positive = 1.0
    """Largest drift from the reference on held-out pairs, in nats per token, of a model that may be
    the best."""
    sync_ref_model: bool = False
    """Update the reference towards the policy during training (TR-DPO)."""
    ref_model_mixup_alpha: Share = 0.6
    """Share of the policy in the updated reference."""
    ref_model_sync_steps: Count = 512
    """Steps between two updates of the reference."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this norm; 0 disables clipping."""
    precision: Literal["exact", "lean"] = "exact"
    """exact: float32 master weights and moments. lean: a third of the optimizer memory, bf16 only:
    stochastically rounded weights and 8-bit moments."""
    rounding: Literal["dithered", "nearest"] = "dithered"
    """How float32 master weights are rounded to bf16, in the forward pass and in files. dithered: a
    fixed threshold for each weight, which keeps updates smaller than a bf16 step. nearest: loses
    them. No effect if neither the run nor its file is bf16; lean rounds its updates by itself."""
    train_batch_size: Count | None = None
    """Pairs per optimizer step over all devices; must match the sizes in
    actor_train.training_args."""
    val_batch_size: Count | None = None
    """From older ROLL configs, whose per-device sizes count answers (two per pair). Sizes that
    add up to 2 x train_batch_size are halved. Evaluation does not depend on batches."""


class LossParameters(Section):
    """Parameters of losses"""

    beta: Positive | None = None
    """Strength of the pull towards the reference; default: that of the loss (0.1 for sigmoid).
    Range: at 0 the preference has no effect, below it is reversed."""
    label_smoothing: BelowHalf | None = None
    """Assumed fraction of mislabelled pairs; default: that of the loss (0 for sigmoid). Range: at
    0.5 the labels say nothing, above it they are reversed."""
    gamma: NotNegative | None = None
    """Target margin in units of reward (SimPO's gamma), also for sigmoid."""
    gamma_beta_ratio: NotNegative | None = None
    """SimPO's margin as a multiple of beta, instead of gamma."""
    length_normalization: bool | None = None
    """Log-probs per token instead of sums; default: that of the loss."""
    cpo_alpha: NotNegative | None = None
    """Weight of the likelihood term in cpo."""
    alphapo_alpha: float | None = None
    """Shape of alphapo's reward; 0 is SimPO's."""
    odpo_alpha: NotNegative | None = None
    """Scale of the margin column in odpo."""
    desirable_weight: NotNegative | None = None
    """Weight of desirable answers in kto, bco and apo_zero_unpaired; it does not change the
    divisor of the mean."""
    undesirable_weight: NotNegative | None = None
    """Weight of undesirable answers, likewise."""
    center_rewards_coefficient: NotNegative | None = None
    """Weight of the squared sum of both scores in bradley_terry, which keeps scores around 0."""
    dpop_lambda: NotNegative | None = None
    """Weight in dpop of the chosen log-prob that falls below the reference's."""
    rdpo_alpha: NotNegative | None = None
    """Reward that each token of an answer costs in rdpo."""
    reward_scale: Positive | None = None
    """Factor of the given scores in reward_rpo. Range: at 0 the scores have no effect."""
    clip_range: BelowOne | None = None
    """advantage: the ratio to the reference has an effect from 1 minus to 1 plus this number."""
    discopop_tau: Positive | None = None
    """Temperature of the blend in discopop."""


class LossModifiers(Section):
    """Modifiers of losses"""

    rpo_alpha: NotNegative | None = None
    """Weight of an extra NLL term on the chosen answers (token mean), as in RPO."""
    pref_ftx: NotNegative | None = None
    """Weight of an extra NLL term on the chosen answers, averaged within each answer first."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js", "alpha"] | None = None
    """Divergence that keeps the policy near the reference; default: reverse_kl."""
    f_alpha_divergence_coef: float | None = None
    """Coefficient of f_divergence_type: alpha; default: 0.5."""
    ld_alpha: UpToOne | None = None
    """Weight of log-probs past the length of the shorter answer (LD-DPO); 1 changes nothing."""
    use_weighting: bool | None = None
    """Weight pairs by their likelihood under the policy (WPO)."""
    soft_labels: bool | None = None
    """Use the column soft_label: the probability that chosen is the better answer."""
    reference_free: bool | None = None
    """Compare with a uniform reference; no reference model is loaded."""


LOSS_NUMBERS = tuple(LossParameters.model_fields)
LOSS_MODIFIERS = tuple(LossModifiers.model_fields)


class LossConfig(LossModifiers, LossParameters, LossKeys):
    """Everything that defines the objective."""

    @property
    def loss_names(self) -> list[str]:
        """Return the names of the losses."""
        names = as_list(self.pref_loss)
        return [{"dpo": "sigmoid"}.get(name.lower(), name) for name in names]

    @property
    def rows(self) -> str:
        """Return what each row of the data must give: pairs, or answers with their labels."""
        if self.task == "reward":
            return "scored" if self.loss_names == ["regression"] else "pairs"
        return {"preference": "pairs", "unpaired": "labelled", "scored": "scored"}.get(
            self.task, "answers"
        )

    @property
    def unit(self) -> str:
        """Return what sizes and speeds count."""
        return "pairs" if self.rows == "pairs" else "answers"

    @property
    def loss_numbers(self) -> JsonObject:
        """Return the parameters of losses that are set; a loss's signature says which it has."""
        return self.model_dump(include={*LOSS_NUMBERS}, exclude_none=True) | self.loss_args

    @property
    def loss_modifiers(self) -> JsonObject:
        """Return the modifiers of losses that are set."""
        return self.model_dump(include={*LOSS_MODIFIERS}, exclude_none=True)


class PairKeys(Section):
    """Pairs"""

    sequence_length: TwoOrMore = 1024
    """Maximum tokens of a prompt with one response. Range: prompt and response need a token
    each."""
    global_template: Text | None = None
    """Chat template if data_args.template is not set."""
    apply_loss_mask: bool = True
    """ColossalChat's switch: false scores every token, like data_args.score: all."""
    chosen_key: Text = "chosen"
    """Column of the preferred answer."""
    rejected_key: Text = "rejected"
    """Column of the other answer."""
    ranked_pairs: Literal["all", "best_vs_rest", "best_vs_worst", "adjacent"] = "all"
    """Pairs to make from several ranked answers to one prompt."""
    min_gap: Positive | None = None
    """Skip pairs of ranked answers whose scores (or ranks) differ by less; default: only ties."""
    max_length_gap: NotNegativeInt | None = None
    """Skip pairs whose answers differ in length by more tokens; default: none."""
    group_responses: bool = True
    """Put all pairs of a ranked row into one step, so that each answer is computed once."""
    on_bad: Literal["drop", "error"] = "drop"
    """drop: drop and count bad rows. error: end the run after counting them."""
    max_bad_fraction: UpToOne = 0.05
    """Maximum fraction of bad rows that may be dropped; overlong rows do not count."""


class TrackingKeys(Section):
    """Tracking"""

    track_with: Tracker | list[Tracker] | None = None
    """One or several trackers in addition to metrics.jsonl, which is always written."""
    tracker_kwargs: TrackerArgs = TrackerArgs()
    """Settings of the trackers."""
    pair_ledger: bool = True
    """Write ledger.arrows into the run folder: margin, log-ratios and gradient weight of every pair
    in every epoch (about 60 bytes a row), which `rather pairs` reads. Only for task: preference."""
    report_html: bool = True
    """Write report.html into the run folder when the run ends: one file that works offline.
    `rather report` writes it at any time."""


class RayArgs(Section):
    """The Ray cluster that provides several devices."""

    address: Text | None = None
    """Address of a running Ray cluster (host:port or auto); default: start a local one."""


class Timeouts(Section):
    """Seconds after which an unresponsive worker counts as failed."""

    connect: Positive = 8.0
    """Until the cluster has the requested nodes and devices."""
    link: Positive = 30.0
    """Until a machine that cannot be reached over the network counts as lost."""
    start: Positive = 1800.0
    """Until workers have started and loaded their models."""
    prepare: Positive = 3600.0
    """With several processes, for reading and tokenizing the pairs, which the first one does."""
    first_step: Positive = 3600.0
    """For the first step of a process, which compiles and fills caches."""
    step: Positive = 1800.0
    """For a training step, or the reference log-probs of one."""
    eval: Positive = 1800.0
    """For the policy's log-probs of one part of an evaluation set."""
    save: Positive = 3600.0
    """For gathering, writing or reading states and models."""

    @property
    def longest(self) -> float:
        """Return the longest limit of a call."""
        return max(self.start, self.prepare, self.first_step, self.step, self.eval, self.save)


class MachineKeys(Section):
    """Machine"""

    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of devices: cpu, cuda, or auto: GPUs if there are any."""
    ray: RayArgs = RayArgs()
    """The Ray cluster, for a config with more than one device."""
    timeouts: Timeouts = Timeouts()
    """Seconds after which an unresponsive worker counts as failed."""
    max_failures: NotNegativeInt = 3
    """On Ray, how often the job is restarted after a failure without a new checkpoint in between;
    0: never. Under torchrun, its own --max-restarts decides."""
    failure_backoff: NotNegative = 10.0
    """Seconds to wait before the job is restarted, doubled with each consecutive failure."""
    ref_tp: Count | None = None
    """ColossalChat's name for reference.strategy_args.tp_size."""

    system_envs: Environment = {}
    """Environment variables of every role."""
    num_nodes: Count = 1
    """Machines."""
    num_gpus_per_node: Count | None = None
    """Devices per machine; device_mapping and the cluster are checked against it."""

    def envs(self, role: RoleConfig) -> dict[str, str]:
        return self.system_envs | role.system_envs


class RoleKeys(Section):
    """Roles"""

    actor_train: ActorConfig = ActorConfig()
    """The policy that is trained."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model; inherits unset keys from actor_train."""
    validation: ValidationConfig = ValidationConfig()
    """The evaluation; its data_args inherit from actor_train.data_args."""


class RunConfig(RoleKeys, MachineKeys, TrackingKeys, PairKeys, LossConfig, StepKeys, RunKeys):
    """A whole run. (Python orders inherited fields from the last base to the first.)"""

    _followed: dict[str, str] = PrivateAttr(default_factory=dict)
    _unresolved: JsonObject = PrivateAttr(default_factory=dict)
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def followed(self) -> dict[str, str]:
        """Return key path -> the key path that it inherits from."""
        return self._followed

    @property
    def unresolved(self) -> JsonObject:
        """Return the values before ${...} was filled in; empty unless loaded from a file."""
        return self._unresolved

    @property
    def sources(self) -> dict[str, str]:
        """Return key path -> the source of its value; empty unless loaded from a file."""
        return self._sources

    def resumed(self, *, has_saved: bool) -> Self:
        """Return the config that resumes a run: from its own checkpoint, or where it began."""
        begins_elsewhere = isinstance(self.resume_from_checkpoint, str) and not has_saved
        source = self.resume_from_checkpoint if begins_elsewhere else "auto"
        return self.model_copy(update={"overwrite": False, "resume_from_checkpoint": source})

    @property
    def rounding_in_file(self) -> Literal["dithered", "nearest"]:
        """Return how a finished run rounded; the config of one from before that key lacks it."""
        return self.rounding if "rounding" in self.model_fields_set else "nearest"

    @property
    def shares_devices(self) -> bool:
        """Whether policy and reference are on the same devices."""
        return self.actor_train.devices == self.reference.devices

    @property
    def roles(self) -> dict[str, RoleConfig]:
        return {"actor_train": self.actor_train, "reference": self.reference}

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir).expanduser() / self.exp_name

    @property
    def log_dir(self) -> Path:
        return Path(self.logging_dir).expanduser() / self.exp_name

    @property
    def checkpoint_copy_dir(self) -> Path:
        """Return the folder of the second copy of checkpoints; the run folder if there is none."""
        output_dir = self.checkpoint_config.output_dir
        if not output_dir or output_dir.startswith(STORE):
            return self.run_dir
        folder = Path(output_dir).expanduser()
        # Runs never share a folder.
        return folder if folder.name == self.exp_name else folder / self.exp_name

    @property
    def checkpoint_store(self) -> str | None:
        """Return the address of this run in an object store."""
        address = (self.checkpoint_config.output_dir or "").rstrip("/")
        return f"{address}/{self.exp_name}" if address.startswith(STORE) else None

    @property
    def tracker_dir(self) -> Path:
        log_dir = self.tracker_kwargs.log_dir
        return Path(log_dir).expanduser() if log_dir else self.log_dir

    @property
    def trackers(self) -> list[str]:
        return as_list(self.track_with)

    @property
    def data_seed(self) -> int:
        data_seed = self.actor_train.training_args.data_seed
        return self.seed if data_seed is None else data_seed

    def data_cache_dir(self, data: DataArgs) -> Path:
        return Path(data.cache_dir or f"{self.output_dir}/.cache/data").expanduser()

    @property
    def vision_cache_dir(self) -> Path:
        return Path(f"{self.output_dir}/.cache/vision").expanduser()

    @property
    def reference_cache_dir(self) -> Path:
        return Path(self.reference.cache.path or f"{self.output_dir}/.cache/reference").expanduser()
