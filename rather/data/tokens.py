"""A pair of text -> token ids, where the answers start, and which tokens are scored.

The boundary is found by tokens: the common beginning of the prompt and both whole sequences. A sequence starts with
exactly one BOS where the tokenizer has one, and ends with at most one EOS. Runs in the child processes, on the
`tokenizers` library alone.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from rather.data.formats import TextPair, is_empty, texts
from rather.data.json_rows import HALF, Bad
from rather.data.messages import Turns
from rather.data.template import RESERVED, ChatTemplate
from rather.errors import DataError

Ids = list[int]
Span = tuple[int, int]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides how text becomes tokens; plain values, so that it can be sent and hashed."""

    tokenizer: str  # the JSON of the tokenizers library
    template: ChatTemplate | None
    bos: int | None
    eos: int | None
    adds_bos: bool
    sequence_length: int
    score: str = "last"
    overlong: str = "drop"
    separator: str = ""
    special_tokens: str = "warn"
    max_prompt_length: int | None = None
    as_trl: str | None = None  # parity: trl-1.x or trl-0.2x

    def to_json(self) -> dict[str, Any]:
        template = asdict(self.template) if self.template else None
        return {**vars(self), "template": template}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Recipe:
        template = ChatTemplate(**values["template"]) if values["template"] else None
        return cls(**{**values, "template": template})


class Note(NamedTuple):
    """Something that was changed in a pair, or that its owner should know."""

    kind: str
    detail: str


@dataclass(frozen=True)
class Encoded:
    """A tokenised pair: `prompt` is the beginning of both sequences, spans count from its start."""

    prompt: Ids
    chosen: Ids
    rejected: Ids
    chosen_scored: tuple[Span, ...]
    rejected_scored: tuple[Span, ...]
    notes: list[Note] = field(default_factory=list)


_CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]"
)


class Encoder:
    """Encodes pairs by a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.tokenizer = Tokenizer.from_str(recipe.tokenizer)
        added = self.tokenizer.get_added_tokens_decoder()
        self.added = frozenset(added)
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        special = sorted(
            (t.content for t in added.values() if t.special and t.content), key=len, reverse=True
        )
        self.special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self.eos_text = self.tokenizer.id_to_token(recipe.eos) if recipe.eos is not None else None
        if recipe.template:
            recipe.template.compile()
        self.tail = self._tail() if recipe.template else []
        secret = secrets.token_hex(8)  # no author of a row can know it, and no result depends on it
        self.real = f"\ue000{secret}\ue001"  # behind special tokens that the template wrote
        self.mark = (
            f"\ue002{secret}\ue001"  # inside special-token text of a row, while it is rendered
        )

    @property
    def is_old_trl(self) -> bool:
        """Before 0.29."""
        return self.recipe.as_trl == "trl-0.2x"

    @property
    def end_of_turn(self) -> int | None:
        """The token with which the template ends an answer."""
        return next((token for token in self.tail if token in self.added), None)

    # ---- the way of one pair

    def encode(self, pair: TextPair) -> Encoded | Bad:
        if _is_torn(pair):
            return HALF
        notes = self._warnings(pair)
        escaped = False
        policy = self.recipe.special_tokens
        pair = pair if self.recipe.as_trl else self._without_final_eos(pair, notes)
        if any(is_empty(answer) for answer in (pair.chosen, pair.rejected)):
            return Bad("empty_response", f"nothing but {self.eos_text}")
        if policy != "keep" and (found := self._special_text(pair)):
            if policy == "drop":
                return Bad(
                    "special_token_text",
                    f"the text holds {found!r}, a special token of the tokenizer",
                )
            escaped = policy == "escape"
            notes.append(
                Note(
                    "special_token_escaped" if escaped else "special_token_text",
                    f"the text holds {found!r}",
                )
            )
        if self.recipe.as_trl and all(
            isinstance(part, str) for part in (pair.prompt, pair.chosen, pair.rejected)
        ):
            return self._encode_as_trl(pair, notes)
        if self.recipe.template is None:
            return self._encode_plain(pair, notes, escaped)
        return self._encode_chat(_as_turns(pair), notes, escaped)

    def _warnings(self, pair: TextPair) -> list[Note]:
        notes = []
        for text in texts(pair):
            if found := _CONTROL.search(text):
                notes.append(
                    Note(
                        "control_characters", f"U+{ord(found[0]):04X} at character {found.start()}"
                    )
                )
                break
        if not any(text.strip() for text in texts(replace(pair, chosen="", rejected=""))):
            notes.append(Note("empty_prompt", "the prompt is empty"))
        return notes

    def _special_text(self, pair: TextPair) -> str | None:
        return next(
            (found[0] for text in texts(pair) if (found := self.special.search(text))), None
        )

    def _without_final_eos(self, pair: TextPair, notes: list[Note]) -> TextPair:
        """EOS written out at the end of an answer: the template or we add it, and one is enough."""
        if not self.eos_text or not any(
            text.rstrip().endswith(self.eos_text) for text in texts(pair)
        ):
            return pair
        cut = replace(
            pair, chosen=self._cut_eos(pair.chosen), rejected=self._cut_eos(pair.rejected)
        )
        if cut != pair:
            notes.append(
                Note(
                    "eos_text_removed",
                    f"an answer ends with {self.eos_text!r}, which is added anyway",
                )
            )
        return cut

    def _cut_eos(self, answer: str | Turns) -> str | Turns:
        assert self.eos_text is not None
        text = answer if isinstance(answer, str) else answer[-1]["content"]
        while text.rstrip().endswith(self.eos_text):
            text = text.rstrip().removesuffix(self.eos_text)
        return text if isinstance(answer, str) else (*answer[:-1], {**answer[-1], "content": text})

    def _encode_plain(self, pair: TextPair, notes: list[Note], escaped: bool) -> Encoded | Bad:
        if (
            not isinstance(pair.prompt, str)
            or not isinstance(pair.chosen, str)
            or not isinstance(pair.rejected, str)
        ):
            raise DataError(
                "the rows hold messages, but there is no chat template: set data_args.template to a name such as "
                "chatml, to a .jinja file, or use a tokenizer that has a template."
            )
        separator = self.recipe.separator
        for answer in (pair.chosen, pair.rejected):
            if pair.prompt and pair.prompt[-1].isalnum() and (separator + answer)[:1].isalnum():
                shown = f"{pair.prompt[-12:]}|{separator}{answer[:12]}"
                notes.append(Note("glued_boundary", f"prompt and answer run together at {shown!r}"))
                break
        start = pair.prompt + separator.rstrip(" ")  # a space belongs to the word after it
        whole = [
            start,
            *(pair.prompt + separator + answer for answer in (pair.chosen, pair.rejected)),
        ]
        prompt, chosen, rejected = (self._one_bos(ids, notes) for ids in self._ids(whole, escaped))
        eos = self.recipe.eos
        if eos is None:
            notes.append(
                Note(
                    "no_eos",
                    "the tokenizer has no EOS: nothing tells the model where an answer ends",
                )
            )
        sequences = [
            ids if eos is None else [*_cut_last(ids, eos), eos] for ids in (chosen, rejected)
        ]
        answers = (
            ({"role": "assistant", "content": pair.chosen},),
            ({"role": "assistant", "content": pair.rejected},),
        )
        return self._finish(prompt, sequences, _Turns((), answers), notes, escaped)

    def _encode_chat(self, turns: _Turns, notes: list[Note], escaped: bool) -> Encoded | Bad:
        assert self.recipe.template is not None
        if turns.tools and not self.recipe.template.takes_tools():
            return Bad(
                "template_error",
                f"chat template {self.recipe.template.name} has no place for tools",
            )
        if clash := [name for name in turns.kwargs if name in RESERVED]:
            return Bad("bad_type", f"chat_template_kwargs must not set {clash[0]!r}")
        rendered = [
            self._rendered(turns, turns.prompt, True, escaped),
            *(
                self._rendered(turns, (*turns.prompt, *answer), False, escaped)
                for answer in turns.answers
            ),
        ]
        for text in rendered:
            if isinstance(text, Bad):
                return text
        ready = [text for text in rendered if isinstance(text, str)]
        if self.is_old_trl:
            start = commonprefix(ready)  # noqa: RUF071 - of texts, not of paths
            return self._encode_in_parts(
                [start, *(text[len(start) :] for text in ready[1:])], turns, notes
            )
        if self.recipe.as_trl:
            prompt, *sequences = self._ids(ready, escaped)
        else:
            prompt, *whole = (self._one_bos(ids, notes) for ids in self._ids(ready, escaped))
            sequences = [self._ended(ids, notes) for ids in whole]
        return self._finish(prompt, sequences, turns, notes, escaped)

    def _encode_as_trl(self, pair: TextPair, notes: list[Note]) -> Encoded | Bad:
        """Plain text has no template there: EOS is written behind it, and the tokenizer adds what it adds."""
        if self.is_old_trl:
            return self._encode_in_parts(list(texts(pair)), _as_turns(pair), notes)
        eos = self.eos_text or ""
        answers = [
            str(text) if str(text).endswith(eos) else f"{text}{eos}"
            for text in (pair.chosen, pair.rejected)
        ]
        whole = [str(pair.prompt), *(f"{pair.prompt}{answer}" for answer in answers)]
        prompt, *sequences = (
            one.ids for one in self.tokenizer.encode_batch_fast(whole, add_special_tokens=True)
        )
        return self._finish(prompt, sequences, _as_turns(pair), notes, False)

    def _encode_in_parts(
        self, parts: Sequence[str], turns: _Turns, notes: list[Note]
    ) -> Encoded | Bad:
        """As TRL before 0.29: prompt and answers each by itself, no BOS, and EOS behind whatever ends an answer."""
        prompt, *answers = self._ids(parts, False)
        end = [] if self.recipe.eos is None else [self.recipe.eos]
        return self._finish(
            prompt, [[*prompt, *answer, *end] for answer in answers], turns, notes, False
        )

    def training_prompt(self, text: str) -> Ids | Bad:
        """What the answer to a text follows in training."""
        if _is_torn(TextPair(text, "", "")):
            return HALF
        if self.recipe.as_trl == "trl-1.x":
            return list(self.tokenizer.encode(text, add_special_tokens=True).ids)
        rendered: str | Bad = text
        if not self.recipe.as_trl:
            turns = _as_turns(TextPair(text, "", ""))
            chats = self.recipe.template is not None
            plain = text + self.recipe.separator.rstrip(" ")
            rendered = self._rendered(turns, turns.prompt, True, False) if chats else plain
        if isinstance(rendered, Bad):
            return rendered
        ids = self._ids([rendered], False)[0]
        return ids if self.recipe.as_trl else self._one_bos(ids, [])

    def inference_prompt(self, pair: TextPair) -> Ids | Bad:
        """What generation starts from: `apply_chat_template(..., add_generation_prompt=True)`, or the plain text."""
        if _is_torn(pair):
            return HALF
        if self.recipe.template is None:
            return list(self.tokenizer.encode(str(pair.prompt), add_special_tokens=True).ids)
        turns = _as_turns(pair)
        text = self._rendered(turns, turns.prompt, True, False)
        return text if isinstance(text, Bad) else self._ids([text], False)[0]

    def _finish(
        self, prompt: Ids, sequences: list[Ids], turns: _Turns, notes: list[Note], escaped: bool
    ) -> Encoded | Bad:
        length = min(_common(prompt, ids) for ids in sequences)
        if length < len(prompt):
            notes.append(Note("boundary_moved", self._moved(prompt, sequences[0], length)))
        scored = [
            self._scored(turns, i, ids, length, notes, escaped) for i, ids in enumerate(sequences)
        ]
        for spans in scored:
            if isinstance(spans, Bad):
                return spans
        first, second = (spans for spans in scored if not isinstance(spans, Bad))
        chosen, rejected = sequences
        if chosen == rejected:
            return Bad("identical_after_truncation", "chosen and rejected become the same tokens")
        pair = Encoded(chosen[:length], chosen[length:], rejected[length:], first, second, notes)
        fitted = self.fitted(pair)
        if isinstance(fitted, Encoded) and not (fitted.chosen_scored and fitted.rejected_scored):
            return Bad("nothing_scored", "no token of an answer is left to score")
        return fitted

    def _moved(self, prompt: Ids, whole: Ids, length: int) -> str:
        begin = max(0, length - 3)
        ours, theirs = (
            self.tokenizer.decode(ids, skip_special_tokens=False)
            for ids in (prompt[begin:], whole[begin : length + 6])
        )
        return f"the prompt's last tokens {ours!r} become {theirs!r} when the answer follows, which starts before them"

    # ---- text to ids

    def _rendered(
        self, turns: _Turns, messages: Turns, start_answer: bool, escaped: bool
    ) -> str | Bad:
        assert self.recipe.template is not None
        if escaped:
            messages = tuple(
                {**m, "content": self.special.sub(self._marked, m["content"])} for m in messages
            )
        text = self.recipe.template.render(messages, start_answer, turns.tools, turns.kwargs)
        if escaped and isinstance(text, str):
            return self.special.sub(lambda found: found[0] + self.real, text).replace(self.mark, "")
        return text

    def _marked(self, found: re.Match[str]) -> str:
        return found[0][0] + self.mark + found[0][1:]

    def _ids(self, rendered: Sequence[str], escaped: bool) -> list[Ids]:
        tokenizer = self._renamed if escaped else self.tokenizer
        return [
            one.ids for one in tokenizer.encode_batch_fast(list(rendered), add_special_tokens=False)
        ]

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The same tokenizer with its special tokens under names that no author can know.

        Text of a row is then tokenised as the plain text that it is, while the template's own special tokens carry the
        secret name. Nothing else changes, so ids are those that the plain tokenizer gives to other text.
        """
        content = json.loads(self.recipe.tokenizer)
        special = {
            t["content"]: t["content"] + self.real for t in content["added_tokens"] if t["special"]
        }
        for token in content["added_tokens"]:
            token["content"] = special.get(token["content"], token["content"])
        model = content["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {
                special.get(text, text): number for text, number in model["vocab"].items()
            }
        elif isinstance(model.get("vocab"), list):
            model["vocab"] = [[special.get(text, text), score] for text, score in model["vocab"]]
        if model.get("unk_token") in special:
            model["unk_token"] = special[model["unk_token"]]
        content["post_processor"] = None  # it knows the old names, and we add BOS and EOS ourselves
        return Tokenizer.from_str(json.dumps(content))

    def _one_bos(self, ids: Ids, notes: list[Note]) -> Ids:
        bos = self.recipe.bos
        if bos is None:
            return ids
        leading = next((i for i, token in enumerate(ids) if token != bos), len(ids))
        if leading > 1 and not any(note.kind == "double_bos" for note in notes):
            notes.append(Note("double_bos", f"{leading} BOS tokens at the start became one"))
        return [bos, *ids[leading:]] if leading or self.recipe.adds_bos else ids

    # ---- the end of a turn

    def _tail(self) -> Ids:
        """What the template writes after an answer, as tokens: end-of-turn token, line end, ..."""
        assert self.recipe.template is not None
        question = {"role": "user", "content": "x"}
        rendered = [
            self.recipe.template.render(
                (question, {"role": "assistant", "content": text}), False, None, {}
            )
            for text in ("a", "b")
        ]
        ready = [text for text in rendered if isinstance(text, str)]
        if len(ready) < 2:
            return []  # rows will say what is wrong
        first, second = self._ids(ready, False)
        return first[len(first) - _common(first[::-1], second[::-1]) :]

    @cached_property
    def _kept_tail(self) -> int:
        """How many tokens of the tail belong to the turn: up to its end-of-turn token, or all but white space."""
        for i, token in enumerate(self.tail):
            if token in self.added:
                return i + 1
        kept = len(self.tail)
        while kept and self._is_blank(self.tail[kept - 1]):
            kept -= 1
        return kept or len(self.tail)

    def _is_blank(self, token: int) -> bool:
        return token not in self.added and not self.tokenizer.decode([token]).strip()

    def _ended(self, ids: Ids, notes: list[Note]) -> Ids:
        """The sequence up to the end of its last turn."""
        tail = self.tail
        if tail and ids[-len(tail) :] == tail:
            ids = ids[: len(ids) - len(tail) + self._kept_tail]
        else:  # a template that ends differently here, because of tools or its own arguments
            end = len(ids)
            while end and self._is_blank(ids[end - 1]):
                end -= 1
            ids = ids[:end] if end and ids[end - 1] in self.added else ids
        while len(ids) > 1 and ids[-1] == ids[-2] and ids[-1] in self.added:
            ids = ids[:-1]
            if not any(note.kind == "double_eos" for note in notes):
                notes.append(
                    Note("double_eos", "several end tokens at the end of an answer became one")
                )
        return ids

    # ---- which tokens are scored

    def _scored(
        self, turns: _Turns, which: int, ids: Ids, boundary: int, notes: list[Note], escaped: bool
    ) -> tuple[Span, ...] | Bad:
        """Token 0 is never scored: nothing predicts it."""
        if self.recipe.score == "all":
            return _spans([(1, len(ids))])
        if self.recipe.as_trl:
            return _spans([(boundary, len(ids))])
        answer = turns.answers[which]
        if self.recipe.template is None or (self.recipe.score == "last" and len(answer) == 1):
            return _spans([(boundary, len(ids))])
        conversation = (*turns.prompt, *answer)
        start = self._start(turns, conversation[:-1], ids, escaped)
        if isinstance(start, Bad):
            return start
        last = (max(start, boundary) if len(answer) == 1 else start, len(ids))
        if self.recipe.score == "last":
            return _spans([last])
        earlier = self._earlier_turns(turns, conversation, ids, notes, escaped)
        return (
            earlier
            if isinstance(earlier, Bad)
            else _spans([*(e for e in earlier if e[1] <= last[0]), last])
        )

    def _start(self, turns: _Turns, before: Turns, ids: Ids, escaped: bool) -> int | Bad:
        text = self._rendered(turns, before, True, escaped)
        if isinstance(text, Bad):
            return text
        return _common(self._one_bos(self._ids([text], escaped)[0], []), ids)

    def _earlier_turns(
        self, turns: _Turns, conversation: Turns, ids: Ids, notes: list[Note], escaped: bool
    ) -> list[Span] | Bad:
        """Where earlier assistant turns lie: found in the rendered text, then by the place of each token in it.

        A template may write a turn differently once it is no longer the last (Qwen3 removes thoughts), so the text of
        the whole conversation is searched, not that of a shorter one.
        """
        whole = self._rendered(turns, conversation, False, escaped)
        if isinstance(whole, Bad):
            return whole
        encoding = (self._renamed if escaped else self.tokenizer).encode(
            whole, add_special_tokens=False
        )
        shift = len(self._one_bos(encoding.ids, [])) - len(encoding.ids)
        starts = [start for start, _ in encoding.offsets]
        spans: list[Span] = []
        for i, turn in enumerate(conversation[:-1]):
            if turn["role"] != "assistant":
                continue
            begin = self._start(turns, conversation[:i], ids, escaped)
            if isinstance(begin, Bad):
                return begin
            from_char = starts[begin - shift] if begin - shift < len(starts) else len(whole)
            place = whole.find(turn["content"].strip(), from_char)
            if place < 0:
                notes.append(
                    Note(
                        "turn_not_scored", f"turn {i + 1} is not found in the rendered conversation"
                    )
                )
                continue
            stop = place + len(turn["content"].strip())
            end = (
                next(
                    (j for j, at in enumerate(starts) if at >= stop and j >= begin - shift),
                    len(starts),
                )
                + shift
            )
            if turn.get("tool_calls"):  # they follow the content, up to the end of the turn
                end = next((j for j in range(end, len(ids)) if ids[j] in self.special_ids), end)
            ended = end < len(ids) and ids[end] in self.added
            spans.append((begin, end + 1 if ended else end))
        return spans

    # ---- length

    def _with_short_prompt(self, pair: Encoded) -> Encoded:
        limit, length = self.recipe.max_prompt_length, len(pair.prompt)
        if limit is None or length <= limit:
            return pair
        told = f"a prompt of {length} tokens; max_prompt_length is {limit}"
        cut = self._cut_prompt(pair, length - limit, told)
        assert cut is not None  # a limit is 2 or more
        return cut

    def fitted(self, pair: Encoded) -> Encoded | Bad:
        """The pair within max_prompt_length and sequence_length."""
        pair = self._with_short_prompt(pair)
        limit, prompt = self.recipe.sequence_length, len(pair.prompt)
        longest = prompt + max(len(pair.chosen), len(pair.rejected))
        if longest <= limit:
            return pair
        told = f"{longest} tokens, of them {prompt} of the prompt; sequence_length is {limit}"
        reason = Bad("prompt_too_long" if prompt >= limit else "too_long", told)
        if self.recipe.overlong == "truncate_prompt" and self.is_old_trl:
            return self._keep_ends(pair, limit, told)
        if self.recipe.overlong == "truncate_prompt":
            return self._cut_prompt(pair, longest - limit, told) or reason
        if self.recipe.overlong == "truncate_response" and prompt < limit:
            return self._cut_answers(pair, limit, told)
        return reason

    def _cut_prompt(self, pair: Encoded, excess: int, told: str) -> Encoded | None:
        """Left, behind the BOS; the last token of the prompt stays, as the first token of an answer needs it."""
        kept = 1 if pair.prompt[:1] == [self.recipe.bos] and not self.is_old_trl else 0
        if excess >= len(pair.prompt) - kept:
            return None

        def moved(spans: tuple[Span, ...]) -> tuple[Span, ...]:
            return _spans([(max(a - excess, kept), b - excess) for a, b in spans])

        return replace(
            pair,
            prompt=pair.prompt[:kept] + pair.prompt[kept + excess :],
            chosen_scored=moved(pair.chosen_scored),
            rejected_scored=moved(pair.rejected_scored),
            notes=[*pair.notes, Note("truncated_prompt", told)],
        )

    def _keep_ends(self, pair: Encoded, limit: int, told: str) -> Encoded | Bad:
        """TRL's keep_end before 0.29: each sequence loses its own beginning, so that they share none any more."""
        both = [
            (pair.prompt + pair.chosen, pair.chosen_scored),
            (pair.prompt + pair.rejected, pair.rejected_scored),
        ]
        cut = [max(0, len(ids) - limit) for ids, _ in both]
        chosen, rejected = (ids[n:] for (ids, _), n in zip(both, cut, strict=True))
        if chosen == rejected:
            return Bad(
                "identical_after_truncation",
                f"the last {limit} tokens of both are the same; {told}",
            )
        scored = [
            _spans([(a - n, b - n) for a, b in spans])
            for (_, spans), n in zip(both, cut, strict=True)
        ]
        return Encoded(
            [],
            chosen,
            rejected,
            scored[0],
            scored[1],
            [*pair.notes, Note("truncated_prompt", told)],
        )

    def _cut_answers(self, pair: Encoded, limit: int, told: str) -> Encoded | Bad:
        room = limit - len(pair.prompt)
        chosen, rejected = pair.chosen[:room], pair.rejected[:room]
        if chosen == rejected:
            return Bad(
                "identical_after_truncation",
                f"the first {room} tokens of both answers are the same; {told}",
            )
        notes = [
            *pair.notes,
            Note("truncated_response", told),
            Note("eos_lost", "a cut answer has lost its end token"),
        ]
        return Encoded(
            pair.prompt,
            chosen,
            rejected,
            _spans([(a, min(b, limit)) for a, b in pair.chosen_scored]),
            _spans([(a, min(b, limit)) for a, b in pair.rejected_scored]),
            notes,
        )


@dataclass(frozen=True)
class _Turns:
    prompt: Turns
    answers: tuple[Turns, Turns]
    tools: list[Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


def _is_torn(pair: TextPair) -> bool:
    """Text of Python may hold half of a character, as bytes of a terminal that are not UTF-8 become."""
    try:
        for text in texts(pair):
            text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _as_turns(pair: TextPair) -> _Turns:
    """Strings are one question and its answer."""
    prompt, chosen, rejected = (
        ({"role": role, "content": part},) if isinstance(part, str) else part
        for role, part in (
            ("user", pair.prompt),
            ("assistant", pair.chosen),
            ("assistant", pair.rejected),
        )
    )
    return _Turns(prompt, (chosen, rejected), pair.tools, pair.template_kwargs)


def _cut_last(ids: Ids, token: int) -> Ids:
    end = len(ids)
    while end and ids[end - 1] == token:
        end -= 1
    return ids[:end]


def _common(prompt: Ids, ids: Ids) -> int:
    """How many tokens both begin with."""
    if ids[: len(prompt)] == prompt:
        return len(prompt)
    return next(i for i in range(len(prompt)) if i >= len(ids) or ids[i] != prompt[i])


def _spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    return tuple((max(a, 1), b) for a, b in spans if b > max(a, 1))
