"""One process of flashkv-bench peers: holds one peer, and answers rounds over a pipe.

Invariants
  - only calls of the peer are timed, and processor time is that of all threads of this process
    meanwhile; making blocks and comparing them is not;
  - all that a get brings is compared with what was put;
  - a peer that raises is an answer ("problem"), not the end: what it raised is part of the figures.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from .measure import stopwatch
from .peers_blocks import BlockSource, key_of
from .peers_protocol import Peer, Plan
from .peers_roster import Entry
from .ttft_protocol import own_output, say_line

RIGHT, MISSING, WRONG, RAISED = "right", "missing", "wrong", "raised"


class Watch:
    """Wall and processor seconds of several stretches together."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu_s = 0.0

    def time(self, call: Any, *arguments: Any) -> Any:
        """Calls, and adds what it took."""
        with stopwatch() as watch:
            result = call(*arguments)
        self.seconds += watch.seconds
        self.cpu_s += watch.cpu_s
        return result


class Worker:
    """The stores of one peer, by their names in its folder."""

    def __init__(self, entry: Entry, folder: Path) -> None:
        self.entry = entry
        self.folder = folder
        self._open: dict[str, Peer] = {}
        self._source: BlockSource | None = None
        self.first = self.new()

    def new(self) -> Peer:
        """Another peer of this kind."""
        made: Peer = import_module(f".{self.entry.module}", __package__).make(self.entry.variant)
        return made

    def hello(self) -> dict[str, Any]:
        """What the peer is."""
        return {**asdict(self.first.facts), "versions": self.first.versions()}

    def put(self, store: str, plan: Plan, *, flush: bool) -> dict[str, Any]:
        """Puts all blocks into a new store, in batches; "bytes" of them, "seconds", "cpu_s"."""
        source, peer, watch = self.source(plan), self.opened(store, plan), Watch()
        for first in range(0, plan.count, plan.batch):
            keys, blocks = source.batch(first, min(plan.batch, plan.count - first))
            peer.stage(blocks)
            watch.time(peer.put, keys, blocks)
        if flush:
            watch.time(peer.flush)
        return {
            "bytes": plan.count * plan.block_bytes,
            "seconds": watch.seconds,
            "cpu_s": watch.cpu_s,
        }

    def get(self, store: str, plan: Plan) -> dict[str, Any]:
        """Gets all blocks in batches, cold; how many were "right", "missing" and "wrong"."""
        source, peer, watch = self.source(plan), self.opened(store, plan), Watch()
        peer.drop_cache()
        found = {RIGHT: 0, MISSING: 0, WRONG: 0}
        for first in range(0, plan.count, plan.batch):
            numbers = range(first, min(first + plan.batch, plan.count))
            keys = [key_of(number) for number in numbers]
            for number, got in zip(numbers, watch.time(peer.get, keys), strict=True):
                found[_verdict(source, number, got)] += 1
        return {
            "bytes": plan.count * plan.block_bytes,
            "seconds": watch.seconds,
            "cpu_s": watch.cpu_s,
            **found,
        }

    def check(self, store: str, plan: Plan) -> dict[str, Any]:
        """Gets blocks one by one: "blocks", what came of each, and "raised", what it said."""
        source, peer = self.source(plan), self.opened(store, plan)
        blocks: list[str] = []
        raised = ""
        for number in range(plan.count):
            came, told = _one(peer, source, number)
            blocks.append(came)
            raised = raised or told
        return {"blocks": blocks, "raised": raised}

    def damage(self, store: str, plan: Plan, number: int) -> dict[str, Any]:
        """Flips a byte of a block on the disk; the store was closed if it can be opened anew."""
        peer = self._open.get(store, self.first)
        return {"at": peer.damage(self.folder / store, plan, self.source(plan).payload(number))}

    def close(self, store: str) -> dict[str, Any]:
        """Closes a store, and takes what it wrote out of the page cache."""
        peer = self._open.pop(store, None)
        if peer is not None:
            peer.close()
            peer.drop_cache()
        return {}

    def drop(self, store: str) -> dict[str, Any]:
        """Takes an open store out of the caches."""
        self._open[store].drop_cache()
        return {}

    def opened(self, store: str, plan: Plan) -> Peer:
        """The store, opened now if it isn't."""
        if store not in self._open:
            peer = self.new()
            peer.open(self.folder / store, plan)
            self._open[store] = peer
        return self._open[store]

    def source(self, plan: Plan) -> BlockSource:
        """The blocks; memory of the last plan's is used again or given up."""
        if self._source is None or self._source.plan != plan:
            self._source = None
            self._source = BlockSource(plan)
        return self._source

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """What a command came to, or {"problem": what was raised}."""
        try:
            if "plan" in command:
                command["plan"] = Plan(**command["plan"])
            done: dict[str, Any] = getattr(self, command.pop("do"))(**command)
        except Exception as error:  # noqa: BLE001  (told, and the next one goes on)
            return {"problem": _told(error)}
        return done


def _one(peer: Peer, source: BlockSource, number: int) -> tuple[str, str]:
    """What came of a block, and what the peer raised."""
    try:
        (got,) = peer.get([key_of(number)])
    except Exception as error:  # noqa: BLE001  (what a peer makes of damage is asked for)
        return RAISED, _told(error)
    return _verdict(source, number, got), ""


def _verdict(source: BlockSource, number: int, got: Any) -> str:
    if got is None:
        return MISSING
    return RIGHT if source.is_right(number, got) else WRONG


def _told(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def main() -> None:
    lines = own_output()
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        worker = Worker(Entry(**settings["entry"]), Path(settings["folder"]))
        say_line(lines, ready=worker.hello())
    except Exception as error:  # noqa: BLE001  (why a peer can't be started is part of the report)
        say_line(lines, error=_told(error))
        sys.stderr.flush()
        os._exit(1)
    for text in sys.stdin:
        say_line(lines, done=worker.answer(json.loads(text)))
    sys.stderr.flush()
    os._exit(0)  # threads of some peers don't end by themselves


if __name__ == "__main__":
    main()
