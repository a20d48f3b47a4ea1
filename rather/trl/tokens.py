"""TRL 1.16's token recipe: which tokens a row becomes, and which of them are scored.

Plain text gets no chat template: EOS is written behind it as text. Messages get the tokenizer's
template, and everything after the prompt is scored. Datasets stay Hugging Face datasets, whose
columns have TRL's names, so that the samplers of transformers see what they see in TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from rather.data.batch import PairBatch, TokenPair
from rather.data.messages import common_length
from rather.data.pack import pack
from rather.data.pairs import spans_of
from rather.errors import ConfigError
from rather.files import parse_json
from rather.pipeline.steps import NO_LIMIT

Ids = list[int]
Row = dict[str, Any]
TEXTS = ("prompt", "chosen", "rejected", "completion", "messages")


def is_chat(row: Row) -> bool:
    """Return whether a row holds messages instead of text."""
    columns = (row[name] for name in TEXTS if name in row)
    first = next(columns, None)
    return isinstance(first, list) and bool(first) and isinstance(first[0], dict)


class Recipe(NamedTuple):
    """Turns the rows of a dataset into token ids."""

    tokenizer: Any
    max_length: int | None
    processes: int | None = None

    def map(self, dataset: Any, function: Callable[..., Row], **options: Any) -> Any:
        if hasattr(dataset, "num_rows"):  # not streamed
            options["num_proc"] = self.processes
        return dataset.map(function, **options)

    def ids(self, text: Any, row: Row, **options: Any) -> Ids:
        """Return the tokens of text or messages."""
        if isinstance(text, str):
            return list(self.tokenizer(text=text)["input_ids"])
        return list(self.rendered(text, row, **options)["input_ids"])

    def rendered(self, messages: Any, row: Row, **options: Any) -> Any:
        tools = row.get("tools")
        tools = parse_json(tools) if isinstance(tools, str) else tools
        options = {"tools": tools, **(row.get("chat_template_kwargs") or {}), **options}
        return self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, **options
        )

    def kept_part(self, truncation_mode: str) -> slice:
        """Return which tokens of a sequence are kept if it is longer than max_length."""
        length = self.max_length
        if length is None:
            return slice(None)
        return {"keep_start": slice(length), "keep_end": slice(-length, None)}[truncation_mode]

    def with_eos(self, text: Any) -> Any:
        end = self.tokenizer.eos_token
        return text + end if isinstance(text, str) and not text.endswith(end) else text

    def answers(self, row: Row, names: Sequence[str]) -> tuple[Ids, list[Ids]]:
        """Return the prompt up to where a whole sequence differs, and the answers after it."""
        starts = {"add_generation_prompt": True} if is_chat(row) else {}
        prompt = self.ids(row["prompt"], row, **starts)
        sequences = [self.ids(row["prompt"] + self.with_eos(row[name]), row) for name in names]
        length = min(common_length(prompt, ids) for ids in sequences)
        return prompt[:length], [ids[length:] for ids in sequences]

    # --- one method for each trainer ---

    def preference(self, dataset: Any, *, drops: bool = True) -> Any:
        """Return prompt_ids, chosen_ids and rejected_ids of each row."""

        def tokens(row: Row) -> Row:
            prompt, (chosen, rejected) = self.answers(row, ("chosen", "rejected"))
            return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}

        dataset = self.map(self._with_prompt(dataset), tokens)
        return self._without_full_prompts(dataset) if drops else dataset

    def unpaired(self, dataset: Any, kl_batch: int | None) -> Any:
        """Return prompt_ids, completion_ids, label; with `kl_batch` a neighbour's answer."""
        dataset = self._with_prompt(dataset)
        columns = list(next(iter(dataset)))
        if "chosen" in columns:
            dataset = self.map(dataset, _unpaired, batched=True, remove_columns=columns)

        def tokens(row: Row) -> Row:
            prompt, (answer,) = self.answers(row, ("completion",))
            return {"prompt_ids": prompt, "completion_ids": answer}

        dataset = self._without_full_prompts(self.map(dataset, tokens))
        if kl_batch is None:
            return dataset
        return self.map(dataset, _neighbours, batched=True, batch_size=kl_batch)

    def reward(self, dataset: Any) -> Any:
        """Return chosen_ids and rejected_ids; rows that are too long are dropped."""

        def tokens(row: Row) -> Row:
            begin = row.get("prompt", "" if isinstance(row["chosen"], str) else [])
            sides = ("chosen", "rejected")
            return {
                f"{side}_ids": self.ids(begin + self.with_eos(row[side]), row) for side in sides
            }

        columns = next(iter(dataset))
        if "chosen_input_ids" in columns:  # older names
            for side in ("chosen", "rejected"):
                dataset = dataset.rename_column(f"{side}_input_ids", f"{side}_ids")
        elif "chosen_ids" not in columns:
            dataset = self.map(dataset, tokens)
        longest = self.max_length
        if longest is None:
            return dataset
        return dataset.filter(
            lambda row: len(row["chosen_ids"]) <= longest and len(row["rejected_ids"]) <= longest
        )

    def concatenated(self, dataset: Any) -> Any:
        """Return whole sequences and their scored tokens, as TRL's ORPO and CPO make them.

        A chat template gives text first. Prompt and answer are tokenised together, without special
        tokens; then BOS and EOS are added.
        """
        tokenizer, longest = self.tokenizer, self.max_length or 512

        def side(prompt: str, answer: str) -> tuple[Ids, Ids]:
            begin = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
            ids = list(tokenizer(prompt + answer, add_special_tokens=False)["input_ids"])
            start = len(begin) - (begin != ids[: len(begin)])
            begin, end = ids[:start], ids[start:]
            if tokenizer.bos_token_id is not None and begin[:1] != [tokenizer.bos_token_id]:
                begin = [tokenizer.bos_token_id, *begin]
            if end[-1:] != [tokenizer.eos_token_id]:
                end = [*end, tokenizer.eos_token_id]
            end = end[: max(0, longest - len(begin))]
            return begin + end, [0] * len(begin) + [1] * len(end)

        def tokens(row: Row) -> Row:
            texts = self._rendered_texts(row) if is_chat(row) else row
            columns: Row = {}
            for name in ("chosen", "rejected"):
                columns[f"{name}_input_ids"], columns[f"{name}_scored"] = side(
                    texts["prompt"], texts[name]
                )
            return columns

        dataset = self.map(self._with_prompt(dataset), tokens)
        return dataset.filter(lambda row: 1 in row["chosen_scored"] and 1 in row["rejected_scored"])

    def _rendered_texts(self, row: Row) -> Row:
        continues = row["prompt"][-1]["role"] == "assistant"
        options = {
            "tokenize": False,
            "tools": row.get("tools"),
            **(row.get("chat_template_kwargs") or {}),
        }
        render = self.tokenizer.apply_chat_template
        prompt = render(
            row["prompt"],
            continue_final_message=continues,
            add_generation_prompt=not continues,
            **options,
        )
        texts = {
            name: render(row["prompt"] + row[name], **options) for name in ("chosen", "rejected")
        }
        length = min(common_length(prompt, text) for text in texts.values())
        return {"prompt": prompt[:length], **{name: text[length:] for name, text in texts.items()}}

    def language_modelling(self, dataset: Any, args: Any, *, completion_only: bool) -> Any:
        """Return input_ids and labels, which are -100 for tokens that are not scored."""
        options = {"return_assistant_tokens_mask": True} if args.assistant_only_loss else {}
        kept_tokens = self.kept_part(args.truncation_mode)
        masks = ["completion_mask", "assistant_masks"] if completion_only else ["assistant_masks"]

        def tokens(row: Row) -> Row:
            if "prompt" in row:
                prompt, (answer,) = self.answers(row, ("completion",))
                scored = [0] * len(prompt) + [1] * len(answer)
                columns = {"input_ids": prompt + answer, "completion_mask": scored}
                if options:
                    rendered = self.rendered(row["prompt"] + row["completion"], row, **options)
                    columns["assistant_masks"] = list(rendered["assistant_masks"])
                return columns
            if is_chat(row):
                rendered = self.rendered(row["messages"], row, **options)
                names = ("input_ids", "assistant_masks") if options else ("input_ids",)
                return {name: list(rendered[name]) for name in names}
            return {"input_ids": self.ids(self.with_eos(row[args.dataset_text_field]), row)}

        def cut(row: Row) -> Row:
            labels = _labels(row, masks)
            return {"input_ids": row["input_ids"][kept_tokens], "labels": labels[kept_tokens]}

        if _has_speakers(next(iter(dataset))):
            dataset = self.map(dataset, _as_messages, remove_columns="conversations")
        first = next(iter(dataset))
        if "messages" in first and "prompt" in first:
            raise ConfigError(
                "train_dataset: rows have messages and a prompt, and TRL mixes the two: it scores "
                "the completion without its end token. Remove one of the columns."
            )
        if "input_ids" not in first:
            dataset = self.map(dataset, tokens)
        dataset = self.map(dataset, cut)
        if self.max_length is None:
            return dataset
        return dataset.filter(lambda row: any(label != -100 for label in row["labels"]))

    def _with_prompt(self, dataset: Any) -> Any:
        return dataset if "prompt" in next(iter(dataset)) else self.map(dataset, _extract_prompt)

    def _without_full_prompts(self, dataset: Any) -> Any:
        longest = self.max_length
        if longest is None:
            return dataset
        return dataset.filter(lambda row: len(row["prompt_ids"]) < longest)


def _extract_prompt(row: Row) -> Row:
    """Take the common beginning of both answers as the prompt, as TRL does."""
    chosen, rejected = row["chosen"], row["rejected"]
    length = common_length(chosen, rejected)
    if length == min(len(chosen), len(rejected)):
        length -= 1  # TRL's loop ends on the last place
    elif chosen[length - 1] == " ":
        length -= 1
    return {"prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}


def _labels(row: Row, masks: Sequence[str]) -> Ids:
    """Return the labels of a row of tokens: its own, or the tokens that all of its masks score."""
    if row.get("labels") is not None:
        return list(row["labels"])
    scored = [row[name] for name in masks if name in row]
    tokens = zip(row["input_ids"], *scored, strict=True)
    return [token if all(bits) else -100 for token, *bits in tokens]


def _has_speakers(row: Row) -> bool:
    """Return whether a row is a list of {"from": ..., "value": ...} in `conversations`."""
    turns = row.get("conversations")
    return isinstance(turns, list) and bool(turns) and {"from", "value"} <= set(turns[0])


def _as_messages(row: Row) -> Row:
    turns = row["conversations"]
    return {"messages": [{"role": turn["from"], "content": turn["value"]} for turn in turns]}


def _unpaired(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    count = len(rows["chosen"])
    doubled = {name: cells + cells for name, cells in rows.items()}
    del doubled["chosen"], doubled["rejected"]
    answers = rows["chosen"] + rows["rejected"]
    return {**doubled, "completion": answers, "label": [True] * count + [False] * count}


def _neighbours(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    answers = rows["completion_ids"]
    return {**rows, "KL_completion_ids": [answers[-1], *answers[:-1]]}


# --- rows of tokens -> packed micro-batches ---


def token_pair(
    sequences: Sequence[tuple[Ids, Ids]], prompt_length: int = 0, **facts: Any
) -> TokenPair:
    """Return one or two sequences with their masks as a pair that shares its first tokens."""
    (chosen, first), *second_side = sequences
    rejected, second = second_side[0] if second_side else ([], [])
    shared = min(prompt_length, len(chosen))
    if second_side:
        shared = min(shared, common_length(chosen, rejected))
    return TokenPair(
        np.array(chosen[:shared], np.int32),
        np.array(chosen[shared:], np.int32),
        np.array(rejected[shared:], np.int32),
        spans_of(first),
        spans_of(second) if second_side else (),
        **facts,
    )


def as_partner(pair: TokenPair) -> TokenPair:
    """Return a single answer whose partner is the second sequence, if there is one."""
    if not len(pair.rejected):
        return pair
    return replace(pair.only("chosen"), partner=pair.rejected, partner_scored=pair.rejected_scored)


def cut_answer(prompt: Ids, answer: Ids, kept: slice) -> tuple[Ids, Ids]:
    """Return the tokens of prompt and answer, and 1 for those of the answer, cut to a length."""
    return (prompt + answer)[kept], ([0] * len(prompt) + [1] * len(answer))[kept]


class Packer:
    """Collates rows into one packed micro-batch: what transformers' loaders call for each batch."""

    def __init__(
        self,
        pairs_of: Callable[[Row], list[TokenPair]],
        *,
        at_end: bool = False,
        by_side: bool = False,
    ) -> None:
        """With `by_side`, each side has a micro-batch of its own, too: only "chosen" is trained."""
        self.pairs_of, self.at_end, self.by_side = pairs_of, at_end, by_side

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        pairs = [pair for row in rows for pair in self.pairs_of(row)]
        numbers = torch.tensor([row.get("row", -1) for row in rows])
        batch = {"rows": numbers, "pairs": self._packed(pairs)}
        for side in ("chosen", "rejected") if self.by_side else ():
            batch[side] = self._packed([pair.only(side) for pair in pairs])
        counted = [pair.only("chosen") for pair in pairs] if self.by_side else pairs
        tokens = sum(map(_padded_tokens, counted))
        if self.at_end:  # pairs end where the score is
            tokens = sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows)
        return {**batch, "tokens": torch.tensor(tokens)}

    def _packed(self, pairs: Sequence[TokenPair]) -> PairBatch:
        (batch,) = pack(pairs, NO_LIMIT, at_end=self.at_end)
        return batch


def _padded_tokens(pair: TokenPair) -> int:
    """Return the tokens of both whole sequences, as TRL counts them."""
    _, (_, scored) = pair.answers
    return pair.tokens + len(pair.prompt) * bool(scored)
