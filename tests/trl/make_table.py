"""Write the table of TRL's arguments into docs/coming_from/trl.md: `python -m tests.trl.make_table`."""

from __future__ import annotations

import re

from rather.trl.configs import REFUSED
from tests.house.source import ROOT

PAGE = ROOT / "docs" / "coming_from" / "trl.md"
BLOCK = re.compile(r"(<!-- begin trl arguments.*?-->\n).*?(<!-- end -->)", re.DOTALL)

# Arguments of TRL that Rather reads -> Rather's key, or what the argument does.
OURS = {
    "loss_type": "pref_loss",
    "loss_weights": "loss_weights",
    "beta": "beta",
    "label_smoothing": "label_smoothing",
    "f_divergence_type": "f_divergence_type",
    "f_alpha_divergence_coef": "f_alpha_divergence_coef",
    "discopop_tau": "discopop_tau",
    "ld_alpha": "ld_alpha",
    "use_weighting": "use_weighting",
    "desirable_weight": "desirable_weight",
    "undesirable_weight": "undesirable_weight",
    "center_rewards_coefficient": "center_rewards_coefficient",
    "cpo_alpha": "rpo_alpha; cpo_alpha for loss_type sigmoid",
    "simpo_gamma": "gamma",
    "alpha": "alphapo_alpha",
    "max_length": "sequence_length",
    "truncation_mode": "data_args.overlong",
    "sync_ref_model": "sync_ref_model",
    "ref_model_mixup_alpha": "ref_model_mixup_alpha",
    "ref_model_sync_steps": "ref_model_sync_steps",
    "model_init_kwargs": "model_args",
    "trust_remote_code": "model_args.trust_remote_code",
    "disable_dropout": "dropout is off; false is refused for a model that has dropout",
    "router_aux_loss_coef": "0 for a mixture of experts; else model_args.moe_aux_loss_coef",
    "precompute_ref_log_probs": "reference.cache",
    "precompute_ref_batch_size": "reference.infer_batch_size",
    "dataset_num_proc": "processes that tokenise",
    "dataset_text_field": "column of plain text",
    "completion_only_loss": "data_args.score",
    "assistant_only_loss": "data_args.score: assistant; the chat template must mark the turns",
    "chat_template_path": "data_args.template; a Jinja file",
    "eos_token": "end token of the tokenizer",
    "pad_token": "padding token of the tokenizer that is saved",
    "shuffle_dataset": "shuffles the rows once",
    "padding_free": "always: nothing is padded; with SFT set max_length=None, as TRL asks",
    "pad_to_multiple_of": "nothing is padded, which changes no number",
    "gradient_checkpointing": "recomputes activations on a GPU; changes no number",
    "prediction_loss_only": "evaluation returns the loss and metrics only",
    "eval_accumulation_steps": "evaluation returns the loss and metrics only",
}  # fmt: skip


def describe_argument(name: str) -> tuple[str, str]:
    """Return "exact" or "refused", and Rather's key or the reason: a row of the docs' table."""
    if name in REFUSED:
        return "refused", REFUSED[name]
    return "exact", OURS.get(name, "transformers' Trainer reads it, as in TRL")


def table() -> str:
    rows = [
        "| argument | | Rather's key, or what it does; why not, and what to do |",
        "|---|---|---|",
    ]
    for name in sorted({*OURS, *REFUSED}):
        status, text = describe_argument(name)
        rows.append(f"| `{name}` | {status} | {text} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    return BLOCK.sub(lambda found: f"{found[1]}{table()}{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
