"""TRL's DPOTrainer on the same token ids, step by step, for the benchmarks. Runs nothing by itself."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from common import Shape, Step, free, pairs_of, peak_gib, synchronize, version_of


@dataclass
class TrlRun:
    """What a run of TRL took."""

    seconds: list[float] = field(default_factory=list)  # of each step, the first ones included
    peak_gib: float = float("nan")
    precompute_seconds: float | None = None
    settings: str = ""


def require_trl(*more: str) -> None:
    missing = [name for name in ("trl", *more) if not version_of(name)]
    if missing:
        raise SystemExit(
            f"{', '.join(missing)} not installed: pip install -c constraints.txt -e '.[bench]'"
        )


def run_trl(
    shape: Shape,
    device: str,
    steps: Sequence[Step],
    *,
    variant: str,
    per_device: int,
    lora: int | None = None,
) -> TrlRun:
    """Trains over `steps` in their order. Out of memory is raised when everything is free again."""
    try:
        return _run(shape, device, steps, variant, per_device, lora)
    finally:
        free()


def _run(
    shape: Shape,
    device: str,
    steps: Sequence[Step],
    variant: str,
    per_device: int,
    lora: int | None,
) -> TrlRun:
    os.environ.setdefault("TQDM_DISABLE", "1")
    cuda = device.startswith("cuda")
    half = cuda and variant != "default"
    run = TrlRun(settings=_described(variant, cuda, per_device))
    model = shape.model(torch.bfloat16 if half else torch.float32, device, "sdpa")
    # The reference of an adapter is the model without it.
    reference = None if variant == "precomputed" or lora else copy.deepcopy(model)
    if half:
        _apply_liger(shape, model, reference)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        trainer = _trainer(model, reference, steps, variant, per_device, folder, cuda, lora)
        if variant == "precomputed":
            synchronize()
            run.precompute_seconds = time.perf_counter() - started
        trainer.add_callback(_step_timer(run.seconds))
        trainer.train()
    run.peak_gib = peak_gib()
    trainer.accelerator.free_memory()
    return run


def _described(variant: str, cuda: bool, per_device: int) -> str:
    if variant == "default":
        kind = "fp32 weights, bf16 autocast, recompute" if cuda else "fp32, recompute"
    elif variant == "long":
        kind = "Liger layers, bf16 weights, recompute"
    else:
        kind = "Liger layers, bf16 weights, no recompute" if cuda else "fp32, no recompute"
    return f"{kind}, {per_device} pairs a batch"


def _apply_liger(shape: Shape, *models: Any) -> None:
    """Layer kernels on policy and reference: `use_liger_kernel` would leave the reference without.

    It replaces functions of transformers' module as well: whatever runs later in this process has them too.
    """
    # If CUTLASS is installed, Liger prefers CuTe kernels. They are compiled for every new shape, and
    # a step takes up to twice as long.
    for operator in ("ROPE", "RMS_NORM", "SWIGLU"):
        os.environ.setdefault(f"LIGER_KERNEL_IMPL_{operator}", "nvidia-triton")
    from liger_kernel import transformers as liger

    name = shape.family.removesuffix("_text")
    apply = getattr(liger, f"apply_liger_kernel_to_{name}", None)
    if apply is None:
        print(f"Liger has no kernels for {shape.family}: TRL runs without them", flush=True)
        return
    # Liger's experts are modules of their own; those of transformers 5 are stacked, and grouped.
    more = {"swiglu": False} if name in ("qwen3_moe", "deepseek_v3") else {}
    for model in filter(None, models):
        apply(cross_entropy=False, fused_linear_cross_entropy=False, model=model, **more)


def _trainer(
    model: Any,
    reference: Any,
    steps: Sequence[Step],
    variant: str,
    per_device: int,
    folder: str,
    cuda: bool,
    lora: int | None,
) -> Any:
    import trl.trainer.dpo_trainer as module
    from transformers import PrinterCallback
    from trl import DPOConfig, DPOTrainer

    # The key of TRL's own cache: a hash of all weights on the host, half a minute of a 7B model that nobody reads here.
    module.hash_module = lambda _model: "benchmark"

    class GivenTokens(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    pairs_per_step = len(pairs_of(steps[0]))
    assert pairs_per_step % per_device == 0, (
        f"{per_device} pairs a batch do not divide a step of {pairs_per_step}"
    )
    default = variant == "default"
    args = DPOConfig(
        output_dir=folder,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        use_cpu=not cuda,
        bf16=cuda and default,  # half weights need no autocast
        gradient_checkpointing=variant in ("default", "long"),
        max_length=None,
        max_steps=len(steps),
        learning_rate=1e-6,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=pairs_per_step // per_device,
        precompute_ref_log_probs=variant == "precomputed",
        dataloader_num_workers=2
        if cuda and not default
        else 0,  # padding goes on while the GPU works
        dataloader_pin_memory=cuda,
        disable_tqdm=True,
    )
    more: dict[str, Any] = {}
    if lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GivenTokens(
        model,
        reference,
        args=args,
        train_dataset=_dataset(steps),
        processing_class=_tokenizer(),
        **more,
    )
    if lora and not default:  # PEFT makes them float32, which is slower
        for parameter in trainer.model.parameters():
            parameter.data = parameter.data.to(model.dtype)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _dataset(steps: Sequence[Step]) -> Any:
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    pairs = [pair for step in steps for pair in pairs_of(step)]
    names = ("prompt", "chosen", "rejected")
    return Dataset.from_dict(
        {f"{name}_ids": [getattr(pair, name).tolist() for pair in pairs] for name in names}
    )


def _tokenizer() -> Any:
    """The trainer wants one for its padding id."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **names)  # type: ignore[no-untyped-call]


def _step_timer(seconds: list[float]) -> Any:
    """From the end of one optimizer step to the end of the next, so that loading a batch counts."""
    from transformers import TrainerCallback

    class StepTimer(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            synchronize()
            self.last = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            now = time.perf_counter()
            seconds.append(now - self.last)
            self.last = now

    return StepTimer()
