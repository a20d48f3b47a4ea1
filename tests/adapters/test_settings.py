"""Adapter settings: every one is honoured or refused with a sentence; files of other programs are read."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest

from rather.cluster.memory import need_of
from rather.cluster.worker import ActorWorker
from rather.config.load import config_from_dict
from rather.config.paths import check_paths
from rather.config.run_config import DPOConfig
from rather.config.schema import ActorModelArgs, ModelArgs
from rather.errors import ConfigError
from rather.model.adapters import adapter_config
from rather.parallel import load
from rather.parallel.load import load_policy
from rather.pipeline.pipeline import DPOPipeline
from rather.plan.memory import known_shapes
from tests.tiny import make_config, nest


def config(args: dict[str, Any] | None = None, **more: Any) -> DPOConfig:
    """`more` has dotted keys with __ for a dot."""
    values: dict[str, Any] = {
        "pretrain": "base",
        "actor_train": {"data_args": {"file_name": "pairs.jsonl"}},
    }
    values["actor_train"]["model_args"] = args or {}
    return config_from_dict(nest(values, more))


TP: dict[str, Any] = {
    "actor_train__strategy_args__tp_size": 2,
    "actor_train__device_mapping": [0, 1],
}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"lora_rank": 4, "lora_dropout": 0.1},
        {},
        "lora_dropout: 0.1 is not 0: both answers of a pair must see the same weights",
    ),
    ({"lora_alpha": 4}, {}, "lora_alpha: needs actor_train.model_args.lora_rank"),
    ({"use_dora": True}, {}, "use_dora: needs actor_train.model_args.lora_rank"),
    (
        {"lora_rank": 4, "adapter_name_or_path": "x"},
        {},
        "lora_rank: cannot be combined with actor_train.model_args.adapter_name_or_path",
    ),
    (
        {"lora_rank": 4, "init_lora_weights": "olora"},
        {},
        "init_lora_weights: 'olora' cannot be used: it must be true, gaussian",
    ),
    (
        {"lora_rank": 4, "init_lora_weights": False},
        {},
        "init_lora_weights: False cannot be used: it must be true, gaussian",
    ),
    (
        {"lora_rank": 4, "init_lora_weights": "pissa", "use_dora": True},
        {},
        "use_dora: cannot be combined with actor_train.model_args.init_lora_weights=pissa",
    ),
    (
        {"lora_rank": 4, "modules_to_save": "norm", "additional_target": "embed_tokens"},
        {},
        'additional_target: "embed_tokens" means actor_train.model_args.modules_to_save: ',
    ),
    (
        {"lora_rank": 4, "additional_target": "norm"},
        TP,
        "additional_target: norm needs whole weights, which tensor parallelism splits",
    ),
    (
        {"additional_target": "norm"},
        {},
        "additional_target: needs actor_train.model_args.lora_rank",
    ),
    (
        {"lora_rank": 4, "use_dora": True},
        TP,
        "use_dora: True needs whole weights, which tensor parallelism splits",
    ),
    (
        {"lora_rank": 4, "init_lora_weights": "pissa"},
        TP,
        "pissa needs whole weights, which tensor parallelism splits",
    ),
    (
        {"lora_rank": 4, "modules_to_save": "norm"},
        TP,
        "norm needs whole weights, which tensor parallelism splits",
    ),
    (
        {"lora_rank": 4},
        {"sync_ref_model": True},
        "sync_ref_model: cannot be combined with actor_train.model_args.lora_rank",
    ),
    (
        {"lora_rank": 4},
        {"reference__offload": "on"},
        "reference.offload: the reference is the policy without its",
    ),
    ({"quantization": "4bit"}, {}, "quantization: needs actor_train.model_args.lora_rank"),
    (
        {"quantization": "4bit", "lora_rank": 4, "init_lora_weights": "pissa"},
        {},
        "quantization: cannot be combined with actor_train.model_args.init_lora_weights=pissa",
    ),
    (
        {"quantization": "4bit", "lora_rank": 4, "use_dora": True},
        {},
        "quantization: cannot be combined with actor_train.model_args.use_dora",
    ),
    (
        {"quantization": "4bit", "lora_rank": 4},
        {"actor_train__device_mapping": [0, 1]},
        "4-bit weights cannot be sharded",
    ),
    (
        {},
        {"reference__model_args__quantization": "4bit"},
        "only a policy with an adapter that is its own reference",
    ),
]


@pytest.mark.parametrize(
    ("args", "more", "sentence"), REFUSED, ids=[sentence[:40] for _, _, sentence in REFUSED]
)
def test_impossible_settings_are_reported(
    args: dict[str, Any], more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config(args, **more)
    assert sentence in str(refused.value)


def test_four_bits_need_their_extra(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "is_bitsandbytes_available", lambda: False)
    settings = {
        "actor_train__model_args__quantization": "4bit",
        "actor_train__model_args__lora_rank": 4,
    }
    with pytest.raises(
        ConfigError, match=r"quantization: 4bit needs bitsandbytes; install rather\[quantization\]"
    ):
        DPOPipeline(make_config(shared, exp_name="extra", **settings)).run()


def test_settings_become_those_of_peft() -> None:
    plain = adapter_config(ActorModelArgs(lora_target="q_proj, v_proj"))
    assert (plain.r, plain.lora_alpha, plain.target_modules) == (8, 16, {"q_proj", "v_proj"})
    own = adapter_config(ActorModelArgs(lora_rank=2, lora_alpha=7, use_rslora=True, use_dora=True))
    assert (own.r, own.lora_alpha, own.target_modules, own.use_rslora, own.use_dora) == (
        2,
        7,
        "all-linear",
        True,
        True,
    )
    roll = adapter_config(ActorModelArgs(lora_rank=2, modules_to_save="norm,embed_tokens"))
    assert roll.modules_to_save == ["norm", "embed_tokens"]


def write(folder: Path, **values: Any) -> dict[str, Any]:
    (folder / "lora.json").write_text(json.dumps(values))
    return {"lora_config": str(folder / "lora.json")}


def test_a_file_of_colossalchat_is_read(tmp_path: Path) -> None:
    file = write(
        tmp_path, r=16, lora_alpha=24, linear_lora_dropout=0, embedding_lora_dropout=0, lora_train_bias="none",
        lora_initialization_method="PiSSA", target_modules=["q_proj", "o_proj"],
    )  # fmt: skip
    read = config(file)
    args = read.actor_train.model_args
    assert (args.lora_rank, args.lora_alpha, args.lora_target) == (16, 24, ["q_proj", "o_proj"])
    assert args.init_lora_weights == "pissa_niter_4"
    assert read.followed["actor_train.model_args.lora_rank"] == "actor_train.model_args.lora_config"
    assert read.keeps_start
    assert config({**file, "lora_rank": 2}).actor_train.model_args.lora_rank == 2


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"r": 4, "linear_lora_dropout": 0.1},
            "0.1 is not allowed: Input should be less than or equal to 0",
        ),
        ({"r": 4, "lora_train_bias": "all"}, "must be none"),
        ({"r": 4, "embedding_lora_dropout": 0.1}, "must be 0"),
        ({"r": 4, "target_module": ["q_proj"]}, "unknown key"),
        ({"r": "four"}, "'four' is not allowed"),
    ],
)
def test_a_file_that_cannot_be_honoured_is_refused(
    tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config(write(tmp_path, **values))
    assert sentence in str(refused.value)


def test_problems_of_settings_in_a_file_name_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, r=4, use_dora=True, lora_initialization_method="PiSSA")
    said = f"lora_config: use_dora in {file['lora_config']}: cannot be combined with"
    with pytest.raises(ConfigError, match=re.escape(said)):
        config(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        config({"lora_config": str(tmp_path / "nowhere.json")})


def test_where_the_reference_is() -> None:
    assert not config().reference_is_policy
    assert config({"lora_rank": 4}).reference_is_policy
    assert not config({"lora_rank": 4}).keeps_start
    existing = {"adapter_name_or_path": "tuned"}
    assert config(existing).keeps_start
    base = config(existing, reference__model_args__adapter_name_or_path=None)
    assert base.reference_is_policy
    assert not base.keeps_start
    for other in (
        {"model_name_or_path": "other"},
        {"adapter_name_or_path": "other"},
        {"dtype": "bf16"},
    ):
        changes = {f"reference__model_args__{key}": value for key, value in other.items()}
        assert not config(existing, **changes).reference_is_policy
    assert not config({"lora_rank": 4}, reference__device_mapping=[1]).reference_is_policy


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"lora_target": "q_project"}, "lora_target: Target modules"),
        (
            {"lora_target": "q_proj,v_project"},
            "lora_target: the model has no module named v_project",
        ),
        (
            {"lora_rank": 2, "modules_to_save": ["norm", "nrom"]},
            "modules_to_save: the model has no module named nrom",
        ),
        (
            {"lora_target": "embed_tokens"},
            "embed_tokens is not a linear layer inside the decoder layers",
        ),
        (
            {"lora_target": ["q_proj", "lm_head"]},
            "lm_head is not a linear layer inside the decoder layers",
        ),
        (
            {"lora_rank": 2, "modules_to_save": "lm_head"},
            "modules_to_save: the embedding of this model is also its head",
        ),
    ],
)
def test_modules_that_cannot_be_adapted_are_refused(
    shared: Path, args: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_policy(str(shared / "base"), ActorModelArgs(**args), "cpu")
    assert sentence in str(refused.value)


def test_a_missing_adapter_is_reported_before_anything_starts(shared: Path) -> None:
    for path, sentence in (
        (shared / "tunde", "tunde does not exist"),
        (shared / "base", "base is not a PEFT adapter"),
    ):
        settings = make_config(shared, actor_train__model_args__adapter_name_or_path=str(path))
        with pytest.raises(
            ConfigError, match=f"actor_train.model_args.adapter_name_or_path: .*{sentence}"
        ):
            check_paths(settings)


def test_a_folder_that_is_not_an_adapter_is_refused(
    shared: Path, tuned: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="base is not a PEFT adapter"):
        load_policy(
            str(shared / "base"), ModelArgs(adapter_name_or_path=str(shared / "base")), "cpu"
        )
    values = json.loads((tuned / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.safetensors").write_bytes(
        (tuned / "adapter_model.safetensors").read_bytes()
    )
    for odd in ({"peft_type": "IA3"}, {"rank_pattern": {"q_proj": 2}}, {"bias": "all"}):
        (tmp_path / "adapter_config.json").write_text(json.dumps(values | odd))
        with pytest.raises(ConfigError, match=f"{next(iter(odd))}: .*variants are supported"):
            load_policy(str(shared / "base"), ModelArgs(adapter_name_or_path=str(tmp_path)), "cpu")


def test_memory_counts_frozen_and_trained_weights_apart(shared: Path) -> None:
    whole = make_config(shared)
    adapted = make_config(shared, actor_train__model_args__lora_rank=4)
    shapes = known_shapes(whole.actor_train.model_path, whole.actor_train.model_args) or {}
    weights = sum(map(prod, shapes.values()))
    full, small = (need_of(each, each.actor_train, "cpu") for each in (whole, adapted))
    assert full is not None
    assert small is not None
    assert full.once == 16 * weights
    assert small.once == 4 * weights + 16 * 3712
    assert small.arithmetic == f"{weights:.3g} weights x 4 bytes + {3712:.3g} weights x 16 bytes"
    workers = (ActorWorker(config, "reference") for config in (adapted, whole))
    shared_model, own_model = (worker.memory_need(worker.worker_config) for worker in workers)
    assert shared_model is None, "the reference is the policy"
    assert own_model is not None


def test_keys_of_adapters_are_not_keys_of_the_reference() -> None:
    with pytest.raises(ConfigError, match="lora_rank"):
        config({}, reference__model_args__lora_rank=4)
