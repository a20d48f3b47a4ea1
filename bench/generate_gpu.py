"""Answers per second of the embedded sampler: a random model of 135M weights on one GPU.

    python bench/generate_gpu.py                                          # 10,000 answers of 256 tokens
    python bench/generate_gpu.py --answers 4 --prompts 2500               # four answers per prefill
    python bench/generate_gpu.py --device cpu --prompts 4 --layers 2 --tokens 8    # tries the script itself

Prompts have 16 to 256 tokens and are cut into chunks as `rather generate` does. A random model hardly ever ends an
answer, so nearly all have the full length: the slowest case. The goal is 10,000 answers in less than 300 seconds.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import RESULTS, write_facts
from transformers import LlamaConfig, LlamaForCausalLM

from rather.model.generate import Decoding, batch_that_fits, generate

VOCABULARY = 49_152
GOAL = 300.0  # seconds for 10,000 answers


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    causal_lm = model(args)
    tokenizer = SimpleNamespace(eos_token_id=2)
    draw = random.Random(0)
    lengths = sorted((draw.randint(16, 256) for _ in range(args.prompts)), reverse=True)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]
    decoding = Decoding(args.tokens, temperature=1.0, top_p=args.top_p)
    batch = args.batch or batch_that_fits(causal_lm, lengths[0] + args.tokens)
    size = max(1, batch // args.answers)
    generate(causal_lm, tokenizer, prompts[:2], Decoding(4, 1.0), answers=args.answers)  # warm-up
    answers = tokens = 0
    begin = time.perf_counter()
    for first in range(0, len(prompts), size):
        chunk = prompts[first : first + size]
        found = generate(causal_lm, tokenizer, chunk, decoding, answers=args.answers)
        answers += len(found)
        tokens += sum(len(answer.ids) for answer in found)
        seconds = time.perf_counter() - begin
        print(
            f"{answers} answers, {tokens} tokens, {seconds:.1f} s, {tokens / seconds:.0f} tokens/s",
            flush=True,
        )
        facts = {"answers": answers, "tokens": tokens, "seconds": round(seconds, 2), "batch": batch}
        peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else None
        write_facts(
            args.json, "generate_gpu", **facts, tokens_per_second=round(tokens / seconds), peak_gib=peak,
            answers_per_prompt=args.answers, decoding=asdict(decoding), weights=causal_lm.num_parameters(),
            goal_seconds=GOAL, reached=seconds * 10_000 / answers < GOAL,
        )  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--answers", type=int, default=1, help="per prompt")
    parser.add_argument("--tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--batch", type=int, help="answers at a time; default: what fits in memory")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, default=RESULTS / "generate_gpu.json")
    return parser.parse_args()


def model(args: argparse.Namespace) -> Any:
    """The shape of SmolLM2-135M with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=args.layers,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.device(args.device):
        made: Any = LlamaForCausalLM(config)
    return made.to(dtype).eval()


if __name__ == "__main__":
    main()
