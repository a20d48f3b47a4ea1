"""Weights, gradients and optimizer of one rank, in bytes: independent of the micro-batches."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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

FOUR_BITS = 0.5  # bytes; scales are counted separately


class WeightBytes(NamedTuple):
    """Bytes of one weight, by purpose."""

    weights: float
    gradients: float = 0.0
    master: float = 0.0
    moments: float = 0.0


class Part(NamedTuple):
    """Weights that are treated alike: their number, their bytes, and extra bytes on every rank."""

    number: int
    each: WeightBytes
    gathered: float


@dataclass(frozen=True)
class RoleState:
    """What the ranks of a role hold: `cut` by tp and pp, with the optimizer in `shards`."""

    parts: tuple[Part, ...]
    shards: int
    cut: int

    @property
    def total(self) -> float:
        """The bytes of all ranks together, if nothing is held twice."""
        return sum(part.number * sum(part.each) for part in self.parts)

    @property
    def own(self) -> float:
        """The bytes of one rank, without what is gathered."""
        return self.total / self.shards / self.cut

    @property
    def gathered(self) -> float:
        return sum(part.number * part.gathered for part in self.parts) / self.cut

    @property
    def by_purpose(self) -> WeightBytes:
        """The bytes of `own` by purpose."""
        columns = zip(*([part.number * x for x in part.each] for part in self.parts), strict=True)
        return WeightBytes(*(sum(column) / self.shards / self.cut for column in columns))

    @property
    def trained(self) -> int:
        return sum(part.number for part in self.parts if part.each.moments)


def itemsize(args: ModelArgs, kind: str) -> int:
    """Return the bytes of a number that is computed with."""
    return 4 if (args.dtype or ("fp32" if kind == "cpu" else "bf16")) == "fp32" else 2


def role_state(
    config: DPOConfig,
    role: RoleConfig,
    kind: str,
    shapes: Shapes,
    args: ModelArgs,
    *,
    narrow: bool = False,
) -> RoleState:
    """Return the state of a role. `narrow`: gradients are summed in bfloat16, as a last resort."""
    found, compute = layout(role), itemsize(args, kind)
    # In a step zero1 and zero2 hold all weights, zero1 also all gradients; those that are summed in
    # lanes are counted elsewhere.
    gathered = compute * (0, 1 if found.canonical else 2, 1, 0)[found.stage]
    frozen = WeightBytes(compute)
    each = _trained_bytes(config, found, args, compute, narrow) if role.trains else frozen
    weights = sum(map(prod, shapes.values()))
    parts: tuple[Part, ...] = (Part(weights, each, gathered),)
    if args.has_adapter:
        base = WeightBytes(FOUR_BITS) if args.quantization else frozen
        adapter = Part(adapter_weights(args, shapes), each, gathered)
        parts = (Part(weights, base, compute if gathered else 0), adapter)
    return RoleState(parts, found.shard * found.cp if found.stage else 1, found.tp * found.pp)


def _trained_bytes(
    config: DPOConfig, found: Layout, args: ModelArgs, compute: int, narrow: bool
) -> WeightBytes:
    """Shards are float32 masters; bfloat16 has a remainder, float16 a whole master."""
    if compute == 4 or found.dp * found.cp > 1:
        return WeightBytes(4, 4, 0, 8)
    if args.dtype == "fp16":
        return WeightBytes(2, 4, 4, 8)
    if config.precision == "lean":
        return WeightBytes(2, 2, 0, 2 + 4 / BLOCK)
    return WeightBytes(2, 2 if narrow and found.devices == 1 else 4, 2, 8)


def adapter_weights(args: ModelArgs, shapes: Shapes) -> int:
    """Return how many weights the adapter of a role has, given the shapes of the base."""
    if args.adapter_name_or_path is not None:
        folder = Path(args.adapter_name_or_path).expanduser()
        with suppress(OSError, RatherError):
            saved = ShardedFiles([folder / "adapter_model.safetensors"])
            return sum(prod(saved.shape(name)) for name in saved)
        return 0
    assert isinstance(args, ActorModelArgs)
    targets = as_list(args.lora_target or "all-linear")
    wanted = [
        shape
        for name, shape in shapes.items()
        if ".layers." in name
        and len(shape) == 2
        and (targets == ["all-linear"] or name.split(".")[-2] in targets)
    ]
    return (args.lora_rank or 8) * sum(map(sum, wanted))


def stored_weights(name: str, revision: str | None) -> int | None:
    """Return how many weights the files of a model have; None if they are not on this machine."""
    shapes = stored_shapes(name, revision)
    return None if shapes is None else sum(map(prod, shapes.values()))


def stored_shapes(name: str, revision: str | None) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes in the files of a model, without tied copies; None if they are not here."""
    try:
        if not is_local(name):
            name = snapshot_download(name, revision=revision, local_files_only=True)
        config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
        stored = ShardedFiles(weight_files(Path(name)))
    except (OSError, ValueError, RatherError):  # loading the model reports the reason
        return None
    tied = config.get("tie_word_embeddings", False)
    return {key: stored.shape(key) for key in stored if not (tied and key == "lm_head.weight")}
