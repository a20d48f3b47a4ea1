"""Weights, gradients and optimizer of one rank, in bytes: what a role holds whatever its micro-batches are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import snapshot_download

from rather.checkpoint.sharded_tensors import ShardedFiles
from rather.config.paths import is_local
from rather.config.schema import ActorModelArgs, DPOConfig, ModelArgs, RoleConfig, as_list
from rather.config.strategies import Layout, layout
from rather.errors import RatherError
from rather.model.files import weight_files
from rather.optim.adamw import BLOCK

if TYPE_CHECKING:
    from rather.model.sizes import Shapes

FOUR_BITS = 0.5  # bytes; scales come on top


class Bytes(NamedTuple):
    """Of one weight, by what they are for."""

    weights: float
    gradients: float = 0.0
    master: float = 0.0
    moments: float = 0.0


class Part(NamedTuple):
    """Weights that are treated alike: how many, their bytes, and those that every rank holds beside its shard."""

    number: int
    each: Bytes
    gathered: float

    @property
    def bytes(self) -> float:
        return sum(self.each)


@dataclass(frozen=True)
class State:
    """What the ranks of a role hold. `cut`: into how many parts tp and pp divide it, `shards`: its optimizer."""

    parts: tuple[Part, ...]
    shards: int
    cut: int

    @property
    def once(self) -> float:
        """Bytes of all ranks together if nothing is held twice."""
        return sum(part.number * part.bytes for part in self.parts)

    @property
    def own(self) -> float:
        """Of one rank, without what is gathered."""
        return self.once / self.shards / self.cut

    @property
    def gathered(self) -> float:
        return sum(part.number * part.gathered for part in self.parts) / self.cut

    @property
    def by_part(self) -> Bytes:
        """`own` by what it is for."""
        sums = (
            sum(part.number * part.each[place] for part in self.parts)
            for place in range(len(Bytes._fields))
        )
        return Bytes(*(number / self.shards / self.cut for number in sums))

    @property
    def trained(self) -> int:
        return sum(part.number for part in self.parts if part.each.moments)


def itemsize(args: ModelArgs, kind: str) -> int:
    """Bytes of a number that is computed with."""
    return 4 if (args.dtype or ("fp32" if kind == "cpu" else "bf16")) == "fp32" else 2


def state_of(
    config: DPOConfig,
    role: RoleConfig,
    kind: str,
    shapes: Shapes,
    args: ModelArgs,
    *,
    narrow: bool = False,
) -> State:
    """`narrow`: gradients are added up in bfloat16, which one device does where nothing else fits."""
    found, compute = layout(role), itemsize(args, kind)
    # In a step zero1 and zero2 hold all weights, zero1 all gradients too; added up in lanes, these are counted below.
    gathered = compute * (0, 1 if found.canonical else 2, 1, 0)[found.stage]
    frozen = Bytes(compute)
    each = _trained(config, found, args, compute, narrow=narrow) if role.trains else frozen
    weights = sum(map(prod, shapes.values()))
    parts: tuple[Part, ...] = (Part(weights, each, gathered),)
    if args.has_adapter:
        base = Bytes(FOUR_BITS) if args.quantization else frozen
        parts = (
            Part(weights, base, compute if gathered else 0),
            Part(adapter_weights(args, shapes), each, gathered),
        )
    return State(parts, found.shard * found.cp if found.stage else 1, found.tp * found.pp)


def _trained(
    config: DPOConfig, found: Layout, args: ModelArgs, compute: int, *, narrow: bool
) -> Bytes:
    """Shards are float32 and their own masters; a bfloat16 weight has a remainder, a float16 one a whole master."""
    if compute == 4 or found.dp * found.cp > 1:
        return Bytes(4, 4, 0, 8)
    if args.dtype == "fp16":
        return Bytes(2, 4, 4, 8)
    if config.precision == "lean":
        return Bytes(2, 2, 0, 2 + 4 / BLOCK)
    return Bytes(2, 2 if narrow and found.devices == 1 else 4, 2, 8)


def adapter_weights(args: ModelArgs, shapes: Shapes) -> int:
    """Numbers in the adapter that a role asks for, by the shapes of the base; at least so many."""
    if args.adapter_name_or_path is not None:
        with suppress(OSError, RatherError):
            saved = ShardedFiles(
                [Path(args.adapter_name_or_path).expanduser() / "adapter_model.safetensors"]
            )
            return sum(prod(saved.shape(name)) for name in saved)
        return 0
    assert isinstance(args, ActorModelArgs)
    targets = as_list(args.lora_target or "all-linear")
    layers = {
        name: shape for name, shape in shapes.items() if ".layers." in name and len(shape) == 2
    }
    wanted = [
        s
        for name, s in layers.items()
        if targets == ["all-linear"] or name.split(".")[-2] in targets
    ]
    return (args.lora_rank or 8) * sum(map(sum, wanted))


def stored_weights(name: str, revision: str | None) -> int | None:
    """Numbers in the model's files, where these are on this machine."""
    shapes = stored_shapes(name, revision)
    return None if shapes is None else sum(map(prod, shapes.values()))


def stored_shapes(name: str, revision: str | None) -> dict[str, tuple[int, ...]] | None:
    """Of the weights in the model's files, where these are on this machine; what is tied is one."""
    try:
        folder = Path(
            name
            if is_local(name)
            else snapshot_download(name, revision=revision, local_files_only=True)
        )
        tied = _json(folder / "config.json").get("tie_word_embeddings", False)
        stored = ShardedFiles(weight_files(folder))
    except (OSError, ValueError, RatherError):  # loading tells why
        return None
    return {key: stored.shape(key) for key in stored if not (tied and key == "lm_head.weight")}


def _json(file: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
