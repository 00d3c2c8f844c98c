"""What pyproject.toml lists is what there is: a wheel lacks no folder that a checkout has."""

from __future__ import annotations

from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer")

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]


def folder_of(package):
    mapped = SETUPTOOLS["package-dir"].get(package)
    return ROOT / (mapped or package.replace(".", "/"))


def test_every_package_is_listed():
    found = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in (ROOT / "flashkv").rglob("__init__.py")
    }
    assert found <= set(SETUPTOOLS["packages"])


def test_every_listed_package_is_there():
    assert all(folder_of(package).is_dir() for package in SETUPTOOLS["packages"])


def test_package_data_are_there():
    for package, patterns in SETUPTOOLS["package-data"].items():
        for pattern in patterns:
            assert list(folder_of(package).glob(pattern)), f"{package}: {pattern}"
