"""Turn a pair of text into token ids, the place where the answers start, and the scored tokens.

The boundary is found by tokens: the common beginning of the prompt and both whole sequences. A
sequence starts with exactly one BOS where the tokenizer has one, and ends with at most one EOS.
This runs in the child processes, on the `tokenizers` library alone.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from rather.data.formats import TextPair, is_empty, texts
from rather.data.json_rows import DropReason
from rather.data.messages import Turns, as_turns, common_length
from rather.data.read import HALF_CHARACTER
from rather.data.template import RESERVED, ChatTemplate
from rather.errors import DataError

Ids = list[int]
Span = tuple[int, int]


@dataclass(frozen=True)
class TokenRecipe:
    """Everything that decides how text becomes tokens, as plain values that can be sent."""

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
    as_trl: str | None = None  # the value of `parity`, or None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TokenRecipe:
        """Return the recipe of which `asdict` made these values."""
        template = ChatTemplate(**values["template"]) if values["template"] else None
        return cls(**{**values, "template": template})


class Note(NamedTuple):
    """A change to a pair, or something that its owner should know."""

    kind: str
    detail: str


@dataclass(frozen=True)
class Encoded:
    """A tokenised pair: `prompt` begins both sequences, and spans count from its start."""

    prompt: Ids
    chosen: Ids
    rejected: Ids
    chosen_scored: tuple[Span, ...]
    rejected_scored: tuple[Span, ...]
    notes: list[Note] = field(default_factory=list)


@dataclass(frozen=True)
class _Talk:
    """A pair as turns, with what is found while it is encoded."""

    prompt: Turns
    answers: tuple[Turns, Turns]
    tools: list[Any] | None
    kwargs: dict[str, Any]
    notes: list[Note]
    is_escaped: bool = False  # special-token text of the row becomes plain text

    @classmethod
    def of(cls, pair: TextPair, notes: list[Note], is_escaped: bool = False) -> _Talk:
        """Return strings as one question and its answers."""
        chosen, rejected = (as_turns(part, "assistant") for part in (pair.chosen, pair.rejected))
        prompt = as_turns(pair.prompt, "user")
        kwargs = pair.template_kwargs
        return cls(prompt, (chosen, rejected), pair.tools, kwargs, notes, is_escaped)

    def note_once(self, kind: str, detail: str) -> None:
        if kind not in (note.kind for note in self.notes):
            self.notes.append(Note(kind, detail))


_CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]"
)


class Encoder:
    """Encodes pairs by a recipe. Methods raise DropReason for text that gives no tokens."""

    def __init__(self, recipe: TokenRecipe) -> None:
        self.recipe = recipe
        self.tokenizer = Tokenizer.from_str(recipe.tokenizer)
        added = self.tokenizer.get_added_tokens_decoder()
        self.added = frozenset(added)
        special = {number: token.content for number, token in added.items() if token.special}
        self.special_ids = frozenset(special)
        longest_first = sorted(filter(None, special.values()), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.eos_text = self.tokenizer.id_to_token(recipe.eos) if recipe.eos is not None else None
        if recipe.template:
            recipe.template.compile()
        self.tail = self._tail() if recipe.template else []
        secret = secrets.token_hex(8)  # no author of a row can know it; no result depends on it
        self.real = f"\ue000{secret}\ue001"  # follows special tokens that the template wrote
        self.mark = f"\ue002{secret}\ue001"  # is inside special-token text of a row in rendering

    @property
    def end_of_turn(self) -> int | None:
        """Return the token with which the template ends an answer."""
        return next((token for token in self.tail if token in self.added), None)

    def encode(self, pair: TextPair) -> Encoded:
        """Return the tokens of a pair."""
        _check_unicode(pair)
        notes: list[Note] = []
        if found := next(filter(None, map(_CONTROL.search, texts(pair))), None):
            detail = f"U+{ord(found[0]):04X} at character {found.start()}"
            notes.append(Note("control_characters", detail))
        if not any(turn["content"].strip() for turn in as_turns(pair.prompt, "user")):
            notes.append(Note("empty_prompt", "the prompt is empty"))
        if not self.recipe.as_trl:
            pair = self._without_final_eos(pair, notes)
        if is_empty(pair.chosen) or is_empty(pair.rejected):
            raise DropReason("empty_response", f"nothing but {self.eos_text}")
        policy, is_escaped = self.recipe.special_tokens, False
        if found := next(filter(None, map(self.special.search, texts(pair))), None):
            detail = f"the text holds {found[0]!r}, a special token of the tokenizer"
            if policy == "drop":
                raise DropReason("special_token_text", detail)
            is_escaped = policy == "escape"
            if policy != "keep":
                kind = "special_token_escaped" if is_escaped else "special_token_text"
                notes.append(Note(kind, detail))
        talk = _Talk.of(pair, notes, is_escaped)
        return self._finish(talk, *self._ids_of(pair, talk))

    def _ids_of(self, pair: TextPair, talk: _Talk) -> list[Ids]:
        """Return the prompt and both whole sequences."""
        parts = (pair.prompt, pair.chosen, pair.rejected)
        is_text = all(isinstance(part, str) for part in parts)
        if self.recipe.as_trl and is_text:
            return self._ids_as_trl(texts(pair))
        if self.recipe.template:
            return self._ids_of_chat(talk)
        if is_text:
            return self._ids_of_text(talk, *texts(pair))
        raise DataError(
            "the rows hold messages, but there is no chat template: set data_args.template to a "
            "name such as chatml, to a .jinja file, or use a tokenizer that has a template."
        )

    def _without_final_eos(self, pair: TextPair, notes: list[Note]) -> TextPair:
        """Cut EOS written as text at the end of an answer: it is added anyway."""
        chosen, rejected = (self._cut_eos(answer) for answer in (pair.chosen, pair.rejected))
        if (chosen, rejected) != (pair.chosen, pair.rejected):
            detail = f"an answer ends with {self.eos_text!r}, which is added anyway"
            notes.append(Note("eos_text_removed", detail))
        return replace(pair, chosen=chosen, rejected=rejected)

    def _cut_eos(self, answer: str | Turns) -> str | Turns:
        text = answer if isinstance(answer, str) else answer[-1]["content"]
        while self.eos_text and text.rstrip().endswith(self.eos_text):
            text = text.rstrip().removesuffix(self.eos_text)
        return text if isinstance(answer, str) else (*answer[:-1], {**answer[-1], "content": text})

    def _ids_of_text(self, talk: _Talk, prompt: str, *answers: str) -> list[Ids]:
        separator, eos = self.recipe.separator, self.recipe.eos
        for answer in answers:
            if prompt and prompt[-1].isalnum() and (separator + answer)[:1].isalnum():
                shown = f"{prompt[-12:]}|{separator}{answer[:12]}"
                talk.note_once("glued_boundary", f"prompt and answer run together at {shown!r}")
        start = prompt + separator.rstrip(" ")  # a space belongs to the word after it
        whole = [start, *(prompt + separator + answer for answer in answers)]
        first, *sequences = (self._one_bos(ids, talk) for ids in self._ids(whole, talk.is_escaped))
        if eos is None:
            detail = "the tokenizer has no EOS: the model cannot learn where an answer ends"
            talk.notes.append(Note("no_eos", detail))
        else:
            for ids in sequences:
                while ids[-1:] == [eos]:
                    ids.pop()
                ids.append(eos)
        return [first, *sequences]

    def _ids_of_chat(self, talk: _Talk) -> list[Ids]:
        template = self.recipe.template
        assert template
        if talk.tools and not template.takes_tools():
            detail = f"chat template {template.name} has no place for tools"
            raise DropReason("template_error", detail)
        if clash := [name for name in talk.kwargs if name in RESERVED]:
            raise DropReason("bad_type", f"chat_template_kwargs must not set {clash[0]!r}")
        rendered = [self._render(talk, talk.prompt, True)]
        rendered += [self._render(talk, (*talk.prompt, *answer), False) for answer in talk.answers]
        ids = self._ids(rendered, talk.is_escaped)
        if self.recipe.as_trl:
            return ids
        prompt, *whole = (self._one_bos(each, talk) for each in ids)
        return [prompt, *(self._cut_tail(each, talk) for each in whole)]

    def _ids_as_trl(self, parts: list[str]) -> list[Ids]:
        """Plain text has no template in TRL: EOS is written behind it as text."""
        eos, prompt = self.eos_text or "", parts[0]
        answers = (text if text.endswith(eos) else text + eos for text in parts[1:])
        whole = [prompt, *(prompt + answer for answer in answers)]
        batch = self.tokenizer.encode_batch_fast(whole, add_special_tokens=True)
        return [one.ids for one in batch]

    def training_prompt(self, text: str) -> Ids:
        """Return the tokens that the answer to a text follows in training."""
        pair = TextPair(text, "", "")
        _check_unicode(pair)
        if self.recipe.as_trl:
            return list(self.tokenizer.encode(text, add_special_tokens=True).ids)
        talk = _Talk.of(pair, [])
        rendered = text + self.recipe.separator.rstrip(" ")
        if self.recipe.template:
            rendered = self._render(talk, talk.prompt, True)
        return self._one_bos(self._ids([rendered])[0], talk)

    def inference_prompt(self, pair: TextPair) -> Ids:
        """Return what generation starts from: the rendered chat, or the plain text."""
        _check_unicode(pair)
        if self.recipe.template is None:
            return list(self.tokenizer.encode(str(pair.prompt), add_special_tokens=True).ids)
        talk = _Talk.of(pair, [])
        return self._ids([self._render(talk, talk.prompt, True)])[0]

    def _finish(self, talk: _Talk, prompt: Ids, *sequences: Ids) -> Encoded:
        length = min(common_length(prompt, ids) for ids in sequences)
        chosen, rejected = sequences
        if length < len(prompt):
            begin = max(0, length - 3)
            ours, theirs = (
                self.tokenizer.decode(ids, skip_special_tokens=False)
                for ids in (prompt[begin:], chosen[begin : length + 6])
            )
            detail = f"the prompt's last tokens {ours!r} become {theirs!r} before the answer"
            talk.notes.append(Note("boundary_moved", detail))
        first, second = (self._scored(talk, i, ids, length) for i, ids in enumerate(sequences))
        answers = chosen[length:], rejected[length:]
        return self.fitted(Encoded(chosen[:length], *answers, first, second, talk.notes))

    # ---- text to ids

    def _render(self, talk: _Talk, messages: Turns, start_answer: bool) -> str:
        assert self.recipe.template
        if not talk.is_escaped:
            return self.recipe.template.render(messages, start_answer, talk.tools, talk.kwargs)

        def marked(found: re.Match[str]) -> str:
            return found[0][0] + self.mark + found[0][1:]

        messages = tuple({**m, "content": self.special.sub(marked, m["content"])} for m in messages)
        text = self._render(replace(talk, is_escaped=False), messages, start_answer)
        return self.special.sub(lambda found: found[0] + self.real, text).replace(self.mark, "")

    def _ids(self, rendered: Sequence[str], is_escaped: bool = False) -> list[Ids]:
        tokenizer = self._escaping if is_escaped else self.tokenizer
        batch = tokenizer.encode_batch_fast(list(rendered), add_special_tokens=False)
        return [one.ids for one in batch]

    @cached_property
    def _escaping(self) -> Tokenizer:
        """The same tokenizer with its special tokens under names that no author can know.

        Text of a row is then tokenised as the plain text that it is, while the template's own
        special tokens carry the secret name. Nothing else changes, so ids are those that the
        plain tokenizer gives to other text.
        """
        content = json.loads(self.recipe.tokenizer)
        model, added = content["model"], content["added_tokens"]
        secret = {t["content"]: t["content"] + self.real for t in added if t["special"]}
        for token in added:
            token["content"] = secret.get(token["content"], token["content"])
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {secret.get(text, text): id for text, id in vocabulary.items()}
        elif isinstance(vocabulary, list):
            model["vocab"] = [[secret.get(text, text), score] for text, score in vocabulary]
        if model.get("unk_token") in secret:
            model["unk_token"] = secret[model["unk_token"]]
        content["post_processor"] = None  # it knows the old names; BOS and EOS are added here
        return Tokenizer.from_str(json.dumps(content))

    def _one_bos(self, ids: Ids, talk: _Talk) -> Ids:
        bos = self.recipe.bos
        if bos is None:
            return ids
        leading = next((i for i, token in enumerate(ids) if token != bos), len(ids))
        if leading > 1:
            talk.note_once("double_bos", f"{leading} BOS tokens at the start became one")
        return [bos, *ids[leading:]] if leading or self.recipe.adds_bos else ids

    # ---- the end of a turn

    def _tail(self) -> Ids:
        """Return what the template writes after an answer: end-of-turn token, line end, ..."""
        question = as_turns("x", "user")
        try:
            first, second = self._ids(
                [
                    self._render(
                        _Talk((), ((), ()), None, {}, []),
                        question + as_turns(text, "assistant"),
                        False,
                    )
                    for text in ("a", "b")
                ]
            )
        except DropReason:
            return []  # each row will report what is wrong
        return first[len(first) - common_length(first[::-1], second[::-1]) :]

    @cached_property
    def _kept_tail(self) -> int:
        """How many tokens of the tail belong to the turn: up to its end token, or no blanks."""
        for i, token in enumerate(self.tail):
            if token in self.added:
                return i + 1
        return self._without_blanks(self.tail) or len(self.tail)

    def _without_blanks(self, ids: Ids) -> int:
        """Return how many tokens are left without white space at the end."""
        end = len(ids)
        while (
            end
            and ids[end - 1] not in self.added
            and not self.tokenizer.decode([ids[end - 1]]).strip()
        ):
            end -= 1
        return end

    def _cut_tail(self, ids: Ids, talk: _Talk) -> Ids:
        """Return the sequence up to the end of its last turn."""
        tail = self.tail
        if tail and ids[-len(tail) :] == tail:
            ids = ids[: len(ids) - len(tail) + self._kept_tail]
        else:  # a template that ends differently here, because of tools or its own arguments
            end = self._without_blanks(ids)
            ids = ids[:end] if end and ids[end - 1] in self.added else ids
        while len(ids) > 1 and ids[-1] == ids[-2] and ids[-1] in self.added:
            ids = ids[:-1]
            talk.note_once("double_eos", "several end tokens at the end of an answer became one")
        return ids

    # ---- which tokens are scored

    def _scored(self, talk: _Talk, which: int, ids: Ids, boundary: int) -> tuple[Span, ...]:
        """Return the scored spans. Token 0 is never scored: nothing predicts it."""
        recipe, answer = self.recipe, talk.answers[which]
        if recipe.score == "all":
            boundary = 1
        elif recipe.template and not recipe.as_trl and (recipe.score, len(answer)) != ("last", 1):
            conversation = (*talk.prompt, *answer)
            start = self._start(talk, conversation[:-1], ids)
            boundary = max(start, boundary) if len(answer) == 1 else start
            if recipe.score != "last":
                earlier = self._earlier_turns(talk, conversation, ids)
                spans = [span for span in earlier if span[1] <= boundary]
                return _spans([*spans, (boundary, len(ids))])
        return _spans([(boundary, len(ids))])

    def _start(self, talk: _Talk, before: Turns, ids: Ids) -> int:
        """Return where the answer to these turns starts in the tokens."""
        rendered = self._render(talk, before, True)
        own = self._one_bos(self._ids([rendered], talk.is_escaped)[0], replace(talk, notes=[]))
        return common_length(own, ids)

    def _earlier_turns(self, talk: _Talk, conversation: Turns, ids: Ids) -> list[Span]:
        """Return where earlier assistant turns are: found in the text, then by token offsets.

        A template may write a turn differently once it is no longer the last (Qwen3 removes
        thoughts), so the text of the whole conversation is searched, not that of a shorter one.
        """
        whole = self._render(talk, conversation, False)
        tokenizer = self._escaping if talk.is_escaped else self.tokenizer
        encoding = tokenizer.encode(whole, add_special_tokens=False)
        shift = len(self._one_bos(encoding.ids, replace(talk, notes=[]))) - len(encoding.ids)
        starts = [start for start, _ in encoding.offsets]
        spans: list[Span] = []
        for i, turn in enumerate(conversation[:-1]):
            if turn["role"] != "assistant":
                continue
            begin = self._start(talk, conversation[:i], ids)
            first = begin - shift
            text = turn["content"].strip()
            place = whole.find(text, starts[first] if first < len(starts) else len(whole))
            if place < 0:
                detail = f"turn {i + 1} is not found in the rendered conversation"
                talk.notes.append(Note("turn_not_scored", detail))
                continue
            stop = place + len(text)
            after = (j for j, at in enumerate(starts) if at >= stop and j >= first)
            end = next(after, len(starts)) + shift
            if turn.get("tool_calls"):  # they follow the content, up to the end of the turn
                end = next((j for j in range(end, len(ids)) if ids[j] in self.special_ids), end)
            spans.append((begin, end + (end < len(ids) and ids[end] in self.added)))
        return spans

    # ---- length

    def fitted(self, pair: Encoded) -> Encoded:
        """Return the pair within max_prompt_length and sequence_length."""
        _check_difference(pair, "chosen and rejected become the same tokens")
        prompt, most = len(pair.prompt), self.recipe.max_prompt_length
        if most is not None and prompt > most:
            detail = f"a prompt of {prompt} tokens; max_prompt_length is {most}"
            pair = self._cut_prompt(pair, prompt - most, Note("truncated_prompt", detail)) or pair
            prompt = len(pair.prompt)
        limit = self.recipe.sequence_length
        longest = prompt + max(len(pair.chosen), len(pair.rejected))
        if longest > limit:
            pair = self._shorten(pair, longest - limit, f"{longest} tokens, of them {prompt} of "
                                 f"the prompt; sequence_length is {limit}")  # fmt: skip
        if not (pair.chosen_scored and pair.rejected_scored):
            raise DropReason("nothing_scored", "no token of an answer is left to score")
        return pair

    def _shorten(self, pair: Encoded, excess: int, detail: str) -> Encoded:
        limit, overlong = self.recipe.sequence_length, self.recipe.overlong
        room = limit - len(pair.prompt)
        cut: Encoded | None = None
        if overlong == "truncate_prompt":
            cut = self._cut_prompt(pair, excess, Note("truncated_prompt", detail))
        elif overlong == "truncate_response" and room > 0:
            lost = Note("eos_lost", "a cut answer has lost its end token")
            cut = replace(
                pair,
                chosen=pair.chosen[:room],
                rejected=pair.rejected[:room],
                chosen_scored=_spans([(a, min(b, limit)) for a, b in pair.chosen_scored]),
                rejected_scored=_spans([(a, min(b, limit)) for a, b in pair.rejected_scored]),
                notes=[*pair.notes, Note("truncated_response", detail), lost],
            )
        if cut is None:
            raise DropReason("too_long" if room > 0 else "prompt_too_long", detail)
        _check_difference(cut, f"what is left of both answers is the same; {detail}")
        return cut

    def _cut_prompt(self, pair: Encoded, excess: int, note: Note) -> Encoded | None:
        """Cut on the left, behind the BOS; the last token stays, as the first answer needs it."""
        kept = 1 if pair.prompt[:1] == [self.recipe.bos] else 0
        if excess >= len(pair.prompt) - kept:
            return None
        chosen, rejected = (
            _spans([(max(a - excess, kept), b - excess) for a, b in spans])
            for spans in (pair.chosen_scored, pair.rejected_scored)
        )
        prompt = pair.prompt[:kept] + pair.prompt[kept + excess :]
        notes = [*pair.notes, note]
        return Encoded(prompt, pair.chosen, pair.rejected, chosen, rejected, notes)


def _check_unicode(pair: TextPair) -> None:
    """Text of Python may hold half of a character, as bytes of a terminal become."""
    try:
        for text in texts(pair):
            text.encode()
    except UnicodeEncodeError:
        raise DropReason(*HALF_CHARACTER) from None


def _check_difference(pair: Encoded, detail: str) -> None:
    if pair.chosen == pair.rejected:
        raise DropReason("identical_after_truncation", detail)


def _spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    return tuple((max(a, 1), b) for a, b in spans if b > max(a, 1))
