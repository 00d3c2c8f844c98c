"""A simulated device, an engine on it, a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from simulation.device import Device
from simulation.engine import RETRIES, Engine, open_plain


@pytest.fixture
def device(seed: int) -> Iterator[Device]:
    with Device(seed) as device:
        yield device


@pytest.fixture
def engine(device: Device) -> Iterator[Engine]:
    with Engine(device, retries=RETRIES) as engine:
        yield engine


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with open_plain(tmp_path / "file") as fd:
        yield fd
