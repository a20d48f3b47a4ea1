"""Runs on pairs with images: they learn what they see, resume to the bit, and export the model."""

from __future__ import annotations

import copy
import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from rather import DPOTrainer, TrainingArguments
from rather.checkpoint.checkpoint import open_checkpoint
from rather.cluster.images import refuse_images
from rather.commands.export import export
from rather.config.run_config import DPOConfig
from rather.data.prepare import Prepared, prepare
from rather.errors import ConfigError
from rather.model.files import TOWER, ModelFiles
from rather.optim.rounding import plain_name
from rather.pipeline.pipeline import DPOPipeline
from tests.cells import cells
from tests.data.vision import processor_of, tokenizer_of, vision_folder
from tests.model.images import tiny_model
from tests.runs import assert_resumes
from tests.tiny import make_config, metrics, rows_of, write_rows

COLOURS = {"r": (230, 20, 20), "g": (20, 230, 20), "b": (20, 20, 230), "w": (240, 240, 240)}
WEIGHTS = "model.safetensors"


def make_model(folder: Path, family: str) -> Path:
    """A whole checkpoint: processor, tokenizer and random weights."""
    vision_folder(folder, family)
    tokenizer = tokenizer_of(family)
    names = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    names |= {"image_token_id": "<|image_pad|>", "video_token_id": "<global-img>"}
    if not family.startswith("qwen"):
        names["image_token_id"] = "<image>"
    marks = {key: tokenizer.convert_tokens_to_ids(text) for key, text in names.items()}
    tiny_model(family, len(tokenizer), marks).save_pretrained(folder)
    return folder


def make_pairs(folder: Path, name: str, count: int, seed: int = 0) -> Path:
    """Images of one colour, of different shades and sizes; the right answer names the colour."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        right, wrong = draw.sample(list(COLOURS), 2)
        shade = tuple(max(0, min(255, level + draw.randint(-15, 15))) for level in COLOURS[right])
        image = Image.new("RGB", (draw.randint(16, 20), draw.randint(16, 20)), shade)
        image.save(folder / f"{name}{number}.png")
        prompt = [{"type": "image"}, {"type": "text", "text": "colour?"}]
        rows.append({
            "images": [f"{name}{number}.png"],
            "prompt": [{"role": "user", "content": prompt}],
            "chosen": [{"role": "assistant", "content": right}],
            "rejected": [{"role": "assistant", "content": wrong}],
        })  # fmt: skip
    return write_rows(folder / f"{name}.jsonl", rows)


def refuse_in(config: DPOConfig, data: Prepared) -> None:
    refuse_images(config.actor_train, config.reference, data)


TRAINING = "actor_train__training_args__"


def vision_config(folder: Path, *, pairs: int = 12, held_out: int = 6, **changes: Any) -> DPOConfig:
    """A run of the vision model in `folder`, which gets one, and pairs; `model_args` are its own."""
    if not (folder / "base").exists():
        make_model(folder / "base", "qwen2_5_vl")
        make_pairs(folder, "pairs", pairs)
        make_pairs(folder, "held_out", held_out, seed=1)
    options = {
        "sequence_length": 256,
        f"{TRAINING}per_device_train_batch_size": 6,
        f"{TRAINING}num_train_epochs": 2,
        "actor_train__model_args": changes.pop("model_args", {}),
    }
    return make_config(folder, **{**options, **changes})


def run(config: DPOConfig) -> Path:
    assert DPOPipeline(config).run() == 0
    return config.run_dir


def counted(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [message for message in caplog.messages if text in message]


def test_features_and_reference_are_hits_in_the_second_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rather")
    config = vision_config(tmp_path)
    folder = run(config)
    before, after = (load_file(f / WEIGHTS) for f in (tmp_path / "base", folder / "model"))
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]) == bool(TOWER.search(name)), name
    for file in ("preprocessor_config.json", "tokenizer.json"):
        assert (folder / "model" / file).exists()
    # 12 training images twice and 6 held-out ones at 3 evaluations; the reference needs each once,
    # and sees those of training first.
    assert counted(caplog, "actor_train: features of images: 36 from the cache, 6 computed")
    assert counted(caplog, "reference: features of images: 6 from the cache, 12 computed")
    assert counted(caplog, "reference log-probs: 12 pairs from the cache, 18 computed")
    caplog.clear()
    other = vision_config(tmp_path, exp_name="again", pref_loss="ipo")
    run(other)
    assert counted(caplog, "actor_train: features of images: 42 from the cache, 0 computed")
    assert counted(caplog, "reference log-probs: 30 pairs from the cache, 0 computed")
    off = vision_config(tmp_path, exp_name="off", model_args={"vision_cache": "off"})
    run(off)
    assert counted(caplog, "actor_train: features of images: 0 from the cache, 42 computed")
    same = [{key: line.get(key) for key in ("loss", "grad_norm")} for line in metrics(config)]
    assert same == [{key: line.get(key) for key in ("loss", "grad_norm")} for line in metrics(off)]


@pytest.mark.parametrize("frozen", cells([""], ["vision", "vision projector"]))
def test_it_resumes_to_the_bit(tmp_path: Path, frozen: str) -> None:
    constant = {f"{TRAINING}lr_scheduler_type": "constant"}
    options = {"model_args": {"freeze": frozen.split()}, **constant}
    config = vision_config(tmp_path, save_steps=2, max_ckpt_to_keep=0, **options)
    assert_resumes(config, 2)
    saved = open_checkpoint(config.run_dir / "checkpoint-2").stored("model")
    assert any(TOWER.search(name) for name in saved) == (frozen != "vision projector")
    export(str(config.run_dir / "checkpoint-2"), tmp_path / "earlier")
    written = ModelFiles([tmp_path / "earlier" / WEIGHTS])
    assert all(torch.equal(written[plain_name(name)], saved[name]) for name in saved)


def preferences(folder: Path, rows: list[dict[str, Any]], images: list[Path]) -> torch.Tensor:
    """By how much plain transformers, with its own processor, prefers the right answer."""
    processor = processor_of("qwen2_5_vl")
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    sums = []
    for row, image in zip(rows, images, strict=True):
        prompt = processor.apply_chat_template(row["prompt"], add_generation_prompt=True)
        for side in ("chosen", "rejected"):
            text = prompt + row[side][0]["content"] + "<|im_end|>"
            inputs = processor(text=[text], images=[Image.open(image)], return_tensors="pt")
            with torch.no_grad():
                logps = torch.log_softmax(model(**inputs).logits[0, -3:-1], dim=-1)
            sums.append(logps.gather(1, inputs["input_ids"][0, -2:, None]).sum())
    return torch.stack(sums).view(-1, 2).diff().neg()[:, 0]


def test_it_learns_what_it_sees_and_the_export_answers_the_same(tmp_path: Path) -> None:
    training = {f"{TRAINING}per_device_train_batch_size": 8, f"{TRAINING}learning_rate": 5e-3}
    config = vision_config(
        tmp_path, pairs=64, held_out=24, model_args={"freeze": []}, beta=1.0, **training
    )
    folder = run(config)
    evaluated = [line for line in metrics(config) if "eval/rewards/accuracies" in line]
    assert evaluated[-1]["eval/rewards/accuracies"] > 0.95
    rows = rows_of(tmp_path / "held_out.jsonl")
    images = [tmp_path / row["images"][0] for row in rows]

    def accuracy(images: list[Path]) -> float:
        after, before = (
            preferences(model, rows, images) for model in (folder / "model", tmp_path / "base")
        )
        return float((after > before).double().mean())

    assert accuracy(images) == pytest.approx(evaluated[-1]["eval/rewards/accuracies"])
    assert accuracy(images[1:] + images[:1]) < 0.7  # it really looks


def test_what_cannot_see_images_is_refused(tmp_path: Path) -> None:
    config = vision_config(tmp_path)
    data = prepare(config)

    def refusal(**changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            refuse_in(vision_config(tmp_path, **changes), data)
        return str(caught.value)

    for size, axis in (("pp_size", "pipeline"), ("cp_size", "context")):
        layout = {"device_mapping": [0, 1], f"strategy_args__{size}": 2}
        said = refusal(**{f"actor_train__{key}": value for key, value in layout.items()})
        assert f"{axis} parallel does not take images" in said
    adapter = {"lora_rank": 2, "freeze": []}
    assert "an adapter is of the language model" in refusal(model_args=adapter)
    refuse_in(vision_config(tmp_path, model_args={"lora_rank": 2}), data)
    with pytest.raises(ConfigError, match=r"freeze: .*vision \| projector"):
        vision_config(tmp_path, model_args={"freeze": ["tower"]})


def test_keys_about_images_are_refused_for_text(tmp_path: Path) -> None:
    data = prepare(make_config(tmp_path))
    for key, value in {"freeze": [], "vision_cache": "off", "vision_cache_gb": 1.0}.items():
        config = make_config(tmp_path, actor_train__model_args={key: value})
        with pytest.raises(ConfigError, match=f"model_args.{key}: no pair has images"):
            refuse_in(config, data)


def test_a_full_cache_computes_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rather")
    config = vision_config(
        tmp_path, model_args={"vision_cache_gb": 3e-6, "lora_rank": 2, "lora_target": "all-linear"}
    )
    folder = run(config)
    files = list((tmp_path / "output" / ".cache" / "vision").rglob("*.features"))
    assert 1 <= len(files) <= 6
    assert counted(caplog, "is full; further images are computed each time")
    adapted = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert adapted
    assert not any(TOWER.search(name) for name in adapted)
    before, after = (load_file(f / WEIGHTS) for f in (tmp_path / "base", folder / "model"))
    assert all(torch.equal(before[name], after[name]) for name in before if TOWER.search(name))
    files[0].write_bytes(b"damaged")
    caplog.clear()
    run(vision_config(tmp_path, exp_name="again", model_args={"lora_rank": 2}))
    assert counted(caplog, "cannot be read and is computed again")


def test_a_trainer_takes_images_of_pillow(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "base", "qwen2_5_vl")
    rows = rows_of(make_pairs(tmp_path, "train", 8))
    for row in rows:
        row["images"] = [Image.open(tmp_path / row["images"][0])]
    model = AutoModelForImageTextToText.from_pretrained(folder)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer = DPOTrainer(
        model,
        DPOConfig(sequence_length=256),
        copy.deepcopy(model),
        TrainingArguments(learning_rate=1e-3, per_device_train_batch_size=4, num_train_epochs=2),
        tokenizer=processor_of("qwen2_5_vl"),
    )
    history = trainer.fit(rows, rows[:4])
    assert history[0]["loss"] == pytest.approx(math.log(2))
    assert len(history) == 4
    other = [{**row, "images": rows[number - 1]["images"]} for number, row in enumerate(rows)]
    assert trainer.evaluate(rows) != trainer.evaluate(other)  # it looks
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]) == bool(TOWER.search(name)), name
    trainer.tokenizer = tokenizer_of("qwen2_5_vl")  # this processor has no part for videos to save
    trainer.save_model(tmp_path / "saved")
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in model.state_dict().items())
    with pytest.raises(ConfigError, match="has a vision or audio tower"):
        DPOTrainer(model, DPOConfig(), copy.deepcopy(model), tokenizer=tokenizer_of("qwen2_5_vl"))
