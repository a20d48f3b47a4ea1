"""Scripts written for TRL, run with TRL and with only Config and Trainer imported from rather.trl.

    python bench/trl_door.py TRL [--scripts MIRROR] [--json FILE]

TRL is a folder with the package `trl` of version 1.16 (a checkout, or site-packages). Its own
scripts trl/scripts/dpo.py, kto.py, reward.py and sft.py train a tiny model in float32 (losses of
each step, keys of log_history) and a Llama of 15M parameters on pairs of the CPU bench's lengths, at
TRL's default batch of 8 (CPU seconds and floating-point operations of a step). With
`--scripts`, the public scripts of bench/trl_door_scripts.txt (repository@commit:path) run, too,
from git directories MIRROR/owner+name/repo. None of these scripts is part of this repository.

A script runs in its own checkout, unchanged except for its imports, with fixtures for what this
machine lacks: hub names are answered by a tiny local model (a GPT-2 where the name says so), data
sets by a few rows, CUDA by the CPU, packages that do not train by stand-ins, and a public script
ends after two steps. The same fixtures serve TRL and Rather.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.machinery
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

HERE = Path(__file__).parent
LIST = HERE / "trl_door_scripts.txt"
RESULTS = HERE / "results" / "trl_door.json"
OWN = ("dpo", "kto", "reward", "sft")
SYSTEMS = ("trl", "rather.trl")
OURS = {
    f"{name}{kind}"
    for name in ("DPO", "KTO", "Reward", "SFT", "ORPO", "CPO")
    for kind in ("Config", "Trainer")
}
SECONDS = 200  # a public script may take
PAIRS = 8  # of a step that is timed: TRL's default batch
TIMED_STEPS = 2  # the first one warms up, and its floating-point operations are counted
LARGEST_FILE = 5_000_000  # bytes that are copied from a repository
# Packages that scripts import and that are not installed here. None of them trains anything.
STAND_INS = (
    *("wandb", "dotenv", "flash_attn", "mlflow", "loguru", "evaluate", "unsloth", "bs4", "nltk"),
    *("sklearn", "modelscope", "matplotlib", "seaborn", "bitsandbytes", "openai", "trackio"),
)
WORDS = [f"w{i}" for i in range(60)]
SCRIPT = "door_script.py"  # the name of a script's copy
LARGE = [False]  # which model and rows the fixtures answer with


# --- a script with other imports ---


class OtherImports(ast.NodeTransformer):
    """Imports configs and trainers from rather.trl; everything else stays with trl."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if (node.module or "").split(".")[0] != "trl":
            return node
        moved = [name for name in node.names if name.name in OURS]
        left = [name for name in node.names if name.name not in OURS]
        found: list[ast.stmt] = []
        if moved:
            found.append(ast.ImportFrom("rather.trl", moved, 0))
        if left:
            found.append(ast.ImportFrom(node.module, left, node.level))
        return found


def with_other_imports(source: str) -> str:
    return ast.unparse(ast.fix_missing_locations(OtherImports().visit(ast.parse(source))))


# --- fixtures, in the process of a script ---


def rows_of(name: str, count: int) -> list[dict[str, Any]]:
    """Return rows with the columns that most preference data sets have."""
    import random

    draw = random.Random(7)

    def words(low: int, high: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))

    def turn(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    rows = []
    for i in range(count):
        prompt, yes, no = words(3, 9), words(2, 9), words(2, 9)
        if "hh-rlhf" in name:
            begin = f"\n\nHuman: {prompt}\n\nAssistant:"
            rows.append({"chosen": f"{begin} {yes}", "rejected": f"{begin} {no}"})
        elif "ultrafeedback" in name or "preference" in name or "zen" in name:
            user = [turn("user", prompt)]
            rows.append({
                "prompt": prompt,
                "chosen": [*user, turn("assistant", yes)],
                "rejected": [*user, turn("assistant", no)],
                "messages": [*user, turn("assistant", yes)],
                "score_chosen": 2.0,
                "score_rejected": 1.0,
            })  # fmt: skip
            if "trl-lib" in name:
                del rows[-1]["prompt"]
        else:
            if "Capybara" in name:
                rows.append({"messages": [turn("user", prompt), turn("assistant", yes)]})
                continue
            rows.append({
                "prompt": prompt, "question": prompt, "instruction": prompt, "query": prompt,
                "input": "", "context": "", "system": "w1", "chosen": yes, "rejected": no,
                "output": yes, "response": yes, "answer": yes, "completion": yes, "code": yes,
                "input_text": prompt, "output_text": yes, "target_text": yes,
                "text": f"{prompt} {yes}", "label": i % 2 == 0,
                "messages": [turn("user", prompt), turn("assistant", yes)],
                "conversations": [turn("user", prompt), turn("assistant", yes)],
            })  # fmt: skip
    return rows


def long_rows(name: str, count: int) -> list[dict[str, Any]]:
    """Return rows as long as those of the CPU bench: UltraFeedback-like, the same in each step.

    Capybara has whole conversations instead of pairs.
    """
    import random

    from common import make_steps, pairs_of

    draw = random.Random(3)

    def turn(role: str, tokens: Any) -> list[dict[str, str]]:
        return [{"role": role, "content": " ".join(draw.choices(WORDS, k=len(tokens)))}]

    (step,) = make_steps("ultrafeedback", 32000, steps=1, pairs=PAIRS)
    rows = []
    for pair in pairs_of(step):
        user = turn("user", pair.prompt)
        yes, no = (turn("assistant", answer) for answer in (pair.chosen, pair.rejected))
        if "Capybara" in name:
            rows.append({"messages": user + yes})
        else:
            rows.append({"prompt": user, "chosen": yes, "rejected": no})
    return rows * count


def make_model(folder: Path, *, large: bool = False) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sys.path.insert(0, str(HERE.parent))
    from tests.golden.trl_run import make_model as make_tiny

    make_tiny(folder)
    tiny = LlamaConfig.from_pretrained(folder)
    if large:
        config = LlamaConfig(
            vocab_size=32000, hidden_size=288, intermediate_size=768, num_hidden_layers=6,
            num_attention_heads=6, num_key_value_heads=6, bos_token_id=1, eos_token_id=2,
            pad_token_id=2, tie_word_embeddings=True,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    else:
        tiny.max_position_embeddings = 4096
        tiny.save_pretrained(folder)
    return folder


def make_gpt2(folder: Path, like: Path) -> Path:
    """Return a tiny GPT-2 with the tokenizer of another model."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(like)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 1024}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answer_hub_names(models: dict[bool, Path], gpt2: Path) -> None:
    """Let every name that is not a folder here mean a local model."""
    import transformers

    classes = (
        "AutoConfig AutoTokenizer AutoProcessor AutoModelForCausalLM PreTrainedConfig AutoModel "
        "AutoModelForSequenceClassification PreTrainedModel PreTrainedTokenizerBase "
        "LlamaForCausalLM GPT2LMHeadModel GPT2Tokenizer GenerationConfig"
    )
    for name in classes.split():
        cls = getattr(transformers, name)
        own = cls.from_pretrained.__func__

        def from_pretrained(kind: Any, path: Any, *args: Any, _own: Any = own, **named: Any) -> Any:
            is_here = (Path(str(path)) / "config.json").exists()
            for key in ("quantization_config", "load_in_4bit", "load_in_8bit", "device_map"):
                named.pop(key, None)  # they need a GPU
            if str(named.get("attn_implementation", "")).startswith("flash"):
                named.pop("attn_implementation")
            named.pop("use_flash_attention_2", None)
            local = gpt2 if "gpt" in str(path).lower() else models[LARGE[0]]
            return _own(kind, path if is_here else str(local), *args, **named)

        cls.from_pretrained = classmethod(from_pretrained)


def answer_data_sets() -> None:
    import datasets

    read_files = datasets.load_dataset

    def load_dataset(path: Any = "", *args: Any, split: Any = None, **named: Any) -> Any:
        files = named.get("data_files")
        if isinstance(files, str) and Path(files).is_file():
            return read_files(path, *args, split=split, **named)
        found = long_rows(str(path), TIMED_STEPS) if LARGE[0] else rows_of(str(path), 24)
        whole = datasets.Dataset.from_list(found)
        if named.get("streaming"):
            whole = whole.to_iterable_dataset()
        if isinstance(split, list):
            return [whole for _ in split]
        names = (
            "train",
            "test",
            "validation",
            "train_prefs",
            "test_prefs",
            "train_sft",
            "test_sft",
            "eval",
        )
        kind = datasets.IterableDatasetDict if named.get("streaming") else datasets.DatasetDict
        return whole if split else kind(dict.fromkeys(names, whole))

    datasets.load_dataset = load_dataset
    datasets.load_from_disk = load_dataset
    datasets.Dataset.from_json = staticmethod(lambda *args, **named: load_dataset(split="train"))


def shorten_runs(folder: Path, steps: int) -> None:
    """Let every config train a few steps in float32 on the CPU, without a network."""
    import transformers

    own = transformers.TrainingArguments.__post_init__

    def post_init(self: Any) -> None:
        self.max_steps, self.num_train_epochs = steps, 1
        self.output_dir, self.use_cpu = str(folder / "out"), True
        self.bf16 = self.fp16 = False
        self.tf32 = None
        self.report_to, self.push_to_hub, self.disable_tqdm = "none", False, True
        self.logging_steps, self.logging_strategy = 1, "steps"
        self.save_strategy, self.load_best_model_at_end = "no", False
        self.eval_strategy, self.do_eval = "no", False
        self.per_device_train_batch_size = min(self.per_device_train_batch_size, 4)
        self.gradient_accumulation_steps = min(self.gradient_accumulation_steps, 2)
        self.dataloader_num_workers, self.dataloader_prefetch_factor = 0, None
        self.optim = "adamw_torch"
        own(self)

    transformers.TrainingArguments.__post_init__ = post_init


def replace_cuda() -> None:
    import torch

    def without_cuda(function: Any) -> Any:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            args = tuple("cpu" if "cuda" in str(each) else each for each in args)
            named = {key: "cpu" if "cuda" in str(each) else each for key, each in named.items()}
            return function(self, *args, **named)

        return call

    torch.nn.Module.to = without_cuda(torch.nn.Module.to)
    torch.Tensor.to = without_cuda(torch.Tensor.to)
    torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.cuda.set_device = lambda *_: None
    torch.cuda.get_device_name = lambda *_: "none"
    is_available = torch.cuda.is_available

    def only_for_scripts() -> bool:
        """Return True to the script itself, which would end; libraries get the truth."""
        caller = sys._getframe(1).f_code.co_filename
        return Path(caller).name == SCRIPT or is_available()

    torch.cuda.is_available = only_for_scripts


class StandIns:
    """Imports a stand-in for a package that is not installed, and for each of its modules."""

    missing = frozenset(name for name in STAND_INS if importlib.util.find_spec(name) is None)

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.split(".")[0] not in self.missing:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return MagicMock(__spec__=spec, __path__=[], __version__="9.9")

    def exec_module(self, module: Any) -> None:
        """Leave it as it is."""


def record_training() -> list[Any]:
    """Return the trainers whose `train` has been called."""
    import transformers

    trained: list[Any] = []
    own = transformers.Trainer.train

    class Times(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if LARGE[0] and state.global_step == 0:
                trained[-1].counter = operation_counter()
                trained[-1].counter.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if LARGE[0] and state.global_step == 1:
                trained[-1].counter.__exit__(None, None, None)
                trained[-1].operations = trained[-1].counter.get_total_flops()
            trained[-1].seconds.append(time.process_time())

    def train(self: Any, *args: Any, **named: Any) -> Any:
        if not trained or trained[-1] is not self:
            self.seconds, self.operations = [time.process_time()], 0
            trained.append(self)
            self.add_callback(Times())
        self.remove_callback(transformers.PrinterCallback)
        return own(self, *args, **named)

    transformers.Trainer.train = train
    return trained


def operation_counter() -> Any:
    """Return torch's counter of the operations of matrix products and attention, on CPUs, too."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_backward_flop_count(grad, query, key, value)

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward_of_it = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return FlopCounterMode(
        display=False, custom_mapping={attention: forward, backward_of_it: backward}
    )


class Runner:
    """Runs scripts one after the other in this process, whose libraries are replaced once."""

    def __init__(self, trl: Path, folder: Path, *, public: bool) -> None:
        self.folder = folder
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "PYTHONBREAKPOINT": "0",
            "MPLBACKEND": "agg",
            "HF_TOKEN": "none",
        }
        sys.path.insert(0, str(trl))
        sys.path.insert(0, str(HERE.parent))
        signal.signal(signal.SIGALRM, too_slow)
        self.trained = record_training()
        self.models = {
            large: make_model(folder / str(large), large=large) for large in (False, True)
        }
        answer_hub_names(self.models, make_gpt2(folder / "gpt2", self.models[False]))
        answer_data_sets()
        if public:
            for name in OWN:  # before modules are replaced that TRL looks for
                importlib.import_module(f"trl.trainer.{name}_trainer")
            shorten_runs(folder, 2)
            replace_cuda()
            sys.meta_path.append(StandIns())

    def run(self, script: Path, package: str, arguments: list[str], *, large: bool = False) -> Any:
        """Return what a script trained with `trl` or `rather.trl`, or why it did not."""
        import transformers

        copy = script.with_name(SCRIPT)
        LARGE[0], found = large, {}
        self.trained.clear()
        sys.argv = [str(copy), *arguments]
        before = os.getcwd()
        checkout = Path(before)
        paths, modules, streams = list(sys.path), set(sys.modules), (sys.stdout, sys.stderr)
        sys.path[:0] = [str(script.parent), str(checkout), str(checkout / "src")]
        signal.alarm(0 if large else SECONDS)
        try:
            transformers.set_seed(7)  # a new head of a reward model is drawn
            source = script.read_text(encoding="utf-8")
            text = with_other_imports(source) if package == "rather.trl" else source
            copy.write_text(text, encoding="utf-8")
            runpy.run_path(str(copy), run_name="__main__")
        except BaseException as error:
            found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            found["refused"] = type(error).__module__.startswith("rather")
        finally:
            signal.alarm(0)
            sys.path[:] = paths
            sys.stdout, sys.stderr = streams
            os.chdir(before)
            for name in set(sys.modules) - modules:  # another script has other modules of this name
                file = getattr(sys.modules[name], "__file__", None) or ""
                if str(file).startswith(str(self.folder)):
                    del sys.modules[name]
        if self.trained:
            found["history"] = self.trained[-1].state.log_history
            found["seconds"] = self.trained[-1].seconds
            found["operations"] = self.trained[-1].operations
        return found


def too_slow(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


# --- comparing ---


def losses(found: dict[str, Any]) -> list[float]:
    return [line["loss"] for line in found.get("history", []) if "loss" in line]


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> float:
    pairs = zip(losses(theirs), losses(ours), strict=True)
    return max((abs(a - b) for a, b in pairs), default=0.0)


def keys(found: dict[str, Any]) -> list[list[str]]:
    return [sorted(line) for line in found.get("history", [])]


def seconds(found: dict[str, Any]) -> float:
    """CPU seconds of a step, without the first."""
    marks = found["seconds"]
    return (marks[-1] - marks[1]) / (len(marks) - 2)


def own_scripts(args: Any, folder: Path, content: dict[str, Any]) -> None:
    """TRL's own scripts: numbers on a tiny model, seconds on a larger one."""
    runner = Runner(args.trl, folder, public=False)
    out = f"--output_dir {folder / 'out'}"
    line = (
        "--model_name_or_path Qwen/Qwen2-0.5B-Instruct --dataset_name trl-lib/ultrafeedback_binarized "
        f"{out} --bf16 False --report_to none --use_cpu --logging_steps 1 --disable_tqdm True"
    )
    short = f"{line} --max_steps 6 --learning_rate 1e-3 --eval_strategy steps --eval_steps 3"
    timed = (
        f"{line} --per_device_train_batch_size {PAIRS} --max_steps {TIMED_STEPS} --save_strategy no "
        "--train_sampling_strategy sequential"
    )
    table: dict[str, Any] = {} if not args.only_speed else content["TRL's own scripts"]
    scripts = {}
    for name in OWN:
        scripts[name] = folder / f"{name}.py"
        source = (args.trl / "trl" / "scripts" / f"{name}.py").read_text(encoding="utf-8")
        scripts[name].write_text(source, encoding="utf-8")
    for name in () if args.only_speed else OWN:
        theirs, ours = (runner.run(scripts[name], each, short.split()) for each in SYSTEMS)
        for found in (theirs, ours):
            if "error" in found:
                raise SystemExit(f"{name}: {found['error']}")
        table[name] = {
            "steps": len(losses(theirs)),
            "largest difference of a loss": difference(theirs, ours),
            "first and last loss": [losses(theirs)[0], losses(theirs)[-1]],
            "same keys of log_history": keys(theirs) == keys(ours),
        }
        print(name, json.dumps(table[name]), flush=True)
        content["TRL's own scripts"] = table
        write(args.json, content)
    for name in OWN:
        arguments = timed.replace("ultrafeedback_binarized", "Capybara") if name == "sft" else timed
        speeds = table[name].setdefault("speed", {})
        for package in args.systems:
            found = runner.run(scripts[name], package, arguments.split(), large=True)
            if "error" in found:
                raise SystemExit(f"{name}: {found['error']}")
            speeds[package] = {
                "CPU seconds of a step": round(seconds(found), 2),
                "operations of a step": found["operations"],
            }
        if len(speeds) == len(SYSTEMS):
            theirs, ours = (speeds[package] for package in SYSTEMS)
            table[name]["times as fast"], table[name]["times the operations"] = (
                round(theirs[key] / ours[key], 2)
                for key in ("CPU seconds of a step", "operations of a step")
            )
        print(name, json.dumps(table[name]), flush=True)
        write(args.json, content)


def outcome(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[str, str]:
    """Return what became of a public script, and why."""
    if ours.get("refused"):
        return "refused", ours["error"]
    if not losses(ours):
        reason = ours.get("error", "it trains nothing")
        return "fails before training, as with TRL" if not losses(theirs) else "fails", reason
    if not losses(theirs):
        return "trains where TRL 1.16 fails", theirs.get("error", "")
    if len(losses(theirs)) != len(losses(ours)) or difference(theirs, ours) > 1e-5:
        return "trains something else", f"{losses(theirs)} and {losses(ours)}"
    return "same losses", f"to {difference(theirs, ours):.1g}"


def copy_files(git: list[str], commit: str, checkout: Path) -> None:
    """Copy the files of a commit that are small and that the mirror holds."""
    listing = subprocess.run([*git, "ls-tree", "-rz", commit], capture_output=True, check=True)
    for line in filter(None, listing.stdout.decode().split("\0")):
        (mode, kind, blob), path = line.split("\t")[0].split(), line.split("\t")[1]
        if kind != "blob" or mode == "120000":
            continue
        size = subprocess.run([*git, "cat-file", "-s", blob], capture_output=True, check=False)
        if size.returncode or int(size.stdout) > LARGEST_FILE:
            continue
        content = subprocess.run([*git, "cat-file", "blob", blob], capture_output=True, check=True)
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_bytes(content.stdout)


def public_scripts(args: Any, folder: Path, content: dict[str, Any]) -> None:
    runner = Runner(args.trl, folder, public=True)
    lines = LIST.read_text(encoding="utf-8").splitlines()
    table = []
    wanted = [line for line in lines if line and line[0] != "#" and args.match in line]
    for number, line in enumerate(wanted):
        address, _, arguments = line.partition(" ")
        repository, _, path = address.partition(":")
        name, _, commit = repository.partition("@")
        checkout = folder / str(number)
        checkout.mkdir()
        git = ["git", "--git-dir", str(args.scripts / name.replace("/", "+") / "repo")]
        copy_files(git, commit, checkout)
        if not (checkout / path).is_file():
            raise SystemExit(f"{address}: not in the mirror")
        os.chdir(checkout)
        ours = runner.run(checkout / path, "rather.trl", arguments.split())
        theirs = {}
        if not ours.get("refused"):
            theirs = runner.run(checkout / path, "trl", arguments.split())
        kind, reason = outcome(theirs, ours)
        reason = reason.replace(str(folder), "").replace(f"{args.trl}/", "")
        table.append({"script": address, "outcome": kind, "reason": reason})
        print(kind, address, reason, sep=" | ", flush=True)
        content["public scripts"] = table
        content["counts"] = Counter(row["outcome"] for row in table)
        write(args.json, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trl", type=Path)
    parser.add_argument("--scripts", type=Path, help="folder of git directories")
    parser.add_argument("--only-scripts", action="store_true")
    parser.add_argument("--only-speed", action="store_true", help="of TRL's own scripts")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--match", default="", help="only public scripts whose address has this")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    content: dict[str, Any] = {}
    if args.json.exists():
        content = json.loads(args.json.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        if not args.only_scripts:
            own_scripts(args, Path(name), content)
        if args.scripts:
            public_scripts(args, Path(name), content)


def write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
