"""Fault: a killed process is gone and its lock is free, but writes that it had given to the kernel
are still on their way; the next process takes their places for free, and they land on its blocks.

flashkv guarantees: opening for writing waits for them first. What it then flushes is there.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from small_disks import MIB, Throttle, small_disk, throttle
from small_stores import BACKENDS, IDENTITY, make, names, payload, read_back, start_child

BEFORE, LOST, AFTER = payload(1, 4), payload(2, 70), payload(3, 70)


def leave_writes_behind(path: Path, backend: str, slow: Throttle) -> None:
    """A process whose 1.1 MiB of captured blocks wait at a slow device is killed."""
    child = start_child(
        f"""
        (Path({str(slow.group)!r}) / "cgroup.procs").write_text(str(os.getpid()))
        store = make(path, backend={backend!r}, codec="raw")
        ns = store.namespace(IDENTITY)
        assert ns.put(names(4, "before"), payload(1, 4)).all_ok
        store.flush()
        print("flushed", flush=True)
        sys.stdin.readline()
        assert ns.put(names(70, "lost"), payload(2, 70)).all_ok
        print(store.stats().writes_inflight, flush=True)
        sys.stdin.readline()
        """,
        path,
    )
    assert child.stdin
    assert child.stdout
    with child:
        assert child.stdout.readline() == "flushed\n"
        slow.write_rate(2_000_000)
        child.stdin.write("go\n")
        child.stdin.flush()
        assert int(child.stdout.readline()) > 0, "no write was on its way"
        child.kill()
    assert child.returncode == -9


@pytest.mark.parametrize(
    ("kind", "backend"), [*(("ext4", backend) for backend in BACKENDS), ("xfs", BACKENDS[0])]
)
def test_late_writes_of_a_killed_process(kind: str, backend: str) -> None:
    with small_disk(kind, 96 * MIB) as disk, throttle(disk) as slow:
        path = disk.place / "kv"
        make(path, backend=backend).close()
        leave_writes_behind(path, backend, slow)
        with make(path, backend=backend, codec="raw") as store:  # from now on at full speed
            ns = store.namespace(IDENTITY)
            assert ns.put(names(70, "after"), AFTER).all_ok
            store.flush()
            found = ns.contains(names(70, "lost"))
            slow.write_rate(0)
            subprocess.run(["sync", "-f", disk.place], check=True)
            for keys, blocks in ((names(4, "before"), BEFORE), (names(70, "after"), AFTER)):
                result, out = read_back(ns, keys, blocks)
                assert result.all_ok, result
                assert (out == blocks).all()
        with make(path, backend=backend) as store:
            ns = store.namespace(IDENTITY)
            assert ns.contains(names(70, "after")).all()
            assert (ns.contains(names(70, "lost")) == found).all(), "a block came back"
