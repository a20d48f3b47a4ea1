"""Make pixels of images, as the vision tower of a family wants them, by transformers' own classes.

Pillow's backends are used everywhere: torchvision's, which transformers prefers if it is installed,
resize with other rounding, so that pixels would depend on what a machine has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from rather.data.batch import PromptImage
from rather.data.image_tokens import QWEN, ImageRecipe
from rather.data.images import MOST_BYTES, open_image
from rather.data.json_rows import DropReason
from rather.data.sampler import PicklesFields
from rather.errors import DataError
from rather.files import read_bytes

UNUSED = ("rows", "cols")  # what a processor returns for its own text


@dataclass(frozen=True, eq=False)
class PixelMaker(PicklesFields):
    """Makes pixels by a recipe. Pickled, it is the recipe alone."""

    recipe: ImageRecipe

    def pixels(self, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        """Return the keyword arguments of the model's `get_image_features` for these images."""
        opened = [self._open(image) for image in images]
        features = self._processor.preprocess(opened, return_tensors="pt")
        return {name: tensor for name, tensor in features.items() if name not in UNUSED}

    def _open(self, image: PromptImage) -> Any:
        """Return an image that is still what it was when the pairs were prepared."""
        name = image.source if isinstance(image.source, str) else "an image of a row"
        try:
            content = image.source
            if isinstance(content, str):
                content = read_bytes(Path(content), MOST_BYTES)
            if self.recipe.image_digest(content) != image.digest:
                raise ValueError("is another image now than when the pairs were prepared")
            return open_image(content)
        except DropReason as reason:
            raise DataError(f"{name}: {reason.detail}.") from None
        except (OSError, ValueError) as error:
            text = getattr(error, "strerror", None) or error
            raise DataError(
                f"{name}: {text}. Restore the image, or delete the folder of data_args.cache_dir "
                "to prepare the pairs again."
            ) from error

    @cached_property
    def _processor(self) -> Any:
        processor: Any
        if self.recipe.family in QWEN:
            from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as of_qwen

            processor = of_qwen.Qwen2VLImageProcessorPil
        elif self.recipe.family == "llava_next":
            from transformers.models.llava_next import image_processing_pil_llava_next as of_llava

            processor = of_llava.LlavaNextImageProcessorPil
        else:
            from transformers.models.smolvlm import image_processing_pil_smolvlm as of_smolvlm

            processor = of_smolvlm.SmolVLMImageProcessorPil
        return processor(**self.recipe.processor, do_convert_rgb=True)
