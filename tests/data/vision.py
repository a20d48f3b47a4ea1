"""Folders of vision models without weights: config, processor, tokenizer and template, all tiny."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

QWEN_TEMPLATE = """\
{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content %}\
<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}\
{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAVA_TEMPLATE = """\
{% for message in messages %}{% if message['role'] == 'user' %}[INST] \
{% for content in message['content'] if content['type'] == 'image' %}<image>
{% endfor %}{% for content in message['content'] if content['type'] == 'text' %}{{ content['text'] }}{% endfor %}\
 [/INST]{% else %} {{ message['content'][0]['text'] }}<|im_end|>{% endif %}{% endfor %}"""
SMOLVLM_TEMPLATE = """\
<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}\
{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}\
{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}\
{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SPECIAL = [
    *("<unk>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES),
]
QWEN: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
QWEN["size"] = {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 64}
LLAVA = {
    "size": {"shortest_edge": 16},
    "crop_size": {"height": 16, "width": 16},
    "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]],
}
SMOLVLM = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}}
COUNTS: dict[str, dict[str, Any]] = {
    "llava_next": {
        "patch_size": 4,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    },
    "smolvlm": {"image_seq_len": 4},
}
END = {"llava_next": "<|im_end|>", "smolvlm": "<end_of_utterance>"}


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the special tokens of all families."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    templates = {"llava_next": LLAVA_TEMPLATE, "smolvlm": SMOLVLM_TEMPLATE}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token=END.get(family, "<|im_end|>"),
        chat_template=templates.get(family, QWEN_TEMPLATE),
    )


def vision_folder(folder: Path, family: str) -> Path:
    """Write what `rather data` reads of a checkpoint."""
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(folder)
    image_token = "<|image_pad|>" if family.startswith("qwen") else "<image>"
    config = {
        "model_type": family,
        "vision_config": {},
        "image_token_id": tokenizer.convert_tokens_to_ids(image_token),
    }
    settings: dict[str, Any] = {"llava_next": LLAVA, "smolvlm": SMOLVLM}.get(family, QWEN)
    (folder / "config.json").write_text(json.dumps(config))
    if family == "qwen2_5_vl":  # as its checkpoints have it
        limits = {
            "min_pixels": settings["size"]["shortest_edge"],
            "max_pixels": settings["size"]["longest_edge"],
        }
        old = {name: setting for name, setting in settings.items() if name != "size"} | limits
        (folder / "preprocessor_config.json").write_text(json.dumps(old))
    else:
        whole = {"image_processor": settings, **COUNTS.get(family, {})}
        (folder / "processor_config.json").write_text(json.dumps(whole))
    return folder


def processor_of(family: str) -> Any:
    """Return transformers' processor with Pillow's backend; it asks for torchvision otherwise."""
    classes = {
        "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil, QWEN),
        "llava_next": (LlavaNextProcessor, LlavaNextImageProcessorPil, LLAVA),
        "smolvlm": (processing_smolvlm.SmolVLMProcessor, SmolVLMImageProcessorPil, SMOLVLM),
    }
    base, images, settings = classes.get(family, (Qwen3VLProcessor, Qwen2VLImageProcessorPil, QWEN))
    processing_smolvlm.num2words = processing_smolvlm.num2words or str  # for video only

    class Processor(base):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
            return type(value)  # there is no video processor without torchvision

    tokenizer = tokenizer_of(family)
    video = {} if family == "llava_next" else {"video_processor": None}
    return Processor(
        image_processor=images(**settings), tokenizer=tokenizer,
        chat_template=tokenizer.chat_template, **video, **COUNTS.get(family, {}),
    )  # fmt: skip


def png(width: int = 20, height: int = 12, colour: Any = (200, 30, 40), **options: Any) -> bytes:
    """Return an image of one colour."""
    return encoded(Image.new("RGB", (width, height), colour), **options)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
