"""`rather generate` for prompts with images: the answers of transformers, and messages to servers."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from rather.commands.generate import AnswerRequest, Prompts, generate_answers
from rather.commands.generate_by_server import with_data_urls
from rather.data.images import data_url
from rather.model.generate import Decoding
from rather.run_folder.model_source import weights_of
from tests.cells import cells
from tests.data.vision import png, processor_of
from tests.tiny import rows_of, write_rows
from tests.train.test_vision_run import make_model


@pytest.mark.parametrize("family", cells(["qwen3_vl", "smolvlm"], ["llava_next"]))
def test_answers_about_images_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make_model(tmp_path / "model", family)
    files = {"red.png": png(60, 12), "blue.png": png(64, 10, "blue")}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>What?", "images": ["red.png"]},
        {"prompt": "<image> or <image>?", "images": [data_url(files["blue.png"]), "red.png"]},
    ]
    path = tmp_path / "prompts.jsonl"
    write_rows(path, rows)
    request = AnswerRequest(2, Decoding(6))
    generate_answers(str(folder), path, tmp_path / "out.jsonl", request)
    written = rows_of(tmp_path / "out.jsonl")
    assert [row["images"] for row in written] == [row["images"] for row in rows]

    processor, model = processor_of(family), AutoModelForImageTextToText.from_pretrained(folder)
    image, text = {"type": "image"}, [{"type": "text", "text": t} for t in ("What?", " or ", "?")]
    parts = [[image, text[0]], [image, text[1], image, text[2]]]
    names = [["red.png"], ["blue.png", "red.png"]]
    for row, content, of_row in zip(written, parts, names, strict=True):
        asked = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        images = [Image.open(io.BytesIO(files[name])) for name in of_row]
        nested = [images] if family == "smolvlm" else images
        inputs = processor(text=[asked], images=nested, return_tensors="pt")
        assert row["prompt_ids"] == inputs["input_ids"][0].tolist()
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        expected = ids[0, inputs["input_ids"].shape[1] :].tolist()
        for answer in row["response_ids"]:
            assert answer == expected[: len(answer)]
            assert answer


def test_a_server_gets_images_inside_its_messages(tmp_path: Path) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(png())
    turns = [{"role": "user", "content": "See <image> here"}, {"role": "assistant", "content": "a"}]
    [user, assistant] = with_data_urls(turns, [str(file)])
    assert assistant == turns[1]
    assert [part["type"] for part in user["content"]] == ["text", "image_url", "text"]
    head, _, body = user["content"][1]["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(body) == png()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "<image>?", "images": ["red.png"]}))
    weights = weights_of(str(make_model(tmp_path / "model", "qwen3_vl")))
    [images] = Prompts(weights, rows, AnswerRequest(1, Decoding(4))).images
    assert images[0].source == str(file)
