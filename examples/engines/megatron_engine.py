"""Megatron-Core as an engine of Rather: `actor_train.engine: megatron_engine.py:MegatronEngine`.

    torchrun --nproc-per-node 2 -m rather train dpo.yaml \\
        actor_train.engine=examples/engines/megatron_engine.py:MegatronEngine \\
        actor_train.strategy_args.strategy_name=megatron_train actor_train.strategy_args.tp_size=2

A GPTModel with the local layer spec (neither Transformer Engine nor apex), in which Rather's segment
attention is the core attention: packed pairs that share a prompt need no other layout. Gradients go
through Megatron's DistributedDataParallel, updates through its distributed optimizer. Tested with
megatron-core 0.16.1 (`pip install rather[engines]`) for llama, mistral, qwen2 and qwen3 with tensor
and data parallel. Checkpoints are Rather's, gathered on the first rank: up to about 3B weights.
PRIVATE lists the attributes that Megatron does not promise; tests/engines checks each.

Megatron names CUDA in many places. On a CPU, which is for tests, `use_cpu` replaces them for the whole
process.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rather.data.batch import Columns, PairBatch
from rather.model.attention import segment_attention
from rather.model.collectives import enter
from rather.model.head import Words, token_logps
from rather.model.megatron import FAMILIES, weight_rows
from rather.model.policy import PolicyModel, pair_columns
from rather.optim.rounding import Rounding
from rather.parallel.load import compute_dtype
from rather.tools.megatron_file import megatron_tensors
from rather.train.engine import Engine, EngineJob, StepOptimizer

KINDS = ("exp_avg", "exp_avg_sq")
PRIVATE = (
    "_get_model_param_range_map",
    "_get_main_param_and_optimizer_states",
    "model_param_group_index_map",
)
# The local layer spec has its own modules for what other specs put into the next linear layer.
LOCAL_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class _OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that code asks for on CUDA."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class _Stream:
    """A stream of a device that has none."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...
    def wait_stream(self, _other: Any) -> None: ...


def use_cpu() -> None:
    """Replace CUDA by the CPU in this process, for tests without a GPU."""
    if getattr(torch.cuda, "is_replaced_by_cpu", False):
        return
    type_of = torch.Tensor.type

    def type_on_cuda(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Megatron's optimizers compare names such as torch.cuda.FloatTensor."""
        name = type_of(tensor, *args, **kwargs)
        if isinstance(name, str) and ".cuda." not in name:
            return name.replace("torch.", "torch.cuda.")
        return name

    replacements: dict[str, Any] = {
        "is_replaced_by_cpu": True,
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_args: None,
        "Stream": _Stream,
        "default_stream": _Stream,
        "current_stream": _Stream,
        "stream": lambda _stream: contextlib.nullcontext(),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.Tensor.cuda = lambda tensor, *_args, **_kwargs: tensor  # type: ignore[method-assign]
    torch.Tensor.type = type_on_cuda  # type: ignore[method-assign, assignment]
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_args, **_kwargs: contextlib.nullcontext()
    _OnCpu().__enter__()


def core_attention() -> type[Any]:
    """Return a module of Megatron's that runs Rather's attention; segments replace the mask."""
    from megatron.core.transformer.module import MegatronModule

    class SegmentAttention(MegatronModule):
        def __init__(
            self, config: Any, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any
        ) -> None:
            super().__init__(config=config)
            self.scale = softmax_scale

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, segments: Any, **_kwargs: Any
        ) -> Tensor:
            heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]  # [N, 1, H, D]
            out, _ = segment_attention(self, *heads, None, segments=segments, scaling=self.scale)
            return out.transpose(0, 1).reshape(query.shape[0], 1, -1)

    return SegmentAttention


def make_gpt(config: Any, dtype: torch.dtype, *, tp: int = 1, pp: int = 1, **options: Any) -> Any:
    """Return a GPTModel of the shape that a Hugging Face config describes."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    has_norms = config.model_type == "qwen3"
    settings = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_width(config),
        ffn_hidden_size=config.intermediate_size,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=has_norms,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Kernels that need apex or Transformer Engine.
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,  # it also marks the weights that are divided
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        calculate_per_token_loss=True,  # sums over ranks, no means
    )
    settings.variable_seq_lengths = pp > 1  # the constructor checks it for experts only
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=has_norms)
    spec.submodules.self_attention.submodules.core_attention = core_attention()
    return GPTModel(
        config=settings,
        transformer_layer_spec=spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(rotary_base(config)),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        **options,
    )


def head_width(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def rotary_base(config: Any) -> float:
    return float(config.rope_parameters["rope_theta"])


def key_of(name: str, first_layer: int = 0) -> tuple[str, int | None]:
    """Return the key of a weight in a checkpoint, and its layer in the whole model."""
    if not name.startswith("decoder.layers."):
        return name, None
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    return f"decoder.layers.{LOCAL_NAMES.get(rest, rest)}", int(number) + first_layer


def local_part(name: str, weight: Tensor, whole: Tensor, rank: int, tp: int) -> Tensor:
    """Return the part of a whole weight that a tensor-parallel rank holds."""
    if not getattr(weight, "tensor_model_parallel", False) or tp == 1:
        return whole
    if name.endswith("linear_fc1.weight"):  # each rank has rows of both halves
        return whole.unflatten(0, (2, -1)).chunk(tp, dim=1)[rank].flatten(0, 1)
    return whole.chunk(tp, dim=weight.partition_dim)[rank]  # type: ignore[attr-defined]


def joined(name: str, weight: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the whole of what tensor-parallel ranks hold."""
    if not getattr(weight, "tensor_model_parallel", False) or len(parts) == 1:
        return parts[0]
    if name.endswith("linear_fc1.weight"):
        return torch.cat([part.unflatten(0, (2, -1)) for part in parts], dim=1).flatten(0, 1)
    return torch.cat(list(parts), dim=weight.partition_dim)  # type: ignore[attr-defined]


@torch.no_grad()
def fill(gpt: Any, tensors: Mapping[str, Tensor], rank: int, tp: int, first_layer: int = 0) -> None:
    """Give a GPTModel its weights: those of a checkpoint, by Megatron's names."""
    for name, weight in gpt.named_parameters():
        key, layer = key_of(name, first_layer)
        whole = tensors[key] if layer is None else tensors[key][layer]
        weight.copy_(local_part(name, weight, whole, rank, tp))


class MegatronPolicy(PolicyModel):
    """A GPTModel that scores packed pairs. `causal_lm` keeps only its config, for exports."""

    def __init__(self, source: PolicyModel, gpt: Any, rank: int, tp: int, group: Any) -> None:
        causal_lm: Any = source.causal_lm.to("meta")
        super().__init__(causal_lm)
        del self._modules["causal_lm"]  # not a part of this model
        self.__dict__["causal_lm"] = causal_lm
        self.gpt, self.rounding = gpt, Rounding("nearest")
        config = causal_lm.config
        if tp > 1:
            self.words = Words(rank * (config.vocab_size // tp), group.group_name)
            self.tp_group = group
        width = head_width(config)
        exponents = torch.arange(0, width, 2).float() / width
        device = next(gpt.parameters()).device
        frequencies = (1.0 / rotary_base(config) ** exponents).to(device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def rope(self, batch: PairBatch) -> Tensor:
        """Return the angles of each token, by its position in its own text."""
        angles = torch.outer(batch.positions_N.float(), self.frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]

    def hidden(self, batch: PairBatch) -> Tensor:
        embedded = self.gpt.embedding(
            input_ids=batch.ids_N[None], position_ids=batch.positions_N[None]
        )
        states: Tensor = self.gpt.decoder(
            hidden_states=embedded, attention_mask=batch.segments, rotary_pos_emb=self.rope(batch)
        )
        return states.transpose(0, 1)

    def score(
        self, hidden_ND: Tensor, batch: PairBatch, *, squares: bool = False
    ) -> tuple[Tensor, Tensor]:
        if self.gpt.share_embeddings_and_output_weights:
            weight = self.gpt.shared_embedding_or_output_weight()
        else:
            weight = self.gpt.output_layer.weight
        rows = hidden_ND.index_select(0, batch.rows_U)
        if self.words:
            rows = enter(rows, self.words.group)
        return token_logps(
            rows, weight, None, batch.targets_U, scale=1.0, softcap=None, squares=squares,
            words=self.words,
        )  # fmt: skip


class MegatronRunner:
    """Runs micro-batches; gradients are summed by Megatron's DistributedDataParallel."""

    def __init__(self, policy: MegatronPolicy, ddp: Any, device: str) -> None:
        self.policy, self.ddp, self.device = policy, ddp, device

    @torch.no_grad()
    def columns(
        self, batches: Sequence[PairBatch], wanted: Collection[str]
    ) -> list[dict[str, Tensor]]:
        return [pair_columns(self.policy, batch.to(self.device), wanted) for batch in batches]

    def backward(
        self,
        batches: Sequence[PairBatch],
        wanted: Collection[str],
        objective: Callable[[PairBatch, Columns], Tensor],
    ) -> None:
        from megatron.core.distributed import finalize_model_grads

        for number, batch in enumerate(batches, start=1):
            self.ddp.is_last_microbatch = number == len(batches)
            local_batch = batch.to(self.device)
            columns = pair_columns(self.policy, local_batch, wanted)
            objective(local_batch, columns).backward()  # type: ignore[no-untyped-call]
        finalize_model_grads([self.ddp])


class _Whole(Mapping[str, Tensor]):
    """Whole tensors by Hugging Face's names; layers are gathered once for all their weights."""

    def __init__(self, config: Any, names: Iterable[str], gather: Callable[[str], Tensor]) -> None:
        self.gather, self.last = gather, ("", torch.empty(0))
        parameters = {key_of(name): name for name in names}
        self.places = {
            f"causal_lm.{name}": (parameters[key, layer], rows)
            for name, key, layer, rows in weight_rows(config)
            if (key, layer) in parameters
        }

    def __getitem__(self, name: str) -> Tensor:
        parameter, rows = self.places[name]
        if self.last[0] != parameter:
            self.last = (parameter, self.gather(parameter).cpu())
        whole = self.last[1]
        if dist.get_rank():
            return whole.new_empty(0)
        return whole.clone() if rows is None else whole[rows]

    def __iter__(self) -> Iterator[str]:
        # Queries, keys and values of a layer come from one tensor.
        return iter(sorted(self.places, key=lambda name: self.places[name][0]))

    def __len__(self) -> int:
        return len(self.places)


class MegatronOptimizer(StepOptimizer):
    """Megatron's distributed optimizer."""

    def __init__(self, policy: MegatronPolicy, ddp: Any, optimizer: Any, job: EngineJob) -> None:
        (self.inner,) = getattr(optimizer, "chained_optimizers", [optimizer])
        self.ddp, self.policy, self.schedule = ddp, policy, job.schedule
        self.tp, self.tp_rank = job.layout.tp, job.mesh.rank("tp")
        self.groups = job.mesh.group("dp"), job.mesh.group("tp")
        self.parameters: dict[str, Any] = dict(policy.gpt.named_parameters())
        self.world = dist.get_world_size()

    def grad_norm(self, _names: Collection[str] | None = None) -> Tensor:
        """Return a share of the norm of all ranks, which Megatron has already summed."""
        self.inner.prepare_grads()
        norm = torch.as_tensor(float(self.inner.get_grad_norm()), dtype=torch.float64)
        return norm / self.world**0.5

    def step(self, _grad_norm: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = self.lr
        if self.inner.config.clip_grad > 0:
            self.inner.clip_grad_norm(self.inner.config.clip_grad)
        self.inner.step_with_ready_grads()
        self.updates += 1

    def zero_grad(self) -> None:
        self.ddp.zero_grad_buffer()
        self.inner.zero_grad()

    @property
    def masters(self) -> Mapping[str, Tensor]:
        return self._whole("param")

    def moments(self) -> dict[str, Tensor]:
        if not self.updates:
            return {}
        found = {}
        for kind in KINDS:
            found |= {f"{name}.{kind}": tensor for name, tensor in self._whole(kind).items()}
        return found

    def _whole(self, kind: str) -> _Whole:
        config = self.policy.causal_lm.config
        return _Whole(config, self.parameters, lambda name: self._gather(name, kind))

    def _shard(self, weight: Any) -> tuple[slice, dict[str, Tensor]] | None:
        """Return this rank's part of a flat weight and its states; None if it has none."""
        if weight not in self.inner.model_param_group_index_map:
            return None
        span = self.inner._get_model_param_range_map(weight)["param"]
        states = self.inner._get_main_param_and_optimizer_states(weight)
        return slice(span.start, span.end), states

    def _gather(self, name: str, kind: str) -> Tensor:
        weight = self.parameters[name]
        flat = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        if held := self._shard(weight):
            flat[held[0]] = held[1][kind].detach().float().reshape(-1)
        data, tensor = self.groups
        if data is not None:
            dist.all_reduce(flat, group=data)
        local = flat.view(weight.shape)
        if tensor is None:
            return local
        parts = [torch.empty_like(local) for _ in range(self.tp)]
        dist.all_gather(parts, local.contiguous(), group=tensor)
        return joined(name, weight, parts)

    @torch.no_grad()
    def load(
        self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int
    ) -> None:
        self.updates = updates
        kinds: dict[str, Mapping[str, Tensor]] = {"param": masters}
        if updates:
            kinds |= {kind: _OfKind(moments, kind) for kind in KINDS}
        config = self.policy.causal_lm.config
        for kind, source in kinds.items():
            tensors = megatron_tensors(_Plain(source), config)
            for name, weight in self.parameters.items():
                key, layer = key_of(name)
                whole = tensors[key] if layer is None else tensors[key][layer]
                local = local_part(name, weight, whole, self.tp_rank, self.tp).to(weight.device)
                self._set(weight, kind, local, updates)

    def _set(self, weight: Any, kind: str, local: Tensor, updates: int) -> None:
        if kind == "param":
            weight.copy_(local)
        if held := self._shard(weight):
            span, states = held
            master = states["param"]
            value = local.reshape(-1)[span].to(master.dtype).view(master.shape)
            if kind == "param":
                master.copy_(value)
                return
            state = self.inner.optimizer.state[master]
            state[kind] = value.clone()
            state["step"] = torch.tensor(float(updates))


class _OfKind(Mapping[str, Tensor]):
    """One kind of moments by the names of their weights."""

    def __init__(self, moments: Mapping[str, Tensor], kind: str) -> None:
        self.moments, self.kind = moments, kind

    def __getitem__(self, name: str) -> Tensor:
        return self.moments[f"{name}.{self.kind}"]

    def __contains__(self, name: object) -> bool:
        return f"{name}.{self.kind}" in self.moments

    def __iter__(self) -> Iterator[str]:
        return (key.rpartition(".")[0] for key in self.moments if key.endswith(f".{self.kind}"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Plain(Mapping[str, Tensor]):
    """Tensors of a policy by the names of its Hugging Face model."""

    def __init__(self, source: Mapping[str, Tensor]) -> None:
        self.source = source

    def __getitem__(self, name: str) -> Tensor:
        return self.source[f"causal_lm.{name}"]

    def __contains__(self, name: object) -> bool:
        return f"causal_lm.{name}" in self.source

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix("causal_lm.") for name in self.source)

    def __len__(self) -> int:
        return len(self.source)


class MegatronEngine(Engine):
    """Tensor and data parallel; the pipeline schedule is shown in tests/engines."""

    def problems(self) -> Iterable[str]:
        job, key = self.job, "actor_train.strategy_args"
        layout = job.layout
        if not dist.is_initialized():
            yield "Megatron-Core needs a process group: start with torchrun --nproc-per-node N"
        for axis in ("pp", "cp", "ep"):
            if getattr(layout, axis) > 1:
                yield f"{key}.{axis}_size: {getattr(layout, axis)} is not possible with this engine"
        if layout.dp > 1 and layout.stage != 1:
            yield (
                f"{key}.strategy_name: its optimizer divides its own state, so use megatron_train "
                "with strategy_config.use_distributed_optimizer: true, or zero1"
            )
        if layout.sequence_parallel:
            yield f"{key}.strategy_config.sequence_parallel: is not possible; remove it"
        if layout.host:
            yield f"{key}: shards in host memory are not possible with this engine"
        if layout.recompute not in (None, "none"):
            yield f"{key}.strategy_config.recompute_granularity: {layout.recompute} is not possible"
        if job.task == "reward":
            yield "task: reward is not possible: the model has no head of one row"

    def _refuse_model(self, config: Any) -> None:
        from rather.errors import ConfigError

        problem = ""
        if config.model_type not in FAMILIES:
            problem = f"model family '{config.model_type}' is not one of {', '.join(FAMILIES)}"
        elif config.rope_parameters.get("rope_type", "default") != "default":
            problem = f"rope_type '{config.rope_parameters['rope_type']}' is not possible"
        elif config.vocab_size % self.job.layout.tp:
            problem = f"tp {self.job.layout.tp} does not divide {config.vocab_size} words"
        elif getattr(config, "sliding_window", None):
            problem = "a sliding window is not possible"
        elif getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
            problem = "biases are not possible"
        if problem:
            raise ConfigError(f"actor_train.engine: Megatron: {self.job.model}: {problem}")

    def build_policy(self) -> MegatronPolicy:
        job, layout = self.job, self.job.layout
        source = job.load()
        config = source.causal_lm.config
        self._refuse_model(config)
        warnings.filterwarnings("ignore", module="megatron")
        if job.device == "cpu":
            use_cpu()
        from megatron.core import parallel_state

        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout.tp)
        dtype = compute_dtype(job.args, job.device)
        gpt = make_gpt(config, dtype, tp=layout.tp).to(job.device)
        rank = job.mesh.rank("tp")
        weights = _Plain({name: p.detach() for name, p in source.named_parameters()})
        fill(gpt, megatron_tensors(weights, config), rank, layout.tp)
        self.exact = source.exact
        return MegatronPolicy(source, gpt, rank, layout.tp, job.mesh.group("tp")).eval()

    def build_optimizer(self, policy: MegatronPolicy) -> MegatronOptimizer:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import (
            OptimizerConfig,
            get_megatron_optimizer,
            get_standard_config_overrides,
        )

        job, args = self.job, self.job.training
        dtype = compute_dtype(job.args, job.device)
        sharing = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
        )
        self.ddp = DistributedDataParallel(policy.gpt.config, sharing, policy.gpt)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=args.learning_rate,
            min_lr=args.learning_rate,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_eps=args.adam_epsilon,
            clip_grad=job.max_grad_norm,
            use_distributed_optimizer=True,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
        )
        overrides = get_standard_config_overrides(settings)
        found = get_megatron_optimizer(settings, [self.ddp], config_overrides=overrides)
        optimizer = MegatronOptimizer(policy, self.ddp, found, job)
        for group in optimizer.inner.param_groups:  # else only Megatron's scheduler does it
            group["weight_decay"] = args.weight_decay * group.get("wd_mult", 1.0)
        if self.exact:
            optimizer.load(self.exact, {}, 0)
            self.exact = {}
        return optimizer

    def build_runner(self, policy: MegatronPolicy, _optimizer: Any) -> MegatronRunner:
        return MegatronRunner(policy, self.ddp, self.job.device)
