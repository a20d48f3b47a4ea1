"""Read a shell script without running it: assignments, arrays, here-documents, simple arithmetic.

What cannot be known without running the script, such as a variable that is assigned within a
condition or a loop, stays in the text as `${...}`, which is not accepted as a setting.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import PurePath

Variables = dict[str, list[str]]
FUNCTION = re.compile(r"^\s*(?:function\s+)?[\w-]+\s*\(\)\s*\{.*?^\}", re.M | re.S)
DOCUMENT = re.compile(
    r"^(?P<line>[^\n#]*?)<<-?\s*(?P<q>['\"]?)(?P<end>\w+)(?P=q)[^\n]*\n"
    r"(?P<body>.*?)^\s*(?P=end)\s*$",
    re.M | re.S,
)
READ = re.compile(r"\bread\s.*?(\w+)\s*$")
ASSIGNMENT = re.compile(r"(\w+)(\[\d+\])?\+?=")
REDIRECTION = re.compile(r"[<>][<>& \t]*")  # `> file`, `2>&1`, `< file`
BLANK, GAP = re.compile(r"[ \t]+|#[^\n]*"), re.compile(r"\s+|#[^\n]*")
NESTED = r"\((?:[^()]++|\((?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+\))*+\)"
# Within a text: an escape, $(command) or `command`, ${name} or $name.
EXPANSION = re.compile(
    rf"\\(?P<escaped>[\"\\$`])|\$(?P<nested>{NESTED})|`(?P<command>[^`]*)`|"
    r"\$(?:\{(?P<braces>[^{}]*)\}|(?P<name>\w+|[@*#?]))",
    re.S,
)
PART = re.compile(
    rf"""'(?P<single>[^']*)'|"(?P<double>(?>\\.|\${NESTED}|`[^`]*`|[^"\\])*+)"|\\(?P<any>.)|"""
    rf"""(?P<plain>[^\s;|&()<>'"\\`$]+|\$(?![\w{{(@*#?]))|{EXPANSION.pattern}""",
    re.S,
)
# Words before a command or an assignment.
LEADING = """
    then else do ! { time exec nohup sudo
    export declare local readonly typeset -a -x -r -ax
""".split()  # noqa: SIM905 - a table of names
OPENS, CLOSES = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
MOST_TEXT = 1_000_000
ARITHMETIC = re.compile(r"\s*\d{1,9}(\s*[-+*/]\s*\d{1,9})*\s*")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def commands(text: str, file: str = "") -> list[tuple[dict[str, str], list[str]]]:
    """Return each command as its environment and its words, with variables filled in."""
    variables: Variables = {"0": [file]} if file else {}

    def keep(found: re.Match[str]) -> str:
        target = READ.search(found["line"])
        if not target:
            return ""  # the input of another command
        body = " ".join(found["body"].replace("\\\n", " ").split()).replace('"', '\\"')
        return f'{target[1]}="{body}"'

    text = DOCUMENT.sub(keep, FUNCTION.sub("", text)).replace("\\\n", " ")
    commands_read: list[tuple[dict[str, str], list[str]]] = []
    depth = 0
    for assigned, words in _commands(f"{text}\n", variables):
        first = words[0] if words else ""
        depth += (first in OPENS) - (first in CLOSES)
        if not words:
            unsure = {name: ["${" + name + "}"] for name in assigned} if depth > 0 else {}
            variables |= assigned | unsure
            continue
        environment = {name: " ".join(values) for name, values in (variables | assigned).items()}
        commands_read.append((environment, words))
    return commands_read


def _commands(text: str, variables: Variables) -> Iterator[tuple[Variables, list[str]]]:
    """Yield assignments and words of each command; the caller updates the variables."""
    assigned: Variables = {}
    words: list[str] = []
    at = 0
    while at < len(text):
        if blank := BLANK.match(text, at):
            at = blank.end()
        elif text[at] in "\n;|&()":
            at += 1
            if words or assigned:
                yield assigned, words
                assigned, words = {}, []
        elif redirection := REDIRECTION.match(text, at):
            if words and words[-1] in ("1", "2") and text[at - 1] != " ":
                words.pop()
            _, at = _word(text, redirection.end(), variables)
        elif not words and (name := ASSIGNMENT.match(text, at)):
            assigned[name[1]], at = _assigned(text, name, variables)
        else:
            read_words, at = _word(text, at, variables)
            if words or not read_words or read_words[0] not in LEADING:
                words += read_words


def _assigned(text: str, name: re.Match[str], variables: Variables) -> tuple[list[str], int]:
    """Return the values that a name gets, and where the assignment ends."""
    unknown = ["${" + name[1] + "}"]
    before = variables.get(name[1], unknown)
    is_array = text[name.end()] == "("
    if is_array:
        values, at = _array(text, name.end(), variables)
    else:
        words, at = _word(text, name.end(), variables)
        values = [" ".join(words)]
    if name[0].endswith("+="):
        values = [*before, *values] if is_array else [before[0] + values[0], *before[1:]]
    return (unknown if name[2] else values), at


def _array(text: str, at: int, variables: Variables) -> tuple[list[str], int]:
    values: list[str] = []
    at += 1
    while text[at : at + 1] not in ("", ")"):
        if gap := GAP.match(text, at):
            at = gap.end()
        else:
            read_words, end = _word(text, at, variables)
            values, at = values + read_words, max(end, at + 1)
    return values, at + 1


def _word(text: str, at: int, variables: Variables) -> tuple[list[str], int]:
    """Read one word; an unquoted variable may make it several, or an empty one."""
    words, start = [""], at
    while piece := PART.match(text, at):
        at = piece.end()
        if piece["double"] is not None:
            words[-1] += _fill(piece["double"], variables)
        elif literal := piece["single"] or piece["any"] or piece["plain"]:
            words[-1] += literal
        elif piece["single"] is None:
            first, *further_words = _expanded(piece, variables)
            words[-1] += first
            words += further_words
        if len(words[-1]) + len(words) > MOST_TEXT:
            raise ValueError("too long")
    if text[at : at + 1] in ("'", '"', "`", "$"):
        raise ValueError(f"no closing {text[at].replace('$', ')')}")
    if words == [""] and text[start:at] in ("$@", "$*", '"$@"', '"$*"'):
        return [], at  # further arguments of the script, of which there may be none
    return [word for word in words if word] or [""], at


def _fill(text: str, variables: Variables) -> str:
    """Return a text with its variables filled in; operators and quotes are text in it."""
    return EXPANSION.sub(lambda found: " ".join(_expanded(found, variables)), text)


def _expanded(found: re.Match[str], variables: Variables) -> list[str]:
    if found["escaped"]:
        return [found["escaped"]]
    if found["nested"] or found["command"] is not None:
        command = found["nested"][1:-1] if found["nested"] else found["command"]
        return _run(command.strip(), variables).split() or [""]
    return _variable(found["name"] if found["braces"] is None else found["braces"], variables)


def _variable(inner: str, variables: Variables) -> list[str]:
    """Return the words of `name`, `name:-default` or `name[@]`."""
    key, colon, default = inner.partition(":")
    key = key.removesuffix("[@]").removesuffix("[*]")
    if colon and default[:1] not in ("-", "="):  # ${a:+b}, ${a:0:3}
        return ["${" + inner + "}"]
    if any(values := variables.get(key, [])) or (key in variables and not colon):
        shown = values if "[" in inner else values[:1]
        return " ".join(shown).split() or [""]
    if colon:
        return default[1:].strip("\"'").split() or [""]
    return [""] if not key or key in "@*#?" else ["${" + inner + "}"]


def _run(inner: str, variables: Variables) -> str:
    """Compute `expr 16 / 2`, $((16 / 2)), dirname, basename; a date is harmless. Nothing is run."""
    arithmetic = inner.startswith("(") and inner.endswith(")")
    if arithmetic or inner.startswith("expr "):
        inner = inner[1:-1] if arithmetic else inner.removeprefix("expr ")
        with_dollars = re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", inner) if arithmetic else inner
        terms = _fill(with_dollars.replace("\\*", "*"), variables)
        if ARITHMETIC.fullmatch(terms):
            numbers, signs = list(map(int, re.findall(r"\d+", terms))), {*terms} & OPERATORS.keys()
            if len(signs) > 1 or 0 in numbers[1:]:
                raise ValueError("arithmetic that is not read")
            return str(reduce(OPERATORS[signs.pop()], numbers) if signs else numbers[0])
    first, *argument = inner.split(maxsplit=1) or [""]
    if first in ("dirname", "basename") and argument:
        path = PurePath("".join(_fill(argument[0], variables).split()).strip("\"'"))
        return str(path.parent) if first == "dirname" else path.name
    return "date" if first == "date" else "${" + first + "}"
