"""Make pairs about coloured shapes, and a tiny vision model with random weights.

Nothing is downloaded. Each pair asks about one image; the rejected answer names another colour.
Writes shapes/: images/, train.jsonl, held_out.jsonl and model/.
"""

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    set_seed,
)

FOLDER = Path("shapes")
COLOURS = {"red": (220, 40, 40), "green": (30, 170, 60), "blue": (40, 70, 220), "white": (240,) * 3}
SHAPES = ("circle", "square", "triangle")
MARKS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def draw_shape(shape, colour, random_):
    """Return an image of one shape, of any size, at any place."""
    image = Image.new("RGB", (48, 48), tuple(random_.randint(5, 60) for _ in range(3)))
    size = random_.randint(34, 42)
    left, top = random_.randint(2, 46 - size), random_.randint(2, 46 - size)
    right, bottom = left + size, top + size
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=colour)
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), fill=colour)
    else:
        draw.polygon([(left, bottom), ((left + right) // 2, top), (right, bottom)], fill=colour)
    return image


def write_pairs(name, count, seed):
    """Write images and rows; the paths in a row are relative to the folder of its file."""
    random_ = random.Random(seed)
    (FOLDER / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        right, wrong = random_.sample(list(COLOURS), 2)
        shape = random_.choice(SHAPES)
        path = f"images/{name}{number}.png"
        draw_shape(shape, COLOURS[right], random_).save(FOLDER / path)
        rows.append({
            "images": [path],
            "prompt": f"<image>Which colour is the {shape}?",
            "chosen": right,
            "rejected": wrong,
        })  # fmt: skip
    (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model():
    """Write a model of the Qwen2.5-VL family that any computer trains in seconds."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", *MARKS.values(), *COLOURS]
    backend.add_tokens([AddedToken(text, special=text[0] == "<") for text in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(FOLDER / "model")
    set_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 512, "tie_word_embeddings": True,
            "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "out_hidden_size": 64, "patch_size": 8, "fullatt_block_indexes": [0, 1],
        },
        tie_word_embeddings=True,
        **{key: tokenizer.convert_tokens_to_ids(text) for key, text in MARKS.items()},
    )  # fmt: skip
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(FOLDER / "model")
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2,
        "temporal_patch_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 48},
    }  # fmt: skip
    (FOLDER / "model" / "preprocessor_config.json").write_text(json.dumps(processor))


if __name__ == "__main__":
    write_pairs("train", 320, seed=0)
    write_pairs("held_out", 80, seed=1)
    write_model()
    print(f"{FOLDER}: 400 images, train.jsonl, held_out.jsonl, model")
