"""Read a training script that uses TRL, without running it.

The settings are the literals in the calls of the trainer, its config, LoraConfig, load_dataset and
from_pretrained. A name stands for the last literal that was assigned to it, if no branch, loop or
function argument may have changed it. Everything else is only known when the script runs.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from rather.config.redaction import looks_secret
from rather.errors import ConfigError
from rather.files import JsonObject, yaml_text
from rather.tools.migrate.python_values import Module, NotKnown, base_of, code_of, is_none
from rather.tools.migrate.settings import SourceSettings

TRAINERS = {f"{name}Trainer": name.lower()
            for name in ("DPO", "KTO", "ORPO", "CPO", "BCO", "SFT")} | {"RewardTrainer": "reward"}  # fmt: skip
WITH_REFERENCE = ("dpo", "kto", "bco")
PARSERS = ("parse_args_and_config", "parse_args_into_dataclasses", "parse_yaml_file", "parse")
TRANSFORMERS_DEFAULTS = {"learning_rate": 5e-5, "bf16": False, "logging_steps": 500}
# Arguments of a trainer that are objects, and those that change no training.
OWN_CODE = ("data_collator", "optimizers", "formatting_func", "model_init", "compute_loss_func",
            "callbacks", "optimizer_cls_and_kwargs")  # fmt: skip
NEEDLESS = ("compute_metrics", "preprocess_logits_for_metrics")
# Arguments of from_pretrained that change no result, and those with a key of TRL.
LOADING = """
    device_map use_cache low_cpu_mem_usage cache_dir token use_auth_token local_files_only return_dict max_memory
    offload_folder num_labels attn_implementation use_flash_attention_2
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
    print_trainable_parameters gradient_checkpointing_enable enable_input_require_grads train eval to cuda
    config.use_cache config.pretraining_tp config.pad_token_id pad_token pad_token_id padding_side save_pretrained
    push_to_hub generate decode batch_decode apply_chat_template device config eos_token model_max_length
    get_memory_footprint generation_config
""".split()  # noqa: SIM905 - a table of names
# Settings that change what a run writes or how fast it is, and not what it trains.
OUTPUT = """
    output_dir overwrite_output_dir run_name project logging_dir logging_steps logging_strategy logging_first_step report_to
    save_steps save_strategy save_total_limit save_only_model push_to_hub hub_model_id hub_token hub_strategy
    hub_private_repo hub_revision eval_steps eval_strategy evaluation_strategy per_device_eval_batch_size do_eval do_train
    dataset_num_proc dataloader_num_workers dataloader_pin_memory remove_unused_columns gradient_checkpointing
    gradient_checkpointing_kwargs disable_tqdm log_level tf32 resume_from_checkpoint ddp_find_unused_parameters
""".split()  # noqa: SIM905 - a table of names
CHANGES_TRAINER = ("add_callback", "pop_callback", "remove_callback", "create_optimizer",
                   "create_scheduler", "create_optimizer_and_scheduler")  # fmt: skip
IN_PLACE = ("set_transform", "set_format")  # what changes the rows of a data set


@dataclass
class Found:
    """What a script sets, and what is only known when it runs, by key."""

    values: JsonObject = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # it changes no training


def read_script(path: Path) -> SourceSettings:
    """Read the settings of the one trainer that a script calls."""
    try:
        tree = ast.parse(yaml_text(path))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: cannot be read as Python ({error}).") from None
    try:
        return Script(tree, path).settings()
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply to be read.") from None


def trainer_in(path: Path) -> str:
    """Return the trainer of TRL that a script calls, such as `dpo`; empty if not exactly one."""
    try:
        calls = Script(ast.parse(yaml_text(path)), path).trainers()
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    return TRAINERS[calls[0][0]] if len(calls) == 1 else ""


class Script(Module):
    """The calls of a script that make a training."""

    def trainers(self) -> list[tuple[str, ast.Call]]:
        """Return the calls of trainers that are TRL's own."""
        found = []
        for call in self.calls():
            module, _, name = self.origin(call.func).rpartition(".")
            if module.partition(".")[0] == "trl" and name in TRAINERS:
                found.append((name, call))
        return found

    def settings(self) -> SourceSettings:
        trainers = self.trainers()
        if not trainers:
            raise ConfigError(
                f"{self.path}: calls none of TRL's trainers ({', '.join(TRAINERS)}); pass the "
                "command line that trains, with --line."
            )
        if len(trainers) > 1:
            places = ", ".join(f"{name} in line {call.lineno}" for name, call in trainers)
            raise ConfigError(f"{self.path}: has several trainers ({places}); keep one of them.")
        name, call = trainers[0]
        program = TRAINERS[name]
        found = Found({"(script)": self.path.name})
        arguments = self._trainer_arguments(call, program, found)
        self._config(call, arguments, found)
        self._model(arguments, program, found)
        self._data(arguments, found)
        self._possible_versions(arguments, found)
        self._later_changes(call, found)
        return SourceSettings(
            self.path.name, found.values, words=("trl", program), program=program,
            folder=self.path.parent, unknown=found.unknown, left_out=found.left_out,
        )  # fmt: skip

    def _keywords(self, call: ast.Call, found: Found) -> dict[str, ast.expr]:
        """Return the named arguments of a call; those of `**mapping` are not known."""
        named = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                code = f"**{ast.unparse(keyword.value)}"
                found.unknown[code] = self.note(keyword.value)
            else:
                named[keyword.arg] = keyword.value
        return named

    def _set(self, key: str, node: ast.expr, found: Found) -> None:
        try:
            found.values[key] = self.value(node)
        except NotKnown as unknown:
            found.values.pop(key, None)
            target = found.left_out if key in OUTPUT else found.unknown
            why = "only known when it runs" if looks_secret(key) else unknown.why
            target[key] = self.note(node, why)

    def _trainer_arguments(self, call: ast.Call, program: str, found: Found) -> dict[str, ast.expr]:
        arguments = self._keywords(call, found)
        order = ("model", "ref_model" if program in WITH_REFERENCE else "args")
        for place, argument in enumerate(call.args):
            if place < len(order) and not isinstance(argument, ast.Starred):
                arguments[order[place]] = argument
            else:
                found.unknown[f"(argument {place + 1})"] = self.note(argument)
        for name in OWN_CODE:
            node = arguments.pop(name, None)
            if node is not None and not is_none(node) and ast.unparse(node) != "[]":
                found.unknown[name] = self.note(node, "code of the script, which is not converted")
        return {name: node for name, node in arguments.items() if name not in NEEDLESS}

    def _config(self, call: ast.Call, arguments: dict[str, ast.expr], found: Found) -> None:
        """Read the trainer's config, and settings that older versions took as its arguments."""
        node = arguments.pop("args", None)
        if node is not None and not is_none(node):
            config = self._constructor(node, "args")
            if self.origin(config.func).rpartition(".")[2] == "TrainingArguments":
                found.values |= TRANSFORMERS_DEFAULTS
                found.values["(config)"] = "TrainingArguments"
            keywords = self._keywords(config, found)
            if config.args:
                keywords["output_dir"] = config.args[0]
            for key, value in keywords.items():
                self._set(key, value, found)
            if isinstance(node, ast.Name):
                self._changed_attributes(node.id, found)
        for key in [name for name in arguments if name not in (
            "model", "ref_model", "train_dataset", "eval_dataset", "peft_config", "tokenizer",
            "processing_class")]:  # fmt: skip
            if not is_none(arguments[key]):
                self._set(key, arguments[key], found)
                found.values["(arguments)"] = True

    def _constructor(self, node: ast.expr, what: str) -> ast.Call:
        """Return the call that makes a config."""
        try:
            made = self.assigned(node) if isinstance(node, ast.Name) else node
        except NotKnown:
            made = node
        if isinstance(made, ast.Call):
            module, name = self.origin(made.func).partition(".")[0], ast.unparse(made.func)
            if module in ("trl", "transformers") and name.rpartition(".")[2] not in PARSERS:
                return made
        parses = any(ast.unparse(call.func).rpartition(".")[2] in PARSERS for call in self.calls())
        way = (
            "pass the command line that trains, with --line"
            if parses
            else "write its settings there"
        )
        raise ConfigError(
            f"{self.path}:{getattr(node, 'lineno', 1)}: {what}={code_of(node)} is only known when "
            f"the script runs; {way}."
        )

    def _changed_attributes(self, name: str, found: Found) -> None:
        """Settings that are assigned after the config was made may come too late, or not at all."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            if ast.unparse(node.value) == name:
                found.values.pop(node.attr, None)
                found.unknown[node.attr] = self.note(node, "assigned after the config was made")

    def _later_changes(self, call: ast.Call, found: Found) -> None:
        """Note what a script does to a trainer that it has made."""
        names = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and node.value is call:
                names |= {ast.unparse(target) for target in node.targets}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Attribute) or base_of(node) not in names:
                continue
            if isinstance(node.ctx, ast.Store) or node.attr in CHANGES_TRAINER:
                found.unknown[ast.unparse(node)] = self.note(node, "it changes the trainer")

    def _is_changed_object(self, node: ast.expr) -> bool:
        """Return whether attributes are assigned to an object after it was made."""
        name = node.id if isinstance(node, ast.Name) else None
        return any(isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                   and base_of(each) == name for each in ast.walk(self.tree))  # fmt: skip

    # ---- model, adapter, reference

    def _model(self, arguments: dict[str, ast.expr], program: str, found: Found) -> None:
        node = arguments.get("model")
        adapters: list[ast.expr] = []
        if node is not None:
            try:
                self._loaded(node, found, adapters)
            except NotKnown as unknown:
                found.unknown["model_name_or_path"] = self.note(unknown.node, unknown.why)
        if (peft := arguments.get("peft_config")) is not None and not is_none(peft):
            adapters.append(peft)
        self._adapter(adapters, found)
        reference = arguments.get("ref_model")
        if reference is not None and not is_none(reference):
            self._reference(reference, found)
        for name in ("processing_class", "tokenizer"):
            if name in arguments:
                self._tokenizer(arguments[name], found)

    def _loaded(self, node: ast.expr, found: Found, adapters: list[ast.expr]) -> None:
        """Read how a model is loaded: its name, dtype, rounding; get_peft_model adds an adapter."""
        while isinstance(node, ast.Name):
            self._check_uses(node.id, node)
            node = self.assigned(node)
        if isinstance(node, ast.Constant):
            found.values["model_name_or_path"] = node.value
            return
        if not isinstance(node, ast.Call):
            raise NotKnown(node)
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "get_peft_model" and len(node.args) == 2:
            adapters.append(node.args[1])
            self._loaded(node.args[0], found, adapters)
        elif name == "prepare_model_for_kbit_training" and node.args:
            self._loaded(node.args[0], found, adapters)
        elif name in ("to", "cuda") and isinstance(node.func, ast.Attribute):
            self._loaded(node.func.value, found, adapters)
        elif name == "from_pretrained" and isinstance(node.func, ast.Attribute):
            self._from_pretrained(node, found)
        else:
            raise NotKnown(node)

    def _from_pretrained(self, call: ast.Call, found: Found) -> None:
        assert isinstance(call.func, ast.Attribute)
        kind = ast.unparse(call.func.value).rpartition(".")[2]
        if not kind.endswith(("ForCausalLM", "ForSequenceClassification")):
            raise NotKnown(call, f"{kind} is not a language model that Rather reads")
        keywords = self._keywords(call, found)
        names = [*call.args, *(keywords.pop(key) for key in ("pretrained_model_name_or_path",)
                               if key in keywords)]  # fmt: skip
        if not names:
            raise NotKnown(call)
        self._set("model_name_or_path", names[0], found)
        for key, node in keywords.items():
            if key == "quantization_config":
                self._rounding(node, found)
            elif key in MODEL:
                self._set(MODEL[key], node, found)
            elif key not in LOADING and not is_none(node):
                found.unknown[key] = self.note(
                    node, f"{kind}.from_pretrained({key}=...) is not read"
                )

    def _rounding(self, node: ast.expr, found: Found) -> None:
        if is_none(node):
            return
        made = self.assigned(node) if isinstance(node, ast.Name) else node
        if self._is_changed_object(node):
            raise NotKnown(node)
        if not isinstance(made, ast.Call) or not ast.unparse(made.func).endswith(
            "BitsAndBytesConfig"
        ):
            raise NotKnown(node)
        for key, value in self._keywords(made, found).items():
            if key in ROUNDED:
                self._set(key, value, found)

    def _adapter(self, adapters: list[ast.expr], found: Found) -> None:
        if not adapters:
            found.values["use_peft"] = False
            return
        node = adapters[-1]
        try:
            made = self.assigned(node) if isinstance(node, ast.Name) else node
        except NotKnown:
            made = node
        is_lora = isinstance(made, ast.Call) and self.origin(made.func).endswith("LoraConfig")
        is_changed = self._is_changed_object(node)
        if len(adapters) > 1 or is_changed or not is_lora or not isinstance(made, ast.Call):
            found.unknown["(adapter)"] = self.note(node)
            return
        found.values |= {"use_peft": True, **LORA_DEFAULTS}
        for key, value in self._keywords(made, found).items():
            if key in LORA:
                self._set(LORA[key], value, found)
            elif key == "bias" and ast.unparse(value) != "'none'":
                is_literal = isinstance(value, ast.Constant)
                why = "an adapter that also trains biases" if is_literal else ""
                found.unknown["bias"] = self.note(value, why)
            elif key not in ("bias", "task_type", "inference_mode") and not is_none(value):
                found.unknown[key] = self.note(value, f"LoraConfig({key}=...) has no counterpart")

    def _reference(self, node: ast.expr, found: Found) -> None:
        other = Found()
        try:
            self._loaded(node, other, [])
        except NotKnown as unknown:
            found.unknown["(reference)"] = self.note(unknown.node, unknown.why)
            return
        if other.unknown:
            found.unknown["(reference)"] = "; ".join(other.unknown.values())
        name = other.values.get("model_name_or_path")
        if name != found.values.get("model_name_or_path"):
            found.values["(reference)"] = name

    def _tokenizer(self, node: ast.expr, found: Found) -> None:
        try:
            if isinstance(node, ast.Name):
                self._check_uses(node.id, node)
                node = self.assigned(node)
            if not isinstance(node, ast.Call) or not node.args:
                raise NotKnown(node)
            if ast.unparse(node.func) != "AutoTokenizer.from_pretrained":
                raise NotKnown(node)
            name = self.value(node.args[0])
        except NotKnown as unknown:
            found.unknown["tokenizer_name_or_path"] = self.note(unknown.node, unknown.why)
            return
        if name != found.values.get("model_name_or_path"):
            found.values["tokenizer_name_or_path"] = name

    def _check_uses(self, name: str, at: ast.AST) -> None:
        """Raise if a script does something to a model or tokenizer that may change the training."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Attribute) or base_of(node) != name:
                continue
            path = ast.unparse(node).removeprefix(f"{name}.")
            is_stored = isinstance(node.ctx, ast.Store)
            if (is_stored or node in self.called) and path not in HARMLESS:
                raise NotKnown(node, f"{ast.unparse(node)} may change what is trained")

    # ---- data

    def _data(self, arguments: dict[str, ast.expr], found: Found) -> None:
        node = arguments.get("train_dataset")
        if node is None:
            return
        try:
            train = self._rows(node)
        except NotKnown as unknown:
            found.unknown["dataset_name"] = self.note(unknown.node, unknown.why)
            return
        found.values |= {
            key: train[key] for key in ("dataset_name", "dataset_config") if key in train
        }
        found.values["dataset_train_split"] = train["split"]
        if train.get("held_out") is not None:
            found.values["test_split_size"] = train["held_out"]
        evaluated = arguments.get("eval_dataset")
        if evaluated is None or is_none(evaluated):
            return
        try:
            held_out = self._rows(evaluated, test=True)
        except NotKnown as unknown:
            found.unknown["(eval_dataset)"] = self.note(unknown.node, unknown.why)
            return
        if train.get("held_out") is not None:
            return
        same = held_out["dataset_name"] == train["dataset_name"] and not train.get("is_file")
        if same and held_out.get("dataset_config") == train.get("dataset_config"):
            found.values["dataset_test_split"] = held_out["split"]
        else:
            found.values["(eval_dataset)"] = held_out

    def _rows(self, node: ast.expr, *, test: bool = False) -> JsonObject:
        """Return the data set that rows are from, its split, and how many of them are held out."""
        while isinstance(node, ast.Name):
            self._check_rows(node.id)
            node = self.assigned(node)
        if isinstance(node, ast.Subscript):
            part = self.value(node.slice)
            rows = self._rows(node.value, test=test)
            if rows.get("held_out") is not None:
                if part != ("test" if test else "train"):
                    raise NotKnown(node)
                return rows
            if rows["split"] is not None:
                raise NotKnown(node)
            return self._file_of({**rows, "split": part}, node)
        if not isinstance(node, ast.Call):
            raise NotKnown(node)
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "load_dataset":
            return self._load_dataset(node)
        if name == "shuffle" and isinstance(node.func, ast.Attribute):
            return self._rows(node.func.value, test=test)
        if name == "train_test_split" and isinstance(node.func, ast.Attribute):
            rows = self._rows(node.func.value, test=test)
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            size = named.get("test_size") or (node.args[0] if node.args else None)
            if size is None or rows.get("held_out") is not None or rows["split"] is None:
                raise NotKnown(node)
            return {**rows, "held_out": self.value(size)}
        if not isinstance(node.func, ast.Attribute):
            raise NotKnown(node)
        raise NotKnown(node, f"{code_of(node)} changes the rows; save them to a file of their own")

    def _check_rows(self, name: str) -> None:
        """Raise if rows are replaced or changed in place."""
        for node in ast.walk(self.tree):
            is_stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
            is_changed = isinstance(node, ast.Attribute) and node.attr in IN_PLACE
            if (is_stored or is_changed) and base_of(node) == name:
                raise NotKnown(
                    node, f"{code_of(node)} changes the rows; save them to a file of their own"
                )

    def _load_dataset(self, call: ast.Call) -> JsonObject:
        order = ("path", "name", "data_dir", "data_files", "split")
        given = dict(zip(order, call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg not in (*order, *HUB, "revision"):
                raise NotKnown(keyword.value)
            given[keyword.arg or ""] = keyword.value
        known = {key: self.value(node) for key, node in given.items() if key not in HUB}
        if known.get("data_dir") or known.get("revision") or not isinstance(known.get("path"), str):
            raise NotKnown(call)
        rows = {"dataset_name": known["path"], "split": known.get("split"),
                "files": known.get("data_files")}  # fmt: skip
        if known.get("name"):
            rows["dataset_config"] = known["name"]
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

    def _possible_versions(self, arguments: dict[str, ast.expr], found: Found) -> None:
        """Note what the arguments of the trainer say about TRL's version."""
        for name in ("tokenizer", "processing_class"):
            if name in arguments:
                found.values["(tokenizer_argument)"] = name
