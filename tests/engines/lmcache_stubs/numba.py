"""Stands in for numba, 210 MB with its compiler, where LMCache's benchmark runs.

LMCache imports it for hashing tokens, which `lmcache bench l2` does not do. Invariant: a function
that numba would compile is never run in its place; it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def njit(*_: object, **__: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `@njit(...)` is used by LMCache: with arguments."""

    def replace(function: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*_: object, **__: object) -> None:
            raise NotImplementedError(f"{function.__name__} needs numba, which isn't here")

        return refuse

    return replace
