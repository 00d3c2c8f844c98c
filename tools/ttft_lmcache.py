"""One process of flashkv-bench ttft: vLLM with LMCache's multi-process server beside it.

Sides and their sources: "flashkv" (FlashKVClient as the server's L2), "raw_block" (LMCache's own
L2 for flash, and "host memory": the server's L1). LMCache itself is imported from its own
environment, and its server runs there.

Invariants
  - before each answer vLLM's prefix cache is emptied, before one from a disk the server's L1 too;
  - the server ends with this process, whatever ends it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from .ttft_protocol import Answer, SideError, serve
from .ttft_vllm import GRANULE, VllmSide

CHUNK: Final = GRANULE  # its default is 256: that many tokens less would be restored
START_S: Final = 120.0
STORED_S: Final = 3.0
HOST: Final = "127.0.0.1"
GIB: Final = 1 << 30
NEEDED: Final = ("lmcache", "sortedcontainers")
QUIET: Final = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
}


class Server:
    """LMCache's server with an L2 adapter."""

    def __init__(self, settings: dict[str, Any], adapter: dict[str, Any], l1_bytes: int) -> None:
        self.port = _free_port()
        command = [
            settings["lmcache_python"], "-m", "lmcache.v1.multiprocess.server",
            "--host", HOST, "--port", str(self.port), "--chunk-size", str(CHUNK),
            "--l1-size-gb", str(max(1, -(-l1_bytes // GIB))), "--eviction-policy", "LRU",
            "--supported-transfer-mode", "auto", "--disable-metrics",
            "--l2-prefetch-policy", "retain",  # what was read stays in L1: "host memory"
            "--l2-adapter", json.dumps(adapter),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env={**os.environ, **QUIET}
        )
        deadline = time.monotonic() + START_S
        while not self._listens():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise SideError("LMCache's server did not start")
            time.sleep(0.1)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0

    def end(self) -> None:
        """Asks it to end, and makes it."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _link(packages: Path, links: Path) -> None:
    """A folder with LMCache and what vLLM has not: of the others vLLM's own count."""
    links.mkdir(exist_ok=True)
    for name in NEEDED:
        link = links / name
        if not link.exists():
            with suppress(FileExistsError):  # the other side was faster
                link.symlink_to(packages / name)


def _hide_llvmlite() -> None:
    """vLLM 0.32 looks at the attributes of all modules, and fails at those of llvmlite, which
    LMCache brings along: out of its sight meanwhile.
    """
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels

    def without_llvmlite(overrides: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if "llvmlite" in name}
        try:
            rebind(overrides)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = without_llvmlite


class LmcacheSide(VllmSide):
    """See ttft_protocol.Side."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ.update(QUIET)
        _link(Path(settings["lmcache_packages"]), Path(settings["lmcache_links"]))
        sys.path.append(settings["lmcache_links"])
        _hide_llvmlite()
        longest = max(map(len, settings["prompts"].values()))
        kv_bytes = settings["bytes_per_token"] * longest
        self.server = Server(settings, self._adapter(settings, kv_bytes), 2 * kv_bytes)
        try:
            super().__init__(settings)
        except BaseException:
            self.server.end()
            raise

    @staticmethod
    def _adapter(settings: dict[str, Any], kv_bytes: int) -> dict[str, Any]:
        folder = Path(settings["folder"])
        if settings["side"] == "flashkv":
            return {
                "type": "native_plugin",
                "module_path": "flashkv.connectors.lmcache",
                "class_name": "FlashKVClient",
                "adapter_params": {
                    "path": str(folder),
                    "capacity": settings["capacity"],
                    "model": settings["model"],
                },
            }
        slot_bytes = CHUNK * settings["bytes_per_token"] + 8192
        capacity = -(-(2 * kv_bytes + (256 << 20)) // 4096) * 4096
        device = folder / "raw.img"
        with device.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, capacity)
        return {
            "type": "raw_block",
            "device_path": str(device),
            "capacity_bytes": capacity,
            "slot_bytes": slot_bytes,
            "use_odirect": True,
            "io_engine": "io_uring",
        }

    def transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{HOST}",
                "lmcache.mp.port": self.server.port,
                "lmcache.mp.transfer_mode": "auto",
            },
        }

    def answer(self, tokens: list[int], source: str) -> Answer:
        self.empty()
        if source in ("flashkv", "raw_block"):
            connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
            if not connector.scheduler_adapter.reset_cache():
                raise SideError("LMCache's server did not empty its memory")
        return self._ask(tokens)

    def settle(self) -> None:
        """The server stores behind the requests, and tells nobody when."""
        super().settle()
        time.sleep(STORED_S)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.server.end()


if __name__ == "__main__":
    serve(LmcacheSide)
