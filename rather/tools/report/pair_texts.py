"""The texts of training pairs, as the tokenizer of the run gives them back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from rich.console import Console

from rather.data.show import image_name

if TYPE_CHECKING:
    from rather.config.found import Trust
    from rather.config.run_config import DPOConfig
    from rather.data.pairs import PairDataset
    from rather.data.prepare import Prepared

MOST = 160  # characters of a text


@dataclass
class PairTexts:
    """The training pairs of a run, with their texts."""

    config: DPOConfig
    prepared: Prepared

    @staticmethod
    def of(run_dir: Path, trust: Trust | None = None) -> PairTexts:
        """Open the pairs that a run folder names. Raise RatherError or OSError if that fails.

        For a run of another user, nothing outside of the folder is read unless it is trusted.
        """
        from rather.config.found import NO_TRUST
        from rather.config.load import load_found
        from rather.data.prepare import prepare

        config = load_found(run_dir / "config.yaml", trust or NO_TRUST)
        return PairTexts(config, prepare(config, console=Console(quiet=True)))

    @property
    def pairs(self) -> PairDataset:
        return self.prepared.train

    @cached_property
    def source_of(self) -> dict[int, str]:
        """Return the source of all pairs by their digests: `source` of the row, or its file."""
        from rather.data.findings import sets_of

        sets, entries = (self.pairs, *self.prepared.evals.values()), sets_of(self.prepared.report)
        files = entries["train"]["files"]
        sources: dict[int, str] = {}
        for pairs, entry in zip(sets, entries.values(), strict=True):
            paths = [file["path"] for file in entry.get("files", files)]
            of_rows = [self._sources_in(Path(path)) for path in paths]
            columns = (pairs.column(name).tolist() for name in ("pair_hash", "source", "number"))
            for digest, file, row in zip(*columns, strict=True):
                sources[digest] = of_rows[file].get(row, paths[file])
        return sources

    def _sources_in(self, path: Path) -> dict[int, str]:
        """Return the texts of the column `source`, by the numbers of their rows."""
        from rather.data.read import find_sources, rows_of

        encoding, sources = self.config.actor_train.data_args.encoding, dict[int, str]()
        for number, row in chain.from_iterable(rows_of(f, encoding) for f in find_sources(path)):
            if isinstance(row, dict) and isinstance(row.get("source"), str):
                sources[number] = row["source"]
        return sources

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
