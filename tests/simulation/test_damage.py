"""Damage: every byte of a small store's files, and every bit of its headers.

In the ordinary run each byte is xored with one pattern, drawn from the seed, and the store of
64 KiB is opened for writing and for reading only by turns; in the soak each byte of one of 256 KiB
is xored with nine, and opened both ways.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import pytest
from simulation.damage import Bench, bench, flipped
from simulation.golden import GEOMETRY, PAGE, Golden, entries_of, golden

PARTS = 10
HEADER_PARTS = 3
SUPERBLOCK = 112
SEGMENT_HEADER = 120
RECORD_HEADER = 144
LOG_HEAD = 16
INLINE = 8  # the type of the TLV that holds an inline record's blocks


def places_of(made: Golden) -> list[tuple[str, int]]:
    """(file, offset) of every byte of every file."""
    return [(name, at) for name, data in made.files.items() for at in range(len(data))]


def damage_byte(
    place: Bench, name: str, offset: int, pattern: int, *, writable: bool, again: bool = False
) -> None:
    """One byte wrong; the store is as it was afterwards."""
    data = place.golden.files[name]
    bad = flipped(data, offset, pattern)
    place.poke(name, offset, bad[offset : offset + 1])
    what = f"{name}: byte {offset} ^ {pattern:#04x}"
    place.look(what, place.allowed_of({name: bad}), writable=writable, again=again)
    if writable:
        place.restore()
    else:
        place.poke(name, offset, data[offset : offset + 1])


@pytest.mark.parametrize("part", range(PARTS))
def test_every_byte(seed: int, part: int) -> None:
    """Headers, too, by the way: their every bit is below."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    made = golden("small")
    with bench(made) as place:
        for number, (name, offset) in enumerate(places_of(made)[part::PARTS]):
            pattern, writable = rng.randrange(1, 256), (number + seed) % 3 == 0
            again = writable and number % 32 == 0
            damage_byte(place, name, offset, pattern, writable=writable, again=again)
        print(place)


# ---- headers -------------------------------------------------------------------------------------


def header_bytes(made: Golden) -> list[tuple[str, int]]:
    """(file, offset) of the bytes of all headers, those of earlier epochs included; but for the
    blocks in those of inline records.
    """
    found = []
    for name, data in made.files.items():
        if name.endswith(".seg"):
            pieces = chain.from_iterable(
                _page_header(data, at) for at in range(0, len(data), PAGE)
            )
        elif name.endswith(".log"):
            pieces = chain.from_iterable(
                range(e.offset, e.offset + LOG_HEAD) for e in entries_of(data)
            )
        else:
            pieces = iter(range(SUPERBLOCK + len(GEOMETRY.to_json()) if data else 0))
        found += [(name, at) for at in pieces]
    return found


def _page_header(data: bytes, at: int) -> Iterator[int]:
    """Offsets of the header that begins a page, if one does."""
    magic = data[at : at + 8]
    if magic == b"FKVSEGMT":
        yield from range(at, at + SEGMENT_HEADER)
    elif magic == b"FKVFOOTR":
        (sections,) = struct.unpack_from("<I", data, at + 44)
        yield from range(at, at + 96 + 24 * sections)
    elif magic.startswith(b"FKVR"):
        (used,) = struct.unpack_from("<I", data, at + 8)
        yield from range(at, at + RECORD_HEADER)
        tlv = at + RECORD_HEADER
        while tlv < at + used:
            kind, _, length = struct.unpack_from("<HHI", data, tlv)
            yield from range(tlv, tlv + 8 + (0 if kind == INLINE else length))
            tlv += 8 + length + -length % 8


def test_headers_are_found() -> None:
    """Of each kind as many as there should be."""
    made = golden("small")
    begins = Counter(
        made.files[name][at : at + 4] for name, at in header_bytes(made) if at % PAGE == 0
    )
    # Namespace and data records: 2 each in both segments' epochs; the earlier epoch's are
    # overwritten but for its footer.
    assert begins[b"FKVS"] == 4, "two segment headers, two superblocks"
    assert begins[b"FKVF"] == 2
    assert begins[b"FKVR"] == 4


@pytest.mark.parametrize("part", range(HEADER_PARTS))
def test_every_bit_of_every_header(seed: int, part: int) -> None:
    print(f"seed {seed}")
    made = golden("small")
    bits = [(name, at, bit) for name, at in header_bytes(made) for bit in range(8)]
    with bench(made) as place:
        for number, (name, at, bit) in enumerate(bits[part::HEADER_PARTS]):
            writable = (number + seed) % 8 == 0
            damage_byte(place, name, at, 1 << bit, writable=writable)
        print(place)


# ---- at length -----------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(40))
def test_every_byte_at_length(seed: int, part: int) -> None:
    """Every bit by itself, and one pattern more, both ways."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    made = golden("large")
    with bench(made) as place:
        for number, (name, offset) in enumerate(places_of(made)[part::40]):
            for pattern in (*(1 << bit for bit in range(8)), rng.randrange(1, 256)):
                damage_byte(place, name, offset, pattern, writable=False)
                again = number % 8 == 0
                damage_byte(place, name, offset, pattern, writable=True, again=again)
        print(place)
