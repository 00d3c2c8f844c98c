"""docs/format.md says what the compiler says: structures, offsets, sizes; its examples hold."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from flashkv import checksums
from flashkv.native import address, ffi, lib, pointer

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
HEADER = (ROOT / "engine_native" / "format.h").read_text(encoding="utf-8")
STRUCTURES = re.findall(r"^\} (fkv_\w+);", HEADER, re.MULTILINE)


def documented(structure: str) -> tuple[int, list[tuple[str, int, int]]]:
    """(size, [(field, offset, size)]) of a structure's section."""
    section = re.search(
        rf"^### `{structure}`, (\d+) bytes\n(.*?)(?=^##)", DOC, re.MULTILINE | re.DOTALL
    )
    assert section, f"no section of {structure}"
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", section[2], re.MULTILINE)
    return int(section[1]), [(name, int(offset), int(size)) for offset, size, name in rows]


def test_all_structures_are_there() -> None:
    assert len(STRUCTURES) == 17
    assert set(re.findall(r"^### `(fkv_\w+)`", DOC, re.MULTILINE)) == set(STRUCTURES)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structure(structure: str) -> None:
    size, fields = documented(structure)
    assert size == ffi.sizeof(structure)
    assert fields == [
        (name, field.offset, ffi.sizeof(field.type)) for name, field in ffi.typeof(structure).fields
    ]
    assert sum(length for _, _, length in fields) == size, "no hidden padding"


@pytest.mark.parametrize(
    ("prefix", "title"),
    [
        ("FKV_MANIFEST_", "### `fkv_manifest_entry`"),
        ("FKV_SECTION_", "### `fkv_section`"),
        ("FKV_TLV_", "### `fkv_tlv`"),
    ],
)
def test_type_numbers(prefix: str, title: str) -> None:
    numbers = re.findall(rf"#define {prefix}(\w+) (\d+)\b", HEADER)
    section = DOC[DOC.index(title) :]
    section = section[: section.index("\n###", 5)]
    told = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", section, re.MULTILINE)
    assert {(name, number) for number, name in told} == set(numbers)


def test_crc() -> None:
    assert "`E3069283`" in DOC
    assert checksums.crc32c(0, b"123456789") == 0xE3069283


def test_worked_example() -> None:
    rows = re.findall(r"^\| [-\d.]+ \| ([0-9A-F]{4}) \| \d+ \| [0-9A-F]{2} \|", DOC, re.MULTILINE)
    values = np.array([int(row, 16) for row in rows], np.uint16)
    line = re.search(r"^stripe: ([0-9A-F |]+?) {4,}", DOC, re.MULTILINE)
    chosen = re.search(r"with parameters `([0-9A-F ]+)`", DOC)
    assert len(values) == 8
    assert line
    assert chosen
    expected = bytes.fromhex(line[1].replace("|", ""))
    parameters = np.array([int(byte, 16) for byte in chosen[1].split()], np.uint8)
    out = np.zeros(64, np.uint8)
    addresses = np.array([address(values)], np.uint64)
    arguments = (pointer(addresses, "uint64_t *"), 1, 16, lib.FKV_STREAM_FXP_BF16)
    chosen_pointer = pointer(parameters, "uint8_t *")
    length = lib.fkv_fxp_encode(*arguments, chosen_pointer, pointer(out, "uint8_t *"))
    assert out[:length].tobytes() == expected


def test_worked_example_of_the_prefix_code() -> None:
    rows = re.findall(r"^\| [-\d.]+ \| ([0-9A-F]{4}) \| \d+ \| [0-9A-F]{2} \|", DOC, re.MULTILINE)
    values = np.array([int(row, 16) for row in rows], np.uint16)
    line = re.search(r"^prefix stripe: ([0-9A-F |]+?) {4,}", DOC, re.MULTILINE)
    base = re.search(r"prefix code, base (\d+), all channels wide", DOC)
    assert line
    assert base
    parameters = np.array([int(base[1]), *[0x20] * 8], np.uint8)
    out, addresses = np.zeros(64, np.uint8), np.array([address(values)], np.uint64)
    arguments = (pointer(addresses, "uint64_t *"), 1, 16, lib.FKV_STREAM_PREFIX_BF16)
    chosen = pointer(parameters, "uint8_t *")
    length = lib.fkv_prefix_encode(*arguments, chosen, pointer(out, "uint8_t *"))
    assert out[:length].tobytes() == bytes.fromhex(line[1].replace("|", ""))
