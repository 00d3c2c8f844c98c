"""The processes that tests/crash/test_sigkill.py kills: each uses a store and says what it does.

Run as a program this is the nursery: it has imported everything and opened nothing, so that a child
forked from it begins at once. Argument: the number of a socket. Each message on it is a Task with
the writing end of a pipe; the answer is the child's process id, and, once asked, how it ended.

Invariants
  - a child says what it is about to do before each call, and what is done after it;
  - a line that it says is whole before the next call begins: a pipe takes it at once or not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from store_support import IDENTITY, open_store

from flashkv import Identity

TOKENS = 16
SHAPE = (2, 2, 2, TOKENS, 64)
"""16 KiB."""
VALUES = 8 * 1024
IDENTITIES = (IDENTITY, Identity(model="test/other", revision="1"))
"""A key belongs to the namespace of its parity."""


@dataclass(frozen=True)
class Task:
    """What a child is to do. stored: keys that are there, all flushed."""

    path: str
    backend: str
    seed: int
    next_key: int
    version: int  # the last that was given
    stored: list[int]


# ---- data --------------------------------------------------------------------------------------


def _pool() -> np.ndarray:
    values = np.random.default_rng(7).standard_normal(1 << 20, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


POOL = _pool()
"""Like activations; blocks are cut from it, since making each anew would take longer than I/O."""


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") + b"-key"


def block(number: int, version: int) -> np.ndarray:
    """What a key holds in a version: no two alike, in any page."""
    mixed = (number * 0x9E3779B1 + version * 0x85EBCA77) & 0xFFFFFFFF
    at = mixed % (len(POOL) - VALUES)
    data = POOL[at : at + VALUES] ^ np.uint16(mixed >> 25)
    data[:4] = np.array([number, version], np.uint32).view(np.uint16)
    return data.reshape(SHAPE)


def blocks(numbers: Sequence[int], version: int) -> np.ndarray:
    return np.stack([block(number, version) for number in numbers])


# ---- a child -----------------------------------------------------------------------------------


class Child:
    """One life: puts, replaces, flushes, deletes, rotates, closes and opens, until it is killed."""

    def __init__(self, task: Task, fd: int) -> None:
        self.task = task
        self.fd = fd
        self.rng = random.Random(task.seed)
        self.codec = self.rng.choice(["raw", "lossless"])
        self.next_key = task.next_key
        self.version = task.version
        self.known = list(task.stored)
        self.pending: list[int] = []  # put and not flushed
        self.open()

    def open(self) -> None:
        self.store = open_store(
            self.task.path, None, capacity=None, backend=self.task.backend, codec=self.codec
        )
        self.names = [self.store.namespace(identity) for identity in IDENTITIES]

    def tell(self, verb: str, numbers: Sequence[int] = ()) -> None:
        os.write(self.fd, (" ".join([verb, *map(str, numbers)]) + "\n").encode())

    def run(self) -> None:
        self.tell("ready")
        deeds = [self.put, self.flush, self.delete, self.rotate, self.reopen]
        while True:
            self.rng.choices(deeds, [70, 16, 12, 1, 1])[0]()

    def put(self) -> None:
        parity = self.rng.randrange(2)
        first = self.next_key + (self.next_key + parity) % 2
        keys = list(range(first, first + 2 * self.rng.randrange(1, 40), 2))
        self.next_key = keys[-1] + 1
        known = [key for key in self.known if key % 2 == parity]
        if self.rng.random() < 0.5:
            keys += self.rng.sample(known, min(len(known), self.rng.randrange(1, 40)))
        self.version += 1
        self.tell("putting", [self.version, *keys])
        put = self.names[parity].put(
            [key_of(key) for key in keys], blocks(keys, self.version), replace=True
        )
        assert put.all_ok, put
        self.tell("put", [self.store.space.evicted_segments])
        self.pending += [key for key in keys if key not in self.pending]

    def flush(self) -> None:
        self.tell("flushing")
        self.store.flush()
        self.flushed()

    def flushed(self) -> None:
        self.tell("flushed", self.pending)
        known = set(self.known)
        self.known += [key for key in self.pending if key not in known]
        self.pending = []

    def delete(self) -> None:
        if self.known:
            parity = self.rng.choice(self.known) % 2
            known = [key for key in self.known if key % 2 == parity]
            self.gone("delet", self.rng.sample(known, min(len(known), 3)))

    def rotate(self) -> None:
        parity = self.rng.randrange(2)
        numbers = [key for key in self.known + self.pending if key % 2 == parity]
        self.gone("rotat", sorted(set(numbers)), parity)

    def gone(self, stem: str, numbers: list[int], rotated: int | None = None) -> None:
        said = numbers if rotated is None else [rotated]
        self.tell(f"{stem}ing", said)
        if rotated is not None:
            self.names[rotated].rotate()
        else:
            self.names[numbers[0] % 2].delete([key_of(number) for number in numbers])
        self.tell(f"{stem}ed", said)
        dead = set(numbers)
        self.known = [key for key in self.known if key not in dead]
        self.pending = [key for key in self.pending if key not in dead]

    def reopen(self) -> None:
        self.tell("closing")
        self.store.close()
        self.flushed()
        self.tell("opening")
        self.open()


# ---- the nursery -------------------------------------------------------------------------------


def serve(line: socket.socket) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(line, 1 << 20, 1)
        if not message:
            return
        asked = json.loads(message)
        if isinstance(asked, int):
            line.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])).encode())
            continue
        pid = os.fork()
        if not pid:
            line.close()
            live(Task(**asked), fds[0])
        os.close(fds[0])
        line.send(json.dumps(pid).encode())


def live(task: Task, fd: int) -> None:
    try:
        Child(task, fd).run()
    except BaseException:  # noqa: BLE001  (whatever it is, the child must not become a nursery)
        traceback.print_exc()
    finally:
        os._exit(1)


class Nursery:
    """The test's side: starts children and buries them."""

    def __init__(self, process_argv: list[str], environment: dict[str, str]) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [*process_argv, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
            )

    def start(self, task: Task) -> tuple[int, int]:
        """(process id, the pipe's end to read from)"""
        ours, theirs = os.pipe()
        try:
            socket.send_fds(self.line, [json.dumps(asdict(task)).encode()], [theirs])
        finally:
            os.close(theirs)
        return self._answer(), ours

    def kill(self, pid: int) -> None:
        """SIGKILL; nobody else can have its number before bury()."""
        os.kill(pid, signal.SIGKILL)

    def bury(self, pid: int) -> int:
        """How the process ended: minus the signal."""
        self.line.send(json.dumps(pid).encode())
        return self._answer()

    def _answer(self) -> int:
        answer = self.line.recv(100)
        assert answer, "the nursery ended: see its traceback above"
        return int(json.loads(answer))

    def close(self) -> None:
        self.line.close()
        self.process.wait(timeout=30)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
