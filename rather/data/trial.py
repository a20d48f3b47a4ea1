"""One call of a user's own data format on the first row of its file, before anything slow."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from rather.config.schema import PairKeys, TrainDataArgs, ValidationDataArgs
from rather.data.formats import FORMATS, FormatError, RowLayout, read_row
from rather.data.json_rows import DropReason
from rather.data.prepare import layout_of
from rather.data.read import find_sources, rows_of
from rather.errors import DataError


def try_own_formats(
    keys: PairKeys, rows: str, training: TrainDataArgs, validation: ValidationDataArgs
) -> None:
    """Read the first row of each file with the user's format, or raise a DataError.

    Rows of a file that is not on this machine yet are read when they arrive.
    """
    evaluation_files = list(chain.from_iterable(validation.sets.values()))
    for data_args, files in ((training, training.files), (validation, evaluation_files)):
        if data_args.format in FORMATS and FORMATS.is_own(data_args.format):
            for file in files:
                if file.is_file():
                    layout = layout_of(keys, rows, data_args)
                    _try_first_row(file, data_args.encoding, layout)


def _try_first_row(file: Path, encoding: str, layout: RowLayout) -> None:
    source = find_sources(file)[0]
    for number, row in rows_of(source, encoding):
        if isinstance(row, DropReason):
            continue
        try:
            read_row(row, layout)
        except FormatError as error:
            raise DataError(f"{file}, {source.unit} {number}: {error}.") from error
        return
