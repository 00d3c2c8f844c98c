"""Stand-in for SGLang's kernels: names can be imported; calling one says that it isn't there."""

from __future__ import annotations

from typing import Any, NoReturn

__version__ = "0.0.0"


class Absent:
    """A kernel that is not here."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"the stand-in of sgl_kernel has no {self.name}")


def __getattr__(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name)
