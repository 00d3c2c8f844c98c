"""The engine's half of flashkv-bench ttft: how a process that holds an engine is asked.

Runs in the engine's own environment, so it needs nothing but Python.

Invariants
  - settings lie in the file that the first argument names; {"ready": facts} goes out when the
    engine waits; then each line of standard input is answered by one line, {"done": ...};
  - lines go to what was standard output at the start; whatever the engine prints goes to standard
    error, so that no line is ever torn;
  - when standard input ends, the engine is closed: no engine outlives who started it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO


class SideError(Exception):
    """The engine can't do what it was asked, or did something else; the message says what."""


@dataclass(frozen=True)
class Answer:
    """A prompt's first token.

    seconds   from the request to the token.
    restored  tokens of the prompt that were not computed.
    """

    seconds: float
    token: int
    restored: int


class Side(Protocol):
    """An engine that runs with one configuration, and what its prompts can come from."""

    def facts(self) -> dict[str, Any]:
        """What figures belong to; "granule": tokens that it restores at once."""

    def answer(self, tokens: list[int], source: str) -> Answer:
        """The first token, the prompt's KV being where the source's name says."""

    def settle(self) -> None:
        """Returns when what was stored can be read from the disk."""

    def close(self) -> None:
        """Ends the engine."""


def serve(open_side: Callable[[dict[str, Any]], Side]) -> None:
    """Answers until standard input ends. Ends the process with status 1 where it can't go on."""
    lines = own_output()
    side = None
    try:
        settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        side = open_side(settings)
        say_line(lines, ready=side.facts())
        for text in sys.stdin:
            command = json.loads(text)
            if command["do"] == "settle":
                side.settle()
                say_line(lines, done={})
            else:
                tokens = settings["prompts"][command["prompt"]]
                say_line(lines, done=asdict(side.answer(tokens, command["source"])))
    except SideError as error:
        say_line(lines, error=str(error))
        sys.exit(1)
    finally:
        if side is not None:
            side.close()


def own_output() -> TextIO:
    """Standard output for lines alone; what anybody else prints goes to standard error."""
    sys.stdout.flush()
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lines


def say_line(lines: TextIO, **line: Any) -> None:
    lines.write(json.dumps(line) + "\n")
    lines.flush()
