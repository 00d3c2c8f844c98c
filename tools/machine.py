"""Facts of the machine and the file system that a benchmark's figures belong to.

Invariant: nothing is changed or measured here; what the machine doesn't tell is left out or has the
name that Python gives it.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from .fio import fio_version


def cpu_model() -> str:
    """The processor's name as Linux tells it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def file_system(path: Path) -> dict[str, str | int]:
    """Kind, device, mount options and free bytes of the file system that holds `path`."""
    place = path.resolve()
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if place.is_relative_to(mount.mountpoint)
    ]
    facts: dict[str, str | int] = {"free_bytes": psutil.disk_usage(str(place)).free}
    if mounts:
        # The longest mount point holds the path; of equal ones the last covers the others.
        mount = max(reversed(mounts), key=lambda each: len(each.mountpoint))
        facts.update(type=mount.fstype, device=mount.device, options=mount.opts)
    return facts


def machine_facts(path: Path) -> dict[str, object]:
    """What the figures depend on and a reader can't guess; "load_1m" tells a busy machine."""
    return {
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "fio": fio_version(),
        "file_system": file_system(path),
        "load_1m": os.getloadavg()[0],
    }
