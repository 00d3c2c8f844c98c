"""What goes wrong in a course: calls of one kind, from the n-th on, so many of them, in one way.

Kinds: those of simulation.filesystem.CALLS, the device's reads, writes and syncs, and the data
plane's allocations.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from simulation import device as dev
from simulation.device import ALWAYS
from simulation.filesystem import CALLS

if TYPE_CHECKING:
    from simulation.course import Course

DEVICE: Final = {"device read": dev.READ, "device write": dev.WRITE, "device sync": dev.SYNC}
ALLOCATION: Final = "allocation"
KINDS: Final = (*CALLS, *DEVICE, ALLOCATION)
RETRIED: Final = (errno.EAGAIN, errno.EINTR)
_ACTIONS: Final = {
    dev.FAIL: "",
    dev.SHORT: "short",
    dev.LATE: "late",
    dev.SLOW: "slow",
    dev.HANG: "hang",
    dev.FLIP: "flip",
    dev.LOSE: "lost",
    dev.STRAY: "stray",
}


@dataclass(frozen=True)
class Fault:
    """One way to fail. amount: see sim.h; of a failing write: bytes that are written all the
    same.
    """

    kind: str
    code: int = errno.EIO
    action: int = dev.FAIL
    amount: int = 0
    count: int = 1

    def __str__(self) -> str:
        what = _ACTIONS[self.action] or errno.errorcode[self.code]
        amount = f" {self.amount}" if self.amount else ""
        times = {1: "", ALWAYS: " from then on"}.get(self.count, f" x{self.count}")
        return f"{self.kind} {what}{amount}{times}"


class Faults:
    """What goes wrong in a course; here: nothing."""

    rots = False
    """From the first hit on anything may vanish: writes get lost unseen."""
    revives = False
    """What was deleted may come back: the log can't be read."""
    forgets_opening = False
    """An opening that it meets may lose blocks that were durable."""
    forgets_reading = False
    """A get that it meets may lose them."""

    def arm(self, course: Course) -> None:
        """The course begins."""

    def hits(self) -> int:
        """Calls that it met so far."""
        return 0

    def end(self) -> None:
        """It is gone."""


class Nth(Faults):
    """A fault that begins with the n-th call."""

    def __init__(self, fault: Fault, number: int) -> None:
        self.fault = fault
        self.number = number
        self.rots = fault.action in (dev.LOSE, dev.STRAY)
        self.revives = fault.kind == "read" and fault.code == errno.EIO and fault.count > 1
        reads = fault.kind == "device read" and fault.code not in RETRIED
        self.forgets_reading = reads
        self.forgets_opening = reads or fault.kind == "device sync"
        self._course: Course | None = None
        self._before = 0
        self._over = threading.Event()
        self._releasing: threading.Thread | None = None

    def arm(self, course: Course) -> None:
        """The course begins."""
        self._course = course
        fault, kind = self.fault, self.fault.kind
        if kind == ALLOCATION:
            dev.fail_allocations(self.number, fault.count)
        elif kind in DEVICE:
            course.device.fault(
                DEVICE[kind],
                fault.action,
                first=self.number,
                count=fault.count,
                result=-fault.code,
                amount=fault.amount,
            )
        else:
            course.files.fail(
                kind, self.number, count=fault.count, code=fault.code, amount=fault.amount
            )
        if fault.action == dev.HANG:
            release = threading.Thread(target=self._release, args=(course.device,), daemon=True)
            self._releasing = release
            release.start()

    def _release(self, device: dev.Device) -> None:
        """What hangs does so for some milliseconds."""
        while not self._over.wait(0.002):
            if device.hanging():
                self._over.wait(0.02)
                device.release()

    def hits(self) -> int:
        """Calls that it met so far."""
        if self._course is None:
            return self._before
        if self.fault.kind == ALLOCATION:
            now = min(dev.allocation_calls() - self.number + 1, self.fault.count)
        elif self.fault.kind in DEVICE:
            now = self._course.device.hits()
        else:
            now = self._course.files.hits
        return self._before + max(0, now)

    def end(self) -> None:
        """It is gone."""
        if self._course is None:
            return
        self._before, course = self.hits(), self._course
        self._course = None
        self._over.set()
        if self._releasing is not None:
            self._releasing.join()
        if self.fault.kind == ALLOCATION:
            dev.fail_allocations()
        course.files.reset()
        course.device.reset()
        course.device.release()


def _several(kind: str, *codes: int) -> list[Fault]:
    """Each once and till the fault is gone."""
    return [Fault(kind, code, count=count) for code in codes for count in (1, ALWAYS)]


def _repeated(kind: str) -> list[Fault]:
    """What is tried again: within the retries, and beyond."""
    return [Fault(kind, code, count=count) for code in RETRIED for count in (1, 5, 40, ALWAYS)]


def faults_of(kind: str) -> list[Fault]:
    """All ways in which calls of a kind fail."""
    if kind == ALLOCATION:
        return [Fault(kind, errno.ENOMEM, count=count) for count in (1, 3, ALWAYS)]
    if kind in ("device read", "device write"):
        shorts = [Fault(kind, action=dev.SHORT, amount=n) for n in (0, 512, 2048, 4096, 5, 4097)]
        shorts += [Fault(kind, action=dev.SHORT, amount=n, count=ALWAYS) for n in (0, 512, 5)]
        same = [*_several(kind, errno.EIO, errno.ENOSPC, errno.ENOMEM), *_repeated(kind), *shorts]
        if kind == "device read":
            return same + [Fault(kind, action=dev.FLIP, amount=bit) for bit in (3, 999, 32845)]
        torn = [Fault(kind, amount=n) for n in (512, 4096)]
        strays = [Fault(kind, action=dev.STRAY, amount=n) for n in (512, 4096)]
        return [*same, *torn, Fault(kind, action=dev.LOSE), *strays]
    if kind == "device sync":
        return _several(kind, errno.EIO, errno.ENOSPC, errno.EAGAIN)
    if kind == "open":
        return _several(kind, errno.EMFILE, errno.EIO, errno.ENOSPC, errno.EACCES, errno.ENOENT)
    if kind == "write":
        torn = [Fault(kind, code, amount=n) for code, n in ((errno.ENOSPC, 40), (errno.EIO, 512))]
        return [*_several(kind, errno.ENOSPC, errno.EIO, errno.EDQUOT), *torn]
    return _several(kind, errno.EIO, errno.ENOSPC, errno.EAGAIN, errno.EINTR)


def times_of(kind: str) -> list[Fault]:
    """All ways in which the device's calls of a kind take their time."""
    late = ((1, 1), (3, 4), (2, ALWAYS))
    return [
        Fault(kind, action=dev.SLOW, amount=5_000),
        *(Fault(kind, action=dev.LATE, amount=amount, count=count) for amount, count in late),
        *(Fault(kind, action=dev.HANG, count=count) for count in (1, 3)),
    ]
