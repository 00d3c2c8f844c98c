"""LMCache's multi-process server, started and stopped by a test.

Invariants
  - it listens on the loopback only, on a port that was free;
  - it ends with the test, and with the process that runs the test, however that ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
READY = "cache server is running..."
START_S, STOP_S = 180.0, 60.0


class Server:
    """A server with flashkv's L2 adapter.

    transfer: how vLLM's KV gets to it: "pickle", or "shared", a segment of /dev/shm.
    """

    def __init__(
        self,
        python: Path,
        folder: Path,
        *,
        chunk_tokens: int,
        adapter_params: dict[str, Any],
        transfer: str,
        environment: dict[str, str],
    ) -> None:
        self.port = free_port()
        self.segment = f"flashkv-test-{os.getpid()}-{self.port}"
        self._log = folder / f"server-{self.port}.log"
        self._report = folder / f"report-{self.port}.json"
        adapter = {
            "type": "native_plugin",
            "module_path": "lmcache_counted",
            "class_name": "CountedClient",
            "adapter_params": {**adapter_params, "report": str(self._report)},
        }
        command = [
            str(python), "-m", "lmcache.v1.multiprocess.server",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--chunk-size", str(chunk_tokens), "--l1-size-gb", "1", "--eviction-policy", "LRU",
            "--supported-transfer-mode", "engine_driven",
            *(["--shm-name", self.segment] if transfer == "shared" else []),
            "--disable-metrics", "--l2-adapter", json.dumps(adapter),
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                preexec_fn=_end_with_parent,  # noqa: PLW1509  (one call of libc)
            )

    def wait_until_ready(self) -> None:
        self._wait(lambda: READY in self.log(), START_S, "the server isn't ready")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def report(self) -> dict[str, Any]:
        """stats() of flashkv's client in the server."""
        said: dict[str, Any] = json.loads(self._report.read_text())
        return said

    def blocks(self, name: str) -> int:
        """Blocks that flashkv has "stored" for the server, or "loaded"."""
        return int(self.report()["blocks"].get(name, 0))

    def wait_for_blocks(self, name: str, count: int) -> None:
        self._wait(lambda: self.blocks(name) >= count, 30, f"fewer than {count} blocks {name}")

    def shared_segments(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"*{self.segment}*"))

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Sends the signal and gives the exit status."""
        self.process.send_signal(how)
        return self.process.wait(STOP_S)

    def end(self) -> None:
        """Leaves nothing of the server behind, in whatever state it is."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for path in self.shared_segments():
            path.unlink(missing_ok=True)

    def _wait(self, done: Callable[[], bool], limit_s: float, else_say: str) -> None:
        until = time.monotonic() + limit_s
        while not done():
            assert self.process.poll() is None, "the server ended\n" + self.log()[-6000:]
            assert time.monotonic() < until, f"{else_say}\n" + self.log()[-6000:]
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
