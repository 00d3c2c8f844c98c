"""The simulated device of test builds, as the tests hold it: records, fails, delays, reorders.

Invariants
 - nothing is decided here: engine_native/sim.h says what each call does;
 - a device outlives the engines that are opened on it; close() comes after theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from flashkv.native import ffi, lib

if not hasattr(lib, "fkv_sim_new"):
    raise ImportError("flashkv is built without the simulated device: set FLASHKV_TEST_BUILD=1")

# Kinds of operations (the first three) and events.
READ: Final = int(lib.FKV_SIM_READ)
WRITE: Final = int(lib.FKV_SIM_WRITE)
SYNC: Final = int(lib.FKV_SIM_SYNC)
SYNC_END: Final = int(lib.FKV_SIM_SYNC_END)
NOTE: Final = int(lib.FKV_SIM_NOTE)
# Actions of faults.
FAIL: Final = int(lib.FKV_SIM_FAIL)
SHORT: Final = int(lib.FKV_SIM_SHORT)
LATE: Final = int(lib.FKV_SIM_LATE)
SLOW: Final = int(lib.FKV_SIM_SLOW)
HANG: Final = int(lib.FKV_SIM_HANG)
FLIP: Final = int(lib.FKV_SIM_FLIP)
LOSE: Final = int(lib.FKV_SIM_LOSE)
STRAY: Final = int(lib.FKV_SIM_STRAY)

ALWAYS: Final = (1 << 64) - 1
NEVER: Final = (1 << 64) - 1
NOT_ENDED: Final = 1
"""Result of a write or sync that has none yet."""


@dataclass(frozen=True)
class Event:
    """One event of a recording; its position is its index there.

    ended: of a write, the position from which on a sync covers it; NEVER where it did not end.
    begun: of a SYNC_END, the position of its SYNC.
    """

    kind: int
    inode: int
    offset: int
    data: bytes
    begun: int
    result: int
    ended: int


class Device:
    """A simulated device. `sim` is what fkv_engine_options takes."""

    def __init__(self, seed: int = 0) -> None:
        self.sim: Any = lib.fkv_sim_new(seed)
        if self.sim == ffi.NULL:
            raise MemoryError("no memory for a simulated device")

    def close(self) -> None:
        """Frees it; no engine may be open on it. May be called again."""
        sim, self.sim = self.sim, ffi.NULL
        lib.fkv_sim_free(sim)

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- files ----

    def bind(self, fd: int, inode: int, alignment: int = 1) -> None:
        """From here on what goes through `fd` is recorded as of `inode`."""
        status = lib.fkv_sim_bind(self.sim, fd, inode, alignment)
        if status != 0:
            raise OSError(-status, "the descriptor can't be bound")

    def unbind(self, fd: int) -> None:
        """Call before the descriptor is closed: its number may come back as another file's."""
        lib.fkv_sim_unbind(self.sim, fd)

    # ---- the recording ----

    def record(self, on: bool = True) -> None:
        """Begins or stops to record; what is recorded stays."""
        lib.fkv_sim_record(self.sim, on)

    def note(self, number: int) -> int:
        """Puts the caller's own event into the order; its position, or NEVER where it is off."""
        return int(lib.fkv_sim_note(self.sim, number))

    def event_count(self) -> int:
        """Length of the recording."""
        return int(lib.fkv_sim_event_count(self.sim))

    def events(self, first: int = 0) -> list[Event]:
        """A copy of the recording from position `first` on."""
        assert not lib.fkv_sim_recording_failed(self.sim), "memory ran out: events are missing"
        room = max(self.event_count() - first, 0)
        rows = ffi.new("fkv_sim_event[]", room)
        count = lib.fkv_sim_events(self.sim, first, room, rows)
        return [
            Event(
                row.kind,
                row.inode,
                row.offset,
                bytes(ffi.buffer(row.data, row.length)) if row.data != ffi.NULL else b"",
                row.begun,
                row.result,
                row.ended,
            )
            for row in rows[0:count]
        ]

    def forget(self) -> None:
        """Empties the recording."""
        lib.fkv_sim_forget(self.sim)

    # ---- faults ----

    def fault(
        self,
        kind: int,
        action: int,
        *,
        first: int = 1,
        count: int = 1,
        result: int = 0,
        amount: int = 0,
    ) -> None:
        """`action` meets calls first to first + count - 1 of that kind since reset()."""
        row = ffi.new("fkv_sim_fault *")
        row.kind, row.action, row.first, row.count = kind, action, first, count
        row.result, row.amount = result, amount
        status = lib.fkv_sim_add_fault(self.sim, row)
        if status != 0:
            raise ValueError(f"no such fault: {kind=} {action=} {first=} {count=}")

    def reset(self) -> None:
        """No faults any more, and calls are counted from 0. What hangs goes on hanging."""
        lib.fkv_sim_reset(self.sim)

    def calls(self, kind: int) -> int:
        """Calls of a kind since reset(), repeats included."""
        return int(lib.fkv_sim_calls(self.sim, kind))

    def hits(self) -> int:
        """Calls since reset() that met a fault."""
        return int(lib.fkv_sim_hits(self.sim))

    def release(self) -> None:
        """Lets what hangs go on."""
        lib.fkv_sim_release(self.sim)

    def hanging(self) -> int:
        """Operations that hang."""
        return int(lib.fkv_sim_hanging(self.sim))

    # ---- order and speed ----

    def inline(self, on: bool = True) -> None:
        """Engines that are opened from here on have no device thread."""
        lib.fkv_sim_inline(self.sim, on)

    def order(self, window: int) -> None:
        """Answers out of order among `window` operations; 1: as submitted."""
        lib.fkv_sim_order(self.sim, window)

    def depth(self, depth: int) -> None:
        """At most so many operations are at the device, the others wait by priority; 0: none
        waits. While no engine is open.
        """
        lib.fkv_sim_depth(self.sim, depth)

    def rate(self, bytes_per_s: int = 0, latency_us: int = 0, channels: int = 0) -> None:
        """A device of that speed; 0: no limit."""
        lib.fkv_sim_rate(self.sim, bytes_per_s, latency_us, channels)


# ---- memory that runs out ----


def fail_allocations(first: int = 0, count: int = 1) -> None:
    """The data plane's allocations number first to first + count - 1 from now on fail; 0: none."""
    lib.fkv_alloc_fail(first, count if first else 0)


def allocation_calls() -> int:
    """Allocations that the data plane tried since fail_allocations()."""
    return int(lib.fkv_alloc_calls())


def live_allocations() -> int:
    """Allocations that the data plane has not given back."""
    return int(lib.fkv_alloc_live())
