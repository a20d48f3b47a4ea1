"""A model folder is untrusted: weights, config, tokenizer and index run no code."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rather.config.schema import ModelArgs
from rather.data.template import load_tokenizer
from rather.errors import ConfigError, DataError
from rather.model.files import weight_files
from rather.parallel.load import load_policy
from tests.commands.conftest import exits
from tests.security.conftest import Bait, Config, change

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def test_the_bait_works(tmp_path: Path) -> None:
    """Else all the tests here would pass for nothing."""
    pickle.loads(pickle.dumps(Bait(tmp_path / "taken")))
    assert (tmp_path / "taken").exists()
    torch.save({"model.weight": Bait(tmp_path / "again")}, tmp_path / "x.bin")
    torch.load(tmp_path / "x.bin", weights_only=False)
    assert (tmp_path / "again").exists()


@pytest.mark.parametrize("kind", ["model", "tokenizer"])
def test_the_bait_of_remote_code_works(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With `trust_remote_code`, and only with it."""
    taken = tmp_path / "taken"
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    (model / "evil.py").write_text(f"import pathlib\npathlib.Path({str(taken)!r}).touch()\n")
    change(model / "tokenizer_config.json", **TOKENIZERS["remote class"])
    change(model / "config.json", **CONFIGS["remote code of an unknown family"])

    def opened(trusted: bool) -> Any:
        if kind == "tokenizer":
            return load_tokenizer(str(model), trust_remote_code=trusted)
        return load_policy(str(model), ModelArgs(trust_remote_code=trusted), "cpu")

    for trusted in (False, True):
        with pytest.raises((ConfigError, DataError)):  # there is no such class in it
            opened(trusted)
        assert taken.exists() is trusted


# --- weights ---


@pytest.mark.parametrize(
    "name", [WEIGHTS, "pytorch_model.bin", "adapter_model.bin", "model.pt", "model.ckpt"]
)
def test_pickled_weights(config: Config, model: Path, pickled: bytes, name: str) -> None:
    (model / WEIGHTS).unlink()
    (model / name).write_bytes(pickled)
    assert "its weights cannot be opened" in exits(2, "train", config())


def test_weights_of_torch_save(config: Config, model: Path, marker: Path) -> None:
    (model / WEIGHTS).unlink()
    torch.save({"model.embed_tokens.weight": Bait(marker)}, model / "pytorch_model.bin")
    change(model / "config.json", transformers_weights="pytorch_model.bin")
    exits(2, "train", config())
    change(model / "config.json", transformers_weights="adapter_model.bin")
    (model / "pytorch_model.bin").rename(model / "adapter_model.bin")
    assert "config.json has transformers_weights" in exits(2, "train", config())


def sharded(model: Path, name: str = "model-00001-of-00001.safetensors") -> Path:
    """The weights behind an index, which says where they lie."""
    shard = (model / name).absolute() if not Path(name).is_absolute() else Path(name)
    weights = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    shard.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, shard, metadata={"format": "pt"})
    (model / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, name)})
    )
    return shard


def test_an_honest_index_is_followed(model: Path) -> None:
    sharded(model)
    assert load_policy(str(model), ModelArgs(), "cpu")


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "{tmp}/out.safetensors", "a/b.safetensors", "x.bin"]
)
def test_an_index_cannot_lead_out(config: Config, model: Path, tmp_path: Path, name: str) -> None:
    sharded(model, name.replace("{tmp}", str(tmp_path)))
    assert "only .safetensors files next to it are read" in exits(2, "train", config())


def test_an_invalid_index_is_refused(model: Path) -> None:
    (model / WEIGHTS).unlink()
    for text in ("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000):
        (model / INDEX).write_text(text)
        with pytest.raises(ConfigError, match=r"index\.json: (is not an index|lists)"):
            weight_files(model)


def test_a_linked_shard_cannot_lead_out(config: Config, model: Path, tmp_path: Path) -> None:
    shard = sharded(model)
    elsewhere = tmp_path / "private.safetensors"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    assert "outside of its folder; copy the file into it" in exits(2, "train", config())


def test_links_inside_the_folder_and_of_a_hub_cache_are_followed(
    model: Path, tmp_path: Path
) -> None:
    (model / WEIGHTS).rename(model / "blob")
    (model / WEIGHTS).symlink_to("blob")
    assert weight_files(model) == [model / WEIGHTS]
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    snapshot = Path(
        shutil.copytree(model, tmp_path / "models--a--b" / "snapshots" / "0a1b", symlinks=True)
    )
    (snapshot / "blob").rename(tmp_path / "models--a--b" / "blobs" / "0c")
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to("../../blobs/0c")
    assert load_policy(str(snapshot), ModelArgs(), "cpu")


# --- config.json ---

REMOTE = {
    "AutoConfig": "evil.EvilConfig",
    "AutoModelForCausalLM": "evil.EvilModel",
    "AutoTokenizer": ["evil.T", None],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "remote code of an unknown family": {"model_type": "evil", "auto_map": REMOTE},
    "remote code of another repository": {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "them/repo--evil.C"},
    },
    "an unknown way of quantising": {
        "quantization_config": {"quant_method": "evil", "_target_": "os.system"}
    },
    "a known way of quantising": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "quantisation that is no mapping": {"quantization_config": "os.system('touch code-ran-here')"},
    "a config that is a list": {"model_type": ["evil"]},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_asks_for_code(config: Config, model: Path, python: str, case: str) -> None:
    (model / "evil.py").write_text(python)
    change(model / "config.json", **CONFIGS[case])
    assert "cannot be" in exits((2, 3), "train", config()).splitlines()[-1]


@pytest.mark.parametrize(
    "values",
    [
        {"auto_map": REMOTE},
        {"_target_": "os.system", "architectures": ["os.system"]},
        {"attn_implementation": "them/kernel", "experts_implementation": None},
        {"torch_dtype": "__import__('os').system('touch code-ran-here')"},
    ],
    ids=["remote code beside a known family", "target", "a kernel of a hub", "a dtype"],
)
def test_a_config_whose_code_is_not_asked(
    model: Path, marker: Path, python: str, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    from transformers.integrations import hub_kernels

    def fetched(*_: Any, **__: Any) -> None:
        marker.touch()

    monkeypatch.setattr(hub_kernels, "get_kernel", fetched)
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fetched)
    (model / "evil.py").write_text(python)
    change(model / "config.json", **values)
    try:
        assert (
            type(load_policy(str(model), ModelArgs(), "cpu").causal_lm).__name__
            == "LlamaForCausalLM"
        )
    except ConfigError as error:
        assert "cannot be opened" in str(error)  # noqa: PT017  (either way is fine; the marker decides)


# --- tokenizer ---


TOKENIZERS: dict[str, dict[str, Any]] = {
    "remote code": {"auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}},
    "remote class": {
        "auto_map": {"AutoTokenizer": ["evil.EvilT", None]},
        "tokenizer_class": "EvilTokenizer",
    },
    "a function": {"tokenizer_class": "os.system"},
    "another repository": {
        "tokenizer_class": "evil.T",
        "auto_map": {"AutoTokenizer": "them/repo--evil.EvilT"},
    },
    "a target": {
        "extra_special_tokens": {
            "a": {"__type": "AddedToken", "content": "x", "_target_": "os.system"}
        }
    },
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_that_asks_for_code(
    config: Config, model: Path, python: str, case: str
) -> None:
    (model / "evil.py").write_text(python)
    (model / "tokenizer.py").write_text(python)
    change(model / "tokenizer_config.json", **TOKENIZERS[case])
    exits((0, 2, 3), "data", config())


def test_a_pickled_tokenizer(config: Config, model: Path, pickled: bytes) -> None:
    for name in ("tokenizer.json", "tokenizer.model", "vocab.pkl", "tokenizer.pkl"):
        (model / name).write_bytes(pickled)
    exits(3, "data", config())


def test_a_tokenizer_cannot_fill_the_memory(model: Path, tmp_path: Path) -> None:
    """Three hundred bytes would make 10^12 characters of one, in a native library."""
    longer = {"type": "Replace", "pattern": {"String": "w"}, "content": "w" * 100}
    for part in ("normalizer", "decoder"):
        folder = Path(shutil.copytree(model, tmp_path / part))
        change(folder / "tokenizer.json", **{part: {"type": "Sequence", f"{part}s": [longer] * 6}})
        assert f"the {part} of its tokenizer can make a text more than 1,000" in exits(
            3, "chat", folder, "--prompt", "w1"
        )


def test_a_regular_expression_that_never_ends(model: Path) -> None:
    expensive = {"Regex": "(w+)+(w+)+(w+)+$x"}
    split = {"type": "Split", "pattern": expensive, "behavior": "Isolated", "invert": False}
    change(model / "tokenizer.json", pre_tokenizer=split)
    assert "the tokenizer fails" in exits(3, "chat", model, "--prompt", "w" * 60)


def test_a_tokenizers_own_template_runs_in_the_sandbox(config: Config, model: Path) -> None:
    escape = "{{ cycler.__init__.__globals__.os.system('touch code-ran-here') }}"
    change(model / "tokenizer_config.json", chat_template=escape)
    (model / "chat_template.jinja").write_text(escape)
    assert load_tokenizer(str(model)).chat_template == escape
    assert "is unsafe" in exits(3, "data", config())
