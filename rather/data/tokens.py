"""Turn a pair of text into token ids, the place where the answers start, and the scored tokens.

The boundary is found by tokens: the common beginning of the prompt and both whole sequences. A
sequence starts with exactly one BOS where the tokenizer has one, and ends with at most one EOS.
This runs in the child processes, on the `tokenizers` library alone.

Rows may be tokens already, as `rather data --save` and ColossalChat's preparation write them. Each
side has its ids and a mask of the tokens that are scored; an attention mask separates tokens from
padding. A row whose lists do not fit together is dropped and counted like any other bad row.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from rather.data.formats import (
    EXTRAS,
    TOKENISED,
    OwnTokens,
    Row,
    RowLayout,
    TextPair,
    extras_of,
    is_empty,
    texts,
)
from rather.data.image_tokens import ImageFacts, ImageReader, ImageRecipe
from rather.data.images import PLACEHOLDER, bad_image
from rather.data.json_rows import DropReason
from rather.data.messages import Content, Json, Turns, as_turns, common_length, wrong_type
from rather.data.pairs import predicted_spans, spans_of
from rather.data.read import HALF_CHARACTER
from rather.data.template import RESERVED, ChatTemplate
from rather.errors import DataError
from rather.files import text_sha

Ids = list[int]
Span = tuple[int, int]
Spans = tuple[Span, ...]


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
    default_system: str | None = None  # for rows without a system turn
    images: ImageRecipe | None = None  # None if only text is read
    has_unused_template: bool = False  # text is plain, but the tokenizer has a chat template

    @cached_property
    def digest(self) -> str:
        """The hash of tokenizer and template, as answers files have it next to their ids."""
        template = self.template.text if self.template else ""
        return text_sha(f"{text_sha(self.tokenizer)}{text_sha(template)}")[:16]


@dataclass(frozen=True)
class Encoded:
    """A tokenised pair: `prompt` begins both sequences, and spans count from its start."""

    prompt: Ids
    chosen: Ids
    rejected: Ids = field(default_factory=list)  # empty for a single answer
    chosen_scored: Spans = ()
    rejected_scored: Spans = ()
    notes: dict[str, str] = field(default_factory=dict)  # kind of a change or warning -> detail
    images: tuple[ImageFacts, ...] = ()  # of the prompt


SIDES = ("chosen", "rejected")
COLUMNS = tuple(
    f"{side}_{name}" for side in SIDES for name in ("input_ids", "attention_mask", "loss_mask")
)
LARGEST_ID = 2**31 - 1
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a turn
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
        self.images = ImageReader(recipe.images) if recipe.images else None
        image_token = self.tokenizer.id_to_token(recipe.images.token) if recipe.images else ""
        if image_token is None:
            raise DataError("the image token of the model's config.json is not in its tokenizer.")
        self.image_token: str = image_token
        secret = secrets.token_hex(8)  # no author of a row can know it; no result depends on it
        self.real = f"\ue000{secret}\ue001"  # follows special tokens that the template wrote
        self.mark = f"\ue002{secret}\ue001"  # is inside special-token text of a row in rendering
        self._begin(TextPair("x", "a", "b"))
        if recipe.template:
            recipe.template.check(compiles=True)
        self.tail = self._tail() if recipe.template else []
        self.end_of_turn = next((token for token in self.tail if token in self.added), None)
        unknown = getattr(self.tokenizer.model, "unk_token", None)
        self.unknown = self.tokenizer.token_to_id(unknown) if unknown else None

    def _begin(self, pair: TextPair) -> None:
        """Check the characters of the next pair, and forget what was found in the last one."""
        self.pair = pair
        self.notes: dict[str, str] = {}
        self.is_escaped = False  # special-token text of the row becomes plain text
        self.prompt_images: tuple[ImageFacts, ...] = ()
        self.inference_prompt: Ids = []  # what generation starts from
        try:
            for text in texts(pair):
                text.encode()
        except UnicodeEncodeError:  # text of Python may hold half of a character
            raise DropReason(*HALF_CHARACTER) from None

    def _note(self, kind: str, detail: str) -> None:
        self.notes.setdefault(kind, detail)

    def encode(self, pair: TextPair) -> Encoded:
        """Return the tokens of a pair."""
        pair = self._with_system(pair)
        self._begin(pair)
        control = _search(_CONTROL, texts(pair))
        if control:
            detail = f"U+{ord(control[0]):04X} at character {control.start()}"
            self._note("control_characters", detail)
        if not any(turn["content"].strip() for turn in as_turns(pair.prompt, "user")):
            self._note("empty_prompt", "the prompt is empty")
        answers = [self._without_final_eos(answer) for answer in pair.answers]
        cut: dict[str, Any] = dict(zip(SIDES, answers, strict=False))
        self.pair = pair = replace(pair, **cut)
        if any(map(is_empty, answers)):
            raise DropReason("empty_response", f"nothing but {self.eos_text}")
        self._check_special_tokens(pair)
        self.prompt_images = self.image_facts(pair)
        prompt, *sequences = self._ids_of(pair)
        length = min(common_length(prompt, ids) for ids in sequences)
        if length < len(prompt):
            changed = self.tokenizer.decode(prompt[length:], skip_special_tokens=False)
            detail = f"the prompt's end {changed!r} becomes other tokens before the answer"
            self._note("boundary_moved", detail)
        columns: dict[str, Any] = {}
        for side, answer, ids in zip(SIDES, pair.answers, sequences, strict=False):
            columns[side] = ids[length:]
            columns[f"{side}_scored"] = self._scored(answer, ids, length)
        encoded = Encoded(
            sequences[0][:length], notes=self.notes, images=self.prompt_images, **columns
        )
        if pair.tokens:
            encoded = self._with_own_tokens(encoded, pair.tokens, prompt)
        self._compare_with_inference(encoded.prompt)
        return self.fit(encoded)

    def _compare_with_inference(self, prompt: Ids) -> None:
        """Note what differs between the prompt that is trained and what generation starts from."""
        template = self.recipe.template
        inference = self.inference_prompt
        if self.recipe.has_unused_template:
            detail = "training has plain text where the tokenizer's own chat template writes turns"
            self._note("prompt_differs", detail)
        elif prompt != inference:
            start = common_length(prompt, inference)
            end = len(_common_end(prompt[start:], inference[start:]))
            trained, served = (
                self.tokenizer.decode(ids[start : len(ids) - end], skip_special_tokens=False)[:80]
                for ids in (prompt, inference)
            )
            by = f"chat template {template.name}" if template else "the tokenizer"
            self._note("prompt_differs", f"training has {trained!r} where {by} gives {served!r}")

    def _with_own_tokens(self, encoded: Encoded, own: OwnTokens, prompt: Ids) -> Encoded:
        """Return the tokens that the model wrote, instead of those that its text becomes.

        They must belong to this tokenizer, template and prompt, and say what the text says.
        """
        end = self.end_of_turn if self.recipe.template else self.recipe.eos
        written = [[*ids, end] if end is not None else ids for ids in own.answers]
        sides = (encoded.chosen, encoded.rejected)
        texts = [encoded.prompt + ids for ids in sides[: len(written)]]
        if texts == [own.prompt + ids for ids in written]:
            return encoded
        is_own = own.digest == self.recipe.digest and own.prompt == prompt
        is_usual = self.recipe.score == "last"
        decoded = [self.tokenizer.decode(ids) for ids in own.answers]
        says_the_same = decoded == [_last_text(answer) for answer in self.pair.answers]
        if not (is_own and is_usual and says_the_same):
            self._note("tokens_changed", "the text becomes other tokens than the model wrote")
            return encoded
        self._note("own_tokens", "the model wrote other tokens than its text becomes")
        answers: dict[str, Any] = {}
        for side, ids in zip(SIDES, written, strict=False):
            answers[side] = ids
            answers[f"{side}_scored"] = ((len(prompt), len(prompt) + len(ids)),)
        return replace(encoded, prompt=prompt, **answers)

    def _check_special_tokens(self, pair: TextPair) -> None:
        """Drop, escape or note a row whose text holds a special token of the tokenizer."""
        contents = texts(pair)
        if pair.images:  # a place of an image is not text of the row
            contents = [text.replace(PLACEHOLDER, " ") for text in contents]
        special = _search(self.special, contents)
        if not special:
            return
        policy = self.recipe.special_tokens
        detail = f"the text holds {special[0]!r}, a special token of the tokenizer"
        if policy == "drop":
            raise DropReason("special_token_text", detail)
        self.is_escaped = policy == "escape"
        if policy != "keep":
            self._note(f"special_token_{'escaped' if self.is_escaped else 'text'}", detail)

    def prompt_ids(self, pair: TextPair, *, as_trained: bool = False) -> Ids:
        """Return what generation starts from, or the tokens that an answer follows in training."""
        pair = self._with_system(pair)
        self._begin(pair)
        recipe = self.recipe
        if recipe.template is None and not as_trained:
            return self._ids([str(pair.prompt)], add_special_tokens=True)[0]
        self.prompt_images = self.image_facts(pair)
        text = str(pair.prompt) + recipe.separator.rstrip(" ")
        if recipe.template:
            text = self._render(as_turns(pair.prompt, "user"), True)
        [ids] = self._ids([text])
        return self._one_bos(ids) if as_trained else ids

    def _with_system(self, pair: TextPair) -> TextPair:
        """Return the pair as a conversation that begins with the default system message."""
        text = self.recipe.default_system
        if text is None:
            return pair
        if self.recipe.template is None:
            raise DataError(
                "data_args.default_system: there is no chat template to put it into; set "
                "data_args.template, or use a tokenizer that has one."
            )
        prompt = as_turns(pair.prompt, "user")
        if prompt[0]["role"] == "system":
            return pair
        return replace(
            pair,
            prompt=({"role": "system", "content": text}, *prompt),
            chosen=as_turns(pair.chosen, "assistant"),
            rejected=as_turns(pair.rejected, "assistant") if pair.rejected else pair.rejected,
        )

    # ---- images

    def image_facts(self, pair: TextPair) -> tuple[ImageFacts, ...]:
        """Return what is known about the images of a prompt; raise DropReason for a bad one."""
        if not pair.images:
            return ()
        assert self.images, "rows with images were refused before"
        if self.recipe.template is None:
            raise bad_image(
                "images need a chat template, which says where they are; set data_args.template: "
                "native"
            )
        return self.images.facts(pair.images, pair.image_dir)

    def _with_image_tokens(self, text: str, images: int) -> str:
        """Return the text of a prompt with all tokens of its images, as processors write it."""
        recipe = self.recipe.images
        if recipe is None:
            return text
        pieces = text.split(self.image_token)
        if len(pieces) != images + 1:
            raise DropReason(
                "image_count",
                f"the chat template and the text give {len(pieces) - 1} image tokens for {images} "
                "images; use the template of the model, and no image token as text",
            )
        written = pieces[0]
        for image, piece in zip(self.prompt_images, pieces[1:], strict=False):
            written += recipe.written(image.grid, self.image_token) + piece
        return written

    # ---- text to ids

    def _conversation(self, answer: Content) -> Turns:
        return (*as_turns(self.pair.prompt, "user"), *as_turns(answer, "assistant"))

    def _without_final_eos(self, answer: Content) -> Content:
        """Cut EOS written as text at the end of an answer: it is added anyway."""
        last_text = _last_text(answer)
        text = last_text
        while self.eos_text and text.rstrip().endswith(self.eos_text):
            text = text.rstrip().removesuffix(self.eos_text)
        if text == last_text:
            return answer
        self._note(
            "eos_text_removed", f"an answer ends with {self.eos_text!r}, which is added anyway"
        )
        return text if isinstance(answer, str) else (*answer[:-1], {**answer[-1], "content": text})

    def _ids_of(self, pair: TextPair) -> list[Ids]:
        """Return the tokens of the prompt and of both whole sequences."""
        if self.recipe.template:
            return self._ids_of_chat(pair, self.recipe.template)
        if not isinstance(pair.prompt, str):
            raise DataError(
                "the rows hold messages, but there is no chat template: set data_args.template to "
                "a name such as chatml, to a .jinja file, or use a tokenizer that has a template."
            )
        prompt, *answers = [self._with_image_tokens(text, 0) for text in texts(pair)]
        return self._ids_of_text(prompt, answers)

    def _ids_of_text(self, prompt: str, answers: Sequence[str]) -> list[Ids]:
        recipe = self.recipe
        for answer in answers:
            if prompt and prompt[-1].isalnum() and (recipe.separator + answer)[:1].isalnum():
                shown = f"{prompt[-12:]}|{recipe.separator}{answer[:12]}"
                self._note("glued_boundary", f"prompt and answer run together at {shown!r}")
        start = prompt + recipe.separator.rstrip(" ")  # a space belongs to the word after it
        sequence_texts = [prompt + recipe.separator + answer for answer in answers]
        [self.inference_prompt] = self._ids([prompt], add_special_tokens=True)
        prompt_ids, *sequences = map(self._one_bos, self._ids([start, *sequence_texts]))
        if recipe.eos is None:
            self._note(
                "no_eos", "the tokenizer has no EOS: the model cannot learn where an answer ends"
            )
            return [prompt_ids, *sequences]
        if recipe.eos == self.unknown:
            self._note("no_eos", f"EOS is {self.eos_text!r}, which also stands for unknown words")
        for ids in sequences:
            while ids[-1:] == [recipe.eos]:
                ids.pop()
            ids.append(recipe.eos)
        return [prompt_ids, *sequences]

    def _ids_of_chat(self, pair: TextPair, template: ChatTemplate) -> list[Ids]:
        if pair.tools and not template.tool_text and "tools" not in template.text:
            raise DropReason(
                "template_error", f"chat template {template.name} has no place for tools"
            )
        for name in pair.template_kwargs:
            if name in RESERVED:
                raise DropReason("bad_type", f"chat_template_kwargs must not set {name!r}")
        prompt_text = self._render(as_turns(pair.prompt, "user"), True)
        rendered = [prompt_text]
        rendered += [self._render_with(answer, prompt_text) for answer in pair.answers]
        self._note_template(pair, rendered)
        ids = self._ids(rendered)
        self.inference_prompt = ids[0]
        prompt, *sequences = map(self._one_bos, ids)
        return [prompt, *map(self._cut_tail, sequences)]

    def _render_with(self, answer: Content, prompt: str) -> str:
        """Return the text of a prompt, which is written as at inference, and an answer.

        A template may write a prompt otherwise once it is not the end: Mistral's leaves the system
        message out.
        """
        question = as_turns(self.pair.prompt, "user")[-1]["content"].strip()
        sequence = self._render(self._conversation(answer), False)
        start = _start_after_change(prompt, sequence, question)
        if not start:
            return sequence
        self._note("prompt_changed", f"the prompt would begin {sequence[:start][:80]!r}")
        return prompt + sequence[start:]

    def _note_template(self, pair: TextPair, rendered: Sequence[str]) -> None:
        """Note signs of a template that was made for another model, or loses text of the row."""
        prompt, *sequences = rendered
        turns = as_turns(pair.prompt, "user")
        question = turns[-1]["content"] if turns else ""
        pieces = question.split(PLACEHOLDER) if pair.images else [question]
        lost = [piece for piece in map(str.strip, pieces) if piece not in prompt]
        if not self.is_escaped and lost:
            detail = f"the rendered prompt {prompt[-80:]!r} does not contain {lost[0][:80]!r}"
            self._note("prompt_lost", detail)
        for answer, sequence in zip(pair.answers, sequences, strict=True):
            lost_parts = [] if self.is_escaped else _lost_parts(answer, prompt, sequence)
            for text in lost_parts:
                end = sequence[-80:]
                detail = f"the rendered answer {end!r} does not contain all of {text[:80]!r}"
                self._note("answer_lost", detail)
        end = self.tokenizer.decode(self.tail, skip_special_tokens=False).strip()
        if not end:
            self._note("no_eos", "the chat template writes no end token after an answer")
        elif self.end_of_turn in (None, self.unknown):
            detail = f"the template ends answers with {end!r}, which is not a token of its own"
            self._note("end_as_text", detail)

    def _render(self, turns: Turns, start_answer: bool) -> str:
        """Return the text of turns. Special-token text of an escaped row cannot match a token."""
        assert self.recipe.template
        written = turns
        if self.is_escaped or self.recipe.images:
            written = tuple({**turn, "content": self._written(turn)} for turn in turns)
        text = self.recipe.template.render(
            written, start_answer, self.pair.tools, self.pair.template_kwargs
        )
        text = self._with_image_tokens(text, sum(map(self._places, turns)))
        if self.is_escaped:
            text = self.special.sub(lambda found: found[0] + self.real, text)
        return text.replace(self.mark, "")

    def _written(self, turn: Json) -> str | list[Json]:
        """Return the content of a turn for the template; with images, as a list of parts."""

        def marked(found: re.Match[str]) -> str:
            return found[0][0] + self.mark + found[0][1:]

        def escaped(text: str) -> str:
            return self.special.sub(marked, text) if self.is_escaped else text

        content = str(turn["content"])
        if not self.recipe.images:
            return escaped(content)
        parts: list[Json] = []
        for i, piece in enumerate(content.split(PLACEHOLDER, self._places(turn))):
            if i:
                parts.append({"type": "image"})
            if piece:
                parts.append({"type": "text", "text": escaped(piece)})
        return parts or [{"type": "text", "text": ""}]

    def _places(self, turn: Json) -> int:
        """Return how many images of the row a turn has."""
        has_places = self.pair.images and turn["role"] != "assistant"
        return turn["content"].count(PLACEHOLDER) if has_places else 0

    def _ids(self, rendered: Sequence[str], *, add_special_tokens: bool = False) -> list[Ids]:
        tokenizer = self.tokenizer if add_special_tokens else self._active_tokenizer
        try:
            batch = tokenizer.encode_batch_fast(
                list(rendered), add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            # A regular expression that is too expensive is a panic, which is not an Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(f"the tokenizer fails ({error}); look at its tokenizer.json.") from None
        return [encoding.ids for encoding in batch]

    @property
    def _active_tokenizer(self) -> Tokenizer:
        return self._escaping if self.is_escaped else self.tokenizer

    @cached_property
    def _escaping(self) -> Tokenizer:
        """The same tokenizer with its special tokens under names that no author can know.

        Text of a row is then tokenised as the plain text that it is, while the template's own
        special tokens carry the secret name. Nothing else changes, so ids are those that the
        plain tokenizer gives to other text.
        """
        content = json.loads(self.recipe.tokenizer)
        model = content["model"]
        added = content["added_tokens"]
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

    def _one_bos(self, ids: Ids) -> Ids:
        bos = self.recipe.bos
        if bos is None:
            return ids
        leading = next((i for i, token in enumerate(ids) if token != bos), len(ids))
        if leading > 1:
            self._note("double_bos", f"{leading} BOS tokens at the start became one")
        return [bos, *ids[leading:]] if leading or self.recipe.adds_bos else ids

    # ---- the end of a turn

    def _tail(self) -> Ids:
        """Return what the template writes after an answer: end-of-turn token, line end, ..."""
        assert self.recipe.template
        try:
            rendered = [self._render(self._conversation(text), False) for text in "ab"]
        except DropReason:
            return []  # each row will report what is wrong
        after = _common_end(*rendered)
        end = self.recipe.template.end
        if end and end not in after:
            raise DataError(
                f"chat template {self.recipe.template.name}: writes {after!r} after an answer, "
                f"without its end_of_assistant, {end!r}; correct one of them."
            )
        # The answers are equal, too, if the tokenizer knows neither word.
        *sequences, alone = self._ids([*rendered, after])
        tail: Ids = _common_end(*sequences)
        return tail[max(0, len(tail) - len(alone)) :]

    def _without_blanks(self, ids: Ids) -> Ids:
        """Return the tokens without white space at the end."""
        end = len(ids)
        while end and ids[end - 1] not in self.added:
            if self.tokenizer.decode([ids[end - 1]]).strip():
                break
            end -= 1
        return ids[:end]

    def _cut_tail(self, ids: Ids) -> Ids:
        """Return the sequence up to the end of its last turn: its end token, or no blanks."""
        tail = self.tail
        if tail and ids[-len(tail) :] == tail:
            shorter_tail = self._without_blanks(tail) or tail
            if self.end_of_turn is not None:
                shorter_tail = tail[: tail.index(self.end_of_turn) + 1]
            ids = ids[: len(ids) - len(tail)] + shorter_tail
        else:  # a template that ends differently here, because of tools or its own arguments
            shorter = self._without_blanks(ids)
            ids = shorter if shorter and shorter[-1] in self.added else ids
        while len(ids) > 1 and ids[-1] == ids[-2] and ids[-1] in self.added:
            ids = ids[:-1]
            self._note("double_eos", "several end tokens at the end of an answer became one")
        return ids

    # ---- which tokens are scored

    def _scored(self, answer: Content, ids: Ids, boundary: int) -> Spans:
        """Return the scored spans. Token 0 is never scored: nothing predicts it."""
        recipe = self.recipe
        turns = len(as_turns(answer, "assistant"))
        earlier: list[Span] = []
        if recipe.score == "all":
            boundary = 1
        elif recipe.template and (recipe.score, turns) != ("last", 1):
            conversation = self._conversation(answer)
            start = self._start(conversation[:-1], ids)
            boundary = max(start, boundary) if turns == 1 else start
            if recipe.score != "last":
                earlier = self._earlier_turns(conversation, ids)
        return predicted_spans(
            [*(span for span in earlier if span[1] <= boundary), (boundary, len(ids))]
        )

    def _start(self, before: Turns, ids: Ids) -> int:
        """Return where the answer to these turns starts in the tokens."""
        [prompt_ids] = self._ids([self._render(before, True)])
        return common_length(self._one_bos(prompt_ids), ids)

    def _earlier_turns(self, conversation: Turns, ids: Ids) -> list[Span]:
        """Return where earlier assistant turns are: found in the text, then by token offsets.

        A template may write a turn differently once it is no longer the last (Qwen3 removes
        thoughts), so the text of the whole conversation is searched, not that of a shorter one.
        """
        asked = len(as_turns(self.pair.prompt, "user"))
        rendered = self._render_with(conversation[asked:], self._render(conversation[:asked], True))
        encoding = self._active_tokenizer.encode(rendered, add_special_tokens=False)
        shift = len(self._one_bos(encoding.ids)) - len(encoding.ids)
        starts = [start for start, _ in encoding.offsets]

        def token_at(place: int, least: int) -> int:
            """Return the first token that begins at a character, or behind it."""
            return next((j for j in range(least, len(starts)) if starts[j] >= place), len(starts))

        spans: list[Span] = []
        for i, turn in enumerate(conversation[:-1]):
            if turn["role"] != "assistant":
                continue
            before = self._render(conversation[:i], True)
            first = self._start(conversation[:i], ids) - shift
            question = conversation[i - 1]["content"].strip()
            if changed := _start_after_change(before, rendered, question):
                first = max(first, token_at(changed, 0))
            text = turn["content"].strip()
            search_from = starts[first] if first < len(starts) else len(rendered)
            text_start = rendered.find(text, search_from)
            if text_start < 0:
                self._note(
                    "turn_not_scored", f"turn {i + 1} is not found in the rendered conversation"
                )
                continue
            stop = text_start + len(text)
            if turn.get("tool_calls"):
                stop = self._end_of_calls(conversation[: i + 1], before, rendered, stop)
            end = token_at(stop, first) + shift
            is_end = end < len(ids) and ids[end] in self.added and not turn.get("tool_calls")
            spans.append((first + shift, end + is_end))
        return spans

    def _end_of_calls(self, turns: Turns, before: str, rendered: str, least: int) -> int:
        """Return where the last of these turns, which calls tools, ends in the conversation.

        Calls follow its content, with marks that only the template knows. So the turn is rendered
        as the last one, and the longest end of it that the conversation has as well is its end.
        """
        alone = self._render(turns, False).rstrip()
        own = alone[common_length(before, alone) :]
        known = bisect_left(range(len(own)), True, key=lambda n: rendered.find(own[n:], least) >= 0)
        return rendered.find(own[known:], least) + len(own) - known

    # ---- length

    def fit(self, pair: Encoded) -> Encoded:
        """Return the pair within max_prompt_length and sequence_length."""
        recipe = self.recipe
        limit = recipe.sequence_length
        prompt_limit = recipe.max_prompt_length
        bos = int(pair.prompt[:1] == [recipe.bos])  # stays in front of a cut prompt
        _check_difference(pair, "chosen and rejected become the same tokens")
        prompt = len(pair.prompt)
        longest = max(len(pair.chosen), len(pair.rejected))
        image_tokens = sum(image.tokens for image in pair.images)
        uncut = f", {image_tokens} of images, which are not cut" if image_tokens else ""
        if prompt_limit is not None and bos < prompt_limit < prompt:
            detail = f"a prompt of {prompt} tokens{uncut}; max_prompt_length is {prompt_limit}"
            _refuse_to_cut(pair, detail)
            pair = _cut(pair, bos, prompt - prompt_limit, longest, truncated_prompt=detail)
            prompt = prompt_limit
        excess = prompt + longest - limit
        if excess > 0:
            sizes = f"{prompt + longest} tokens, of them {prompt} of the prompt{uncut}"
            detail = f"{sizes}; sequence_length is {limit}"
            room = limit - prompt
            if recipe.overlong == "truncate_prompt":
                _refuse_to_cut(pair, detail)
            if recipe.overlong == "truncate_prompt" and excess < prompt - bos:
                # The last token of the prompt stays, as the first of the answer needs it.
                pair = _cut(pair, bos, excess, longest, truncated_prompt=detail)
            elif recipe.overlong == "truncate_response" and room > 0:
                lost = "a cut answer has lost its end token"
                pair = _cut(pair, bos, 0, room, truncated_response=detail, eos_lost=lost)
            else:
                raise DropReason("too_long" if room > 0 else "prompt_too_long", detail)
            _check_difference(pair, f"what is left of both answers is the same; {detail}")
        if not pair.chosen_scored or (pair.rejected and not pair.rejected_scored):
            raise DropReason("nothing_scored", "no token of an answer is left to score")
        return pair


def _refuse_to_cut(pair: Encoded, detail: str) -> None:
    """Drop a pair whose prompt would be cut, if it has images."""
    if pair.images:
        raise DropReason("prompt_too_long", detail)


def _contains(rendered: str, text: str) -> bool:
    """Return whether the text was rendered, whatever became of its white space."""
    return text.strip() in rendered or "".join(text.split()) in "".join(rendered.split())


def _start_after_change(prompt: str, sequence: str, question: str) -> int:
    """Return where the answer begins in a sequence that has another prompt; 0 if it has the same.

    What only follows the prompt's last text, `question`, may differ: that is the start of an answer.
    """
    end = prompt.rfind(question) + len(question)
    common = common_length(prompt, sequence)
    if not question or common >= end:
        return 0
    begin = sequence.find(prompt[end - len(question) :], max(0, common - len(question)))
    return begin + len(prompt) - end + len(question) if begin >= 0 else 0


def _lost_parts(answer: Content, prompt: str, sequence: str) -> Iterator[str]:
    """Yield what a template left out of an answer: its text, its thoughts, calls of tools."""
    parts = [_last_text(answer)]
    turns = () if isinstance(answer, str) else answer
    parts += [turn[name] for turn in turns[-1:] for name in THOUGHTS if name in turn]
    for text in parts:
        if isinstance(text, str) and not _contains(sequence, text):
            yield text
    # Calls are written in their order: a second call of a tool is looked for behind the first.
    written = "".join(sequence[common_length(prompt, sequence) :].split())
    for name, arguments in _tool_calls(turns):
        _, found, behind = written.partition("".join(name.split()))
        for text in _texts_within(arguments) if found else ():
            if "".join(text.split()) not in written:
                yield text
        if not found:
            yield name
        written = behind


def _tool_calls(turns: Turns) -> Iterator[tuple[str, Any]]:
    """Yield the name and the arguments of each tool that is called."""
    for turn in turns:
        calls = turn.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                yield function["name"], function.get("arguments")


def _texts_within(arguments: Any) -> Iterator[str]:
    """Yield the texts in the arguments of a call that every template writes alike, not escaped."""
    if isinstance(arguments, dict | list):
        values = arguments.values() if isinstance(arguments, dict) else arguments
        for value in values:
            yield from _texts_within(value)
    elif isinstance(arguments, str) and json.dumps(arguments) == f'"{arguments}"':
        yield arguments


def _last_text(answer: Content) -> str:
    """Return the text of an answer, or of the last of its turns."""
    return answer if isinstance(answer, str) else str(answer[-1]["content"])


def _common_end(one: Any, other: Any) -> Any:
    return one[len(one) - common_length(one[::-1], other[::-1]) :]


def _search(pattern: re.Pattern[str], contents: Iterable[str]) -> re.Match[str] | None:
    return next(filter(None, map(pattern.search, contents)), None)


def _check_difference(pair: Encoded, detail: str) -> None:
    if pair.chosen == pair.rejected:
        raise DropReason("identical_after_truncation", detail)


def _cut(pair: Encoded, kept: int, excess: int, room: int, **notes: str) -> Encoded:
    """Cut `excess` tokens of the prompt behind the first `kept`, and answers longer than `room`."""
    prompt = pair.prompt[:kept] + pair.prompt[kept + excess :]
    end = len(prompt) + room

    def cut_spans(spans: Spans) -> Spans:
        return predicted_spans((max(a - excess, kept), min(b - excess, end)) for a, b in spans)

    return replace(
        pair,
        prompt=prompt,
        chosen=pair.chosen[:room],
        rejected=pair.rejected[:room],
        chosen_scored=cut_spans(pair.chosen_scored),
        rejected_scored=cut_spans(pair.rejected_scored),
        notes=pair.notes | notes,
    )


# ---- rows that are tokens already


def is_tokenised(row: Row, layout: RowLayout) -> bool:
    """Return whether tokens are read. ColossalChat's rows have text too, for another format."""
    if layout.format != "auto":
        return layout.format == TOKENISED
    return row.get("chosen_input_ids") is not None and row.get("rejected_input_ids") is not None


def read_tokenised(row: Row, layout: RowLayout, encoder: Encoder) -> tuple[TextPair, Encoded]:
    """Return the pair, with its tokens written out where others have text."""
    if layout.rows != "pairs":
        raise DropReason("bad_type", "tokenised rows are pairs; name files of text for this task")
    renamed = {ours: row.get(theirs) for ours, theirs in layout.columns.items() if ours in EXTRAS}
    score_all = encoder.recipe.score == "all"
    chosen, first = _side(row, "chosen", score_all)
    rejected, second = _side(row, "rejected", score_all)
    extras = extras_of({**row, **renamed})
    # The prompt is the common beginning, up to the last turn that is scored.
    turn = min(first[-1][0], second[-1][0])
    last = turn if turn > 1 else min(len(chosen), len(rejected)) - 1
    start = min(common_length(chosen, rejected), last)
    if start == 0 and chosen != rejected:
        raise DropReason("prompt_mismatch", "chosen and rejected do not begin with the same token")
    images = encoder.recipe.images
    if images and images.token in (*chosen, *rejected):
        raise bad_image("rows of tokens cannot hold images; give the rows as text")
    whole_pair = Encoded(chosen[:start], chosen[start:], rejected[start:], first, second)
    encoded = encoder.fit(whole_pair)
    prompt = _written_out(encoded.prompt)
    pair = TextPair(prompt, _written_out(encoded.chosen), _written_out(encoded.rejected), **extras)
    return pair, encoded


def _written_out(ids: Ids) -> str:
    return " ".join(map(str, ids))


def _side(row: Row, side: str, score_all: bool) -> tuple[Ids, Spans]:
    """Return one sequence without its padding, and its scored spans."""
    ids = _numbers(row, f"{side}_input_ids", LARGEST_ID)
    ones = [1] * len(ids)
    scored = ones if score_all else _numbers(row, f"{side}_loss_mask", 1)
    attention = f"{side}_attention_mask"
    real = _numbers(row, attention, 1) if row.get(attention) is not None else ones
    if not len(ids) == len(scored) == len(real):
        sizes = f"{len(ids)} ids, {len(scored)} in its loss_mask, {len(real)} in its attention_mask"
        raise DropReason("bad_mask", f"{side} has {sizes}; the numbers must be equal")
    begin = common_length(real, [0] * len(real))
    end = begin + common_length(real[begin:], ones)
    if any(real[end:]):
        raise DropReason("bad_mask", f"{side}_attention_mask has a hole at token {end + 1}")
    if not score_all and any(scored[:begin] + scored[end:]):
        raise DropReason("bad_mask", f"{side}_loss_mask scores padding")
    spans = spans_of(scored[begin:end])
    if not spans:
        raise DropReason(
            "nothing_scored", f"{side}_loss_mask scores no token that comes after another one"
        )
    return ids[begin:end], spans


def _numbers(row: Row, name: str, largest: int) -> list[int]:
    values: Any = row.get(name)
    if values is None:
        raise DropReason("missing_key", f"{name} must be a list, found null")
    if not isinstance(values, list):
        raise wrong_type(name, "a list", values)
    if not all(isinstance(number, int) and 0 <= number <= largest for number in values):
        raise DropReason("bad_type", f"{name} must hold whole numbers from 0 to {largest}")
    return list(map(int, values))
