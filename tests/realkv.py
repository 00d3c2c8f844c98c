"""Real KV tensors for tests, read with numpy alone.

A .safetensors file is an 8-byte header length, a JSON header and the tensors' bytes. bfloat16,
which numpy lacks, comes back as its raw bits in uint16.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

_TYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "I32": "<i4", "I64": "<i8", "U8": "u1"}
_TESTS = Path(__file__).resolve().parent

SAMPLE = _TESTS / "data" / "realkv_sample.safetensors"
FULL_SET = _TESTS.parent.parent / "shared" / "data" / "realkv"


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file, by name, as read-only views of one memory map."""
    header_bytes = int.from_bytes(path.open("rb").read(8), "little")
    start = 8 + header_bytes
    content = np.memmap(path, np.uint8, mode="r")
    header = json.loads(bytes(content[8:start]))
    header.pop("__metadata__", None)
    return {
        name: content[start + row["data_offsets"][0] : start + row["data_offsets"][1]]
        .view(_TYPES[row["dtype"]])
        .reshape(row["shape"])
        for name, row in header.items()
    }


def full_set() -> list[Path]:
    """The files of the larger set that may lie beside the project; empty where it doesn't."""
    return sorted(FULL_SET.glob("*.safetensors"))
