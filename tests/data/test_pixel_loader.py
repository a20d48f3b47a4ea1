"""Pixels made by child processes are those of this process, and errors of a child name the image."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from rather.data import pixel_loader
from rather.data.batch import PromptImage
from rather.data.image_tokens import ImageRecipe, image_recipe
from rather.data.pixel_loader import PixelLoader, main
from rather.data.pixels import PixelMaker
from rather.errors import DataError
from tests.data.vision import png, vision_folder


class InThread(pixel_loader._Child):
    """Answers as a child process does, from a thread: no process has to start."""

    def __init__(self, recipe: ImageRecipe) -> None:
        self.connection, theirs = Pipe()
        self.answers = pixel_loader._file_in_memory()
        handles = (os.dup(theirs.fileno()), os.dup(self.answers.fileno()))
        threading.Thread(target=main, args=handles, daemon=True).start()
        theirs.close()
        self.connection.send_bytes(json.dumps(asdict(recipe)).encode())


@pytest.mark.parametrize("where", [InThread, pytest.param(None, marks=pytest.mark.wide)])
def test_a_child_makes_the_same_pixels(
    where: type | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where:
        monkeypatch.setattr(pixel_loader, "_Child", where)
    recipe = image_recipe(vision_folder(tmp_path, "qwen2_5_vl"))
    maker = PixelMaker(recipe)
    images = []
    for number, colour in enumerate(((200, 0, 0), (0, 200, 0))):
        content = png(20, 12 + number, colour)
        file = tmp_path / f"{number}.png"
        file.write_bytes(content)
        grid = recipe.grid(12 + number, 20)
        source = str(file) if number else content
        images.append(PromptImage(recipe.image_digest(content), source, grid, recipe.tokens(grid)))
    lost = PromptImage("f" * 32, str(tmp_path / "lost.png"), (1, 4, 4), 4)
    loader = PixelLoader(maker, processes=1)
    loader.begin([*images, lost])
    for image in images:
        made, expected = loader.take(image), maker.pixels([image])
        assert made.keys() == expected.keys()
        assert all(torch.equal(made[name], expected[name]) for name in made)
    with pytest.raises(DataError, match=r"lost\.png"):
        loader.take(lost)
    loader.close()
