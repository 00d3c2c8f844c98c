"""Other compressors on the same tensors, in the same run: ZipNN, blosc2, zstd.

Invariants
  - a peer that is not installed is named with the reason; the others are measured;
  - peers get a copy of their input: ZipNN overwrites what it is given;
  - what a peer decodes is compared with what it was given, before anything is timed;
  - seconds are processor time of all threads of the process, peers being told to use one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Final

from .bench_sets import BenchError

UNIT_BYTES: Final = 32 << 10
PASSES: Final = 5
Step = Callable[[bytes], bytes]
Make = Callable[[], tuple[Step, Step]]


@dataclass(frozen=True)
class Peer:
    """make() returns (encode, decode); both leave what they are given as it is."""

    name: str
    package: str
    make: Make


def _zipnn() -> tuple[Step, Step]:
    module: Any = import_module("zipnn")
    coder = module.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)

    def encode(data: bytes) -> bytes:
        return bytes(coder.compress(bytearray(data)))  # a copy: compress() overwrites it

    def decode(data: bytes) -> bytes:
        return bytes(coder.decompress(data))

    return encode, decode


def _blosc2() -> tuple[Step, Step]:
    module: Any = import_module("blosc2")
    module.set_nthreads(1)
    settings = {
        "typesize": 2,
        "clevel": 1,
        "codec": module.Codec.ZSTD,
        "filters": [module.Filter.SHUFFLE],
        "filters_meta": [0],
        "nthreads": 1,
    }

    def encode(data: bytes) -> bytes:
        return bytes(module.compress2(data, **settings))

    def decode(data: bytes) -> bytes:
        return bytes(module.decompress2(data, nthreads=1))

    return encode, decode


def _zstd() -> tuple[Step, Step]:
    module: Any = import_module("zstandard")
    return module.ZstdCompressor(level=1).compress, module.ZstdDecompressor().decompress


PEERS: Final = (
    Peer("zipnn", "zipnn", _zipnn),
    Peer("blosc2", "blosc2", _blosc2),
    Peer("zstd", "zstandard", _zstd),
)


def measure_peers(
    data: bytes, folder: Path | None, step: Callable[[str], None], peers: tuple[Peer, ...] = PEERS
) -> dict[str, Any]:
    """Ratios and speeds of each peer, of the whole data and of units of 32 KiB.

    folder: packages that are not in this environment (pip install --target). Raises BenchError
    where a peer brings other bytes back.
    """
    figures: dict[str, Any] = {"peers": {}, "peers_left_out": {}}
    with _found_in(folder):
        for peer in peers:
            step(f"{peer.name}, beside")
            try:
                encode, decode = peer.make()
            except ImportError as error:
                figures["peers_left_out"][peer.name] = str(error)
                continue
            figures["peers"][peer.name] = metadata.version(peer.package)
            units = [data[at : at + UNIT_BYTES] for at in range(0, len(data), UNIT_BYTES)]
            figures |= _figures(peer.name, [data], encode, decode)
            figures |= _figures(f"{peer.name}_32k", units, encode, decode)
    return figures


@contextmanager
def _found_in(folder: Path | None) -> Iterator[None]:
    """Imports look into the folder too, for as long as this is entered."""
    path = [str(folder.resolve())] if folder else []
    sys.path.extend(path)
    try:
        yield
    finally:
        for entry in path:
            sys.path.remove(entry)


def _figures(name: str, units: list[bytes], encode: Step, decode: Step) -> dict[str, float]:
    coded = [encode(unit) for unit in units]
    for number, (unit, small) in enumerate(zip(units, coded, strict=True)):
        if decode(small) != unit:
            raise BenchError(f"{name} brought other bytes back, unit {number} of {len(units)}")
    total = sum(map(len, units))
    return {
        f"{name}_ratio": total / sum(map(len, coded)),
        f"{name}_encode_gbps": total / _seconds(units, encode) / 1e9,
        f"{name}_decode_gbps": total / _seconds(coded, decode) / 1e9,
    }


def _seconds(units: list[bytes], step: Step) -> float:
    """Median processor seconds of a pass over all units."""
    return statistics.median(_passes(units, step))


def _passes(units: list[bytes], step: Step) -> Iterator[float]:
    for _ in range(PASSES):
        before = time.process_time()
        for unit in units:
            step(unit)
        yield max(time.process_time() - before, 1e-9)
