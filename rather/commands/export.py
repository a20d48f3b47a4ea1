"""`rather export`: a model, adapter, run or checkpoint as a folder of its own, opened again before it gets its name."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from rather.commands.merge import Merged, log_probs, merge
from rather.config.schema import ModelArgs
from rather.errors import ConfigError
from rather.model.check import TOLERANCE
from rather.model.digest import model_folder
from rather.model.export import publish, whole_adapter, whole_model
from rather.parallel.load import DTYPES, load_policy
from rather.run_folder.model_source import Weights, here, weights_of

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Wanted:
    """What shall be written. Without a dtype that of the source, without a size files of 4 GB."""

    adapter: bool = False  # alone, instead of merged into its base
    dtype: str | None = None
    largest: int | None = None  # bytes of a file


def export(name: str, out: Path, wanted: Wanted) -> str:
    """Writes the folder `out`, complete or not at all; says how its log-probs compare with those of the source."""
    if out.exists():
        raise ConfigError(f"{out}: is there already; name a folder that is not")
    if wanted.adapter and (wanted.dtype or wanted.largest):
        raise ConfigError(
            "--dtype, --shard-size: an adapter is one file in float32; leave them out with --adapter"
        )
    source = _source(name, wanted)
    if not source.args.has_adapter:
        return _model(source, out, wanted)
    if not wanted.adapter and source.checkpoint is None:
        return _merged(str(source.args.adapter_name_or_path), out, wanted)
    return _adapter(source, out, wanted)


def bytes_of(size: str) -> int:
    """5GB, 500MB: powers of ten, as transformers counts."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)", size.strip(), re.IGNORECASE)
    if not found or float(found[1]) == 0:
        raise ConfigError(f"--shard-size {size}: write a number and KB, MB or GB, such as 5GB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def _source(name: str, wanted: Wanted) -> Weights:
    """Of a run with an adapter, the adapter lies beside the model that it was merged into."""
    beside = Path(name).expanduser() / "adapter"
    source = weights_of(
        str(beside) if wanted.adapter and (beside / "adapter_config.json").is_file() else name
    )
    if wanted.adapter and not source.args.has_adapter:
        raise ConfigError(f"--adapter: {name} has no adapter; leave it out to export the model")
    return source


def _model(source: Weights, out: Path, wanted: Wanted) -> str:
    device = here()
    policy = source.load(device, "fp32")
    config = policy.causal_lm.config
    config.dtype = DTYPES[wanted.dtype] if wanted.dtype else config.dtype
    before = log_probs(policy, device)
    temporary = whole_model(policy, {}, source.tokenizer(), out, wanted.largest)
    dtype = config.dtype
    del policy
    return _published(source, temporary, out, before, dtype, ModelArgs(dtype="fp32"))


def _adapter(source: Weights, out: Path, wanted: Wanted) -> str:
    device = here()
    policy = source.load(device, "fp32")
    before = log_probs(policy, device)
    weights = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    alone = out if wanted.adapter else out.with_name(f"{out.name}-adapter")
    tokenizer = source.tokenizer()
    temporary = whole_adapter(
        policy.causal_lm, weights, (source.model, source.args), tokenizer, alone
    )
    del policy
    if wanted.adapter:
        args = source.args.of_other_weights().model_copy(
            update={
                "adapter_name_or_path": str(temporary),
                "dtype": "fp32",
                "revision": source.args.revision,
            }
        )
        return _published(source, temporary, out, before, torch.float32, args)
    try:
        return _merged(str(temporary), out, wanted)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _merged(adapter: str, out: Path, wanted: Wanted) -> str:
    return str(
        merge(
            adapter,
            out,
            dtype=DTYPES[wanted.dtype] if wanted.dtype else None,
            largest=wanted.largest,
        )
    )


def _published(
    source: Weights,
    temporary: Path,
    out: Path,
    before: torch.Tensor,
    dtype: torch.dtype,
    args: ModelArgs,
) -> str:
    """Opens what was written, and gives it its name where it is the same model but for rounding."""
    device = here()
    try:
        opened = load_policy(source.model if args.has_adapter else str(temporary), args, device)
        result = Merged(
            source.name, float((log_probs(opened, device) - before).abs().max()), TOLERANCE[dtype]
        )
        if not result.difference <= TOLERANCE[dtype]:
            raise ConfigError(
                f"{out}: not written: {result}; does {source.name} hold numbers that {dtype} cannot?"
            )
    except BaseException:
        shutil.rmtree(temporary)
        raise
    publish(temporary, out, _card(source, out, str(result)))
    return str(result)


def _card(source: Weights, out: Path, said: str) -> str:
    """The source's own, which may name a licence, and what was done."""
    done = f"\nExported from `{source.name}` by Rather: {said}.\n"
    folder = None if source.checkpoint else model_folder(source.model, source.args.revision)
    own = folder / "README.md" if folder else None
    return (own.read_text(encoding="utf-8") if own and own.is_file() else f"# {out.name}\n") + done
