"""Does influence on held-out pairs find flipped labels better than the ledger's score?

    RATHER_TEST_DATA=/path/to/data python bench/influence.py [--sets politeness] [--seeds 0 1 2 3 4]

The gradient of the head for one pair is the sum over its tokens of h x dL/dh: h is the hidden state,
dL/dh the gradient of the pair's loss there. A random projection of both sides to 8 numbers makes 64
of it, which keep dot products in expectation (TracIn). A pair whose projection points against the mean of the
held-out pairs hurts them. Trains as bench/flipped_pairs.py with 20 % of the labels flipped,
computes the projections with the trained model, and compares AUCs on the same seeds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from common import RESULTS, machine
from flipped_pairs import SETS, Cell
from numpy.typing import NDArray
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from rather.data.batch import TokenPair
from rather.data.prepare import prepare
from rather.tools.report.pairs import PairHistory, auc, read_ledger

SHARE, SIDE = 0.2, 8
MATTERS = 0.01  # of the AUC: a smaller gain is not worth the code


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("RATHER_TEST_DATA"))
    add("--out", type=Path, default=Path("output/bench-influence"))
    add("--sets", nargs="+", choices=SETS, default=["politeness"])
    add("--seeds", type=int, nargs="+", default=list(range(5)))
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for name in args.sets:
        for seed in args.seeds:
            folder = args.out / f"{name}-{seed}"
            cell = Cell(args.data, folder, name, SETS[name], SHARE, seed, retrain=False)
            rows.append({"set": name, "seed": seed, **compare(cell)})
            print(rows[-1], flush=True)
    gains = [row["influence"] - row["doctor"] for row in rows]
    gain, error = statistics.fmean(gains), statistics.stdev(gains) / len(gains) ** 0.5
    keep = gain - 2 * error > MATTERS
    result = {"machine": machine(), "rows": rows, "gain": gain, "standard_error": error}
    result["decision"] = "keep influence" if keep else "the ledger's score is enough"
    print(json.dumps({key: result[key] for key in ("gain", "standard_error", "decision")}))
    (RESULTS / "influence.json").write_text(json.dumps(result, indent=1) + "\n")


def compare(cell: Cell) -> dict[str, float]:
    cell.run()
    planted = [int(json.loads(line)["id"], 16) for line in (cell.folder / "planted.jsonl").open()]
    config = cell.config("flipped", [str(cell.folder / "planted.jsonl")])
    data = prepare(config)
    base, trained = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (config.actor_train.model_path, config.run_dir / "model")
    )
    held = data.evals[""].take(range(len(data.evals[""])))
    target = projections(base, trained, held, cell.setting.beta).mean(axis=0)
    train = data.train.take(range(len(data.train)))
    against = -projections(base, trained, train, cell.setting.beta) @ target
    flipped = np.isin([pair.digest for pair in train], planted)
    history = PairHistory.of(read_ledger(config.run_dir))
    doctor = auc(history.flip_score, np.isin(history.ids, np.array(planted, np.uint64)))
    return {"influence": auc(against, flipped), "doctor": doctor}


def projections(
    base: torch.nn.Module, trained: torch.nn.Module, pairs: Iterable[TokenPair], beta: float
) -> NDArray[np.float64]:
    """Return 64 numbers of each pair."""
    head = trained.get_output_embeddings().weight
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(head.shape[1], SIDE, generator=draw) / SIDE**0.5 for _ in range(2))
    rows = []
    for pair in pairs:
        margin, states = torch.zeros(()), []
        for sign, answer, spans in (
            (1, pair.chosen, pair.chosen_scored),
            (-1, pair.rejected, pair.rejected_scored),
        ):
            ids = torch.from_numpy(np.concatenate([pair.prompt, answer])).long()[None]
            places = torch.tensor([i for first, end in spans for i in range(first, end)])
            with torch.no_grad():
                known = base(ids).logits[0].log_softmax(-1)
                state = trained.base_model(ids).last_hidden_state[0]
            state = state.requires_grad_()
            logps = (state @ head.detach().T).log_softmax(-1)
            picked = (places - 1, ids[0, places])
            margin = margin + sign * (logps[picked].sum() - known[picked].sum())
            states.append(state)
        gradients = torch.autograd.grad(-logsigmoid(beta * margin), states)
        parts = [
            (state.detach() @ left).T @ (slope @ right)
            for state, slope in zip(states, gradients, strict=True)
        ]
        rows.append(sum(parts[1:], parts[0]).flatten().double().numpy())
    return np.stack(rows)


if __name__ == "__main__":
    main()
