"""The refactored engine computes the bits of commit 137f6e4, and resumes older checkpoints.

    python -m tests.same.before_after [cells ...] [--keep FOLDER]

For each cell, `rather train` runs a tiny model from a git worktree of the old commit and from this
working tree: in one process, on several ranks as torchrun starts them, or on a local Ray. Metrics,
every file of tensors in the last checkpoint, its state and the exported model must be equal to the
bit. Cells marked with `resume` also let this tree resume the old commit's checkpoint of step 2,
with the caches that the old commit wrote, and refuse to do so when the template, the loss or the
batch has changed. Cells with a `base` of their own are older: they are only resumed, and end in the
weights that the old commit trained. A difference exits with status 1.

`--keep` stores the old commits' runs in a folder and reuses them the next time, which halves the
time. A run takes about 2 s in one process, 5 s on two ranks and 20 s on Ray (the table shows the
seconds of each), plus 8 s for the imports of each tree: 4 minutes for all cells on two idle cores.

Intended differences to 137f6e4 are in INTENDED and NEW_METRICS.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tiny import make_model, make_pairs, nest, rows_of, untimed

BASE = "137f6e4"
# Keys of state.json that it has since: the drift of the base, for limits on the best model; what was
# judged, for a best model that is not luck; and the engine, whose default is the only one of then.
INTENDED = (".progress.base", ".progress.best_scores", ".progress.judged", ".identity.engine")
NEW_METRICS = ("eval/drift",)  # of answers with labels, which had none
ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("run_jobs.py")
SAVED_AT = 2  # the step whose checkpoint is resumed


@dataclass(frozen=True)
class Cell:
    """One run: what differs from COMMON (dotted keys), on how many ranks, and whether it is also
    resumed. One rank with several devices starts a local Ray.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    resume: bool = False
    refuses: dict[str, str] = field(default_factory=dict)  # override -> the field that is refused
    base: str = BASE  # the commit that this tree must equal; an older one is only resumed

    @property
    def way(self) -> str:
        """Return what starts the ranks."""
        if self.ranks > 1:
            return "torchrun"
        return "ray" if "actor_train.device_mapping" in self.keys else "process"


COMMON: dict[str, Any] = {
    "sequence_length": 64,
    "max_steps": 5,
    "save_steps": SAVED_AT,
    "eval_steps": 3,
    "max_ckpt_to_keep": 0,
    "track_with": None,
    "report_html": False,
    "actor_train.training_args.learning_rate": 1e-3,
    "train_batch_size": 8,
    "actor_train.max_tokens_per_microbatch_in_train": 128,
}
LORA = {"actor_train.model_args.lora_rank": 4}
TR_DPO = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6}
REFUSALS = {
    "global_template=chatml": "chat template",
    "pref_loss=ipo": "loss",
    "train_batch_size=4": "global batch",
}


def on_two(**strategy: Any) -> dict[str, Any]:
    """Return the keys of a run on two devices."""
    keys = {f"actor_train.strategy_args.{key}": value for key, value in strategy.items()}
    return {**keys, "actor_train.device_mapping": [0, 1]}


APART = {"actor_train.device_mapping": [0], "reference.device_mapping": [1]}
# Three steps are an epoch, so the reference of the last two is known.
TWO_EPOCHS = {"train_batch_size": 16, "actor_train.training_args.num_train_epochs": 2}

CELLS = {
    "float32": Cell({"actor_train.model_args.dtype": "fp32"}, resume=True, refuses=REFUSALS),
    "bf16": Cell({"actor_train.model_args.dtype": "bf16"}),
    "lora": Cell(LORA, resume=True, refuses={"pref_loss=ipo": "loss"}),
    "pissa": Cell({**LORA, "actor_train.model_args.init_lora_weights": "pissa"}),
    "ipo": Cell({"pref_loss": "ipo"}),
    "orpo": Cell({"pref_loss": "orpo"}),
    "aot": Cell({"pref_loss": "aot"}),
    "kto": Cell({"task": "unpaired"}, resume=True),
    "reward": Cell({"task": "reward"}),
    "sft": Cell({"task": "sft"}),
    "tr-dpo": Cell(TR_DPO, resume=True, refuses={"ref_model_mixup_alpha=0.5": "synced reference"}),
    "lean": Cell({"precision": "lean", "actor_train.model_args.dtype": "bf16"}, resume=True),
    # The log window of three steps is open when step 2 is saved: its sums are part of the
    # checkpoint.
    "resume": Cell({"logging_steps": 3}, resume=True),
    "dp2": Cell(on_two(), ranks=2),
    "zero3": Cell(on_two(strategy_name="zero3"), ranks=2, resume=True),
    "tp2": Cell(on_two(tp_size=2), ranks=2, resume=True),
    "pp2": Cell(on_two(pp_size=2), ranks=2),
    "cp2": Cell(on_two(cp_size=2), ranks=2),
    "torchrun-apart": Cell(APART, ranks=2, resume=True),
    "tr-dpo-apart": Cell({**APART, **TR_DPO}, ranks=2, resume=True),
    "cached-apart": Cell({**APART, **TWO_EPOCHS}, ranks=2, resume=True),
    "ray-dp2": Cell(on_two()),
    "ray-apart": Cell(APART, resume=True),
    "dede740": Cell(resume=True, base="dede740"),
    "dede740-zero3": Cell(on_two(strategy_name="zero3"), ranks=2, resume=True, base="dede740"),
}


# --- what is run ---


@dataclass(frozen=True)
class Job:
    """One `rather train` of one tree."""

    folder: Path  # holds output, caches, logs and the YAML file of the run
    cell: Cell
    overrides: tuple[str, ...] = ()

    @property
    def run_dir(self) -> Path:
        return self.folder / "output" / "run"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def yaml(self) -> Path:
        return self.folder / "run.yaml"

    def is_done(self, inputs: Path) -> bool:
        """Tell whether the folder holds this very run, finished."""
        return (self.run_dir / "model").exists() and self.yaml.read_text() == self.text(inputs)

    def description(self, inputs: Path) -> dict[str, Any]:
        """Write the YAML file and return the job as the driver reads it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.yaml.write_text(self.text(inputs))
        arguments = [str(self.yaml), *self.overrides]
        return {"arguments": arguments, "ranks": self.cell.ranks, "log": str(self.log)}

    def text(self, inputs: Path) -> str:
        """Return the YAML file of the run, as JSON, which is YAML."""
        keys = {
            **COMMON,
            "exp_name": "run",
            "output_dir": str(self.folder / "output"),
            "logging_dir": str(self.folder / "logs"),
            "pretrain": str(inputs / "base"),
            "actor_train.data_args.file_name": str(inputs / "pairs.jsonl"),
            "validation.data_args.file_name": str(inputs / "held_out.jsonl"),
            **self.cell.keys,
        }
        return json.dumps(nest({}, keys, "."), indent=1)


def run_jobs(tree: Path, jobs: list[Job], inputs: Path) -> list[tuple[list[int], float]]:
    """Run the jobs with the package of `tree`; return the exit codes and seconds of each."""
    if not jobs:
        return []
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([job.description(inputs) for job in jobs], file)
        file.flush()
        command = [sys.executable, "-P", str(DRIVER), file.name]
        done = subprocess.run(
            command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return [(codes, seconds) for codes, seconds in json.loads(done.stdout.splitlines()[-1])]


def interrupted_copy(run: Job, folder: Path, cell: Cell, *overrides: str) -> Job:
    """Copy a finished run to `folder`, as it would be if it had been killed after step 2."""
    shutil.copytree(run.folder, folder)
    copy = Job(folder, cell, overrides)
    copy.log.unlink()
    for path in copy.run_dir.glob("checkpoint-*"):
        if path.name != f"checkpoint-{SAVED_AT}":
            shutil.rmtree(path)
    shutil.rmtree(copy.run_dir / "model")
    (copy.run_dir / "LATEST").write_text(f"checkpoint-{SAVED_AT}\n")
    return copy


# --- what is compared ---


def tensor_files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(folder.glob("*.safetensors"))}


def compare(got: Path, expected: Path) -> list[str]:
    """Return one line for each difference between two run folders."""
    found = []
    lines, old_lines = (untimed(rows_of(path / "metrics.jsonl")) for path in (got, expected))
    for one, other in zip(lines, old_lines, strict=False):
        one = {key: one[key] for key in one if key in other or key not in NEW_METRICS}
        found += [
            f"metrics, step {other.get('step')}: {key} is {one.get(key)!r}, was {other.get(key)!r}"
            for key in sorted(one.keys() | other.keys())
            if json.dumps(one.get(key)) != json.dumps(other.get(key))
        ]
    if len(lines) != len(old_lines):
        found.append(f"{len(lines)} lines of metrics, were {len(old_lines)}")
    for name in (f"checkpoint-{COMMON['max_steps']}", "model"):
        found += compare_tensors(got / name, expected / name)
    found += compare_state(
        *(path / f"checkpoint-{COMMON['max_steps']}" for path in (got, expected))
    )
    for name in ("config.json", "tokenizer.json", "adapter_config.json"):
        one, other = got / "model" / name, expected / "model" / name
        if one.exists() != other.exists():
            found.append(f"model/{name}: exists in one of the two")
        elif one.exists() and json.loads(one.read_text()) != json.loads(other.read_text()):
            found.append(f"model/{name}: differs")
    return found


def compare_tensors(got: Path, expected: Path) -> list[str]:
    """Compare names and bytes of tensor files; name the tensors that differ."""
    ours, theirs = tensor_files(got), tensor_files(expected)
    found = [f"{got.name}/{name}: in one of the two" for name in ours.keys() ^ theirs.keys()]
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name].read_bytes() == theirs[name].read_bytes():
            continue
        one, other = load_file(ours[name]), load_file(theirs[name])
        unequal = [
            key
            for key in sorted(one.keys() | other.keys())
            if key not in one or key not in other or not _same_bits(one[key], other[key])
        ]
        what = ", ".join(unequal[:4]) or "the header or the order of tensors"
        found.append(f"{got.name}/{name}: {len(unequal)} tensors differ ({what})")
    return found


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def compare_state(got: Path, expected: Path) -> list[str]:
    """Everything in state.json must be equal, except length and digest of the metrics, which
    depend on times.
    """
    one, other = (
        dict(_leaves("", json.loads((path / "state.json").read_text()))) for path in (got, expected)
    )
    return [
        f"state.json: {key} is {one.get(key)!r}, was {other.get(key)!r}"
        for key in sorted(one.keys() | other.keys())
        if not key.startswith((".metrics_", *INTENDED)) and one.get(key) != other.get(key)
    ]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    else:
        yield path, json.dumps(value)


# --- the whole ---


@contextmanager
def base_tree(commit: str) -> Iterator[Path]:
    """Check an old commit out into a temporary worktree."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def has_base() -> bool:
    """Tell whether the git history here has the old commits."""
    git = ["git", "-C", str(ROOT), "cat-file", "-e"]
    commits = {cell.base for cell in CELLS.values()}
    asked = [[*git, f"{commit}^{{commit}}"] for commit in commits]
    return not any(
        subprocess.run(each, capture_output=True, check=False).returncode for each in asked
    )


def base_runs(names: list[str], keep: Path) -> dict[str, Job]:
    """Return the old commits' run of each cell; runs found in `keep` are not repeated."""
    inputs = keep / "inputs"
    if not (inputs / "held_out.jsonl").exists():
        make_model(inputs / "base")
        make_pairs(inputs / "pairs.jsonl", 40)
        make_pairs(inputs / "held_out.jsonl", 9, seed=1)
    jobs = {name: Job(keep / name, CELLS[name]) for name in names}
    missing = [job for job in jobs.values() if not job.is_done(inputs)]
    for job in missing:
        shutil.rmtree(job.folder, ignore_errors=True)
    for commit in sorted({job.cell.base for job in missing}):
        run_base(commit, [job for job in missing if job.cell.base == commit], inputs)
    return jobs


def run_base(commit: str, jobs: list[Job], inputs: Path) -> None:
    with base_tree(commit) as tree:
        for job, (codes, _) in zip(jobs, run_jobs(tree, jobs, inputs), strict=True):
            if any(codes):
                raise SystemExit(f"{commit} exits with {codes}:\n{job.log.read_text()[-3000:]}")


@dataclass(frozen=True)
class Outcome:
    """What became of one run of this tree."""

    good: str  # what it should do: "same bits" or "refused"
    seconds: float
    differences: list[str]


def check(names: list[str], keep: Path, work: Path) -> dict[str, Outcome]:
    """Run the cells from both trees and compare them."""
    base = base_runs(names, keep)
    runs: dict[str, tuple[Job, Path, str]] = {}  # -> job, the run to equal, the field to refuse
    for name in names:
        cell, before = CELLS[name], base[name]
        if cell.base == BASE:
            runs[name] = Job(work / name, cell), before.run_dir, ""
        if cell.resume:
            copy = interrupted_copy(before, work / f"{name}-resumed", cell)
            runs[f"{name}, resumed"] = copy, before.run_dir, ""
        for override, refused in cell.refuses.items():
            copy = interrupted_copy(before, work / f"{name}-{override}", cell, override)
            runs[f"{name}, {override}"] = copy, before.run_dir, refused
    done = run_jobs(ROOT, [job for job, _, _ in runs.values()], keep / "inputs")
    outcomes = {}
    for (what, (job, before_dir, refused)), (codes, seconds) in zip(
        runs.items(), done, strict=True
    ):
        if refused:
            outcomes[what] = Outcome("refused", seconds, check_refusal(job, codes, refused))
        else:
            found = check_run(job, codes, before_dir, resumed=what.endswith("resumed"))
            outcomes[what] = Outcome("same bits", seconds, found)
    return outcomes


def check_refusal(job: Job, codes: list[int], field: str) -> list[str]:
    log = job.log.read_text()
    if codes == [4] and f"\n  {field}" in log and "resume.allow=[" in log:
        return []
    return [f"not refused: exit {codes}\n{log[-1500:]}"]


def check_run(job: Job, codes: list[int], expected: Path, *, resumed: bool) -> list[str]:
    log = job.log.read_text()
    if any(codes):
        return [f"exit {codes}\n{log[-3000:]}"]
    if resumed and f"checkpoint-{SAVED_AT}" not in log:
        return [f"did not resume:\n{log[-1500:]}"]
    if resumed and (new := cache_keys(job.run_dir) ^ cache_keys(expected)):
        return [f"does not find the old caches: {', '.join(sorted(new))}"]
    if job.cell.base != BASE:  # metrics and state of older commits have other fields
        return compare_tensors(job.run_dir / "model", expected / "model")
    return compare(job.run_dir, expected)


def cache_keys(run_dir: Path) -> set[str]:
    """Return the names that digests give to prepared pairs, and to the log-probs of a reference."""
    cache = run_dir.parent / ".cache"
    return {path.name for path in (*cache.glob("data/*.arrow"), *cache.glob("reference/*/"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cells", nargs="*", help=f"any of {', '.join(CELLS)}; all by default")
    parser.add_argument("--keep", type=Path, help="folder of the old commit's runs, reused")
    options = parser.parse_args()
    if unknown := set(options.cells) - CELLS.keys():
        parser.error(f"unknown cells: {', '.join(sorted(unknown))}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        keep = options.keep.resolve() if options.keep else Path(temporary) / "base"
        results = check(options.cells or list(CELLS), keep, Path(temporary) / "head")
    width = max(map(len, results))
    for what, outcome in results.items():
        verdict = "DIFFERENT" if outcome.differences else outcome.good
        print(f"{what:{width}}  {verdict:9}  {outcome.seconds:5.1f} s")
        print("".join(f"    {line}\n" for line in outcome.differences[:12]), end="")
    print(f"{time.monotonic() - started:.0f} s")
    return int(any(outcome.differences for outcome in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
