"""Find, open and check the images of rows: within a folder, a list of formats and limits of size.

An image is named by a path, which must lead to a file inside `data_args.image_dir`, or it is in the
row itself; bytes and objects of Pillow become data URLs, so that every reference is a text. Nothing
is downloaded. An image that cannot be used is a counted reason, never a crash. This runs in the
tokenising processes, which limit time and memory, and again where pixels are made.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rather.data.json_rows import DropReason
from rather.errors import DataError
from rather.files import read_inside

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # 8 bits or fewer
MOST_BYTES = 48 << 20  # of a file
MOST_PIXELS = 1 << 26  # of an image; below the limit at which Pillow warns of a bomb
MOST_PIXELS_OF_A_ROW = 1 << 27
MOST_IMAGES = 64  # of a row
MOST_RATIO = 200  # of the sides; the processors of Qwen's families fail beyond it
PLACEHOLDER = "<image>"
PARTS = ("image", "image_url", "input_image")  # types of parts of a message that are images
NAMES = ("bytes", "image", "path", "url", "image_url", "base64")  # keys of one image
DATA_URL = "data:"


def bad_image(detail: str) -> DropReason:
    return DropReason("bad_image", detail)


# ---- what a row says about its images


def references(column: Any) -> list[str]:
    """Return the images of a column as paths and data URLs."""
    values = column if isinstance(column, list | tuple) else [column]
    return [reference(value) for value in values]


def reference(value: Any) -> str:
    """Return one image as a path or data URL: text, bytes, an object of these, or Pillow's."""
    if isinstance(value, Mapping):
        inner = next((value[name] for name in NAMES if value.get(name) is not None), None)
        if inner is None:
            keys = ", ".join(map(str, value)) or "no keys"
            raise bad_image(f"an image must have one of {', '.join(NAMES)}; it has {keys}")
        if value.get("base64") is inner and isinstance(inner, str):
            return inner if inner.startswith(DATA_URL) else f"data:;base64,{inner}"
        return reference(inner)
    if isinstance(value, bytes | bytearray | memoryview):
        return data_url(bytes(value))
    if hasattr(value, "getbands") and hasattr(value, "save"):  # an image of Pillow
        return data_url(_as_png(value))
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value.strip():
        raise bad_image(f"an image must be a path, bytes or a data URL, found {str(value)[:40]!r}")
    return value


def data_url(content: bytes, kind: str = "") -> str:
    """Return bytes as a text that holds them."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _as_png(image: Any) -> bytes:
    """Return a file of an image of Pillow, which keeps the limits of other files."""
    image = _decoded(lambda: image)
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        image = image.convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def content_of(reference: str) -> bytes:
    """Return the bytes that a data URL holds."""
    head, comma, body = reference.partition(",")
    if not comma or not head.endswith(";base64"):
        raise bad_image(f"a data URL must begin with data:image/...;base64, found {head[:40]!r}")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_image(f"its base64 text is damaged ({error})") from None


# ---- opening


def read_image(reference: str, folder: str) -> tuple[str, bytes]:
    """Return the real path of an image, empty for one inside its row, and the content."""
    if reference.startswith(DATA_URL):
        content = content_of(reference)
        if len(content) > MOST_BYTES:
            raise bad_image(f"more than {MOST_BYTES >> 20} MiB")
        return "", content
    shown = reference[:100]
    if "://" in reference[:20]:
        raise bad_image(f"{shown}: nothing is downloaded; save the image as a file")
    try:
        path, content = read_inside(Path(folder), reference, MOST_BYTES)
    except PermissionError as error:
        reason = f"cannot be read ({error.strerror})"
        if error.filename == reference:
            reason = f"is outside data_args.image_dir ({folder})"
        raise bad_image(f"{shown}: {reason}") from None
    except FileNotFoundError:
        raise bad_image(f"{shown}: no such file in {folder} (data_args.image_dir)") from None
    except OSError as error:
        raise bad_image(f"{shown}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:  # too large, or a name that no file has
        raise bad_image(f"{shown}: {error}") from None
    return str(path), content


def open_image(content: bytes) -> Any:
    """Return an image of Pillow, decoded completely and upright; raise DropReason.

    Only the decoders of FORMATS see the content. The size is checked before anything is decoded.
    """
    if not content:
        raise bad_image("the file is empty")

    def opened() -> Any:
        # Pillow would load the decoder of WebP too late.
        from PIL import Image, WebPImagePlugin  # noqa: F401

        return Image.open(io.BytesIO(content), formats=FORMATS)

    return _decoded(opened)


def _decoded(opened: Callable[[], Any]) -> Any:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise DataError(
            "images need Pillow; install it with: pip install 'rather[vision]'"
        ) from None
    try:
        with warnings.catch_warnings(action="ignore"):  # of a bomb: the limit here is smaller
            image = opened()
            _check_kind(image)
            image.load()
            return ImageOps.exif_transpose(image)
    except DropReason:
        raise
    except UnidentifiedImageError:
        detail = f"not an image of a known format ({', '.join(FORMATS)})"
        raise bad_image(detail) from None
    except Image.DecompressionBombError:
        raise bad_image(f"more than {MOST_PIXELS:,} pixels") from None
    except MemoryError:
        raise bad_image("decoding it takes too much memory") from None
    except Exception as error:  # decoders raise anything for damaged content
        raise bad_image(f"damaged: {type(error).__name__}: {str(error)[:100]}") from None


def _check_kind(image: Any) -> None:
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise bad_image(f"{width} x {height} pixels; at most {MOST_PIXELS:,} are read")
    if max(width, height) > MOST_RATIO * min(width, height):
        raise bad_image(f"{width} x {height} pixels; one side may be {MOST_RATIO} times the other")
    # A photo of a phone may hold a second, smaller picture (MPO); its first is the photo.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise bad_image("animated; save one of its frames as an image")
    if image.mode not in MODES:
        raise bad_image(f"its pixels are {image.mode}; save it as RGB with 8 bits per channel")
