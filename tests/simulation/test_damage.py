"""Damage: every byte of a small store's files, and every bit of its headers.

In the ordinary run each byte of the store of 64 KiB is xored with one pattern, drawn from the seed,
and each bit of each header is turned; an image has one such place in each of some files that don't
lean on one another, and one image in eight is opened for writing. In the soak each byte of the
store of 256 KiB is xored with nine patterns, one at a time, and opened both ways.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import pytest
from simulation.damage import Bench, bench, flipped
from simulation.golden import GEOMETRY, PAGE, Golden, entries_of, golden, segment_path

PARTS = 10
HEADER_PARTS = 3
SUPERBLOCK = 112
SEGMENT_HEADER = 120
RECORD_HEADER = 144
LOG_HEAD = 16
CONTENTS = (8, 9)  # TLVs that hold an inline record's blocks, a namespace's identity
Spot = tuple[str, int, int]
"""File, offset, what is xored."""


def places_of(made: Golden) -> list[tuple[str, int]]:
    """(file, offset) of every byte of every file."""
    return [(name, at) for name, data in made.files.items() for at in range(len(data))]


def damage_bytes(
    place: Bench, spots: Sequence[Spot], *, writable: bool, again: bool = False
) -> None:
    """Some bytes wrong, in a file one at most; the store is as it was afterwards."""
    files = place.golden.files
    bad: dict[str, bytes | None] = {}
    for name, offset, pattern in spots:
        wrong = flipped(files[name], offset, pattern)
        bad[name] = wrong
        place.poke(name, offset, wrong[offset : offset + 1])
    what = "; ".join(f"{name}: byte {offset} ^ {pattern:#04x}" for name, offset, pattern in spots)
    place.look(what, place.allowed_of(bad), writable=writable, again=again)
    if writable:
        place.restore()
        return
    for name, offset, _ in spots:
        place.poke(name, offset, files[name][offset : offset + 1])


def images_of(made: Golden) -> list[list[tuple[str, int]]]:
    """Every byte of the small store's files, in images that each have one of each segment, and of
    what else doesn't lean on the segments, nor they on it: what one of them costs is told from
    what another does, since no two of an image can lose blocks. Bytes of the log that rules are
    damaged one at a time.
    """
    one, two = map(segment_path, made.segments)
    size = made.segment_bytes
    rest = [(n, at) for n, at in places_of(made) if n not in (one, two, made.log)]
    assert len(rest) <= size
    images = []
    for page in range(size // PAGE):
        other = (page + 3) % (size // PAGE)
        assert not (made.record_at(0, page) and made.record_at(1, other))
        for at in range(page * PAGE, (page + 1) * PAGE):
            there = other * PAGE + at % PAGE
            images.append([(one, at), (two, there), *rest[at : at + 1]])
    return images + [[(made.log, at)] for at in range(len(made.files[made.log]))]


def test_the_images_have_every_byte() -> None:
    made = golden("small")
    images = images_of(made)
    assert sorted(chain.from_iterable(images)) == sorted(places_of(made))
    assert len(places_of(made)) > 64 << 10


@pytest.mark.parametrize("part", range(PARTS))
def test_every_byte(seed: int, part: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    with bench(golden("small")) as place:
        for number, image in enumerate(images_of(place.golden)[part::PARTS]):
            spots = [(name, at, rng.randrange(1, 256)) for name, at in image]
            writable = (number + seed) % 8 == 0
            damage_bytes(place, spots, writable=writable, again=writable and number % 32 == 0)
        print(place)


# ---- headers -------------------------------------------------------------------------------------


def header_bytes(made: Golden) -> list[tuple[str, int]]:
    """(file, offset) of the bytes of all headers, those of earlier epochs included; but for what
    they hold of blocks and identities.
    """
    found = []
    for name, data in made.files.items():
        if name.endswith(".seg"):
            pieces = chain.from_iterable(_page_header(data, at) for at in range(0, len(data), PAGE))
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
            yield from range(tlv, tlv + 8 + (0 if kind in CONTENTS else length))
            tlv += 8 + length + -length % 8


def test_headers_are_found() -> None:
    """Of each kind as many as there should be."""
    made = golden("small")
    begins = Counter(
        made.files[name][at : at + 4] for name, at in header_bytes(made) if at % PAGE == 0
    )
    # Of the earlier epoch in segment 0 only the directory is left, and its footer.
    assert begins[b"FKVS"] == 4, "two segment headers, two superblocks"
    assert begins[b"FKVF"] == 2
    assert begins[b"FKVR"] == 5, "two of namespaces, three of blocks"


@pytest.mark.parametrize("part", range(HEADER_PARTS))
def test_every_bit_of_every_header(seed: int, part: int) -> None:
    """One of a segment or of the log that rules at a time, and beside it one of what doesn't lean
    on these: superblocks and the log before.
    """
    print(f"seed {seed}")
    made = golden("small")
    bits = [(name, at, 1 << bit) for name, at in header_bytes(made) for bit in range(8)]
    rest = [spot for spot in bits if not spot[0].endswith(".seg") and spot[0] != made.log]
    first = [spot for spot in bits if spot[0].endswith(".seg") or spot[0] == made.log]
    assert len(first) > len(rest)
    images = [[spot, *rest[number : number + 1]] for number, spot in enumerate(first)]
    with bench(made) as place:
        for number, image in enumerate(images[part::HEADER_PARTS]):
            damage_bytes(place, image, writable=(number + seed) % 8 == 0)
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
                spots = [(name, offset, pattern)]
                damage_bytes(place, spots, writable=False)
                damage_bytes(place, spots, writable=True, again=number % 8 == 0)
        print(place)
