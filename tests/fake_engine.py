"""A stand-in for an engine's process of flashkv-bench ttft, which behaves as FAKE_ENGINE says.

Speaks the real protocol. It keeps a prompt's "KV" in a file of its folder and reads that for the
sources of a disk. Each question goes to the file that FAKE_LOG names.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from flashkv.tools.ttft_protocol import Answer, SideError, serve

SECONDS = {"computed": 8.0, "ours": 2.0, "theirs": 4.0, "host memory": 1.0, "fill": 9.0}
FAULT = os.environ.get("FAKE_ENGINE", "")
READ = {"from memory": (), "from disk": ("ours", "theirs", "host memory")}.get(
    FAULT, ("ours", "theirs")
)


class FakeSide:
    def __init__(self, settings: dict[str, Any]) -> None:
        if FAULT == "no start":
            raise SideError("this engine can't start")
        if FAULT == "crash":
            sys.exit("a library went down")
        self.settings = settings
        self.log(f"{settings['side']} start {os.getpid()}")
        child = subprocess.Popen(["sleep", "1000"])
        self.log(f"child {child.pid}")
        path = Path("/dev/shm") / f"flashkv-fake-{os.getpid()}"
        with path.open("w+b") as file:
            file.truncate(mmap.PAGESIZE)
            self.shared = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.log(f"shared {path}")
        self.semaphore = multiprocessing.get_context("spawn").Semaphore()
        self.log(f"shared /dev/shm/sem.{self.semaphore._semlock.name.lstrip('/')}")

    def log(self, text: str) -> None:
        with Path(os.environ["FAKE_LOG"]).open("a") as file:
            file.write(text + "\n")

    def facts(self) -> dict[str, Any]:
        return {"version": "1", "granule": 64, "dtype": self.settings["dtype"]}

    def answer(self, tokens: list[int], source: str) -> Answer:
        self.log(f"{len(tokens)} {source}")
        if FAULT == "hang" and source == "ours":
            time.sleep(1000)
        print("an engine's own line, where the protocol's lines go")
        kept = Path(self.settings["folder"]) / str(len(tokens))
        whole = (len(tokens) - 1) // 64 * 64
        if source == "fill":
            kept.write_bytes(os.urandom(whole * self.settings["bytes_per_token"]))
        elif source in READ:
            kept.read_bytes()
        token = 7 + (FAULT == "other token" and source == "theirs")
        restored = 0 if source == "computed" else whole - 64 * (FAULT == "lost block")
        return Answer(SECONDS[source] * len(tokens), token, restored)

    def settle(self) -> None:
        self.log("settle")

    def close(self) -> None:
        if FAULT == "stubborn":
            time.sleep(1000)


if __name__ == "__main__":
    serve(FakeSide)
