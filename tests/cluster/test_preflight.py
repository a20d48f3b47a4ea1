"""Memory before anything is loaded: what cannot fit is refused with its arithmetic, what may fit is
not."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from rather.cluster.memory import Ledger, Room, free_in_group, free_memory, need_of
from rather.config.schema import ModelArgs
from rather.errors import ConfigError
from rather.plan.memory import known_shapes
from tests.tiny import make_config

DEVICES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preflight")


@pytest.fixture(scope="module")
def weights(folder: Path) -> int:
    shapes = known_shapes(make_config(folder).actor_train.model_path, ModelArgs()) or {}
    found = sum(map(prod, shapes.values()))
    assert found == 17_536  # 63 x 32 embeddings, two layers, a norm; the head is tied
    return found


def need(folder: Path, name: str, kind: str = "cpu", role: str = "actor_train", **args: Any) -> Any:
    strategy = {"strategy_name": name, **args}
    config = make_config(
        folder, actor_train__device_mapping=DEVICES, **{f"{role}__strategy_args": strategy}
    )
    return need_of(config, config.actor_train if role == "actor_train" else config.reference, kind)


ROW = 32  # weights; shards are whole rows, so the 63 rows of the embedding count as 64


@pytest.mark.parametrize(
    ("name", "args", "bytes_a_weight"),
    [
        ("zero1", {}, 16 / 4 + 8),
        ("zero2", {}, 16 / 4 + 4),
        ("zero3", {}, 16 / 4),
        ("hsdp", {"strategy_config": {"shard_size": 2}}, 16 / 2),
    ],
)
def test_each_rank_holds_its_share_of_the_state(
    folder: Path, weights: int, name: str, args: dict[str, Any], bytes_a_weight: float
) -> None:
    assert need(folder, "ddp").host == pytest.approx(weights * 16)
    assert need(folder, name, **args).host == pytest.approx((weights + ROW) * bytes_a_weight)


def test_the_last_stage_holds_the_tied_embedding_as_well(folder: Path, weights: int) -> None:
    layer = (weights - 63 * ROW - ROW) / 2
    norms = 3 * ROW  # each tensor-parallel rank has them whole
    divided = layer - 2 * ROW + 64 * ROW
    found = need(folder, "3d", tp_size=2, pp_size=2)
    assert found.host == pytest.approx((divided / 2 + norms) * 16)


def test_on_a_gpu_the_state_is_there_unless_offloaded(folder: Path, weights: int) -> None:
    on_device, on_host = need(folder, "zero3", "cuda"), need(folder, "gemini_auto", "cuda")
    each = 18 / 4  # 16 bytes, and the low bits of masters, over four ranks
    assert (on_device.device, on_device.host) == ((weights + ROW) * each, 0)
    assert (on_host.device, on_host.host) == (0, (weights + ROW) * each)
    frozen = need(folder, "hf_infer", "cuda", role="reference")
    assert (frozen.device, frozen.host) == (weights * 2, 0)  # in bfloat16, whole


def test_a_machine_must_hold_all_its_workers(folder: Path, weights: int) -> None:
    held, frozen = need(folder, "ddp"), need(folder, "hf_infer", role="reference")
    enough = [Room("a", device, free=4 * weights * (16 + 4), device=0) for device in DEVICES]
    Ledger().add("actor_train", held, enough)
    ledger = Ledger()
    ledger.add(
        "actor_train", held, [Room("a", d, free=4 * weights * 16, device=0) for d in DEVICES]
    )
    with pytest.raises(ConfigError) as refused:  # the policy alone would fit
        ledger.add(
            "reference", frozen, [Room("a", d, free=4 * weights * 16, device=0) for d in DEVICES]
        )
    said = str(refused.value)
    assert said.startswith(
        "memory: a has 0.00105 GiB, and weights, gradients and optimizer alone are 0.00131 GiB: "
    )
    assert (
        "4 x actor_train 1.75e+04 weights x 16 bytes, 4 x reference 1.75e+04 weights x 4 bytes."
        in said
    )


def test_a_gpu_must_hold_its_roles_or_the_error_says_how_many_would(
    folder: Path, weights: int
) -> None:
    held = need(folder, "ddp", "cuda")
    rooms = [Room("a", device, free=1, device=weights * 15) for device in DEVICES]
    with pytest.raises(
        ConfigError, match=r"memory: GPU 0 of a has .+ x 18 bytes\. Divided by .+ need 2 such GPUs"
    ):
        Ledger().add("actor_train", held, rooms)
    Ledger().add("actor_train", need(folder, "zero3", "cuda"), rooms)


def test_a_missing_model_is_reported_when_it_is_loaded(tmp_path: Path) -> None:
    assert known_shapes(str(tmp_path / "nowhere"), ModelArgs()) is None
    Ledger().add("actor_train", None, [])


def test_memory_limits_of_a_container_are_respected(tmp_path: Path) -> None:
    files = {
        "memory.max": "1000\n",
        "memory.current": "700\n",
        "memory.stat": "anon 500\ninactive_file 150\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert list(free_in_group(tmp_path)) == [450]
    (tmp_path / "memory.max").write_text("max\n")
    assert list(free_in_group(tmp_path)) == []
    assert free_memory() > 1 << 20
