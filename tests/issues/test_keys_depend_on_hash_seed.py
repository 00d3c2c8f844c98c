"""Fault: keys depend on PYTHONHASHSEED or on hash(None), and no other process finds the blocks.

flashkv guarantees: token keys, namespace digests and what is stored under them are the same in
every interpreter, whatever its hash seed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_stores import PRELUDE

SCRIPT = (
    PRELUDE
    + """
from flashkv import Identity, KVGeometry, Shard
identity = Identity(model="m", revision="r", extras={"b": 1, "a": None or "x", "c": 2.5, "d": True})
store = make(path)
for shard in (None, Shard(heads=(0, 1))):
    namespace = store.namespace(identity, shard=shard)
    keys = namespace.token_keys(list(range(200)), block_tokens=64, salt=b"s", extra=b"lora")
    shape = (len(keys), 2, 2, 2 if shard is None else 1, 64, 64)
    blocks = np.full(shape, 0x3F80, np.uint16)
    result = namespace.put(keys, blocks)
    print(namespace.digest.hex(), keys.tobytes().hex(), [int(s) for s in result.statuses])
print(hash("text") % 1000)
store.close()
"""
)


@pytest.fixture
def outputs(folder: Path) -> list[list[str]]:
    """Lines of three interpreters with different hash seeds that used one store in turn."""
    found = []
    for seed in ("0", "1", "31337"):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "PYTHONHASHSEED": seed,
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder)],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.splitlines())
    return found


def test_three_interpreters_agree(outputs: list[list[str]]) -> None:
    assert len({lines[-1] for lines in outputs}) > 1, "the seeds had no effect"
    stored = "[0, 0, 0, 0]"
    present = "[7, 7, 7, 7]"
    for line in (0, 1):
        first, *others = (lines[line] for lines in outputs)
        assert first.endswith(stored)
        assert all(other == first.replace(stored, present) for other in others)
    assert outputs[0][0] != outputs[0][1].replace(stored, present)
