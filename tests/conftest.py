"""Fixtures of all tests: a seed that is printed and can be given again, folders on a real disk.

FLASHKV_SEED=N repeats every random choice, hypothesis' too, of the run that printed N.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.core
import pytest
from store_support import ROOT, file_system

SEED = int(os.environ.get("FLASHKV_SEED") or random.SystemRandom().randrange(1 << 32))
os.environ["FLASHKV_SEED"] = str(SEED)  # the processes that share the tests share it


def pytest_configure(config: pytest.Config) -> None:
    if hypothesis.core.global_force_seed is None:
        hypothesis.core.global_force_seed = SEED
    # How long an example takes says something of the machine, nothing of the code.
    if hypothesis.settings.get_current_profile_name() == "default":
        hypothesis.settings.register_profile("flashkv", deadline=None)
        hypothesis.settings.load_profile("flashkv")


def pytest_report_header() -> str:
    return f"random seed {SEED}; the same run again: FLASHKV_SEED={SEED} ./run test"


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no garbage collection looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.when == "call" and report.failed:
        report.sections.append(
            ("to replay", f"FLASHKV_SEED={SEED} ./run test {item.nodeid.split('::')[0]}")
        )
    return report


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that follows from the run's seed and the test's name."""
    return random.Random(f"{SEED} {request.node.name}").randrange(1 << 32)


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Lets the run end with a figure that this test measured."""
    return lambda figure: record_property("figure", figure)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, figure in report.user_properties:
            if report.when == "call" and name == "figure":
                terminalreporter.write_line(f"{report.nodeid.split('::')[-1]}: {figure}")


@pytest.fixture
def disk_path(tmp_path: Path) -> Iterator[Path]:
    """An empty folder on a disk's file system, gone after the test."""
    if file_system(tmp_path) not in ("tmpfs", "ramfs"):
        folder = tmp_path / "disk"
        folder.mkdir()
    else:
        (ROOT / "build").mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=ROOT / "build", prefix="test-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def store_path(disk_path: Path) -> Path:
    """Where a test may make its store."""
    return disk_path / "store"
