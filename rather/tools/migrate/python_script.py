"""Read a training script that uses TRL, without running it.

The settings are the literals in the calls of the trainer, its config, LoraConfig, load_dataset and
from_pretrained. A name stands for the last literal that was assigned to it, if no branch, loop or
function argument may have changed it. Everything else is only known when the script runs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from rather.config.redaction import looks_secret
from rather.errors import ConfigError
from rather.files import JsonObject, yaml_text
from rather.tools.migrate.python_values import (
    Module,
    NotKnown,
    code_of,
    is_none,
    is_stored,
    is_text,
    last_name,
)
from rather.tools.migrate.settings import SourceSettings

TRAINERS = {
    f"{name}Trainer": name.lower() for name in ("DPO", "KTO", "ORPO", "CPO", "BCO", "SFT", "Reward")
}
WITH_REFERENCE = ("dpo", "kto", "bco")
PARSERS = ("parse_args_and_config", "parse_args_into_dataclasses", "parse_yaml_file", "parse")
TRANSFORMERS_DEFAULTS = {"learning_rate": 5e-5, "bf16": False, "logging_steps": 500}
# Arguments of a trainer that are objects, and those that change no training.
OWN_CODE = ("data_collator", "optimizers", "formatting_func", "model_init", "compute_loss_func",
            "callbacks", "optimizer_cls_and_kwargs")  # fmt: skip
NEEDLESS = ("compute_metrics", "preprocess_logits_for_metrics")
# Arguments of from_pretrained that change no result, and those with a key of TRL.
LOADING = """
    device_map use_cache low_cpu_mem_usage cache_dir token use_auth_token local_files_only
    return_dict max_memory offload_folder num_labels attn_implementation use_flash_attention_2
""".split()  # noqa: SIM905 - a table of names
MODEL = {"torch_dtype": "torch_dtype", "dtype": "torch_dtype", "revision": "model_revision",
         "trust_remote_code": "trust_remote_code", "load_in_4bit": "load_in_4bit",
         "load_in_8bit": "load_in_8bit"}  # fmt: skip
ROUNDED = ("load_in_4bit", "load_in_8bit")
LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
        "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
        "use_rslora": "use_rslora", "use_dora": "use_dora"}  # fmt: skip
LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8}
HUB = ("cache_dir", "num_proc", "token", "trust_remote_code", "keep_in_memory", "verification_mode")
# What a script may do to a model or a tokenizer without changing the training.
HARMLESS = """
    print_trainable_parameters gradient_checkpointing_enable enable_input_require_grads train eval
    to cuda config.use_cache config.pretraining_tp config.pad_token_id pad_token pad_token_id
    padding_side save_pretrained push_to_hub generate decode batch_decode apply_chat_template device
    config eos_token model_max_length get_memory_footprint generation_config
""".split()  # noqa: SIM905 - a table of names
# Settings that change what a run writes or how fast it is, and not what it trains.
OUTPUT = """
    output_dir overwrite_output_dir run_name project logging_dir logging_steps logging_strategy
    logging_first_step report_to save_steps save_strategy save_total_limit save_only_model
    push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_revision eval_steps
    eval_strategy evaluation_strategy per_device_eval_batch_size do_eval do_train dataset_num_proc
    dataloader_num_workers dataloader_pin_memory remove_unused_columns gradient_checkpointing
    gradient_checkpointing_kwargs disable_tqdm log_level tf32 resume_from_checkpoint
    ddp_find_unused_parameters
""".split()  # noqa: SIM905 - a table of names
# Arguments of a trainer that are read by themselves; the others are settings.
OBJECTS = ("args", "model", "ref_model", "train_dataset", "eval_dataset", "peft_config",
           "tokenizer", "processing_class")  # fmt: skip
SAVE_THEM = "save them to a file of their own"
CHANGES_TRAINER = ("add_callback", "pop_callback", "remove_callback", "create_optimizer",
                   "create_scheduler", "create_optimizer_and_scheduler")  # fmt: skip
IN_PLACE = ("set_transform", "set_format")  # what changes the rows of a data set
# Calls by which a script decides something that its command line does not say.
DECIDING = """
    TrainingArguments LoraConfig setup_chat_format get_chat_template map filter select
    train_test_split concatenate_datasets interleave_datasets
""".split()  # noqa: SIM905 - a table of names
NAMING = ("load_dataset", "from_pretrained")
IN_CODE = "decided in the script, not on its command line"


def read_script(path: Path) -> SourceSettings:
    """Read the settings of the one trainer that a script calls."""
    try:
        return _parsed(path).settings()
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply to be read.") from None


def trainer_in(path: Path) -> str:
    """Return the trainer of TRL that a script calls, such as `dpo`; empty if not exactly one."""
    try:
        calls = _parsed(path).trainers()
    except (ConfigError, RecursionError):
        return ""
    return TRAINERS[calls[0][0]] if len(calls) == 1 else ""


def set_in_code(path: Path) -> dict[str, str]:
    """Return what a script with a command line sets by itself, and where.

    TRL's own scripts leave nearly everything to the command line; those of users are often called
    the same.
    """
    try:
        return _parsed(path).set_in_code()
    except (ConfigError, RecursionError) as error:
        return {"(program)": f"{path.name} cannot be read ({str(error)[:100]})"}


def decides_by_name(config: str) -> Callable[[ast.Call], bool]:
    """Return whether a call decides what is trained, though the command line does not say it."""

    def decides(call: ast.Call) -> bool:
        name = last_name(call.func)
        names_one = name in NAMING and any(map(is_text, call.args[:1]))
        return names_one or name in (*DECIDING, config)

    return decides


def _parsed(path: Path) -> Script:
    try:
        tree = ast.parse(yaml_text(path))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: cannot be read as Python ({error}).") from None
    return Script(tree, path)


class Script(Module):
    """The calls of a script that make a training, and the settings in them."""

    def __init__(self, tree: ast.Module, path: Path) -> None:
        super().__init__(tree, path)
        self.values: JsonObject = {"(script)": path.name}
        # What is only known when the script runs, and why: it decides the training, or does not.
        self.unknown: dict[str, str] = {}
        self.left_out: dict[str, str] = {}

    def trainers(self) -> list[tuple[str, ast.Call]]:
        """Return the calls of trainers that are TRL's own."""
        trainers = []
        for call in self.calls():
            module, _, name = self.origin(call.func).rpartition(".")
            if module.partition(".")[0] == "trl" and name in TRAINERS:
                trainers.append((name, call))
        return trainers

    def settings(self) -> SourceSettings:
        trainers = self.trainers()
        if not trainers:
            raise ConfigError(
                f"{self.path}: calls none of TRL's trainers ({', '.join(TRAINERS)}); pass the "
                "command line that trains, with --line."
            )
        if len(trainers) > 1:
            calls = ", ".join(f"{name} in line {call.lineno}" for name, call in trainers)
            raise ConfigError(f"{self.path}: has several trainers ({calls}); keep one of them.")
        name, call = trainers[0]
        program = TRAINERS[name]
        arguments = self._trainer_arguments(call, program)
        self._config(arguments)
        self._model(arguments)
        self._data(arguments)
        self._later_changes(call)
        return SourceSettings(
            self.path.name, self.values, words=("trl", program), program=program,
            folder=self.path.parent, unknown=self.unknown, left_out=self.left_out,
        )  # fmt: skip

    def set_in_code(self) -> dict[str, str]:
        """Return what the script sets by itself, although it has a command line."""
        trainers = self.trainers()
        parsed = [call for call in self.calls() if last_name(call.func) in PARSERS]
        if len(trainers) != 1 or not parsed:
            why = "reads its command line in its own way" if trainers else "calls no trainer of TRL"
            return {"(program)": f"{self.path.name} {why}"}
        [(name, trainer)] = trainers
        calls = filter(decides_by_name(name.replace("Trainer", "Config")), self.calls())
        notes = {code_of(call.func): self.note(call, IN_CODE) for call in calls}
        for keyword in trainer.keywords:
            if keyword.arg not in (*OBJECTS, *NEEDLESS) and isinstance(keyword.value, ast.Constant):
                notes[str(keyword.arg)] = self.note(keyword.value, IN_CODE)
        changes = self._assigned_settings(self._targets(parsed))
        return notes | {code_of(node): self.note(node, IN_CODE) for node in changes}

    def _assigned_settings(self, names: set[str]) -> Iterator[ast.Attribute]:
        """Yield assignments to the template, or to settings that were parsed into these names."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and is_stored(node):
                is_parsed = node.attr not in OUTPUT and ast.unparse(node.value) in names
                if is_parsed or node.attr == "chat_template":
                    yield node

    def _targets(self, calls: list[ast.Call]) -> set[str]:
        """Return the names that the results of calls are assigned to."""
        assigned = (
            node for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and node.value in calls
        )  # fmt: skip
        targets = chain.from_iterable(node.targets for node in assigned)
        return {ast.unparse(name) for each in targets for name in getattr(each, "elts", [each])}

    # ---- what is known

    def _keywords(self, call: ast.Call) -> dict[str, ast.expr]:
        """Return the named arguments of a call; those of `**mapping` are not known."""
        by_name = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                self.unknown[f"**{ast.unparse(keyword.value)}"] = self.note(keyword.value)
            else:
                by_name[keyword.arg] = keyword.value
        return by_name

    def _set(self, key: str, node: ast.expr) -> None:
        try:
            self.values[key] = self.value(node)
        except NotKnown as unknown:
            self.values.pop(key, None)
            target = self.left_out if key in OUTPUT else self.unknown
            why = "only known when it runs" if looks_secret(key) else unknown.why
            target[key] = self.note(node, why)

    @contextmanager
    def _noting(self, key: str) -> Iterator[None]:
        """Note that a key is unknown if what it depends on is."""
        try:
            yield
        except NotKnown as unknown:
            self.unknown[key] = self.note(unknown.node, unknown.why)

    def _made(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name stands for, or the name if that is not known."""
        try:
            return self.assigned(node) if isinstance(node, ast.Name) else node
        except NotKnown:
            return node

    def _unchanged_call(self, node: ast.expr) -> ast.Call | None:
        """Return the call that makes an object; None if that is not known, or it is changed."""
        is_changed = isinstance(node, ast.Name) and any(map(is_stored, self.uses(node.id)))
        constructor = self._made(node)
        return constructor if isinstance(constructor, ast.Call) and not is_changed else None

    def _followed(self, node: ast.expr, check: Callable[[str], None]) -> ast.expr:
        """Return the expression behind names, each of which is checked for changes."""
        while isinstance(node, ast.Name):
            check(node.id)
            node = self.assigned(node)
        return node

    # ---- the trainer and its config

    def _trainer_arguments(self, call: ast.Call, program: str) -> dict[str, ast.expr]:
        """Return the arguments that say something, by name; None is the default of each."""
        arguments = self._keywords(call)
        order = ("model", "ref_model" if program in WITH_REFERENCE else "args")
        for position, argument in enumerate(call.args):
            if position < len(order) and not isinstance(argument, ast.Starred):
                arguments[order[position]] = argument
            else:
                self.unknown[f"(argument {position + 1})"] = self.note(argument)
        for name in ("tokenizer", "processing_class"):
            if name in arguments:  # it says something about TRL's version
                self.values["(tokenizer_argument)"] = name
        for name in OWN_CODE:
            node = arguments.pop(name, None)
            if node is not None and not is_none(node) and ast.unparse(node) != "[]":
                self.unknown[name] = self.note(node, "code of the script, which is not converted")
        return {name: node for name, node in arguments.items()
                if name not in NEEDLESS and not is_none(node)}  # fmt: skip

    def _config(self, arguments: dict[str, ast.expr]) -> None:
        """Read the trainer's config, and settings that older versions took as its arguments."""
        if node := arguments.get("args"):
            config = self._constructor(node, "args")
            if self.origin(config.func).rpartition(".")[2] == "TrainingArguments":
                self.values |= TRANSFORMERS_DEFAULTS
                self.values["(config)"] = "TrainingArguments"
            keywords = self._keywords(config)
            if config.args:
                keywords["output_dir"] = config.args[0]
            for key, expression in keywords.items():
                self._set(key, expression)
            if isinstance(node, ast.Name):
                self._changed_attributes(node.id)
        for key, node in arguments.items():
            if key not in OBJECTS:
                self._set(key, node)
                self.values["(arguments)"] = True

    def _constructor(self, node: ast.expr, what: str) -> ast.Call:
        """Return the call that makes a config."""
        constructor = self._made(node)
        if isinstance(constructor, ast.Call):
            module = self.origin(constructor.func).partition(".")[0]
            if module in ("trl", "transformers") and last_name(constructor.func) not in PARSERS:
                return constructor
        parses = any(last_name(call.func) in PARSERS for call in self.calls())
        way = (
            "pass the command line that trains, with --line"
            if parses
            else "write its settings there"
        )
        raise ConfigError(
            f"{self.path}:{getattr(node, 'lineno', 1)}: {what}={code_of(node)} is only known when "
            f"the script runs; {way}."
        )

    def _changed_attributes(self, name: str) -> None:
        """Settings that are assigned after the config was made may come too late, or not at all."""
        for use in self.uses(name):
            if (
                isinstance(use, ast.Attribute)
                and isinstance(use.value, ast.Name)
                and is_stored(use)
            ):
                self.values.pop(use.attr, None)
                self.unknown[use.attr] = self.note(use, "assigned after the config was made")

    def _later_changes(self, trainer: ast.Call) -> None:
        """Note what a script does to a trainer that it has made."""
        names = [
            ast.unparse(name) for name, expression in self.value_of.items() if expression is trainer
        ]
        for use in chain.from_iterable(map(self.uses, names)):
            if isinstance(use, ast.Attribute) and (is_stored(use) or use.attr in CHANGES_TRAINER):
                self.unknown[ast.unparse(use)] = self.note(use, "it changes the trainer")

    # ---- model, adapter, reference

    def _model(self, arguments: dict[str, ast.expr]) -> None:
        adapters: list[ast.expr] = []
        if node := arguments.get("model"):
            with self._noting("model_name_or_path"):
                self._loaded(node, adapters)
        if peft := arguments.get("peft_config"):
            adapters.append(peft)
        self._adapter(adapters)
        if reference := arguments.get("ref_model"):
            with self._noting("(reference)"):
                self._reference(reference)
        for name in ("processing_class", "tokenizer"):
            if name in arguments:
                with self._noting("tokenizer_name_or_path"):
                    self._tokenizer(arguments[name])

    def _loaded(self, node: ast.expr, adapters: list[ast.expr]) -> None:
        """Read how a model is loaded: its name, dtype, rounding; get_peft_model adds an adapter."""
        node = self._followed(node, self._check_uses)
        if isinstance(node, ast.Constant):
            self.values["model_name_or_path"] = node.value
            return
        if not isinstance(node, ast.Call):
            raise NotKnown(node)
        name = last_name(node.func)
        if name == "get_peft_model" and len(node.args) == 2:
            adapters.append(node.args[1])
            self._loaded(node.args[0], adapters)
        elif name == "prepare_model_for_kbit_training" and node.args:
            self._loaded(node.args[0], adapters)
        elif name in ("to", "cuda") and isinstance(node.func, ast.Attribute):
            self._loaded(node.func.value, adapters)
        elif name == "from_pretrained" and isinstance(node.func, ast.Attribute):
            self._from_pretrained(node, last_name(node.func.value))
        else:
            raise NotKnown(node)

    def _from_pretrained(self, call: ast.Call, kind: str) -> None:
        if not kind.endswith(("ForCausalLM", "ForSequenceClassification")):
            raise NotKnown(call, f"{kind} is not a language model that Rather reads")
        keywords = self._keywords(call)
        name_argument = keywords.pop("pretrained_model_name_or_path", None)
        name = call.args[0] if call.args else name_argument
        if name is None:
            raise NotKnown(call)
        self._set("model_name_or_path", name)
        for key, node in keywords.items():
            if key == "quantization_config":
                self._rounding(node)
            elif key in MODEL:
                self._set(MODEL[key], node)
            elif key not in LOADING and not is_none(node):
                why = f"{kind}.from_pretrained({key}=...) is not read"
                self.unknown[key] = self.note(node, why)

    def _rounding(self, node: ast.expr) -> None:
        if is_none(node):
            return
        constructor = self._unchanged_call(node)
        if constructor is None or last_name(constructor.func) != "BitsAndBytesConfig":
            raise NotKnown(node)
        for key, expression in self._keywords(constructor).items():
            if key in ROUNDED:
                self._set(key, expression)

    def _adapter(self, adapters: list[ast.expr]) -> None:
        if not adapters:
            self.values["use_peft"] = False
            return
        node = adapters[-1]
        constructor = self._unchanged_call(node) if len(adapters) == 1 else None
        if constructor is None or not self.origin(constructor.func).endswith("LoraConfig"):
            self.unknown["(adapter)"] = self.note(node)
            return
        self.values |= {"use_peft": True, **LORA_DEFAULTS}
        for key, expression in self._keywords(constructor).items():
            if key in LORA:
                self._set(LORA[key], expression)
            elif key == "bias" and ast.unparse(expression) != "'none'":
                is_literal = isinstance(expression, ast.Constant)
                why = "an adapter that also trains biases" if is_literal else ""
                self.unknown["bias"] = self.note(expression, why)
            elif key not in ("bias", "task_type", "inference_mode") and not is_none(expression):
                why = f"LoraConfig({key}=...) has no counterpart"
                self.unknown[key] = self.note(expression, why)

    def _reference(self, node: ast.expr) -> None:
        reference_script = Script(self.tree, self.path)
        reference_script._loaded(node, [])
        if reference_script.unknown:
            self.unknown["(reference)"] = "; ".join(reference_script.unknown.values())
        self._set_if_other("(reference)", reference_script.values.get("model_name_or_path"))

    def _tokenizer(self, node: ast.expr) -> None:
        node = self._followed(node, self._check_uses)
        if not isinstance(node, ast.Call) or not node.args:
            raise NotKnown(node)
        if ast.unparse(node.func) != "AutoTokenizer.from_pretrained":
            raise NotKnown(node)
        self._set_if_other("tokenizer_name_or_path", self.value(node.args[0]))

    def _set_if_other(self, key: str, name: object) -> None:
        if name != self.values.get("model_name_or_path"):
            self.values[key] = name

    def _check_uses(self, name: str) -> None:
        """Raise if a script does something to a model or tokenizer that may change the training."""
        for use in self.uses(name):
            path = ast.unparse(use).removeprefix(f"{name}.")
            is_action = isinstance(use, ast.Attribute) and (is_stored(use) or use in self.called)
            if is_action and path not in HARMLESS:
                raise NotKnown(use, f"{ast.unparse(use)} may change what is trained")

    # ---- data

    def _data(self, arguments: dict[str, ast.expr]) -> None:
        if "train_dataset" not in arguments:
            return
        with self._noting("dataset_name"):
            rows = self._rows(arguments["train_dataset"])
            names = {"split": "dataset_train_split", "held_out": "test_split_size"}
            for key in ("dataset_name", "dataset_config", *names):
                if key in rows:
                    self.values[names.get(key, key)] = rows[key]
            if "eval_dataset" in arguments:
                with self._noting("(eval_dataset)"):
                    self._held_out(rows, self._rows(arguments["eval_dataset"], test=True))

    def _held_out(self, train: JsonObject, held_out: JsonObject) -> None:
        if "held_out" in train:
            return
        same = held_out["dataset_name"] == train["dataset_name"] and not train.get("is_file")
        if same and held_out.get("dataset_config") == train.get("dataset_config"):
            self.values["dataset_test_split"] = held_out["split"]
        else:
            self.values["(eval_dataset)"] = held_out

    def _rows(self, node: ast.expr, *, test: bool = False) -> JsonObject:
        """Return the data set that rows are from, its split, and how many of them are held out."""
        node = self._followed(node, self._check_rows)
        match node:
            case ast.Subscript():
                return self._part(self._rows(node.value, test=test), node, test=test)
            case ast.Call() if last_name(node.func) == "load_dataset":
                return self._load_dataset(node)
            case ast.Call(func=ast.Attribute(value=inner, attr="shuffle")):
                return self._rows(inner, test=test)
            case ast.Call(func=ast.Attribute(value=inner, attr="train_test_split")):
                rows = self._rows(inner, test=test)
                by_name = {keyword.arg: keyword.value for keyword in node.keywords}
                size = by_name.get("test_size") or (node.args[0] if node.args else None)
                if size is not None and "held_out" not in rows and rows["split"] is not None:
                    return {**rows, "held_out": self.value(size)}
            case ast.Call(func=ast.Attribute()):
                raise NotKnown(node, f"{code_of(node)} changes the rows; {SAVE_THEM}")
        raise NotKnown(node)

    def _part(self, rows: JsonObject, node: ast.Subscript, *, test: bool) -> JsonObject:
        """Return a part of rows: `data["train"]`."""
        split = self.value(node.slice)
        if "held_out" in rows and split == ("test" if test else "train"):
            return rows
        if "held_out" in rows or rows["split"] is not None:
            raise NotKnown(node)
        return self._file_of({**rows, "split": split}, node)

    def _check_rows(self, name: str) -> None:
        """Raise if rows are replaced or changed in place."""
        for use in self.uses(name):
            is_method = isinstance(use, ast.Attribute) and use.attr in IN_PLACE
            is_part = isinstance(use, ast.Subscript) and is_stored(use)
            if is_method or is_part:
                raise NotKnown(use, f"{code_of(use)} changes the rows; {SAVE_THEM}")

    def _load_dataset(self, call: ast.Call) -> JsonObject:
        order = ("path", "name", "data_dir", "data_files", "split")
        arguments = dict(zip(order, call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg not in (*order, *HUB, "revision"):
                raise NotKnown(keyword.value)
            arguments[keyword.arg or ""] = keyword.value
        settings = {key: self.value(node) for key, node in arguments.items() if key not in HUB}
        if settings.get("data_dir") or settings.get("revision"):
            raise NotKnown(call)
        if not isinstance(settings.get("path"), str):
            raise NotKnown(call)
        rows = {"dataset_name": settings["path"], "split": settings.get("split"),
                "files": settings.get("data_files")}  # fmt: skip
        if settings.get("name"):
            rows["dataset_config"] = settings["name"]
        return self._file_of(rows, call) if rows["split"] is not None else rows

    def _file_of(self, rows: JsonObject, node: ast.AST) -> JsonObject:
        """Return rows of `load_dataset("json", data_files=...)` under the names of their files."""
        files = rows["files"]
        if files is None:
            return rows
        if isinstance(files, dict):
            files = files.get(rows["split"])
        elif rows["split"] != "train":
            raise NotKnown(node)
        if files is None or rows["dataset_name"] not in ("json", "parquet", "arrow", "csv"):
            raise NotKnown(node)
        return {"dataset_name": files, "split": "train", "files": None, "is_file": True}
