"""Stand-in for torchvision: names can be imported; nothing of them works."""

from __future__ import annotations

from typing import Any, NoReturn

__version__ = "0.28.0"


class Absent:
    """A class or function that is not here; so are its attributes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("the stand-in of torchvision does nothing")

    def __getattr__(self, name: str) -> Absent:
        return Absent()


def __getattr__(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent()
