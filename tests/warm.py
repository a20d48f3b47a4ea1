"""Train once at import: children of the fork server (tests/tiny.py) then find everything that a
first run imports and builds, which takes them three times as long as the run itself."""

from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch

from rather.pipeline.pipeline import DPOPipeline
from tests.tiny import make_config

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
    assert DPOPipeline(make_config(Path(folder), max_steps=1)).run() == 0
