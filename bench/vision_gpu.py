"""Image pairs on one GPU: pairs/s of ours and of TRL, memory beside its forecast; a Qwen2.5-VL-3B shape.

    python bench/vision_gpu.py                       # needs trl, datasets, pillow; about 6 minutes on an H200
    python bench/vision_gpu.py --tiny                # a minute on a CPU: does everything work?

Weights are random, images are generated (448 x 448: 256 tokens each), answers are random letters of a tokenizer
of bytes. Both systems start from the same folder and files, train the language model with vision and projector
frozen, and run the reference online. Ours is a whole `rather train` of two epochs: images are computed in the first
and come from the cache in the second. TRL has bf16 weights without autocast, Liger's layers if they are installed,
no recomputation, 4 loader processes, and the largest batch that fits. The first steps of each are not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the workers

import numpy as np
import torch
from common import RESULTS, free, machine, peak_gib, table, told, version_of, write_facts

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>",
    "<|vision_end|>", "<|video_pad|>",
)  # fmt: skip
MARKS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
WARM_UP = 3  # steps that are not measured
# Qwen2.5-VL-3B; the vision tower has transformers' defaults.
TEXT = {
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151_936,
    "tie_word_embeddings": True, "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}  # fmt: skip
TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048}
TINY_TEXT = TEXT | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
}  # fmt: skip
TINY_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2,
    "fullatt_block_indexes": [1],
}  # fmt: skip


def main() -> None:
    args = arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.only:
        cell = run_ours(args) if args.only == "ours" else run_trl(args)
        (args.folder / f"{args.only}.json").write_text(json.dumps(cell))
        return
    print(told(machine()), flush=True)
    if not (args.folder / "pairs.jsonl").exists():
        make_model(args.folder / "base", tiny=args.tiny)
        make_pairs(args)
    cells = [cell for cell in (run_alone(args, "ours"), first_that_fits(args)) if cell]
    report(args, cells)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small model and few pairs, on a CPU")
    parser.add_argument("--pairs", type=int, help="default: 1000")
    parser.add_argument("--side", type=int, help="of an image in pixels; default: 448")
    parser.add_argument("--step", type=int, help="pairs of an optimizer step; default: 32")
    parser.add_argument("--steps", type=int, default=10, help="of TRL, the first 3 not measured")
    parser.add_argument("--batch", type=int, help="pairs of TRL's batches; default: what fits")
    parser.add_argument("--lora", type=int, help="rank of an adapter, for both")
    parser.add_argument("--only", choices=("ours", "trl"))
    parser.add_argument("--folder", type=Path, default=Path("output/bench-vision"))
    parser.add_argument("--json", type=Path, default=RESULTS / "vision_gpu.json")
    args = parser.parse_args()
    args.pairs = args.pairs or (24 if args.tiny else 1000)
    args.side = args.side or (56 if args.tiny else 448)
    args.step = args.step or (4 if args.tiny else 32)
    args.steps = min(args.steps, args.pairs // args.step)
    return args


def run_alone(args: argparse.Namespace, system: str, *more: str) -> dict[str, Any] | None:
    """Run one system in a process of its own: its memory is gone afterwards."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", system, *more]
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        return dict(json.loads((args.folder / f"{system}.json").read_text()))
    print(f"{system} {' '.join(more)} ended with code {code}", flush=True)
    return None


def first_that_fits(args: argparse.Namespace) -> dict[str, Any] | None:
    cells = (run_alone(args, "trl", "--batch", str(batch)) for batch in trl_batches(args))
    return next(filter(None, cells), None)


def trl_batches(args: argparse.Namespace) -> list[int]:
    if args.batch:
        return [args.batch]
    return [size for size in (16, 8, 4, 2, 1) if size <= args.step]


# --- model and pairs ---


def make_tokenizer(folder: Path) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(folder: Path, *, tiny: bool) -> None:
    """Random weights, made on the GPU if there is one."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(folder)
    config = Qwen2_5_VLConfig(
        text_config=TINY_TEXT if tiny else TEXT,
        vision_config=TINY_TOWER if tiny else TOWER,
        **{key: tokenizer.convert_tokens_to_ids(text) for key, text in MARKS.items()},
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    settings = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    settings |= {
        "min_pixels": 56 * 56,
        "max_pixels": 1280 * 28 * 28,
        "image_processor_type": "Qwen2VLImageProcessor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.3g}B weights", flush=True)
    del model
    free()


def make_pairs(args: argparse.Namespace) -> None:
    """Rows with one image each: squares of random colours; answers of 20 to 400 letters."""
    from PIL import Image

    draw = np.random.default_rng(0)

    def letters(mean: float, most: int) -> str:
        count = int(np.clip(draw.lognormal(np.log(mean) - 0.245, 0.7), 20, most))
        return "".join(map(chr, draw.integers(97, 123, count)))

    rows = []
    (args.folder / "images").mkdir(exist_ok=True)
    for number in range(args.pairs):
        squares = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(squares).resize((args.side, args.side), Image.Resampling.NEAREST)
        image.save(args.folder / "images" / f"{number}.png")
        content = [{"type": "image"}, {"type": "text", "text": letters(40, 100)}]
        rows.append({
            "images": [f"images/{number}.png"],
            "prompt": [{"role": "user", "content": content}],
            "chosen": [{"role": "assistant", "content": letters(170, 400)}],
            "rejected": [{"role": "assistant", "content": letters(150, 400)}],
        })  # fmt: skip
    text = "\n".join(map(json.dumps, rows)) + "\n"
    (args.folder / "pairs.jsonl").write_text(text, encoding="utf-8")


# --- ours ---


def run_ours(args: argparse.Namespace) -> dict[str, Any]:
    from rather.config.load import config_from_dict
    from rather.pipeline.pipeline import DPOPipeline

    shutil.rmtree(args.folder / "output", ignore_errors=True)
    values: dict[str, Any] = {
        "exp_name": "vision",
        "output_dir": str(args.folder / "output"),
        "logging_dir": str(args.folder / "logs"),
        "pretrain": str(args.folder / "base"),
        "sequence_length": 2048,
        "track_with": None,
        "report_html": False,
        "forgetting": "off",
        "logging_steps": 1,
        "reference": {"cache": {"enabled": False}},  # online, as TRL's
        "actor_train": {
            "model_args": {"lora_rank": args.lora} if args.lora else {},
            "data_args": {"file_name": str(args.folder / "pairs.jsonl")},
            "training_args": {
                "learning_rate": 1e-6,
                "num_train_epochs": 2,
                "per_device_train_batch_size": args.step,
            },
        },
    }
    config = config_from_dict(values)
    assert DPOPipeline(config).run() == 0
    file = config.run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    speeds = [line["pairs_per_second"] for line in lines if "pairs_per_second" in line]
    plan = json.loads((config.run_dir / "plan.json").read_text(encoding="utf-8"))
    half = len(speeds) // 2
    forecast, measured = plan["memory_bytes"]["total"], plan["measured"]["memory_bytes"]
    return {
        "system": "ours",
        "pairs_per_second": statistics.median(speeds[WARM_UP:half]),
        "pairs_per_second_cached": statistics.median(speeds[half:]),
        "GiB": measured / 2**30,
        "GiB_forecast": forecast / 2**30,
        "forecast_error": forecast / measured - 1,
        "speeds": speeds,
        "how": f"{plan['micro_batches_per_step']} micro-batches a step",
    }


# --- TRL ---


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("TQDM_DISABLE", "1")
    import copy

    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    from trl_peer import _step_timer

    cuda = torch.cuda.is_available()
    model = load_model(args.folder / "base", torch.bfloat16 if cuda else torch.float32)
    reference = None if args.lora else copy.deepcopy(model)
    liger = cuda and bool(version_of("liger-kernel"))
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2_5_vl as apply

        for each in filter(None, (model, reference)):
            apply(cross_entropy=False, fused_linear_cross_entropy=False, model=each)
    model.model.visual.requires_grad_(False)
    rows = [json.loads(line) for line in (args.folder / "pairs.jsonl").read_text().splitlines()]
    dataset = Dataset.from_list(rows[: args.steps * args.step])
    folder = str(args.folder)

    def open_images(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        from PIL import Image

        opened = [[Image.open(f"{folder}/{name}") for name in row] for row in batch["images"]]
        return {**batch, "images": opened}

    dataset.set_transform(open_images)
    settings = DPOConfig(
        output_dir=str(args.folder / "trl"), report_to="none", logging_strategy="no",
        save_strategy="no", use_cpu=not cuda, bf16=False, gradient_checkpointing=False,
        max_length=None, max_steps=args.steps, learning_rate=1e-6, disable_tqdm=True,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=max(1, args.step // args.batch),
        dataloader_num_workers=4 if cuda else 0, dataloader_pin_memory=cuda,
        remove_unused_columns=False,
    )  # fmt: skip
    more: dict[str, Any] = {}
    if args.lora:
        from peft import LoraConfig

        targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
        more["peft_config"] = LoraConfig(r=args.lora, target_modules=targets)
    trainer = DPOTrainer(
        model, reference, args=settings, train_dataset=dataset,
        processing_class=load_processor(args.folder / "base"), **more,
    )  # fmt: skip
    seconds: list[float] = []
    trainer.add_callback(_step_timer(seconds))
    free()
    trainer.train()
    return {
        "system": "TRL",
        "pairs_per_second": args.step
        / statistics.median(seconds[min(WARM_UP, len(seconds) - 1) :]),
        "GiB": peak_gib(),
        "seconds": seconds,
        "how": f"{args.batch} pairs a batch, {'Liger layers' if liger else 'no Liger'}",
    }


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    )
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def load_processor(folder: Path) -> Any:
    """TRL's is what AutoProcessor gives; without torchvision one is built on Pillow's backend."""
    from transformers import AutoProcessor, AutoTokenizer
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    if version_of("torchvision"):
        return AutoProcessor.from_pretrained(folder)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class Processor(Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, _name: str, value: Any) -> Any:
            return type(value)  # there is no video processor without torchvision

    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Processor(
        image_processor=images, tokenizer=tokenizer, chat_template=TEMPLATE, video_processor=None
    )


def report(args: argparse.Namespace, cells: list[dict[str, Any]]) -> None:
    by_system = {cell["system"]: cell for cell in cells}
    ours, trl = by_system.get("ours"), by_system.get("TRL")
    ratios = {}
    if ours and trl:
        for name in ("pairs_per_second", "pairs_per_second_cached"):
            ratios[name] = ours[name] / trl["pairs_per_second"]
    facts = {name: getattr(args, name) for name in ("pairs", "side", "step", "lora", "tiny")}
    write_facts(args.json, "vision_gpu", cells=cells, ratios=ratios, **facts)
    names = ("system", "pairs_per_second", "pairs_per_second_cached", "GiB", "GiB_forecast")
    rows = [[cell.get(name) for name in (*names, "how")] for cell in cells]
    table("image pairs", ("system", "pairs/s", "features cached", "GiB", "forecast", "how"), rows)
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} x TRL")
    if ours:
        print(f"memory: forecast {ours['forecast_error']:+.1%} against what was measured")


if __name__ == "__main__":
    main()
