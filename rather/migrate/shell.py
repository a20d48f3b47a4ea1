"""Read a shell script without running it: assignments, arrays, here-documents, simple arithmetic.

What cannot be known without running the script, such as a variable that is assigned within a
condition or a loop, stays in the text as `${...}`, which is not accepted as a setting.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath

Variables = dict[str, list[str]]
FUNCTION = re.compile(r"^\s*(?:function\s+)?[\w-]+\s*\(\)\s*\{.*?^\}", re.M | re.S)
DOCUMENT = re.compile(
    r"^(?P<line>[^\n#]*?)<<-?\s*(?P<q>['\"]?)(?P<end>\w+)(?P=q)[^\n]*\n(?P<body>.*?)^\s*(?P=end)\s*$",
    re.M | re.S,
)
READ = re.compile(r"\bread\s.*?(\w+)\s*$")
ASSIGNMENT = re.compile(r"(\w+)(\[\d+\])?\+?=")
NAME = re.compile(r"\{([^{}]*)\}|(\w+|[@*#?])")
FLOW = ("then", "else", "do", "!", "{", "time", "exec", "nohup", "sudo")
DECLARE = ("export", "declare", "local", "readonly", "typeset", "-a", "-x", "-r", "-ax")
UNKNOWN = re.compile(r"\$[{(]")
OPENS, CLOSES = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
MOST_TEXT = 1_000_000
OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


def commands(text: str, file: str = "") -> list[tuple[dict[str, str], list[str]]]:
    """Return each command as its environment and its words, with variables filled in."""
    variables: Variables = {"0": [file]} if file else {}
    documents: list[str] = []

    def keep(found: re.Match[str]) -> str:
        target = READ.search(found["line"])
        if not target:
            return ""  # the input of another command
        documents.append(found["body"].replace("\\\n", " "))
        return f"{target[1]}=\0{len(documents) - 1}\0"

    text = DOCUMENT.sub(keep, FUNCTION.sub("", text)).replace("\\\n", " ")
    result: list[tuple[dict[str, str], list[str]]] = []
    depth = 0
    for assigned, words in _Lexer(text, variables, documents).commands():
        first = words[0] if words else ""
        depth += (first in OPENS) - (first in CLOSES)
        if not words:
            unsure = {name: ["${" + name + "}"] for name in assigned} if depth > 0 else {}
            variables |= assigned | unsure
            continue
        environment = {name: " ".join(values) for name, values in (variables | assigned).items()}
        result.append((environment, words))
    return result


class _Lexer:
    """Split a script into words, as a shell does."""

    def __init__(self, text: str, variables: Variables, documents: list[str]) -> None:
        self.text, self.at = text, 0
        self.variables, self.documents = variables, documents

    def commands(self) -> Iterator[tuple[Variables, list[str]]]:
        """Yield assignments and words of each command; the caller updates the variables."""
        while found := self._next():
            yield found

    def _next(self) -> tuple[Variables, list[str]] | None:
        assigned: Variables = {}
        words: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t":
                self.at += 1
            elif char in "\n;|&()":
                self.at += 1
                if words or assigned:
                    return assigned, words
            elif char == "#":
                self.at = (self.text + "\n").index("\n", self.at)
            elif char in "<>":
                if words and words[-1] in ("1", "2") and self.text[self.at - 1] != " ":
                    words.pop()
                self._skip_redirection()
            elif not words and (name := ASSIGNMENT.match(self.text, self.at)):
                self.at = name.end()
                value = self._array() if self._peek() == "(" else self._value()
                assigned[name[1]] = self._assigned(name, value)
            else:
                found = self._word()
                if words or found[:1] not in ([word] for word in (*FLOW, *DECLARE)):
                    words += found
        return (assigned, words) if words or assigned else None

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _skip_redirection(self) -> None:
        """Skip `> file`, `2>&1`, `< file`."""
        while self._peek() and self._peek() in "<>& \t":
            self.at += 1
        if self._peek() not in ("", "\n"):
            self._word()

    def _assigned(self, name: re.Match[str], value: list[str]) -> list[str]:
        """Return the variable after `a=`, `a+=` (more of an array, or of a text), or `a[1]=`."""
        before = self.variables.get(name[1], ["${" + name[1] + "}"])
        if name[2]:
            return ["${" + name[1] + "}"]
        if not name[0].endswith("+="):
            return value
        is_array = self.text[name.end() : name.end() + 1] == "("
        return [*before, *value] if is_array else [before[0] + value[0], *before[1:]]

    def _value(self) -> list[str]:
        return [" ".join(self._word())]

    def _array(self) -> list[str]:
        self.at += 1
        values: list[str] = []
        while self._peek() not in ("", ")"):
            if self._peek() in " \t\n":
                self.at += 1
            elif self._peek() == "#":
                self.at = (self.text + "\n").index("\n", self.at)
            else:
                values += self._word()
        self.at += 1
        return values

    def _word(self) -> list[str]:
        """Read one word; an unquoted variable may make it several, or an empty one."""
        words = [""]
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;|&()<>":
            char = self.text[self.at]
            self.at += 1
            if char == "'":
                words[-1] += self._until("'")
            elif char == '"':
                words[-1] += self._quoted()
            elif char == "\\":
                words[-1] += self._peek()
                self.at += 1
            elif char == "\0":
                body = self.documents[int(self._until("\0"))]
                words[-1] += " ".join(_Lexer(body, self.variables, []).document())
            elif char == "`":
                words[-1] += self._run(self._until("`"))
            elif char == "$":
                parts = self._expanded()
                words[-1] += parts[0] if parts else ""
                words += parts[1:]
            else:
                words[-1] += char
            if len(words[-1]) + len(words) > MOST_TEXT:
                raise ValueError("too long")
        if self.at == start:  # an operator that no command begins with
            self.at += 1
        elif words == [""] and self.text[start : start + 2] in ("$@", "$*", "$1"):
            return []
        return [""] if words == [""] else [word for word in words if word]

    def document(self) -> list[str]:
        """Return the words of a here-document; operators and quotes are text in it."""
        parts: list[str] = []
        while self.at < len(self.text):
            place = self.text.find("$", self.at)
            end = len(self.text) if place < 0 else place
            parts.append(self.text[self.at : end])
            self.at = end + 1
            if place >= 0:
                parts.append(" ".join(self._expanded()))
        return "".join(parts).split()

    def _until(self, end: str) -> str:
        place = self.text.find(end, self.at)
        if place < 0:
            raise ValueError(f"no closing {end}")
        found, self.at = self.text[self.at : place], place + 1
        return found

    def _quoted(self) -> str:
        found = ""
        while self._peek() != '"':
            if not self._peek():
                raise ValueError('no closing "')
            char = self._peek()
            self.at += 1
            if char == "$":
                found += " ".join(self._expanded())
            elif char == "`":
                found += self._run(self._until("`"))
            elif char == "\\" and self._peek() in ('"', "\\", "$", "`"):
                found += self._peek()
                self.at += 1
            else:
                found += char
        self.at += 1
        return found

    def _expanded(self) -> list[str]:
        """Return what the text after a dollar sign stands for."""
        if self._peek() == "(":
            return self._run(self._parentheses()).split() or [""]
        name = NAME.match(self.text, self.at)
        if name is None:
            return ["$"]
        self.at = name.end()
        inner = name[1] if name[1] is not None else name[2]
        key, colon, default = inner.partition(":")
        key = key.removesuffix("[@]").removesuffix("[*]")
        if colon and default[:1] not in ("-", "="):  # ${a:+b}, ${a:0:3}
            return ["${" + inner + "}"]
        if any(values := self.variables.get(key, [])) or (key in self.variables and not colon):
            kept = values if "[" in inner else values[:1]
            return " ".join(kept).split() or [""]
        if colon:
            return default[1:].strip("\"'").split() or [""]
        if not key or key.isdigit() or key in "@*#?":
            return [""]
        return ["${" + inner + "}"]

    def _parentheses(self) -> str:
        depth, start = 0, self.at
        while self._peek():
            depth += {"(": 1, ")": -1}.get(self._peek(), 0)
            self.at += 1
            if not depth:
                return self.text[start + 1 : self.at - 1]
        raise ValueError("no closing )")

    def _run(self, command: str) -> str:
        """Compute `expr 16 / 2` and $((16 / 2)), dirname, basename; a date is harmless; nothing is run."""
        inner = command.strip()
        arithmetic = inner.startswith("(") and inner.endswith(")")
        if arithmetic or inner.startswith("expr "):
            inner = inner[1:-1] if arithmetic else inner.removeprefix("expr ")
            named = re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", inner) if arithmetic else inner
            terms = _Lexer(named.replace("\\*", "*"), self.variables, []).document()
            spaced = re.sub(r"([-+*/])", r" \1 ", " ".join(terms)).split()
            numbers = [int(term) for term in spaced[::2] if term.isdigit() and len(term) < 10]
            if len(numbers) == len(spaced[::2]) and set(spaced[1::2]) <= set(OPERATORS):
                return str(_left_to_right(numbers, spaced[1::2]))
        first, *rest = inner.split(maxsplit=1) or [""]
        if first in ("dirname", "basename") and rest:
            path = PurePath("".join(_Lexer(rest[0], self.variables, []).document()).strip("\"'"))
            return str(path.parent) if first == "dirname" else path.name
        return "date" if first == "date" else "${" + first + "}"


def _left_to_right(numbers: list[int], signs: list[str]) -> int:
    if len(numbers) != len(signs) + 1 or len(set(signs)) > 1 or 0 in numbers[1:]:
        raise ValueError("arithmetic that is not read")
    total = numbers[0]
    for sign, number in zip(signs, numbers[1:], strict=True):
        total = OPERATORS[sign](total, number)
    return total
