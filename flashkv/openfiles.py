"""Descriptors: a store keeps its segment files open, and leaves the process its share.

Invariant: a store holds at most half of the descriptors that the process may have; the soft limit
is raised for it, never beyond the hard one.
"""

from __future__ import annotations

import resource

from flashkv import limits


def open_files_max(wanted: int) -> int:
    """How many files a store may hold open, given that it would like `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = limits.OPEN_FILES_SHARE * wanted + limits.OPEN_FILES_SPARE
    if soft != unlimited and soft < needed:
        more = needed if hard == unlimited else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
        except (ValueError, OSError):  # not allowed here
            pass
    if soft == unlimited:
        return wanted
    return max(1, min(wanted, (soft - limits.OPEN_FILES_SPARE) // limits.OPEN_FILES_SHARE))
