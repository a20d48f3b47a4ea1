"""What rounding to bf16 costs: held-out margin, loss and log-probs of what a user gets, next to TRL.

    RATHER_TEST_DATA=/path/to/data python bench/quality.py --only ours     # no other package needed
    python bench/quality.py --part 1/4 --json part1.json                   # ... and 2/4, 3/4, 4/4
    python bench/quality.py --merge part?.json --json bench/results/quality.json --write

Trains a bf16 model on real pairs at several learning rates, with float32 weights, with weights
rounded to the nearest bf16 value and with dithered weights in the forward pass. The float32 masters
of each run are then scored as they are, rounded to nearest and dithered. What Rather exported is
scored itself, and must equal its masters, rounded, to the bit. TRL trains on the same pairs in the
same order, in float32 with bf16 autocast; on a CPU without bf16 instructions without autocast,
which loses nothing. Scoring uses plain transformers in float32 on padded rows, and no code of
Rather. Several parts can share a GPU; give each OMP_NUM_THREADS=1. The JSON is written after every
run, and the same command continues it. The exit code is 1 if one of the checks at the end fails.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gzip
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, free, machine, write_facts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from safetensors.torch import load_file
from torch import Tensor

RATES = (5e-7, 2e-6, 5e-6, 2e-5, 5e-5)
FORWARDS = ("float32", "nearest", "dithered")
BETA = 0.1
LAST = 10  # training steps whose margin is averaged
WITHIN, KEPT = 0.1, (0.99, 1.01)
PAGE = Path(__file__).parent.parent / "docs" / "precision.md"
BEGIN, END = "<!-- begin: bench/quality.py -->", "<!-- end: bench/quality.py -->"
NOT_MEASURED = "*Not measured yet.*"

Weights = Mapping[str, Tensor]
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What all parts of one result have in common."""

    model: str
    rates: tuple[float, ...]
    seeds: int
    keys: int
    steps: int
    batch: int
    held_out: int


@dataclass(frozen=True)
class Job:
    """One training run."""

    rate: float
    seed: int
    forward: str  # one of FORWARDS, or TRL
    key: int = 0  # of the thresholds; 0 is the product's own


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.merge:
        settings, machines, rows = merged(args.merge)
    else:
        settings, machines, rows = measured(args)
    write_result(args.json, settings, machines, rows)
    print(markdown(settings, machines, rows))
    if args.write:
        PAGE.write_text(filled(PAGE.read_text("utf-8"), args.json), "utf-8")
    if args.part or args.only:
        print("Merge all parts with --merge for the checks.")
        return 0
    verdicts = checks(settings, rows)
    for passed, text in verdicts:
        print(f"{'pass' if passed else 'FAIL'}: {text}")
    if args.quick:
        print("--quick is too small to judge: the checks do not set the exit code.")
    return int(not args.quick and not all(passed for passed, _ in verdicts))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    cuda, data = torch.cuda.is_available(), os.environ.get("RATHER_TEST_DATA")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=data, help="folder with models/ and pairs/")
    add("--model", type=Path, help="a bf16 model; default: stories15M of the data folder")
    add("--pairs", type=Path, help=".jsonl or .jsonl.gz; default: stories15M_vader_onpolicy")
    add("--rates", type=float, nargs="+", help="learning rates")
    add("--seeds", type=int, help="orders of the training pairs")
    add("--keys", type=int, help="sets of thresholds")
    add("--steps", type=int, help="optimizer steps of a run")
    add("--batch", type=int, help="pairs of a step")
    add("--held-out", type=int, help="pairs that are scored")
    add("--quick", action="store_true", help="a few small runs, to try the script out")
    add("--only", choices=("ours", "trl"))
    add("--part", help="2/4: the second quarter of the runs")
    add("--merge", type=Path, nargs="+", help="combine these results instead of running")
    add("--json", type=Path, default=Path("output/bench-quality/quality.json"))
    add(
        "--out",
        type=Path,
        default=Path("output/bench-quality"),
        help="for runs; emptied as it goes",
    )
    add("--write", action="store_true", help=f"write the tables into {PAGE.name}")
    args = parser.parse_args(arguments)
    whole = {"rates": RATES, "seeds": 3, "keys": 3, "steps": 24, "batch": 4, "held_out": 32}
    whole |= {"steps": 40, "batch": 16, "held_out": 128} if cuda else {}
    small = {"rates": (2e-6, 5e-5), "seeds": 1, "keys": 1, "steps": 3, "batch": 4, "held_out": 8}
    for name, value in (small if args.quick else whole).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not args.merge and not args.data and not (args.model and args.pairs):
        parser.error("name the data folder with --data or RATHER_TEST_DATA")
    return args


# --- runs ---


def measured(args: argparse.Namespace) -> tuple[Settings, list[Any], list[Row]]:
    """Train and score what `args` select and the JSON does not have yet."""
    model = args.model or args.data / "models/stories15M"
    pairs = args.pairs or args.data / "pairs/stories15M_vader_onpolicy.jsonl.gz"
    names = ("seeds", "keys", "steps", "batch", "held_out")
    own = {name: getattr(args, name) for name in names}
    settings = Settings(model.name, tuple(args.rates), **own)
    rows: list[Row] = []
    if args.json.exists():
        found, _, rows = read(args.json)
        if found != settings:
            raise SystemExit(
                f"{args.json}: has other settings; remove it, or choose another --json"
            )
    done = {Job(*(row[name] for name in Job.__dataclass_fields__)) for row in rows}
    wanted = [job for job in selected(args, settings) if job not in done]
    if any(job.forward == "TRL" for job in wanted):
        from trl_peer import require_trl

        require_trl()
    torch.set_flush_denormal(True)
    bench = Bench(settings, model, pairs, args.out / (args.part or "all").replace("/", "-of-"))
    columns = (*Progress.get_default_columns()[:1], BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(elapsed_when_finished=True), console=console
    ) as bar:
        task = bar.add_task("runs", total=len(wanted))
        for job in wanted:
            bar.update(task, description=f"{job.forward}, {job.rate:g}, seed {job.seed}")
            rows += bench.rows(job)
            write_result(args.json, settings, [machine()], rows)
            bar.advance(task)
    return settings, [machine()], rows


def selected(args: argparse.Namespace, settings: Settings) -> list[Job]:
    jobs = []
    for rate in settings.rates:
        for seed in range(settings.seeds):
            if args.only != "trl":
                jobs += [Job(rate, seed, forward) for forward in FORWARDS[:2]]
                jobs += [Job(rate, seed, "dithered", key) for key in range(settings.keys)]
            if args.only != "ours":
                jobs.append(Job(rate, seed, "TRL"))
    part, parts = map(int, (args.part or "1/1").split("/"))
    if not 1 <= part <= parts:
        raise SystemExit(f"--part {args.part}: write 1/4, 2/4, 3/4 or 4/4 for quarters")
    return jobs[part - 1 :: parts]


class Bench:
    """The data, the scorer and the runs."""

    def __init__(self, settings: Settings, model: Path, pairs: Path, out: Path) -> None:
        self.settings, self.model, self.out = settings, model, out
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        every = token_pairs(model, pairs)
        # Fixed and spread over the file, whatever the seed.
        places = {round(i * len(every) / settings.held_out) for i in range(settings.held_out)}
        held_out = [pair for i, pair in enumerate(every) if i in places]
        self.training = [pair for i, pair in enumerate(every) if i not in places]
        (out / "train.jsonl").write_text("\n".join(map(json.dumps, map(row_of, self.training))))
        self.scorer = Scorer(model, held_out, self.device)
        self.source = {name: w.clone() for name, w in self.scorer.weights().items()}
        self.reference = self.scorer.log_probs(self.source)

    def rows(self, job: Job) -> list[Row]:
        """Train one model and return the scores of everything that is made of it."""
        began = time.perf_counter()
        train = self.train_trl if job.forward == "TRL" else self.train_ours
        masters, written, margin = train(job)
        files: dict[tuple[str, int], Weights] = {("float32", 0): masters, **written}
        trained = {"train_margin": margin, "seconds": round(time.perf_counter() - began, 1)}
        exact, rows = self.scorer.log_probs(masters), []
        for (kind, key), weights in files.items():
            log_probs = exact if weights is masters else self.scorer.log_probs(weights)
            scores = judged(log_probs, self.reference, exact)
            scores["kept"] = kept_share(self.source, masters, weights)
            rows.append({**asdict(job), "file": kind, "file_key": key, **scores, **trained})
        free()
        return rows

    def train_ours(self, job: Job) -> tuple[Weights, dict[tuple[str, int], Weights], float]:
        """Train with Rather; return the masters, the files made of them, and the last margins."""
        from rather.pipeline.pipeline import DPOPipeline
        from rather.run_folder.model_source import weights_of

        config = self.config(job)
        shutil.rmtree(config.run_dir, ignore_errors=True)
        silence = open(os.devnull, "w")  # noqa: SIM115
        with silence, contextlib.redirect_stdout(silence), salted(job.key):
            code = DPOPipeline(config).run()
        if code:
            raise SystemExit(f"{job}: the run ended with exit code {code}")
        checkpoint = config.run_dir / f"checkpoint-{self.settings.steps}"
        policy = weights_of(str(checkpoint)).load("cpu", "fp32").causal_lm
        masters = {name: weight.detach() for name, weight in policy.named_parameters()}
        files = {("nearest", 0): rounded("nearest", masters)}
        for key in [job.key] if job.forward == "dithered" else range(self.settings.keys):
            files["dithered", key] = rounded("dithered", masters, key)
        exported = load_file(config.run_dir / "model" / "model.safetensors")
        own = (job.forward, job.key)
        if own in files:
            for name, weight in exported.items():
                if not torch.equal(weight.view(torch.int16), files[own][name].view(torch.int16)):
                    raise SystemExit(f"{job}: {name} was not exported as its master, rounded")
            files[own] = exported
        lines = (config.run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
        margins = [line["rewards/margins"] for line in map(json.loads, lines) if "loss" in line]
        shutil.rmtree(config.run_dir)
        return masters, dict(files), statistics.fmean(margins[-LAST:])

    def config(self, job: Job) -> Any:
        from rather.config.load import config_from_dict

        settings = self.settings
        training = {
            "learning_rate": job.rate,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": settings.batch,
            "num_train_epochs": settings.steps,
        }
        values = {
            "exp_name": f"{job.forward}-{job.rate:g}-{job.seed}-{job.key}",
            "output_dir": str(self.out / "runs"),
            "logging_dir": str(self.out / "logs"),
            "pretrain": str(self.model),
            "seed": job.seed,
            "beta": BETA,
            "sequence_length": self.scorer.longest,
            "max_steps": settings.steps,
            "save_steps": None,
            "compile": "off",
            "report_html": False,
            "actor_train": {
                "model_args": {"dtype": "fp32" if job.forward == "float32" else "bf16"},
                "training_args": training,
                "data_args": {"file_name": str(self.out / "train.jsonl")},
            },
        }
        if job.forward != "float32":
            values["rounding"] = job.forward
        return config_from_dict(values)

    def train_trl(self, job: Job) -> tuple[Weights, dict[tuple[str, int], Weights], float]:
        """Train with TRL; return its weights, those weights served in bf16, and the last margins."""
        from datasets import Dataset
        from datasets.utils.logging import disable_progress_bar
        from transformers import PrinterCallback
        from trl import DPOConfig, DPOTrainer
        from trl_peer import _tokenizer

        from rather.data.sampler import Order

        class GivenTokens(DPOTrainer):  # type: ignore[misc]
            def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
                return dataset

        disable_progress_bar()
        settings = self.settings
        order = Order(((0, len(self.training), 1.0),), settings.batch, job.seed)
        steps = [order.step(step) for step in range(settings.steps)]
        if any(len(step) != settings.batch for step in steps):
            raise SystemExit(
                "TRL cannot end an epoch with a smaller step: lower --steps or --batch"
            )
        taken = [self.training[row] for step in steps for row in step.tolist()]
        columns = {f"{name}_ids": [pair[name] for pair in taken] for name in taken[0]}
        policy = plain_model(self.model, self.device)
        with tempfile.TemporaryDirectory() as folder:
            args = DPOConfig(
                output_dir=folder,
                report_to="none",
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
                use_cpu=self.device == "cpu",
                bf16=has_bf16_products(),
                gradient_checkpointing=False,
                max_length=None,
                seed=job.seed,
                beta=BETA,
                max_steps=settings.steps,
                learning_rate=job.rate,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_grad_norm=1.0,
                train_sampling_strategy="sequential",
                per_device_train_batch_size=settings.batch,
            )
            data = Dataset.from_dict(columns)
            given = {"args": args, "train_dataset": data, "processing_class": _tokenizer()}
            trainer = GivenTokens(policy, copy.deepcopy(policy), **given)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        history = trainer.state.log_history
        margins = [entry["rewards/margins"] for entry in history if "rewards/margins" in entry]
        masters = {name: weight.detach().cpu() for name, weight in policy.named_parameters()}
        served = {name: weight.to(torch.bfloat16) for name, weight in masters.items()}
        return masters, {("nearest", 0): served}, statistics.fmean(margins[-LAST:])


def has_bf16_products() -> bool:
    """Return whether bf16 products are fast here: emulated ones are 70 to 200 times slower."""
    from rather.parallel.load import cpu_has_bf16

    return torch.cuda.is_available() or cpu_has_bf16()


def token_pairs(model: Path, file: Path) -> list[dict[str, list[int]]]:
    """Tokenise pairs of text. Answers get no end token: the samples were cut at a length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    rows = map(json.loads, content.decode().splitlines())
    return [
        {"prompt": tokenizer(row["prompt"])["input_ids"]}
        | {
            side: tokenizer(row[side], add_special_tokens=False)["input_ids"]
            for side in ("chosen", "rejected")
        }
        for row in rows
    ]


def row_of(pair: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return a pair as Rather reads tokens."""
    prompt, row = pair["prompt"], {}
    for side in ("chosen", "rejected"):
        row[f"{side}_input_ids"] = prompt + pair[side]
        row[f"{side}_loss_mask"] = [0] * len(prompt) + [1] * len(pair[side])
    return row


# --- rounding ---


@contextlib.contextmanager
def salted(key: int) -> Iterator[None]:
    """Draw other thresholds, wherever the product does: the names that it hashes get a suffix."""
    from rather.optim import rounding

    if torch.cuda.is_available():
        import rather.optim.kernels  # noqa: F401
    plain = rounding.hash_key

    def hash_key(name: str) -> tuple[int, int]:
        return plain(f"{name}#{key}" if key else name)

    users = [m for m in list(sys.modules.values()) if getattr(m, "hash_key", None) is plain]
    try:
        for module in users:
            vars(module)["hash_key"] = hash_key
        yield
    finally:
        for module in users:
            vars(module)["hash_key"] = plain


def rounded(kind: str, masters: Weights, key: int = 0) -> dict[str, Tensor]:
    from rather.optim.rounding import Rounding

    with salted(key):
        rule = Rounding(kind)  # type: ignore[arg-type]
        return {name: rule.rounded(name, weight) for name, weight in masters.items()}


def kept_share(source: Weights, masters: Weights, written: Weights) -> float:
    """Return the projection of the written change on the true change."""
    dot = square = 0.0
    for name, before in source.items():
        true = masters[name].double() - before.double()
        dot += float((true * (written[name].double() - before.double())).sum())
        square += float((true * true).sum())
    return dot / square


# --- the independent scorer: plain transformers, nothing of Rather ---


def plain_model(folder: Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    causal_lm: Any = AutoModelForCausalLM
    return causal_lm.from_pretrained(folder, dtype=torch.float32).to(device)


class Scorer:
    """Log-probs of answers in float32: one padded row per answer, full log-softmax."""

    def __init__(self, model: Path, pairs: Sequence[Mapping[str, list[int]]], device: str) -> None:
        self.model = plain_model(model, device).eval().requires_grad_(False)
        self.longest: int = self.model.config.max_position_embeddings
        self.rows = [(p["prompt"], p[side]) for p in pairs for side in ("chosen", "rejected")]

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.cpu() for name, weight in self.model.named_parameters()}

    @torch.no_grad()
    def log_probs(self, weights: Weights, rows: int = 16) -> Tensor:
        """Return [pairs, 2] sums over the tokens of an answer."""
        parameters = dict(self.model.named_parameters())
        assert set(weights) == set(parameters)
        for name, weight in weights.items():
            parameters[name].copy_(weight)
        parts = [self.rows[i : i + rows] for i in range(0, len(self.rows), rows)]
        return torch.cat([self._batch(part) for part in parts]).view(-1, 2)

    def _batch(self, rows: Sequence[tuple[list[int], list[int]]]) -> Tensor:
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids, scored = torch.zeros(2, len(rows), width, dtype=torch.long).unbind()
        seen = torch.zeros_like(ids)
        for i, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids[i, :end] = torch.tensor(prompt + answer)
            scored[i, len(prompt) : end] = 1
            seen[i, :end] = 1
        device = self.model.device
        ids, scored = ids.to(device), scored.to(device)
        logits = self.model(input_ids=ids, attention_mask=seen.to(device)).logits[:, :-1]
        each: Tensor = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return (each.double() * scored[:, 1:]).sum(1).cpu()


def judged(log_probs: Tensor, reference: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the mean scores; `exact` are the log-probs of the float32 weights."""
    change = log_probs - reference
    margin = BETA * (change[:, 0] - change[:, 1])
    return {
        "margin": float(margin.mean()),
        "loss": float(-torch.nn.functional.logsigmoid(margin).mean()),
        "accuracy": float((margin > 0).double().mean()),
        "error": float((log_probs - exact).abs().mean()),
    }


# --- results ---


def write_result(
    path: Path, settings: Settings, machines: Iterable[Any], rows: Iterable[Row]
) -> None:
    # `machine`: where the runs were made, not where they were merged.
    facts = {"machine": list(machines), "settings": asdict(settings), "rows": list(rows)}
    write_facts(path, "quality", **facts)


def read(path: Path) -> tuple[Settings, list[Any], list[Row]]:
    found = json.loads(path.read_text("utf-8"))
    settings = Settings(**{**found["settings"], "rates": tuple(found["settings"]["rates"])})
    return settings, found["machine"], found["rows"]


def merged(paths: Sequence[Path]) -> tuple[Settings, list[Any], list[Row]]:
    """Combine parts; a run that several of them have counts once."""
    parts = {path: read(path) for path in paths}
    settings = parts[paths[0]][0]
    for path, (own, *_) in parts.items():
        if own != settings:
            raise SystemExit(f"{path}: its settings differ from those of {paths[0]}")
    machines: list[Any] = []
    rows: dict[tuple[Any, ...], Row] = {}
    for _, own_machines, own_rows in parts.values():
        machines += [each for each in own_machines if each not in machines]
        for row in own_rows:
            names = (*Job.__dataclass_fields__, "file", "file_key")
            rows.setdefault(tuple(row[name] for name in names), row)
    return settings, machines, sorted(rows.values(), key=lambda row: (row["rate"], row["seed"]))


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


class Numbers:
    """One number of each run at one learning rate, and what follows from them."""

    def __init__(self, rows: Iterable[Row], rate: float, forward: str, file: str, name: str):
        wanted = (rate, forward, file)
        self.values: list[float] = []
        by_seed: dict[int, list[float]] = {}
        for row in rows:
            if (row["rate"], row["forward"], row["file"]) == wanted:
                self.values.append(row[name])
                by_seed.setdefault(row["seed"], []).append(row[name])
        self.mean = statistics.fmean(self.values) if self.values else math.nan
        self.spread = deviation(self.values)
        self.spread_over_seeds = deviation([statistics.fmean(each) for each in by_seed.values()])

    def text(self, digits: int) -> str:
        if not self.values:
            return "-"
        return f"{self.mean:.{digits}f} ± {self.spread:.{digits}f}"


SUMMARY = (
    "learning rate",
    "float32 masters",
    "exported bf16 file",
    "share kept",
    "rounded to nearest",
    "share kept",
    "TRL, as saved",
    "TRL, served in bf16",
)
COLUMNS = (
    "forward",
    "file",
    "held-out margin",
    "held-out loss",
    "accuracy",
    "log-prob error",
    "share kept",
    "training margin",
)
DIGITS = {"margin": 4, "loss": 4, "accuracy": 3, "error": 3, "kept": 3}
FILES = {
    **{(forward, file): (forward, file) for forward in FORWARDS for file in FORWARDS},
    ("TRL", "float32"): ("TRL", "float32, as saved"),
    ("TRL", "nearest"): ("TRL", "nearest, as served in bf16"),
}


def markdown(settings: Settings, machines: Sequence[Mapping[str, Any]], rows: list[Row]) -> str:
    where = "; ".join(
        f"{m['gpu'] or m['cpu'] or 'CPU'}, torch {m['torch']}"
        + (f", TRL {m['trl']}" if "trl" in m else "")
        for m in machines
    )
    lines = [
        f"{settings.model}, {settings.steps} steps of {settings.batch} pairs, "
        f"{settings.held_out} held-out pairs ({where}).",
        f"Mean ± standard deviation over runs; seeds: {settings.seeds}, sets of thresholds: "
        f"{settings.keys}.",
        "Held-out margin after training with dithered weights, and of TRL:",
        "",
        *table(SUMMARY, [summary(rows, rate) for rate in settings.rates]),
        "",
        "Held-out loss after training with dithered weights, for each set of thresholds, as the mean "
        "over seeds. Set 0 is the one that Rather",
        "uses; the others are random draws of the same kind. Runs with the same set have nearly the "
        "same rounding errors, so they are not",
        "independent. The spread is the standard deviation over seeds.",
        "",
        *table(
            [
                "learning rate",
                "float32 masters",
                *(f"exported, set {key}" for key in range(settings.keys)),
                "TRL, as saved",
                "spread over seeds",
                "TRL, served in bf16",
            ],
            [losses(settings, rows, rate) for rate in settings.rates],
        ),
        "",
        *compared(settings, rows),
        "",
        "All combinations. The log-prob error is against the float32 weights of the same run, in "
        "nats per answer. The training",
        f"margin is that of the last {LAST} steps, as the forward pass saw it.",
    ]
    for rate in settings.rates:
        lines += ["", f"Learning rate {rate:g}:", ""]
        lines += table(COLUMNS, details(rows, rate))
    return "\n".join(lines) + "\n"


def table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(names)
    return [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows)]


def summary(rows: list[Row], rate: float) -> list[str]:
    number = functools.partial(Numbers, rows, rate)
    cells = [f"{rate:g}", number("dithered", "float32", "margin").text(4)]
    for file in ("dithered", "nearest"):
        cells.append(number("dithered", file, "margin").text(4))
        cells.append(number("dithered", file, "kept").text(3))
    return cells + [number("TRL", file, "margin").text(4) for file in ("float32", "nearest")]


def losses(settings: Settings, rows: list[Row], rate: float) -> list[str]:
    cells = [f"{Numbers(rows, rate, 'dithered', 'float32', 'loss').mean:.5f}"]
    for key in range(settings.keys):
        own = [row for row in rows if row["key"] == key]
        cells.append(f"{Numbers(own, rate, 'dithered', 'dithered', 'loss').mean:.5f}")
    saved, served = (Numbers(rows, rate, "TRL", file, "loss") for file in ("float32", "nearest"))
    peers = [f"{saved.mean:.5f}", f"{saved.spread_over_seeds:.5f}", f"{served.mean:.5f}"]
    return [f"{rate:g}", *cells, *peers]


def compared(settings: Settings, rows: list[Row]) -> Iterator[str]:
    """Say where the exported file is worse than TRL's float32 weights, seed for seed."""
    kinds: dict[str, list[Row]] = {"the mean of all sets": rows}
    kinds["set 0"] = [row for row in rows if row["key"] == 0]
    for name, own in kinds.items():
        above = []
        for rate in settings.rates:
            file = Numbers(own, rate, "dithered", "dithered", "loss")
            peer = Numbers(own, rate, "TRL", "float32", "loss")
            spread = max(file.spread_over_seeds, peer.spread_over_seeds)
            if file.mean > peer.mean + spread:
                above.append(f"{rate:g} (by {file.mean - peer.mean:.5f}, spread {spread:.5f})")
        places = ", ".join(above) or "no learning rate"
        yield f"- The loss of {name} is above TRL's as saved by more than this spread at {places}."


def details(rows: list[Row], rate: float) -> Iterator[list[str]]:
    for (forward, file), names in FILES.items():
        number = functools.partial(Numbers, rows, rate, forward, file)
        if number("margin").values:
            cells = [number(name).text(digits) for name, digits in DIGITS.items()]
            yield [*names, *cells, number("train_margin").text(4) if file == "float32" else ""]


def checks(settings: Settings, rows: list[Row]) -> list[tuple[bool, str]]:
    """Return what must hold at each learning rate; a comparison that was not measured fails."""
    verdicts = []
    for rate in settings.rates:
        number = functools.partial(Numbers, rows, rate)
        masters = number("dithered", "float32", "margin")
        file = number("dithered", "dithered", "margin")
        nearest = number("dithered", "nearest", "margin")
        verdicts.append(
            (
                abs(file.mean - masters.mean) <= WITHIN * abs(masters.mean),
                f"{rate:g}: held-out margin of the exported bf16 model {file.mean:.4f}, of its "
                f"masters {masters.mean:.4f} (within {WITHIN:.0%}); nearest: {nearest.mean:.4f}",
            )
        )
        kept = number("dithered", "dithered", "kept")
        least, most = min(kept.values, default=math.nan), max(kept.values, default=math.nan)
        lost = number("dithered", "nearest", "kept")
        verdicts.append(
            (
                KEPT[0] <= least <= most <= KEPT[1],
                f"{rate:g}: share kept {least:.4f} to {most:.4f} ({KEPT[0]} to {KEPT[1]}); "
                f"nearest: {lost.mean:.4f}",
            )
        )
        loss = number("dithered", "dithered", "loss")
        for kind, text in (("float32", "as saved"), ("nearest", "as served in bf16")):
            peer = number("TRL", kind, "loss")
            spread = max(loss.spread, peer.spread)
            verdicts.append(
                (
                    loss.mean <= peer.mean + spread,
                    f"{rate:g}: held-out loss {loss.mean:.5f}, TRL's {text} {peer.mean:.5f} "
                    f"(may be above by the spread over seeds and thresholds, {spread:.5f})",
                )
            )
    return verdicts


def filled(page: str, path: Path = RESULTS / "quality.json") -> str:
    """Return the page with the tables of a result between its markers."""
    text = markdown(*read(path)) if path.exists() else f"{NOT_MEASURED}\n"
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE}: the markers {BEGIN} and {END} are missing")
    return f"{before}{BEGIN}\n{text}{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
