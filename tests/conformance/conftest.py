"""Fixtures of the tests that drive the store as inference engines do."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(disk_path: Path) -> Path:
    """An empty folder on a disk's file system."""
    return disk_path
