"""Small file systems of a test's own: images with a loop device, or memory; and what goes wrong
with them: full, failing, read-only, without power, slow.

Invariants
  - nothing is left behind, however a test ends: no mount, no loop device, no image; what a process
    left that was killed goes with the next test that mounts;
  - what isn't possible here (not root, no mkfs, a kernel without it) skips the test and says so.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
from io_support import ROOT

MIB: Final = 1 << 20
SMALLEST: Final = {"ext2": 1 * MIB, "ext4": 24 * MIB, "xfs": 300 * MIB, "btrfs": 400 * MIB}
"""Bytes of an image; it is sparse."""
_MAKE: Final = {
    "ext2": ["-q", "-F", "-m", "0"],
    "ext4": ["-q", "-F", "-m", "0"],
    "xfs": ["-q"],
    "btrfs": ["-q"],
}
PREFIX: Final = "test-disk-"
_SHUTDOWN: Final = 0x8004587D
_NO_LOG_FLUSH: Final = 2
_BLKIO: Final = Path("/sys/fs/cgroup/blkio")


class SmallDisk:
    """A mounted file system; `place` is its root."""

    def __init__(self, folder: Path, kind: str, size_bytes: int, options: str) -> None:
        self.kind = kind
        self.size_bytes = size_bytes
        self.place = folder / "mounted"
        self.image = folder / "image"
        self.filler = self.place / "filler"
        self._options = options
        self.place.mkdir()
        if kind not in ("tmpfs", "ramfs"):
            with self.image.open("wb") as file:
                file.truncate(size_bytes)
            run([f"mkfs.{kind}", *_MAKE[kind], self.image], f"no mkfs.{kind} that works here")

    # ---- mounting ----

    def mount(self) -> None:
        if self.kind == "ramfs":
            command = ["mount", "-t", "ramfs", "none"]
        elif self.kind == "tmpfs":
            command = ["mount", "-t", "tmpfs", "-o", f"size={self.size_bytes}", "tmpfs"]
        else:
            options = ",".join(filter(None, ["loop", self._options]))
            command = ["mount", "-t", self.kind, "-o", options, str(self.image)]
        run([*command, self.place], f"{self.kind} can't be mounted here")

    def unmount(self) -> None:
        """Rings that were just closed hold the mount a moment longer."""
        for _ in range(100):
            done = subprocess.run(
                ["umount", self.place], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return
            time.sleep(0.05)
        raise AssertionError(f"something holds the mount: {done.stderr}")

    def remount(self, options: str) -> None:
        run(["mount", "-o", f"remount,{options}", self.place], f"no remount with {options} here")

    def check(self) -> None:
        """Asserts that the unmounted file system is whole."""
        command = {"ext4": ["e2fsck", "-fn"], "xfs": ["xfs_repair", "-n"]}[self.kind]
        done = subprocess.run([*command, self.image], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    # ---- room ----

    def free_bytes(self) -> int:
        status = os.statvfs(self.place)
        return status.f_bavail * status.f_frsize

    def fill(self, spare_bytes: int = 0) -> None:
        """Takes what is free, to the last block, in a file; then gives some of it back."""
        with self.filler.open("ab", buffering=0) as filler:
            for step in (4 * MIB, 1 << 16, 4096):
                with suppress(OSError):
                    while True:
                        os.posix_fallocate(filler.fileno(), filler.tell(), step)
                        filler.seek(step, os.SEEK_CUR)
            with suppress(OSError):
                while True:
                    filler.write(bytes(4096))
            if spare_bytes:
                filler.truncate(max(0, filler.tell() - spare_bytes))
            with suppress(OSError):
                os.fsync(filler.fileno())

    def empty(self) -> None:
        """What fill() took is free again."""
        self.filler.unlink(missing_ok=True)

    # ---- faults ----

    def cut_power(self) -> None:
        """From now on nothing reaches the device; its journal isn't written either."""
        fd = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, ctypes.c_uint32(_NO_LOG_FLUSH))
        except OSError as error:
            pytest.skip(f"{self.kind} has no shutdown: {error}")
        finally:
            os.close(fd)

    def fail(self) -> None:
        """ext4 meets an error; what it does then is the mount option `errors`."""
        device = Path(f"/sys/dev/block/{self.device()}").resolve().name
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a test")

    @contextmanager
    def small_requests(self) -> Iterator[None]:
        """Requests of one page each, as long as the disk stays mounted.

        A loop device takes it for a success when the file below takes a part of a request, as on a
        file system that fills up; the rest is lost without a word. A page is taken whole or not.
        """
        limit = Path(f"/sys/dev/block/{self.device()}/queue/max_sectors_kb")
        before = limit.read_text()
        limit.write_text("4")
        try:
            yield
        finally:
            limit.write_text(before)

    def restart(self) -> None:
        """Unmounts and mounts again: the journal is replayed."""
        self.unmount()
        self.mount()

    def device(self) -> str:
        """major:minor of the loop device."""
        source = subprocess.run(
            ["findmnt", "-no", "SOURCE", self.place], capture_output=True, text=True, check=True
        ).stdout.strip()
        number = Path(source).stat().st_rdev
        return f"{os.major(number)}:{os.minor(number)}"


@contextmanager
def small_disk(
    kind: str, size_bytes: int = 0, *, folder: Path | None = None, options: str = ""
) -> Iterator[SmallDisk]:
    """A file system of that kind, mounted; its image lies on the project's disk, or in `folder`."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    (ROOT / "build").mkdir(exist_ok=True)
    sweep()
    at = tempfile.mkdtemp(dir=folder or ROOT / "build", prefix=f"{PREFIX}{os.getpid()}-")
    try:
        disk = SmallDisk(Path(at), kind, max(size_bytes, SMALLEST.get(kind, 0)), options)
        disk.mount()
        try:
            yield disk
            disk.unmount()
        finally:  # what a failing test holds open is let go with it
            if os.path.ismount(disk.place):
                subprocess.run(["umount", "-l", disk.place], check=False)
    finally:
        shutil.rmtree(at, ignore_errors=True)


def sweep() -> None:
    """Takes away what processes left that are gone."""
    for left in (ROOT / "build").glob(f"{PREFIX}*-*"):
        pid = left.name.removeprefix(PREFIX).split("-")[0]
        if not Path("/proc", pid).exists():
            subprocess.run(["umount", "-l", left / "mounted"], capture_output=True, check=False)
            shutil.rmtree(left, ignore_errors=True)


def run(command: list[Any], why: str) -> None:
    """Runs a command; skips the test where it fails."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"{why}: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{why}: {error.stderr.strip()}")


class Throttle:
    """A control group whose processes may write so much of a device a second."""

    def __init__(self, device: str, name: str) -> None:
        self._device = device
        self.group = _BLKIO / name
        try:
            self.group.mkdir()
            self.write_rate(0)
        except OSError as error:
            pytest.skip(f"no control groups for block devices: {error}")

    def write_rate(self, bytes_per_s: int) -> None:
        """0: without limit."""
        file = self.group / "blkio.throttle.write_bps_device"
        file.write_text(f"{self._device} {bytes_per_s}")

    def remove(self) -> None:
        with suppress(OSError):
            self.write_rate(0)
        for _ in range(100):
            with suppress(OSError):
                self.group.rmdir()
                return
            time.sleep(0.05)


@contextmanager
def throttle(disk: SmallDisk) -> Iterator[Throttle]:
    """A throttle for the disk's loop device."""
    one = Throttle(disk.device(), f"flashkv-test-{os.getpid()}")
    try:
        yield one
    finally:
        one.remove()
