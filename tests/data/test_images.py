"""Rows with images: shapes of peers, tokens and pixels as in transformers, and images that are bad."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import shutil
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from rich.console import Console

from rather.api.feed import Feed
from rather.config.run_config import DPOConfig
from rather.config.schema import TrainDataArgs
from rather.data.batch import PromptImage
from rather.data.formats import FORMATS as PAIR_FORMATS
from rather.data.formats import RowLayout, TextPair, read_row
from rather.data.image_tokens import FAMILIES, image_recipe
from rather.data.images import MOST_IMAGES, content_of, data_url
from rather.data.json_rows import DropReason
from rather.data.overlap import find_overlap
from rather.data.pairs import SCHEMA
from rather.data.pixels import PixelMaker
from rather.data.pool import LimitedEncoder
from rather.data.prepare import BadRows, prepare, recipe_of
from rather.data.show import token_view
from rather.data.tokens import Encoder
from rather.errors import DataError
from rather.files import text_sha
from tests.data.conftest import counts, data_config
from tests.data.rows import PAIRED, assistant, draw_row, user
from tests.data.vision import encoded, png, processor_of, tokenizer_of, vision_folder
from tests.tiny import write_rows

ANSWERS = {"chosen": "a red one", "rejected": "a blue one"}
SIZES = [(20, 12), (7, 31), (64, 64), (90, 33), (8, 8), (130, 20)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("vision")
    return {family: vision_folder(base / family, family) for family in FAMILIES}


def encoder_of(folder: Path, family: str, **settings: Any) -> Encoder:
    data = TrainDataArgs(**settings)
    recipe = image_recipe(folder, data.image_max_pixels, data.image_min_pixels)
    return Encoder(recipe_of(tokenizer_of(family), data, 4096, images=recipe))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_pixels_are_those_of_the_models_processor(
    folders: dict[str, Path], family: str
) -> None:
    processor = processor_of(family)
    encoder = encoder_of(folders[family], family)
    maker = pickle.loads(pickle.dumps(PixelMaker(image_recipe(folders[family]))))
    files = [png(*size, colour=(9 * i, 200, 7)) for i, size in enumerate(SIZES)]
    prompt = (
        user(f"{'<image>' * (len(SIZES) - 1)}Which?"),
        assistant("The second."),
        user("And <image>?"),
    )
    image = {"type": "image"}
    which, second, and_, end = (
        {"type": "text", "text": text} for text in ("Which?", "The second.", "And ", "?")
    )
    messages = [user([*[image] * 5, which]), assistant([second]), user([and_, image, end])]
    text = processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    images = [Image.open(io.BytesIO(file)) for file in files]
    nested = [images] if family == "smolvlm" else images
    expected = processor(text=[text], images=nested, return_tensors="pt")

    pair = TextPair(prompt, (assistant("a"),), "", images=_urls(files))
    tokens = encoder.encode(pair)
    assert tokens.prompt == encoder.prompt_ids(pair) == expected["input_ids"][0].tolist()
    assert encoder.recipe.images
    of_images = [tokens.prompt.count(encoder.recipe.images.token)]
    assert of_images == [sum(image.tokens for image in tokens.images)]
    made = []
    for facts, file in zip(tokens.images, files, strict=True):
        made.append(maker.pixels([PromptImage(facts.digest, file, facts.grid, facts.tokens)]))
    tiles = 1 if family == "smolvlm" else 0
    for name in made[0]:
        rows = [pixels[name] for pixels in made]
        whole = expected[name]
        if family == "llava_next" and name == "pixel_values":  # its batches are padded
            whole = torch.cat(
                [image[: len(row[0])] for image, row in zip(whole, rows, strict=True)]
            )
            rows = [row[0] for row in rows]
        assert torch.equal(torch.cat(rows, dim=tiles), whole), name


def _urls(files: list[bytes]) -> tuple[str, ...]:
    return tuple(map(data_url, files))


def test_pixel_limits_are_those_of_the_processor(folders: dict[str, Path]) -> None:
    folder = folders["qwen2_5_vl"]
    own = image_recipe(folder)
    assert own.grid(100, 100) == (1, 16, 16)
    assert image_recipe(folder, most_pixels=8 * 8 * 9).grid(100, 100) == (1, 6, 6)
    assert image_recipe(folder, least_pixels=8 * 8 * 25).grid(8, 8) == (1, 10, 10)
    assert image_recipe(folder, most_pixels=64).digest != own.digest
    with pytest.raises(DataError, match="image_min_pixels: 5000 is more"):
        image_recipe(folder, most_pixels=400, least_pixels=5000)
    with pytest.raises(DataError, match="'llava_next' has fixed"):
        image_recipe(folders["llava_next"], most_pixels=400)


# ---- shapes of rows

PARTS = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
COLUMNS: list[dict[str, Any]] = [
    {"images": ["a.png"]},
    {"images": "a.png"},
    {"image": "a.png"},
    {"images": [{"bytes": None, "path": "a.png"}]},
]
NAMED_PARTS: list[dict[str, Any]] = [  # of Axolotl, Qwen and OpenAI, and with the nulls of a table
    {"type": "image", "path": "a.png"},
    {"type": "image", "url": "a.png"},
    {"type": "image", "image": "a.png"},
    {"type": "image_url", "image_url": {"url": "a.png"}},
    {"type": "image", "text": None, "image": "a.png"},
]


def assert_one_question_about_one_image(row: dict[str, Any]) -> None:
    row_pairs = read_row(row, RowLayout(refuse_images=""))
    assert not row_pairs.dropped
    [pair] = row_pairs.pairs
    question = pair.prompt if isinstance(pair.prompt, str) else pair.prompt[-1]["content"]
    assert question == "<image>What?", row
    assert pair.images == ("a.png",)
    assert not row_pairs.ignored
    [refused] = read_row(row, RowLayout()).dropped
    assert refused.reason == "images_refused"


@pytest.mark.parametrize("name", PAIRED)
def test_a_row_of_every_format_may_have_an_image(name: str) -> None:
    draw = Random(name)
    for column in COLUMNS * 5:
        row, _ = draw_row(PAIR_FORMATS[name], draw, "<image>What?")
        assert_one_question_about_one_image(row | column)
    if "rejected_images" in PAIR_FORMATS[name].may:
        assert_one_question_about_one_image(
            row | {"images": ["a.png"], "rejected_images": ["a.png"]}
        )


def test_images_as_parts_of_a_message() -> None:
    """Named in the part, or of a column; without a place they come first."""
    for part in NAMED_PARTS:
        question = {
            "role": "user",
            "content": [part, {"type": "text", "text": "What?", "image": None}],
        }
        assert_one_question_about_one_image({"prompt": [question], **ANSWERS})
    for question in (PARTS, {"role": "user", "content": "What?"}):
        assert_one_question_about_one_image({"images": ["a.png"], "prompt": [question], **ANSWERS})
        both = {name: [question, assistant(ANSWERS[name])] for name in ANSWERS}
        assert_one_question_about_one_image({"images": ["a.png"], **both})


def test_images_in_the_row_itself_become_data_urls() -> None:
    file = png()
    picture = Image.open(io.BytesIO(file))
    text = base64.b64encode(file).decode()
    images: list[Any] = [file, {"bytes": file, "path": "a.png"}, {"base64": text}, picture]
    row = {"prompt": "<image>" * 4, "images": images, **ANSWERS}
    [pair] = read_row(row, RowLayout(refuse_images="")).pairs
    contents = [content_of(image) for image in pair.images]
    assert contents[:3] == [file] * 3
    assert Image.open(io.BytesIO(contents[3])).tobytes() == picture.tobytes()


def test_an_image_of_pillow_keeps_the_limits_of_files(tmp_path: Path) -> None:
    """It is turned upright, and refused where a file of the same image is refused."""
    red, noise = Image.new("RGB", (40, 12), "red"), Image.effect_noise((64, 64), 50)
    turned = Image.Exif()
    turned[0x0112] = 6
    photo = Image.open(io.BytesIO(encoded(red, "JPEG", exif=turned)))
    jpeg = encoded(noise.convert("RGB"), "JPEG")
    frames = encoded(red, "GIF", save_all=True, append_images=[Image.new("RGB", (40, 12))])
    closed = Image.open(io.BytesIO(jpeg))
    closed.close()

    def pairs_of(image: Any) -> Any:
        row = {"prompt": "<image>q", "images": [image], **ANSWERS}
        return read_row(row, RowLayout(refuse_images=""))

    for image in (photo, red.convert("CMYK"), red.convert("YCbCr"), red.convert("PA")):
        [pair] = pairs_of(image).pairs
        shown = Image.open(io.BytesIO(content_of(pair.images[0])))
        assert shown.size == ((12, 40) if image is photo else (40, 12))
    bad = {
        "damaged": [Image.open(io.BytesIO(jpeg[: len(jpeg) // 2])), closed],
        "animated": [Image.open(io.BytesIO(frames))],
        "8 bits": [Image.new(mode, (20, 12)) for mode in ("I", "F", "I;16", "I;16B", "HSV", "La")],
        "pixels": [Image.new("L", (70_000, 1_000)), Image.new("RGB", (0, 9))],
    }
    for word, images in bad.items():
        for image in images:
            [dropped] = pairs_of(image).dropped
            assert dropped.reason == "bad_image"
            assert word in dropped.detail


# ---- bad rows and images


def _header(width: int, height: int) -> bytes:
    """Return a PNG that says a size and has no pixels."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + size
    data = b"IDAT" + zlib.compress(b"")
    pieces = [struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))]
    pieces.append(struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(pieces)


def _files(folder: Path) -> None:
    """Write good and bad images."""
    grey = Image.new("L", (20, 12), 90)
    red = Image.new("RGB", (40, 12), "red")
    turned = Image.Exif()
    turned[0x0112] = 6
    frames = [Image.new("RGB", (20, 12), (90 * i, 0, 0)) for i in range(3)]
    jpeg = encoded(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG")
    good = png()
    contents = {
        "good.png": good, "good.jpg": jpeg, "good.webp": encoded(red, "WEBP"),
        "good.gif": encoded(red, "GIF"), "good.bmp": encoded(red, "BMP"), "grey.png": encoded(grey),
        "palette.png": encoded(red.convert("P")), "alpha.png": encoded(red.convert("RGBA")),
        "grey_alpha.png": encoded(grey.convert("LA")), "bit.png": encoded(grey.convert("1")),
        "cmyk.jpg": encoded(red.convert("CMYK"), "JPEG"),
        "exif.jpg": encoded(red, "JPEG", exif=turned), "no_name": good, "wrong_name.jpg": good,
        "rgb16.bmp": encoded(red.convert("RGB"), "BMP"), "one_pixel.png": png(1, 1),
        "empty.png": b"", "truncated.jpg": jpeg[: len(jpeg) // 2], "truncated.png": good[:-30],
        "half_header.png": good[:20], "no_pixels.png": _header(20, 12),
        "huge.png": _header(100_000, 100_000), "large.png": _header(30_000, 3_000),
        "thin.png": png(1000, 1), "zero.png": _header(0, 12),
        "text.png": b"this is text", "html.jpg": b"<html>404 not found</html>",
        "script.svg": b"<svg xmlns='http://www.w3.org/2000/svg'><script/></svg>",
        "file.pdf": b"%PDF-1.7", "file.ps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "file.tiff": encoded(red, "TIFF"), "file.ico": encoded(red, "ICO"),
        "file.ppm": encoded(red, "PPM"), "file.tga": encoded(red, "TGA"),
        "sixteen.png": encoded(Image.new("I;16", (20, 12), 40_000)),
        "animated.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "animated.webp": encoded(red, "WEBP", save_all=True, append_images=[Image.new("RGB", (40, 12))]),
        "animated.png": encoded(red, save_all=True, append_images=[Image.new("RGB", (40, 12))]),
        "bad_crc.png": good[:45] + bytes([good[45] ^ 255]) + good[46:],
        "gzip.png": b"\x1f\x8b" + good,
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "secret.png").write_bytes(good)
    (folder / "link.png").symlink_to(outside / "secret.png")
    (folder / "link_folder").symlink_to(outside)
    (folder / "inner.png").symlink_to("good.png")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    (folder / "dead.png").symlink_to("nothing.png")


TRAINS = """
    good.png good.jpg good.webp good.gif good.bmp grey.png palette.png alpha.png grey_alpha.png bit.png
    cmyk.jpg exif.jpg no_name wrong_name.jpg rgb16.bmp one_pixel.png inner.png ./good.png
    folder.png/../good.png
""".split()  # noqa: SIM905 - names of files
BAD_IMAGES = """  a word of the reason: images
    : half_header.png zero.png .
    empty: empty.png data:image/png;base64,
    damaged: truncated.jpg truncated.png no_pixels.png bad_crc.png
    pixels: huge.png
    30000 x 3000 pixels: large.png
    200 times: thin.png
    known format: text.png html.jpg script.svg file.pdf file.ps file.tiff file.ico file.ppm file.tga
    known format: gzip.png data:text/plain;base64,aGVsbG8=
    8 bits: sixteen.png
    animated: animated.gif animated.webp animated.png
    outside data_args.image_dir: link.png link_folder/secret.png ../outside/secret.png /etc/passwd
    cannot be read: loop.png good.png/x.png
    not a regular file: folder.png pipe.png
    no such file: dead.png missing.png
    nothing is downloaded: http://host/a.png https://host/a.png file:///etc/passwd s3://bucket/a.png
    base64: data:image/png;base64,@@@
    data URL: data:image/png,abc
""".strip().splitlines()[1:]
ODD_NAMES = {"cannot be read": "x" * 5000, "null": "a\0b.png", "must be a path": ""}
ONE = {"images": ["good.png"]}
BAD_ROWS: dict[str, list[dict[str, Any]]] = {  # a word of the reason -> rows whose shape is bad
    "2 places for images": [{"prompt": "<image><image>q", **ONE}],
    "1 places for images": [
        {"prompt": "<image>q", "images": ["good.png"] * 2}, {"prompt": "<image>q", "images": []},
        {"prompt": "<image>q", "image": None},
    ],
    "0 images": [{"prompt": [PARTS], "images": []}, {"prompt": [PARTS]}],
    "must be a path": [
        {"prompt": "q", "images": [None]}, {"prompt": "<image>q", "images": ["good.png", None]},
        {"prompt": "q", "images": 5}, {"prompt": "q", "images": [["good.png"]]},
    ],
    "keep one": [{"prompt": "<image>q", **ONE, "image": "good.png"}],
    "must have one of": [{"prompt": "q", "images": [{"x": 1}]}],
    "65 images": [{"prompt": "q", "images": ["good.png"] * (MOST_IMAGES + 1)}],
    "video": [
        {"prompt": "q", "videos": ["a.mp4"]}, {"prompt": "q", "audio": "a.wav"},
        {"prompt": [user([{"type": "video", "video": "a.mp4"}])]},
    ],
    "prompts only": [
        {"prompt": "q", **ONE, "rejected_images": ["good.jpg"]},
        {"prompt": "q", **ONE, "chosen": [assistant([{"type": "image"}])]},
    ],
    "2 image tokens for 1": [
        {"prompt": "<image>q <|image_pad|>", **ONE},
        {"prompt": "<image>q", **ONE, "chosen": "<|image_pad|>"},
    ],
    "1 image tokens for 0": [{"prompt": "q <|image_pad|>"}],
    "image parts and the text": [
        {"prompt": [user([{"type": "image"}, {"type": "text", "text": "<image>"}])], **ONE},
    ],
    "into the row": [{"prompt": [user("q") | ONE]}],
}  # fmt: skip


def about(*images: str) -> dict[str, Any]:
    return {"prompt": "<image>What?", "images": list(images), **ANSWERS}


def test_bad_images_and_rows_have_a_reason_each_and_nothing_is_lost(
    folders: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    _files(folder)
    good = [about(name) for name in TRAINS]
    bad = [(about(name), word) for word, name in ODD_NAMES.items()]
    for line in BAD_IMAGES:
        word, _, names = line.strip().partition(": ")
        bad += [(about(name), word.strip(":")) for name in names.split()]
    bad += [({**ANSWERS, **row}, word) for word, rows in BAD_ROWS.items() for row in rows]
    assert len(bad) >= 60
    rows = write_rows(folder / "rows.jsonl", [*good, *(row for row, _ in bad)])
    pairs, report = _prepared(folders["qwen2_5_vl"], rows, max_bad_fraction=1.0)
    train = report["train"]
    assert train["rows"] == len(good) + len(bad)
    assert pairs.column("number").tolist() == list(range(1, len(TRAINS) + 1))
    dropped = counts(train, "dropped")
    assert sum(dropped.values()) == len(bad)
    assert dropped.keys() == {"bad_image", "image_count", "bad_type"}
    assert "Traceback" not in capfd.readouterr().err
    encoder = encoder_of(folders["qwen2_5_vl"], "qwen2_5_vl")
    for row, word in bad:
        assert word in _reason(row, encoder, folder), row
    # What trains is what it shows: the photo was turned, the rest kept its size.
    maker = PixelMaker(image_recipe(folders["qwen2_5_vl"]))
    grids = {}
    for name, pair in zip(TRAINS, pairs.take(range(len(pairs))), strict=True):
        [image] = pair.images
        assert maker.pixels([image])["image_grid_thw"].tolist() == [list(image.grid)]
        grids[name] = image.grid
    assert grids["good.bmp"] == (1, 4, 10)
    assert grids["exif.jpg"] == (1, 10, 4)


def _reason(row: dict[str, Any], encoder: Encoder, folder: Path) -> str:
    row_pairs = read_row(row, RowLayout(refuse_images=""))
    if row_pairs.dropped:
        return row_pairs.dropped[0].detail
    [pair] = row_pairs.pairs
    with pytest.raises(DropReason) as caught:
        encoder.encode(replace(pair, image_dir=str(folder)))
    return caught.value.detail


def _prepared(model: Path, rows: Path, data: Any = None, **settings: Any) -> tuple[Any, Any]:
    settings = {"sequence_length": 512, "data": data or {}, **settings}
    config = data_config(rows.parent, model, rows, **settings)
    prepared = prepare(config, console=Console(file=io.StringIO()))
    return prepared.train, prepared.report


# ---- whole sets


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """Rows about two images: the same question about another one, one without, one too long."""
    (tmp_path / "red.png").write_bytes(png())
    (tmp_path / "blue.png").write_bytes(png(40, 24, "blue"))
    question = {"prompt": "<image>Which colour?", **ANSWERS}
    rows = [
        {**question, "images": ["red.png"]},
        {**question, "images": ["blue.png"]},
        {"prompt": "No picture <image> here", **ANSWERS},
        {**question, "prompt": f"<image>{'x' * 400}", "images": ["blue.png"]},
        {**question, "images": ["red.png"]},
    ]
    return write_rows(tmp_path / "rows.jsonl", rows)


@pytest.mark.parametrize("overlong", ["truncate_prompt", "truncate_response"])
def test_a_set_with_images_knows_them_and_never_cuts_one(
    folders: dict[str, Path], shapes: Path, overlong: str
) -> None:
    folder = folders["qwen2_5_vl"]
    data = {"overlong": overlong}
    settings: dict[str, Any] = {"sequence_length": 200, "max_bad_fraction": 1.0}
    pairs, report = _prepared(folder, shapes, data, **settings)
    train = report["train"]
    assert counts(train, "dropped") == {"prompt_too_long": 1}
    assert "of images, which are not cut" in json.dumps(train["dropped"])
    assert train["warned"]["duplicate_pair"]["count"] == 1  # the last row; not the second
    assert len(set(pairs.column("pair_hash").tolist())) == 3
    assert pairs.image_tokens.tolist() == [4, 15, 0, 4]
    assert pairs.has_images
    assert [image.tokens for image in pairs.images()] == [4, 15]
    first, second, without, again = pairs.take(range(4))
    assert first.prompt_key == again.prompt_key != second.prompt_key
    assert without.images == ()
    assert (first.prompt == pairs.image_token).sum() == 4
    view = token_view(pairs, tokenizer_of("qwen2_5_vl"), 2)
    assert "[image blue.png: 15 tokens]" in [
        text for text, _ in view[1]["sides"]["chosen"]["shown"]
    ]
    # A second start finds what the first built; an image that changed is not trained unseen.
    assert _prepared(folder, shapes, data, **settings)[1] == report
    maker = PixelMaker(image_recipe(folder))
    maker.pixels(second.images)
    (shapes.parent / "blue.png").write_bytes(png(40, 24, "green"))
    with pytest.raises(DataError, match=r"blue.png: is another image now"):
        maker.pixels(second.images)


def test_a_table_of_images_and_rows_in_python_give_the_same_pairs(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    file = png(40, 24, "blue")
    row = {"prompt": "<image>Which colour?", **ANSWERS}
    table = [{**row, "images": [{"bytes": file, "path": None}]}]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    [pair] = _prepared(folders["qwen3_vl"], tmp_path / "rows.parquet")[0].take([0])
    config = DPOConfig.model_validate({"sequence_length": 512})
    rows = [{**row, "images": [Image.open(io.BytesIO(file))]}, {**row, "images": [file]}]
    feed = Feed(rows, config, 2, processor_of("qwen3_vl"))
    assert feed.rows is not None
    for from_python in feed.rows:
        assert from_python.prompt.tolist() == pair.prompt.tolist()
        assert from_python.chosen_scored == pair.chosen_scored
        [image], [stored] = from_python.images, pair.images
        assert (image.grid, image.tokens) == (stored.grid, stored.tokens)
        assert feed.images
        made = PixelMaker(feed.images).pixels([image])["pixel_values"]
        own = PixelMaker(image_recipe(folders["qwen3_vl"])).pixels([stored])["pixel_values"]
        assert torch.equal(made, own)
    assert pair.images[0].source == file
    with pytest.raises(DataError, match="not the processor of a vision model"):
        _ = Feed(rows, config, 2, tokenizer_of("qwen3_vl")).rows


def test_text_is_prepared_as_before_whatever_the_model(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[dict[str, Any]] = []

    def sha(text: str) -> str:
        if text.startswith('{"'):
            settings.append(json.loads(text))
        return text_sha(text)

    monkeypatch.setattr("rather.data.prepare.text_sha", sha)
    rows = [{"prompt": "What <image>?", **ANSWERS}] * 300
    path = write_rows(tmp_path / "rows.jsonl", rows)
    pairs, report = _prepared(folders["qwen3_5"], path)
    [address] = settings
    assert address.keys() == {
        "version", "files", "tokenizer", "template", "layout", "sequence_length", "score",
        "overlong", "separator", "special_tokens", "encoding",
    }  # fmt: skip
    assert pairs.file.table.schema == SCHEMA
    assert not pairs.has_images
    # What was hashed before images were read.
    assert int(pairs.column("pair_hash")[0]) == 15126211106175468177
    assert int(pairs.column("normal_prompt")[0]) == 6269488697681391200
    assert not report["train"]["dropped"]


def test_images_may_come_late(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "late.png").write_bytes(png())
    rows = [{"prompt": f"What {number}?", **ANSWERS} for number in range(300)]
    rows += [{"prompt": "q", "images": ["late.png"], **ANSWERS}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for _ in ("built", "from the cache"):
        pairs, report = _prepared(folders["qwen3_5"], path)
        assert pairs.has_images
        assert len(pairs) == 301
        assert not report["train"]["dropped"]
        assert [image.source for image in pairs.images()] == [str(tmp_path / "late.png")]


@pytest.mark.parametrize(
    ("model_type", "says"),
    [("gemma3", "images are not trained with 'gemma3'"), ("qwen3", "reads text only")],
)
def test_images_for_another_model_are_refused_by_name(
    folders: dict[str, Path], shapes: Path, model_type: str, says: str
) -> None:
    folder = shapes.parent / "model"
    shutil.copytree(folders["qwen3_5"], folder)
    tower = {"vision_config": {}} if model_type == "gemma3" else {}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **tower}))
    with pytest.raises(BadRows, match=says):
        _prepared(folder, shapes)
    with pytest.raises(DataError, match=r"data_args.image_dir: .*remove the key"):
        _prepared(folder, shapes, {"image_dir": str(shapes.parent)})


def test_a_child_answers_about_images_as_the_encoder_does(folders: dict[str, Path]) -> None:
    encoder = encoder_of(folders["smolvlm"], "smolvlm")
    limited = LimitedEncoder(encoder.recipe, "test")
    pair = TextPair("<image>What?", "a", "b", images=_urls([png(90, 30)]))
    assert limited.encode(pair) == encoder.encode(pair)
    assert limited.prompt_ids(pair) == encoder.prompt_ids(pair)
    assert limited.image_facts(pair) == encoder.image_facts(pair)


def test_same_words_about_another_image_do_not_overlap(tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(13))
    rows = [{"prompt": words, "images": [name]} for name in ("a.png", "b.png")]
    train = write_rows(tmp_path / "train.jsonl", rows)
    held = write_rows(tmp_path / "held.jsonl", rows[1:])
    overlap = find_overlap([train], {"held": [held]}, set(), "utf-8")
    assert overlap["texts"]["held"] == {"rows": 1, "first": ["train.jsonl:2"]}
