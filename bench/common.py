"""What the speed benchmarks share: seeded pairs, FLOPs needed and spent, our engine, tables and JSON. Runs nothing."""

from __future__ import annotations

import copy
import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from rather.data.batch import Columns, TokenPair

# As the workers do, for both systems. Read at the first use of a GPU.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

PEAK = 989e12  # dense bfloat16 FLOP/s of an H100 or H200, by its data sheet: what strict MFU divides by
REACHED = 790e12  # what a matrix product of 8192^3 reaches on an H200: the standard algorithm's speed of light
SIGMA = 0.7  # of the logarithm of a length
LONGEST = 1024
RESULTS = Path(__file__).parent / "results"

Ids = NDArray[np.int32]


# --- pairs ---


@dataclass(frozen=True)
class Lengths:
    """How long prompts and answers are: lognormal means before the cut to a range, and answers per prompt."""

    prompt: float
    answers: tuple[float, ...]
    prompt_range: tuple[int, int] = (1, LONGEST)


LENGTHS = {
    "ultrafeedback": Lengths(180, (320, 290)),
    "long": Lengths(1654, (250, 250), (500, 3000)),  # 1500 on average after the cut
    "four": Lengths(200, (300, 300, 300, 300)),
}


@dataclass(frozen=True)
class Prompt:
    """A prompt and its answers, best first; every answer is compared with every later one."""

    prompt: Ids
    answers: tuple[Ids, ...]

    @property
    def pairs(self) -> list[TokenPair]:
        better_worse = [
            (i, j) for i in range(len(self.answers)) for j in range(i + 1, len(self.answers))
        ]
        return [_pair(self.prompt, self.answers[i], self.answers[j]) for i, j in better_worse]


Step = Sequence[Prompt]


def make_steps(
    lengths: str, vocabulary: int, *, steps: int, pairs: int, seed: int = 0, scale: float = 1.0
) -> list[list[Prompt]]:
    """The prompts of so many optimizer steps of `pairs` pairs; a step is the same whatever comes after it.

    `scale` shortens all alike, for a warm-up: what share is padding stays the same.
    """
    kind = LENGTHS[lengths]
    pairs_per_prompt = len(kind.answers) * (len(kind.answers) - 1) // 2
    assert pairs % pairs_per_prompt == 0, (
        f"{lengths}: {pairs_per_prompt} pairs a prompt do not divide {pairs}"
    )
    draw = np.random.default_rng(seed)

    def ids(mean: float, low: int, high: int) -> Ids:
        length = np.clip(draw.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA), low, high)
        return draw.integers(3, vocabulary, max(1, int(scale * length)), dtype=np.int32)

    def prompt() -> Prompt:
        answers = tuple(ids(mean, 1, LONGEST) for mean in kind.answers)
        return Prompt(ids(kind.prompt, *kind.prompt_range), answers)

    return [[prompt() for _ in range(pairs // pairs_per_prompt)] for _ in range(steps)]


def pairs_of(step: Step) -> list[TokenPair]:
    return [pair for prompt in step for pair in prompt.pairs]


def _pair(prompt: Ids, chosen: Ids, rejected: Ids) -> TokenPair:
    start = len(prompt)
    return TokenPair(
        prompt, chosen, rejected, ((start, start + len(chosen)),), ((start, start + len(rejected)),)
    )


# --- models and their FLOPs ---


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like model."""

    family: str  # transformers' name of its configuration
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool

    @property
    def block_weights(self) -> int:
        """Weights of the matrices of all layers."""
        kv_width = self.hidden // self.heads * self.kv_heads
        return self.layers * self.hidden * (2 * self.hidden + 2 * kv_width + 3 * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        return self.block_weights + self.head_weights * (1 if self.tied else 2)

    @property
    def more(self) -> dict[str, Any]:
        """Further settings of transformers' configuration."""
        return {}

    def forward_flops(self, tokens: float, rows: float, cells: float) -> float:
        """Tokens through the layers, rows through the head, (query, key) cells through attention."""
        attention = 4 * self.layers * self.hidden * cells
        return 2 * self.block_weights * tokens + 2 * self.head_weights * rows + attention

    def model(self, dtype: torch.dtype, device: str, attention: str, *, seed: int = 0) -> Any:
        """Random weights made on the device itself: billions of them take minutes on a CPU."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            self.family,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            max_position_embeddings=8192,
            initializer_range=0.02,
            bos_token_id=1,
            eos_token_id=2,
            **self.more,
        )
        torch.manual_seed(seed)
        with torch.device(device):
            causal_lm: Any = AutoModelForCausalLM
            model = causal_lm.from_config(config, dtype=dtype, attn_implementation=attention)
        return model.to(device).eval()


@dataclass(frozen=True)
class ExpertShape(Shape):
    """A shape whose `intermediate` is the width of one expert."""

    experts: int
    chosen: int
    head_dim: int

    @property
    def block_weights(self) -> int:
        """Weights that one token uses in the matrices of all layers."""
        return self._blocks(self.chosen)

    def _blocks(self, experts: int) -> int:
        attention, router = 2 * self.head_dim * (self.heads + self.kv_heads), self.experts
        return self.layers * self.hidden * (attention + router + 3 * self.intermediate * experts)

    @property
    def weights(self) -> int:
        return self._blocks(self.experts) + self.head_weights * (1 if self.tied else 2)

    @property
    def more(self) -> dict[str, Any]:
        return {
            "head_dim": self.head_dim,
            "moe_intermediate_size": self.intermediate,
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.001,
        }


SHAPES = {
    "15M": Shape("llama", 288, 6, 6, 6, 768, 32_000, True),
    "135M": Shape("llama", 576, 30, 9, 3, 1536, 49_152, True),
    "0.5B": Shape("qwen2", 896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": Shape("qwen2", 1536, 28, 12, 2, 8960, 151_936, True),
    "3B": Shape("qwen2", 2048, 36, 16, 2, 11_008, 151_936, True),
    "7B": Shape("qwen2", 3584, 28, 28, 4, 18_944, 152_064, False),
    "8B": Shape("llama", 4096, 32, 32, 8, 14_336, 128_256, False),
    "14B": Shape("qwen2", 5120, 48, 40, 8, 13_824, 152_064, False),
    "32B": Shape("qwen2", 5120, 64, 40, 8, 27_648, 152_064, False),
    "70B": Shape("llama", 8192, 80, 64, 8, 28_672, 128_256, False),
}


def needed_flops(shape: Shape, prompt: int, answers: Sequence[int], *, reference: bool) -> float:
    """Of all pairs of one prompt: it runs once, each answer once, the head on answers only; training is 3 forwards."""
    tokens = prompt + sum(answers)
    cells = prompt**2 / 2 + sum(prompt * answer + answer**2 / 2 for answer in answers)
    return (4 if reference else 3) * shape.forward_flops(tokens, sum(answers), cells)


def standard_flops(shape: Shape, prompt: int, chosen: int, rejected: int) -> float:
    """Of one pair by the usual algorithm: the prompt twice, the head on every token, the reference each time."""
    tokens = 2 * prompt + chosen + rejected
    cells = prompt**2 + prompt * (chosen + rejected) + (chosen**2 + rejected**2) / 2
    return 4 * shape.forward_flops(tokens, tokens, cells)


def needed_by_step(shape: Shape, step: Step, *, reference: bool) -> float:
    return sum(
        needed_flops(shape, len(p.prompt), [len(a) for a in p.answers], reference=reference)
        for p in step
    )


def speed_of_light(shape: Shape, steps: Iterable[Step]) -> float:
    """Pairs/s of the standard algorithm on an H200 that runs every FLOP of it at 790 TFLOP/s, and nothing else."""
    pairs = [pair for step in steps for pair in pairs_of(step)]
    flops = sum(standard_flops(shape, len(p.prompt), len(p.chosen), len(p.rejected)) for p in pairs)
    return len(pairs) / (flops / REACHED)


# --- measuring ---


@dataclass
class Cell:
    """One system on one kind of pairs: seconds of each measured step, and what follows from them."""

    system: str
    lengths: str
    reference: str  # online, cached
    pairs: int  # of an optimizer step
    seconds: list[float] = field(default_factory=list)
    peak_gib: float = float("nan")
    settings: str = ""
    failed: str = ""  # why there are no numbers
    mfu: float | None = None
    of_light: float | None = None  # times the standard algorithm's speed of light
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def pairs_per_second(self) -> float:
        return self.pairs / statistics.median(self.seconds) if self.seconds else float("nan")

    def rate(self, shape: Shape, steps: Sequence[Step]) -> None:
        """MFU and share of light, of the steps that were measured."""
        measured = steps[: len(self.seconds)]
        needed = [
            needed_by_step(shape, step, reference=self.reference == "online") for step in measured
        ]
        if measured:
            self.mfu = (
                statistics.median(n / s for n, s in zip(needed, self.seconds, strict=True)) / PEAK
            )
            self.of_light = self.pairs_per_second / speed_of_light(shape, measured)


def ratio(fast: Cell, slow: Cell) -> float:
    """How many times faster, step against the same step."""
    both = list(zip(fast.seconds, slow.seconds, strict=False))
    return statistics.median(b / a for a, b in both) if both else float("nan")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> None:
    """Gives back what the last system held, so that the next one's peak is its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Of the GPU's memory since `free`; on a CPU the largest this process ever was."""
    import resource

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def resident_gib() -> float:
    """What this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def milliseconds(work: Callable[[], Any], *, repeats: int) -> float:
    """Median of so many runs after one that warms up."""
    taken = []
    for _ in range(repeats + 1):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken[1:])


def peak_mib(work: Callable[[], Any]) -> float:
    """Memory of the device that `work` takes at its peak beyond what is held before; NaN where a CPU cannot say."""
    free()
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again, unseen
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
        before = _status("VmRSS")
        work()
        return (_status("VmHWM") - before) / 1024
    except (OSError, AttributeError):  # not Linux with glibc
        return float("nan")


def anonymous_mib() -> float:
    """What this process holds that no file backs: pages of a mapped file can be dropped at any time."""
    return _status("RssAnon") / 1024


def _status(name: str) -> int:
    """In KiB."""
    return next(
        (int(line.split()[1]) for line in _lines("/proc/self/status") if line.startswith(name)), 0
    )


# --- our engine ---


class Ours:
    """Our engine on one device, without files: what the workers and the pipeline put together."""

    def __init__(self, policy: Any, reference: Any, *, compiled: bool) -> None:
        self.policy, self.reference, self.compiled = policy, reference, compiled
        self.budget = self.ladder = 0
        self.treatment = ""

    def plan(
        self, steps: Iterable[Step], *, tokens: int | None = None, recompute: Any = None
    ) -> None:
        """Tokens of a micro-batch and what becomes of activations: as told, else as fast as the memory allows."""
        from rather.data.pack import pack
        from rather.model.budget import LADDER, PARKING_PAYS, NoRoom, choose_budget

        steps = list(steps)
        largest = max(pair.tokens for step in steps for pair in pairs_of(step))
        options: dict[str, Any] = {
            "tokens": tokens,
            "recompute": recompute,
            "offload": False,
            "largest_pair": largest,
        }
        in_a_step = sum(batch.real_tokens for batch in pack(pairs_of(steps[0]), 32768))
        options["make_room"] = (
            self.reference.park if self.reference and in_a_step > PARKING_PAYS else None
        )
        trainer, gradients = self.policy, ""
        try:
            budget = choose_budget(trainer.policy, trainer, compiled=self.compiled, **options)
        except NoRoom:
            if not trainer.narrow_gradients():
                raise
            gradients = ", bf16 gradients"
            budget = choose_budget(trainer.policy, trainer, compiled=self.compiled, **options)
        self.budget, self.ladder = budget.tokens, LADDER[trainer.policy.causal_lm.device.type]
        parked = ", reference on the host" if self.reference and self.reference.parked else ""
        self.treatment = f"recompute {budget.recompute}{gradients}{parked}"

    @property
    def settings(self) -> str:
        return f"bins of {self.budget} tokens, {self.treatment}"

    def halve(self) -> None:
        self.budget //= 2

    def run(
        self, steps: Sequence[Step], known: Sequence[Columns] | None = None
    ) -> Iterator[tuple[float, Columns]]:
        """Seconds of each step and its reference log-probs, computed unless known. Packing runs ahead in a thread."""
        from rather.pipeline.steps import ahead

        remembered = iter(known or ())
        synchronize()
        started = time.perf_counter()
        sizes = [self.budget] if known else [self.budget, 2 * self.budget]
        packed = (self._packed(pairs_of(step), sizes) for step in steps)
        for train, *infer in ahead(packed, 2):
            columns = self.reference.log_probs(*infer) if infer else next(remembered)
            self.policy.train_step(train, columns)
            synchronize()
            yield time.perf_counter() - started, columns
            started = time.perf_counter()  # waiting for the packer counts

    def _packed(self, pairs: Sequence[TokenPair], sizes: Sequence[int]) -> list[list[Any]]:
        """Micro-batches of each of these sizes."""
        from rather.data.pack import pack

        packed = (pack(pairs, size, ladder=self.ladder) for size in sizes)
        return [[batch.pin_memory() for batch in batches] for batches in packed]

    def forget_reference(self) -> None:
        self.reference = None
        free()


def ours(
    shape: Shape,
    device: str,
    *,
    reference: bool = True,
    lean: bool = False,
    compiled: bool = False,
    rounding: str = "dithered",
    lora: int | None = None,
    lora_experts: bool = False,
    on_host: int | None = None,
) -> Ours:
    """Our engine as the workers build it, with random weights instead of a folder's. `plan` comes next."""
    from rather.config.schema import TrainingArgs
    from rather.losses.objective import configure
    from rather.model.attention import IMPLEMENTATION
    from rather.model.layers import arrange_layers
    from rather.model.policy import PolicyModel
    from rather.optim.optimizer import Optimizer, schedule
    from rather.optim.rounding import Rounding
    from rather.train.rank_trainer import RankTrainer

    torch.set_flush_denormal(True)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    policy = PolicyModel(shape.model(dtype, device, IMPLEMENTATION))
    loss = configure(["sigmoid"], {"beta": 0.1})
    frozen: Any = None
    if lora:
        _adapt(policy.causal_lm, lora, experts=lora_experts)
        reference = False
    if reference:
        frozen = RankTrainer(copy.deepcopy(policy).requires_grad_(False), loss)
        arrange_layers(frozen.policy, compiled=compiled, alone=True)
    training = TrainingArgs()
    rate = schedule(training, total_steps=1000)
    options: dict[str, Any] = {"schedule": rate, "max_grad_norm": 1.0, "lean": lean}
    options["rounding"] = Rounding(rounding)  # type: ignore[arg-type]
    options["on_host"] = on_host
    optimizer = Optimizer(policy.named_parameters(), training, **options)
    trainer = RankTrainer(policy, loss, optimizer)
    return Ours(trainer, AdaptersOff(trainer) if lora else frozen, compiled=compiled)


class AdaptersOff:
    """The reference of a policy with an adapter: itself without it."""

    parked = None

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def park(self) -> bool:
        return False

    def log_probs(self, batches: Any) -> Columns:
        from rather.model.adapters import as_reference

        with as_reference(self.trainer.policy):
            columns: Columns = self.trainer.log_probs(batches)
            return columns


def _adapt(causal_lm: Any, rank: int, *, experts: bool = False) -> None:
    """A new adapter on all linear layers, and on stacked experts: its second matrices are zero."""
    from rather.config.schema import ActorModelArgs
    from rather.model.adapters import inject

    stacks = ["experts.gate_up_proj", "experts.down_proj"] if experts else []
    inject(causal_lm, ActorModelArgs(lora_rank=rank, lora_target=["all-linear", *stacks]))
    for name, parameter in causal_lm.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(causal_lm.dtype)
            if ".lora_B." in name:
                parameter.data.zero_()


def known_columns(pairs: int) -> Columns:
    """Stands for a table of reference log-probs: any numbers serve, reading them costs nothing."""
    return {"sum": torch.full((pairs, 2), -1000.0, dtype=torch.float64)}


# --- reports ---


def machine() -> dict[str, Any]:
    """Hardware and versions that a number belongs to."""
    names = ("torch", "transformers", "triton", "flash-attn-4")
    names += ("trl", "liger-kernel", "accelerate", "datasets")
    versions = {name: version for name in names if (version := version_of(name))}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        None,
    )
    return {
        "gpu": gpu,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
    }


def told(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints a table wide enough for a log file. Numbers in three or more digits, missing ones as a dash."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*map(shown, row))
    Console(width=220).print(made)


def shown(value: Any) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def write_json(path: Path, name: str, cells: Iterable[Cell], **more: Any) -> None:
    """The whole result so far: called after every cell, so that a stopped run loses nothing."""
    entries = [{**asdict(cell), "pairs_per_second": cell.pairs_per_second} for cell in cells]
    write_facts(path, name, cells=entries, **more)


def write_facts(path: Path, name: str, **facts: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"benchmark": name, "machine": machine(), **facts}
    path.write_text(json.dumps(_without_nan(result), indent=1) + "\n", encoding="utf-8")


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []
