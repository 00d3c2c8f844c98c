"""flashkv-bench ttft's half of ttft_protocol.py: starts a process with an engine, and asks it.

Invariants
  - a session's processes are a group of their own; end() leaves none of them, however they behave,
    and nothing of the shared memory that they had;
  - each question has a time limit: an engine that hangs is an error, not a bench that hangs;
  - what the engine printed is shown only where it failed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

from .demo_protocol import DemoError

START_S: Final = 300.0
ANSWER_S: Final = 600.0
END_S: Final = 20.0
KILL_S: Final = 20.0
POLL_S: Final = 0.01
TOLD_LINES: Final = 20
SHARED_MEMORY: Final = Path("/dev/shm")


class Session:
    """An engine in a process of its own. Made at once; ready() waits for it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115  (end() closes it)
            "w+", encoding="utf-8", errors="replace"
        )
        self._waiting = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def ready(self) -> dict[str, Any]:
        """What the engine says of itself once it runs. Raises DemoError."""
        return self._hear("ready", START_S)

    def answer(self, prompt: str, source: str) -> dict[str, Any]:
        """ttft_protocol.Answer of a prompt, by its name in the settings. Raises DemoError."""
        self._tell({"do": "answer", "prompt": prompt, "source": source})
        return self._hear("done", ANSWER_S)

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """What the process answers a command of its own protocol. Raises DemoError."""
        self._tell(command)
        return self._hear("done", ANSWER_S)

    def kill(self) -> None:
        """Ends the process at once, as a crash does; end() does the rest."""
        self._process.kill()
        self._process.wait()

    def settle(self) -> None:
        """Returns when what was stored can be read from the disk. Raises DemoError."""
        self._tell({"do": "settle"})
        self._hear("done", ANSWER_S)

    def read_bytes(self) -> int:
        """What the session's processes have read from devices so far."""
        total = 0
        for process in self._processes():
            with suppress(psutil.Error, OSError):  # it may have just ended
                total += int(process.io_counters().read_bytes)
        return total

    def end(self) -> None:
        """Asks the engine to end, then makes its whole group. Never raises."""
        shared = self._shared_memory()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._wait_for_the_others()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._errors.close()
            for path in shared:
                path.unlink(missing_ok=True)

    def _processes(self) -> Iterator[psutil.Process]:
        """Those of the session's group, whoever started them."""
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, PermissionError):
                if os.getpgid(process.pid) == self._process.pid:
                    yield process

    def _wait_for_the_others(self) -> None:
        """A killed process runs on until the kernel comes to it, and holds its memory as long."""
        deadline = time.monotonic() + KILL_S
        while any(map(_runs, self._processes())) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _shared_memory(self) -> list[Path]:
        """What the session's processes have mapped of it: some engines leave theirs behind.

        By inodes: a semaphore's file has another name than the one that it is mapped under.
        """
        inodes: set[int] = set()
        for process in self._processes():
            with suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
                lines = (line.split(maxsplit=5) for line in maps.splitlines())
                inodes |= {
                    int(line[4])
                    for line in lines
                    if len(line) == 6 and line[5].startswith(f"{SHARED_MEMORY}/")
                }
        with os.scandir(SHARED_MEMORY) as entries:
            return [Path(entry.path) for entry in entries if entry.inode() in inodes]

    def _tell(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it ended: the line that it doesn't send then says why
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()

    def _hear(self, kind: str, limit_s: float) -> dict[str, Any]:
        line = json.loads(self._line(time.monotonic() + limit_s) or "{}")
        if kind in line:
            answer: dict[str, Any] = line[kind]
            return answer
        if "error" in line:
            raise DemoError(f"{self.name}: {line['error']}")
        raise DemoError(f"{self.name} gave no answer:\n{self._end_of_errors()}")

    def _line(self, deadline: float) -> bytes:
        """The next line; nothing where the process ended or the time is over."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._waiting:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                return b""
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                return b""
            self._waiting += piece
        line, _, self._waiting = self._waiting.partition(b"\n")
        return line

    def _end_of_errors(self) -> str:
        self._errors.seek(0)
        return "".join(self._errors.readlines()[-TOLD_LINES:]).strip()


def _runs(process: psutil.Process) -> bool:
    """Whether it is more than an entry that its parent hasn't collected."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def drop_cached_pages(folder: Path) -> None:
    """Takes a folder's files out of the page cache; what isn't on the disk yet is written first."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # the engine has just renamed or removed it
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
