"""A store that keeps a file a segment open takes the descriptors of the process that embeds it.

flashkv raises the soft limit within the hard one, keeps to half of it, makes room by dropping the
oldest segment when it may open no more, and says what to do where it can't open at all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHILD = """
import resource, sys
import numpy as np
import flashkv
from flashkv import Identity, KVGeometry, Options

path, hard = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, hard), hard))
store = flashkv.open(path, capacity="256MiB", geometry=KVGeometry.opaque(1 << 18),
                     options=Options(segment_bytes="4MiB", codec="raw"))
blocks = store.namespace(Identity(model="m"))
data = np.zeros((12, 1 << 18), np.uint8)
for i in range(60):
    assert blocks.put([b"%d-%d" % (i, j) for j in range(12)], data).all_ok, i
with open("/dev/null"):
    pass
stats = store.stats()
print(sum(stats.segments.values()), stats.evicted_segments)
store.close()
"""


def run(path: Path, hard: int) -> tuple[int, int]:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(hard)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    segments, evicted = child.stdout.split()
    return int(segments), int(evicted)


def test_the_hard_limit_bounds_the_segments(tmp_path: Path) -> None:
    segments, evicted = run(tmp_path / "store", 64)
    assert segments <= (64 - 16) // 2
    assert evicted > 0


def test_the_soft_limit_is_raised(tmp_path: Path) -> None:
    segments, evicted = run(tmp_path / "store", 1024)
    assert segments > 40
    assert evicted == 0
