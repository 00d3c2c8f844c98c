"""vLLM behind LMCache's multi-process server behind flashkv: both are restarted, the KV is there.

LMCache keeps KV in host memory, too (L1): what a new server has, it has from flashkv.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_server import Server
from small_stores import edit, segment_files
from store_support import ROOT

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = Path(os.environ.get("FLASHKV_ENGINES") or ROOT / ".engines")
PACKAGES = ENVIRONMENTS / "vllm-lmcache"  # LMCache beside vLLM
DURABLE_S = 4.0  # after which what was stored survives a kill
CHUNK = 256  # tokens; a multiple of vLLM's block

Start = Callable[..., Server]


@pytest.fixture
def other(prompt: list[int]) -> list[int]:
    """1,000 tokens whose first two chunks are those of the prompt."""
    return [*prompt[:700], *reversed(prompt[700:1000])]


@pytest.fixture
def start(store_path: Path, tmp_path: Path, tiny_model: Path) -> Iterator[Start]:
    """Starts a server over the test's store and waits until it is ready; all are ended."""
    servers: list[Server] = []
    params = {
        "path": str(store_path),
        "capacity": "256MiB",
        "model": str(tiny_model),
        "options": {"segment_bytes": "4MiB", "free_floor_bytes": 0},
    }

    def start(transfer: str = "pickle") -> Server:
        python = ENVIRONMENTS / "lmcache" / "bin" / "python"
        if not python.exists() or not (PACKAGES / ".flashkv-engine").exists():
            pytest.skip("no LMCache beside vLLM here: ./run test-engines makes it")
        servers.append(
            Server(
                python,
                tmp_path,
                chunk_tokens=CHUNK,
                adapter_params=params,
                transfer=transfer,
                environment={**os.environ, **QUIET, "PYTHONPATH": paths(ROOT, HERE)},
            )
        )
        servers[-1].wait_until_ready()
        return servers[-1]

    yield start
    for server in servers:
        server.end()


QUIET = {
    "OMP_NUM_THREADS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "HF_HUB_OFFLINE": "1",
}


def paths(*folders: Path) -> str:
    return os.pathsep.join(map(str, folders))


@pytest.fixture
def generate(run_engine: Callable[..., Any], tiny_model: Path) -> Callable[..., Any]:
    """Asks a new vLLM, of a server or alone, one prompt after another.

    Gives what it generates, and how many tokens of each prompt it didn't compute. With a server the
    engine is in a process of its own, as is vLLM's default: vLLM 0.32 doesn't start where numba,
    which LMCache brings, was imported into the engine's process before.
    """

    def generate(server: Server | None, *prompts: list[int]) -> tuple[list[Any], list[int]]:
        steps = [{"do": "generate", "prompts": [{"ids": ids}]} for ids in prompts]
        engine: dict[str, Any] = {"enable_prefix_caching": False}
        environment: dict[str, str] = {}
        if server is not None:
            environment = {
                **QUIET,
                "PYTHONPATH": paths(ROOT, HERE, PACKAGES),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            }
            engine = {
                "kv_transfer_config": {
                    "kv_connector": "LMCacheMPConnector",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": {
                        "lmcache.mp.host": "tcp://127.0.0.1",
                        "lmcache.mp.port": server.port,
                    },
                }
            }
        given = {"store": None, "engine": engine, "steps": steps}
        results = run_engine("vllm", "vllm_run.py", tiny_model, json.dumps(given), **environment)
        assert all(result["emptied"] for result in results)  # vLLM's own cache, between prompts
        return [one["tokens"][0] for one in results], [one["cached"][0] for one in results]

    return generate


def test_restarts(
    start: Start, generate: Callable[..., Any], prompt: list[int], other: list[int]
) -> None:
    """A server is killed, the next one is stopped; vLLM is new each time."""
    said, _ = generate(None, prompt, other)

    server = start()
    assert generate(server, prompt) == (said[:1], [0])
    server.wait_for_blocks("stored", 5)
    assert (server.blocks("stored"), server.blocks("loaded")) == (5, 0)
    time.sleep(DURABLE_S)
    server.stop(signal.SIGKILL)

    server = start("shared")
    assert server.shared_segments()
    assert generate(server, prompt, other) == (said, [5 * CHUNK, 2 * CHUNK])
    assert server.blocks("loaded") == 7
    assert server.report()["events"] == {}
    server.wait_for_blocks("stored", 1)  # the other prompt's third
    assert server.stop() == 0
    assert server.shared_segments() == []

    server = start()
    assert generate(server, other) == (said[1:], [3 * CHUNK])
    assert (server.blocks("stored"), server.blocks("loaded")) == (0, 3)
    assert server.stop() == 0


def test_damage(
    start: Start, generate: Callable[..., Any], prompt: list[int], store_path: Path
) -> None:
    """The third chunk turns out to be damaged while the server loads it."""
    said, _ = generate(None, prompt)
    server = start()
    assert generate(server, prompt) == (said, [0])
    server.wait_for_blocks("stored", 5)
    assert server.stop() == 0

    server = start()
    with edit(segment_files(store_path)[0]) as fd:
        for page in range(300, 380, 8):
            os.pwrite(fd, b"damage" * 8, page * 4096 + 100)
    tokens, cached = generate(server, prompt, prompt)
    assert tokens == [*said, *said]
    assert cached == [2 * CHUNK, 5 * CHUNK]
    # All but the third, then the first two again; from the third on the server has them itself.
    report = server.report()
    assert report["blocks"] == {"loaded": 6, "stored": 3}
    assert report["store"]["damaged_blocks"] == 1
    assert server.stop() == 0
