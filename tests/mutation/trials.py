"""Runs the codecs' tests on the core of a copy, as often as asked: the process behind workshop.py.

    trials.py      in the copy's root: a request a line in, a JSON reply a line out

A request: {"tests": [paths], "examples": count, "properties_only": bool, "seconds": {test: what it
takes}, "core": SHA-256 of the core's file}. The reply: {"code": pytest's exit status or one of the
below, "signal": what killed it or 0, "test": the last one that ran, "seconds": {...}}.

Invariants
  - a trial is a fork of a process that has loaded the packages that tests need, never the core:
    each loads that anew, and runs no test where it is not the file that was asked for;
  - one seed, no example database, no deadlines: the same core gives the same verdict;
  - the quickest tests come first; one that takes far more of the processor's time than it took on
    the whole core is stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies
import numpy as np
import pytest

OTHER_CORE, NOT_LOADED = 70, 71
HANG_FACTOR, HANG_SECONDS = 10, 5.0
WALL_SECONDS = 600.0  # that nothing waits for ever
LOG = "trial.log"


class Watch:
    """pytest's plugin: order, limits, and what to report."""

    def __init__(self, request: dict[str, Any], reply: int) -> None:
        self.request, self.reply = request, reply

    def tell(self, **facts: object) -> None:
        os.write(self.reply, json.dumps(facts).encode() + b"\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.request["properties_only"]:
            items[:] = [item for item in items if hasattr(item.obj, "hypothesis")]
        items.sort(key=lambda item: self.request["seconds"].get(item.nodeid, 0.0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.tell(test=item.nodeid)
        known = self.request["seconds"].get(item.nodeid, 60.0)
        signal.setitimer(signal.ITIMER_PROF, HANG_FACTOR * known + HANG_SECONDS)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self.tell(test=report.nodeid, seconds=round(report.duration, 3))


def core_is(digest: str) -> int:
    """0, or what is wrong with the core that was loaded."""
    try:
        from flashkv import _native
    except ImportError:
        return NOT_LOADED
    file = Path(_native.__file__).resolve()
    if not file.is_relative_to(Path.cwd().resolve()):
        return OTHER_CORE
    return 0 if hashlib.sha256(file.read_bytes()).hexdigest() == digest else OTHER_CORE


def trial(request: dict[str, Any], reply: int) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (0, 1, 2):
        os.dup2(log, stream)
    wrong = core_is(request["core"])
    if wrong:
        return wrong
    hypothesis.settings.register_profile(
        "mutation",
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        max_examples=request["examples"],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("mutation")
    words = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", *request["tests"]]
    code = int(pytest.main(words, plugins=[Watch(request, reply)]))
    sys.stdout.flush()
    return code


def waited(child: int) -> int:
    """The child's status; one that outlasts every limit is killed."""
    descriptor = os.pidfd_open(child)
    if not select.select([descriptor], [], [], WALL_SECONDS)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(descriptor)
    return os.waitpid(child, 0)[1]


def answer(request: dict[str, Any]) -> dict[str, object]:
    told = Path("trial.facts")
    reply = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = trial(request, reply)
        finally:
            os._exit(code)
    status = waited(child)
    os.close(reply)
    facts = [json.loads(line) for line in told.read_text(encoding="utf-8").splitlines()]
    return {
        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "test": facts[-1]["test"] if facts else "",
        "seconds": {fact["test"]: fact["seconds"] for fact in facts if "seconds" in fact},
    }


def main() -> None:
    np.zeros(1)
    assert not [name for name in sys.modules if name.startswith("flashkv")]
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
