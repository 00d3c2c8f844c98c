"""The processes that tests/crash/test_sigkill.py kills: each leads a life and says so on a pipe.

Run as a program this is the nursery: it has imported everything and opened nothing, so that a child
forked from it begins at once. Argument: the number of a socket. Each message on it is a Task with
the writing end of a pipe; the answer is the child's process id, and, once asked, how it ended.

Invariant: a line that a child says is whole before its next call begins: a pipe takes it at once
or not.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict

from lives import Life, Task


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
    def say(verb: str, numbers: Sequence[int]) -> None:
        os.write(fd, (" ".join([verb, *map(str, numbers)]) + "\n").encode())

    try:
        life = Life(task, say)
        while True:
            life.deed()
    except BaseException:  # noqa: BLE001  (whatever it is, the child must not become a nursery)
        traceback.print_exc()
    finally:
        os._exit(1)


class Nursery:
    """The test's side: starts children and buries them."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
            )

    def start(self, task: Task) -> tuple[int, int]:
        """(process id, the pipe's end to read from); the id is the child's until it is buried."""
        ours, theirs = os.pipe()
        try:
            socket.send_fds(self.line, [json.dumps(asdict(task)).encode()], [theirs])
        finally:
            os.close(theirs)
        return self._answer(), ours

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
