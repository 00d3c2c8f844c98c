"""Small faults in C sources: one operator, constant or condition at a time.

Invariants
  - a mutant differs from its source in one token of code: comments, strings, preprocessor lines and
    type declarations stay as they are;
  - the same source gives the same mutants in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SKIPPED = re.compile(
    r"""
      /\*.*?\*/                        # comments
    | //[^\n]*
    | "(?:\\.|[^"\\\n])*"              # strings
    | '(?:\\.|[^'\\\n])*'
    | ^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*   # preprocessor lines
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_TOKEN = re.compile(
    r"""
      (?P<number>(?<![\w.])(?:0[xX][0-9a-fA-F]+|[0-9]+)(?:[uUlL]*)(?![\w.]))
    | (?P<operator><<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|->|\+=|-=|\*=|/=|%=|&=|\|=|\^=
        |[-+*/%&|^~!<>?=])
    | (?P<word>\b(?:return|if|continue|break|true|false|while)\b)
    """,
    re.VERBOSE,
)
# A line up to the name of an array that is not the first one there.
_LATER = re.compile(
    r"\s*(?:static |const )*(?:\w+_t|__m\w+|float|bool|int) (?:\w+ = [\w.]+, )*[^(=]*$"
)
_SWAPS = {
    "<": ("<=", ">"),
    "<=": ("<", ">"),
    ">": (">=", "<"),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "&&": ("||",),
    "||": ("&&",),
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "/": ("*",),
    "%": ("/",),
    "&": ("|",),
    "|": ("&",),
    "^": ("&",),
    "<<": (">>",),
    ">>": ("<<",),
    "+=": ("-=",),
    "-=": ("+=",),
    "|=": ("&=",),  # "^=" is the same where bits are put together
    "&=": ("|=",),
    "^=": ("|=",),
    "<<=": (">>=",),
    ">>=": ("<<=",),
    "true": ("false",),
    "false": ("true",),
    "~": ("",),
    "!": ("",),
    "continue": ("break",),
    "break": ("continue",),
}


@dataclass(frozen=True)
class Mutant:
    """Characters [start, end) of a file become `text`; `line` counts from 1."""

    file: str
    line: int
    start: int
    end: int
    old: str
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old!r} -> {self.text!r}"


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a source, in its order."""
    code = _SKIPPED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    found = []
    for token in _TOKEN.finditer(code):
        line = code.count("\n", 0, token.start()) + 1
        where = file, line, *token.span(), token[0]
        found += [Mutant(*where, text) for text in _changes(code, token)]
    return found


def _changes(code: str, token: re.Match[str]) -> Iterator[str]:
    text = token[0]
    if _in_declared_size(code, token.start()):
        return
    if token["number"]:
        yield from _numbers(code, token)
    elif text in _SWAPS and not _is_declaration_or_unary(code, token):
        yield from _SWAPS[text]


def _numbers(code: str, token: re.Match[str]) -> Iterator[str]:
    digits = re.match(r"(0[xX][0-9a-fA-F]+|[0-9]+)([uUlL]*)", token[0])
    assert digits is not None
    value, suffix = int(digits[1], 0), digits[2]
    yield f"{value + 1}{suffix}"
    if value:
        yield f"{value - 1}{suffix}"


def _in_declared_size(code: str, at: int) -> bool:
    """Whether it is in the size of an array: another size is no fault, or a crash."""
    line = code[code.rfind("\n", 0, at) + 1 : at]
    if line.count("[") <= line.count("]"):
        return False
    before = line[: line.rindex("[")]
    named = re.search(r"([A-Za-z_]\w*)[ *]+[A-Za-z_]\w*(?:\[[^\]]*\])*$", before)
    if named is not None and named[1] not in ("return", "else", "case", "sizeof"):
        return True
    return _LATER.match(before) is not None


def _is_declaration_or_unary(code: str, token: re.Match[str]) -> bool:
    """Whether it is no operator of two values: the sources' style puts a space behind those."""
    return token[0] in ("*", "&", "-", "+") and not code[token.end() : token.end() + 1].isspace()
