"""Chat templates: named ones, the tokenizer's own, or a local Jinja file.

They are rendered as Hugging Face renders them, in Jinja's immutable sandbox. It stops code but not
endless loops or huge strings; the child process that renders has limits of time and memory. Only
this module of the data room imports transformers, and only when a tokenizer is loaded: the
children need neither it nor torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from rather.config.reserved import RESERVED_IN_TEMPLATES
from rather.data.json_rows import DropReason
from rather.data.messages import Json, Turns
from rather.data.tokenizer_files import check_tokenizer_files
from rather.errors import DataError
from rather.files import inspect_folder, parse_json, read_json, yaml_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rather.config.schema import ActorConfig

_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

_QWEN_SYSTEM = """\
{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}\
{% else %}{% set system = DEFAULT %}{% set turns = messages %}{% endif %}\
{% if system or tools %}<|im_start|>system
{{ system }}{% if tools %}{{ '\n\n' if system }}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}

{{ tool | tojson }}{% endfor %}

</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{% endif %}<|im_end|>
{% endif %}"""
_QWEN_TURNS = """\
{% for m in turns %}{% if m.role == 'tool' %}\
{% if loop.first or turns[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}

<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or turns[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}\
{% else %}<|im_start|>{{ m.role }}
{{ CONTENT }}{% for call in m.tool_calls or [] %}{% set f = call.function or call %}\
{{ '\n' if m.content or not loop.first }}\
<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments if f.arguments is string else f.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}"""
_QWEN3_THOUGHT = """\
{% set ns = namespace(last=0) %}\
{% for m in turns %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"""
_QWEN3_CONTENT = """\
(m.content if m.role != 'assistant' else \
m.content.split('</think>')[-1].lstrip('\n') if loop.index0 < ns.last else \
m.content if '</think>' in m.content else \
'<think>\n' ~ (m.reasoning_content | default('') | trim('\n')) ~ '\n</think>\n\n' ~ m.content.lstrip('\n'))"""
_QWEN3_START = """\
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
_QWEN_DEFAULT = "'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'"

TEMPLATES = {
    "chatml": _TURNS + _START,
    "qwen2_5": _QWEN_SYSTEM.replace("DEFAULT", _QWEN_DEFAULT)
    + _QWEN_TURNS.replace("CONTENT", "m.content")
    + _START,
    "qwen3": _QWEN_SYSTEM.replace("DEFAULT", "''")
    + _QWEN3_THOUGHT
    + _QWEN_TURNS.replace("CONTENT", _QWEN3_CONTENT)
    + _QWEN3_START,
    "llama3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "gemma": "{{ bos_token }}{% set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ system if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "mistral": "{{ bos_token }}{% set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}[INST] {{ system if loop.first }}{{ m.content }}[/INST]{% endif %}{% endfor %}",
    "phi3": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "vicuna": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} "
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}USER: {{ m.content | trim }} ASSISTANT:{% endif %}{% endfor %}",
}
ALIASES = {
    "qwen2_5_dpo": "qwen2_5",
    "qwen2.5": "qwen2_5",
    "llama3_1": "llama3",
    "gemma2": "gemma",
    "gemma3": "gemma",
}
CONVERSATION = ("chat_template", "system_message", "end_of_assistant", "stop_ids")
MOST_GROWTH = 1_000  # times, of a text by its normalizer or decoder
RESERVED = RESERVED_IN_TEMPLATES


def load_tokenizer(
    path: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub name, with EOS as pad token if it has none.

    No mask is ever made from ids, so that it does not matter which token pads.
    """
    from transformers import AutoTokenizer

    if folder := inspect_folder(path, revision):
        check_tokenizer_files(folder)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    except BaseException as error:
        # transformers raises a dozen kinds, which mean the same to a user; a panic of Rust is not
        # an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(f"{path}: the tokenizer cannot be loaded ({first}).") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise DataError(
            f"{path}: only tokenizers with a tokenizer.json are read; save it as a fast tokenizer."
        )
    _refuse_growth(path, tokenizer.backend_tokenizer)
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def use_processor_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Take the template of a model's processor, which older checkpoints have in a file of its own."""
    path = folder / "chat_template.json"
    if path.is_file():
        try:
            tokenizer.chat_template = str(read_json(path)["chat_template"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path}: has no chat_template ({error}).") from error


def _refuse_growth(path: str, backend: Any) -> None:
    """Refuse replacements that multiply a text: some bytes of tokenizer.json could fill the memory."""

    def growth(part: Any) -> int:
        if isinstance(part, dict) and part.get("type") == "Replace":
            return max(1, len(part["content"]))
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return math.prod(map(growth, inner))

    for name in ("normalizer", "decoder"):
        component = getattr(backend, name)
        if component and growth(parse_json(component.__getstate__())) > MOST_GROWTH:
            raise DataError(
                f"{path}: the {name} of its tokenizer can make a text more than {MOST_GROWTH:,} "
                "times longer; use another tokenizer.json."
            )


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja text and the variables it may use; rows with tools use `tool_text` if it is set."""

    name: str
    text: str
    variables: dict[str, Any] = field(default_factory=dict)
    tool_text: str | None = None
    end: str | None = None  # text that must follow an answer

    def check(self, *, compiles: bool = False) -> None:
        """Parse the template, or compile it, which needs a process with limits.

        Compiling computes constants such as {{ 'x' * 10**10 }}.
        """
        work: Callable[[str], object] = _compiled if compiles else _ENVIRONMENT.parse
        try:
            for text in filter(None, (self.text, self.tool_text)):
                work(text)
        # ValueError: a number of 5,000 digits
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise DataError(f"chat template {self.name}: {error}") from error

    def render(
        self, turns: Turns, start_answer: bool, tools: list[Any] | None, kwargs: Json
    ) -> str:
        """Return the text of turns, with the start of an answer if one is to follow."""
        values = {
            **self.variables,
            **kwargs,
            "messages": list(turns),
            "add_generation_prompt": start_answer,
            "tools": tools,
            "documents": None,
        }
        text = self.tool_text if tools and self.tool_text else self.text
        try:
            return _compiled(text).render(values)
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything at a row it was not written for
            detail = f"chat template {self.name}: {type(error).__name__}: {error}"
            raise DropReason("template_error", detail) from error


def choose_template(
    wanted: str | None,
    tokenizer: PreTrainedTokenizerBase,
    kwargs: Mapping[str, Any] | None = None,
) -> ChatTemplate | None:
    """Return a template by name, by file, or the tokenizer's own; None means plain text.

    `kwargs` are variables of the template, beside the tokenizer's special tokens.
    """
    name = ALIASES.get(wanted or "", wanted or "")
    chosen: ChatTemplate | None = None
    if name in ("", "native"):
        chosen = own_template(tokenizer)
        if chosen is None and name:
            raise DataError(
                f"data_args.template: native, but the tokenizer {tokenizer.name_or_path} has no "
                f"chat template; choose one of {', '.join(TEMPLATES)}, a .jinja file, or none for "
                "plain text."
            )
    elif name != "none":
        path = Path(name).expanduser().absolute()
        if name not in TEMPLATES and not path.is_file():
            raise DataError(
                f"data_args.template: {name!r} is neither a known template nor a file at {path}. "
                f"Known are {', '.join(['native', 'none', *TEMPLATES])}."
            )
        text, end = (TEMPLATES[name], None) if name in TEMPLATES else read_template(path)
        chosen = ChatTemplate(name, text, _variables(tokenizer), end=end)
    if chosen:
        chosen.check()
        return replace(chosen, variables={**chosen.variables, **(kwargs or {})})
    if kwargs:
        raise DataError(
            "data_args.chat_template_kwargs: there is no chat template that could use them; set "
            "data_args.template, or use a tokenizer that has one."
        )
    return None


def read_template(path: Path) -> tuple[str, str | None]:
    """Return the Jinja text of a file, and for JSON also what must follow an answer.

    A file is Jinja, or JSON as ColossalChat has it. A system_message begins the conversations that
    have no system turn.
    """
    try:
        text = yaml_text(path)
        if not re.match(r'\s*{\s*["}]', text):
            return text, None
        settings = parse_json(text)
        if "chat_template" not in settings or not settings.keys() <= {*CONVERSATION}:
            raise ValueError(f"its keys are {', '.join(settings)}")
        text, system, end = (str(settings.get(key) or "") for key in CONVERSATION[:3])
    except (OSError, ValueError) as error:
        raise DataError(
            f"data_args.template: {path} cannot be read ({error}). It must be a Jinja file, or JSON "
            f"with {', '.join(CONVERSATION)}."
        ) from error
    if system:
        turn = json.dumps({"role": "system", "content": system}, ensure_ascii=False)
        # Jinja removes the line end after a tag, so that the text begins a line as in its file.
        with_system = f"{{% set messages = [{turn}] + messages %}}"
        text = f"{{% if messages[0].role != 'system' %}}{with_system}{{% endif %}}\n{text}"
    return text, end


def tokenizer_of(actor: ActorConfig) -> Any:
    """Return the policy's tokenizer with the chat template it is trained with, for the export."""
    args = actor.model_args
    tokenizer = load_tokenizer(actor.tokenizer_path, args.revision, args.trust_remote_code)
    template = choose_template(actor.data_args.template, tokenizer)
    if template and template.name != "native":
        tokenizer.chat_template = template.text
    return tokenizer


def own_template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """Return the template that the tokenizer came with."""
    templates: Any = tokenizer.chat_template
    if templates is None:
        return None
    texts = {"default": templates} if isinstance(templates, str) else dict(templates)
    if "default" not in texts:
        raise DataError(
            f"{tokenizer.name_or_path}: its chat templates are {', '.join(texts)}, none is called "
            "default; save the right one as a .jinja file and name it in data_args.template."
        )
    return ChatTemplate("native", texts["default"], _variables(tokenizer), texts.get("tool_use"))


def _variables(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    tokens = tokenizer.special_tokens_map.items()
    return {name: str(token) for name, token in tokens if isinstance(token, str)}


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks answers for other trainers; here it only shows its content."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)


_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
)
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
_compiled = cache(_ENVIRONMENT.from_string)
