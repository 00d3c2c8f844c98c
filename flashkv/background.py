"""Calls that go on beside the caller: syncs of full segments, the making of files.

Invariants
  - calls are made one after the other, in the order in which they were given;
  - close() returns once all of them are over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar


class When(Enum):
    """When a call is made that nobody waits for yet. Without threads a course repeats itself."""

    THREAD = "on a thread of its own"
    AT_ONCE = "before anything else"
    AT_LAST = "once it is waited for"


THREAD_NAME: Final = "flashkv-background"
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Later(Protocol[Result_co]):
    """What BlockIO.later() was given to do."""

    def done(self) -> bool:
        """Whether it is over. Never waits."""

    def result(self) -> Result_co:
        """Waits for it; raises what the call raised."""


class _Alone(Generic[Result]):
    """A call without a thread."""

    def __init__(self, call: Callable[[], Result], when: When) -> None:
        self._future: Future[Result] = Future()
        self._call = call
        if when is When.AT_ONCE:
            self._run()

    def _run(self) -> None:
        try:
            self._future.set_result(self._call())
        except OSError as error:
            self._future.set_exception(error)

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Result:
        if not self._future.done():
            self._run()
        return self._future.result()


class Background:
    """Makes calls. later() is for one thread at a time."""

    def __init__(self, when: When) -> None:
        self._when = when
        self._thread: ThreadPoolExecutor | None = None

    def later(self, call: Callable[[], Result]) -> Later[Result]:
        """The call may raise OSError."""
        if self._when is not When.THREAD:
            return _Alone(call, self._when)
        new = self._thread is None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, THREAD_NAME)
        try:
            return self._thread.submit(call)
        except RuntimeError:  # no thread is to be had, or the interpreter ends (atexit)
            if new:
                self._thread = None  # what it was given it never does
            return _Alone(call, When.AT_ONCE)

    def close(self) -> None:
        """May be called again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()


def on_a_thread() -> bool:
    """Whether the caller is on the thread of a Background."""
    return threading.current_thread().name.startswith(THREAD_NAME)
