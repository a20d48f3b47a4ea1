"""The texts of training pairs, as the tokenizer of the run gives them back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from rich.console import Console

from rather.data.show import image_name

if TYPE_CHECKING:
    from rather.config.found import Trust
    from rather.config.run_config import DPOConfig
    from rather.data.pairs import PairDataset

MOST = 160  # characters of a text


@dataclass
class PairTexts:
    """The training pairs of a run, with their texts."""

    config: DPOConfig
    pairs: PairDataset

    @staticmethod
    def of(run_dir: Path, trust: Trust | None = None) -> PairTexts:
        """Open the pairs that a run folder names. Raise RatherError or OSError if that fails.

        For a run of another user, nothing outside of the folder is read unless it is trusted.
        """
        from rather.config.found import NO_TRUST
        from rather.config.load import load_found
        from rather.data.prepare import prepare

        config = load_found(run_dir / "config.yaml", trust or NO_TRUST)
        return PairTexts(config, prepare(config, console=Console(quiet=True)).train)

    @cached_property
    def tokenizer(self) -> Any:
        from rather.data.template import load_tokenizer

        actor = self.config.actor_train
        return load_tokenizer(actor.tokenizer_path, actor.model_args.revision, False)

    @cached_property
    def places(self) -> dict[int, int]:
        """Return the place of each pair by its digest; of equal pairs the first."""
        digests = self.pairs.column("pair_hash").tolist()
        return {digest: i for i, digest in reversed(list(enumerate(digests)))}

    def shortened(self, place: int) -> dict[str, str]:
        """Return the end of the prompt and the beginning of both answers, each on one line."""
        (pair,) = self.pairs.take([place])
        images = "".join(f"[{image_name(image)}] " for image in pair.images)
        return {
            "prompt": images + _shorten(self._decode(pair.prompt), from_end=True),
            "chosen": _shorten(self._decode(pair.chosen)),
            "rejected": _shorten(self._decode(pair.rejected)),
        }

    def _decode(self, ids: NDArray[Any]) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def _shorten(text: str, *, from_end: bool = False) -> str:
    line = " ".join(text.split())
    if len(line) <= MOST:
        return line
    return f"...{line[-MOST:]}" if from_end else f"{line[:MOST]}..."
