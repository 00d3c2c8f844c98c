"""Chunks of opaque bytes in zstd frames: exact, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import realkv
import zstandard
from codec_contents import streams_of
from fxp_reference import CANARY, _u8
from hypothesis import given
from hypothesis import strategies as st

from flashkv.native import lib

pytestmark = pytest.mark.skipif(not lib.fkv_zstd_there(), reason="no libzstd on this system")
PLAIN, ZSTD, HALVES = (int(lib.FKV_CHUNK_PLAIN), int(lib.FKV_CHUNK_ZSTD), int(lib.FKV_CHUNK_HALVES))
CHUNK, SHIFT = int(lib.FKV_CHUNK_BYTES), int(lib.FKV_CHUNK_MODE_SHIFT)
OK, DAMAGED = int(lib.FKV_OK), int(lib.FKV_DAMAGED)


def encode(mode: int, content: bytes, room: int | None = None) -> bytes:
    source, room = np.frombuffer(content, np.uint8), len(content) if room is None else room
    out = np.full(room + 64, CANARY, np.uint8)
    length = int(lib.fkv_zstd_encode(mode, _u8(source), len(content), _u8(out), room))
    assert length <= room
    assert (out[room:] == CANARY).all()
    return out[:length].tobytes()


def decode(mode: int, stored: bytes, length: int) -> bytes | None:
    """The chunk's bytes, or None where it is refused; nothing behind them is written."""
    out = np.full(length + 64, CANARY, np.uint8)
    source = np.frombuffer(stored + bytes(64), np.uint8)
    status = lib.fkv_zstd_decode(len(stored) | mode << SHIFT, _u8(source), _u8(out), length)
    assert (out[length:] == CANARY).all()
    assert status in (OK, DAMAGED)
    return out[:length].tobytes() if status == OK else None


def content_of(kind: str, length: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    if kind == "zeros":
        return bytes(length)
    if kind == "text":
        return (b"key and value, " * (length // 15 + 1))[:length]
    if kind == "random":
        return rng.bytes(length)
    floats = rng.normal(size=length // 2 + 1).astype(np.float32).view(np.uint32) >> 16
    return floats.astype("<u2").tobytes()[:length]


KINDS = ["zeros", "text", "random", "bfloat16"]


@given(
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from([ZSTD, HALVES]),
    length=st.one_of(st.integers(1, 5000), st.sampled_from([CHUNK - 1, CHUNK])),
    seed=st.integers(0, 1 << 32),
)
def test_round_trip(kind: str, mode: int, length: int, seed: int) -> None:
    content = content_of(kind, length, seed)
    stored = encode(mode, content)
    if stored:
        assert len(stored) <= length
        assert decode(mode, stored, length) == content
        if mode == HALVES:
            assert stored[: (length + 1) // 2] == content[::2]
            upper = zstandard.ZstdDecompressor().decompress(stored[(length + 1) // 2 :])
            assert upper == content[1::2]
    assert decode(PLAIN, content, length) == content


@given(
    mode=st.sampled_from([PLAIN, ZSTD, HALVES]),
    length=st.integers(2, 3000),
    seed=st.integers(0, 1 << 32),
    flips=st.lists(st.integers(0, 1 << 31), max_size=4),
    cut=st.integers(-9, 9),
)
def test_damaged_chunks(mode: int, length: int, seed: int, flips: list[int], cut: int) -> None:
    """Other bytes or a refusal, never more than the chunk's length and never a crash."""
    content = content_of("bfloat16", length, seed)
    stored = bytearray(content if mode == PLAIN else encode(mode, content) or b"\0")
    for flip in flips:
        stored[flip // 8 % len(stored)] ^= 1 << flip % 8
    changed = bytes(stored[:cut]) if cut < 0 else bytes(stored) + bytes(cut)
    decode(mode, changed, length)
    assert decode(3, changed, length) is None


def frame_with(content: bytes, **how: bool) -> bytes:
    return zstandard.ZstdCompressor(**how).compress(content)


def lying_frames() -> Iterator[tuple[str, bytes]]:
    good = frame_with(bytes(1000))
    yield "shorter", frame_with(bytes(999))
    yield "longer", frame_with(bytes(1001))
    yield "a terabyte", b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + good[6:]
    yield "a window of 2 GiB", b"\x28\xb5\x2f\xfd\x00\xa8" + good[6:]
    yield "of zstd 0.7", b"\x27" + good[1:]
    yield "skippable", b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + good
    yield "two of them", frame_with(bytes(500)) + frame_with(bytes(500))
    yield "one behind it", good + b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    yield "no frame", b"\0" * 40
    yield "a dictionary", b"\x28\xb5\x2f\xfd\x21\x07" + good[5:]


@pytest.mark.parametrize(("name", "frame"), list(lying_frames()), ids=lambda value: str(value)[:9])
def test_frames_that_lie_are_refused(name: str, frame: bytes) -> None:
    assert decode(ZSTD, frame_with(bytes(1000)), 1000) == bytes(1000)
    assert decode(ZSTD, frame, 1000) is None, name
    assert decode(HALVES, bytes(1000) + frame, 2000) is None, name


def test_chunks_that_lie_are_refused() -> None:
    """Modes that aren't there, lower halves without upper ones."""
    halves = b"\x11\x22\x33" + frame_with(b"abc")
    assert decode(HALVES, halves, 6) == b"\x11a\x22b\x33c"
    assert decode(3, halves, 6) is None
    assert decode(HALVES, b"\x11" + frame_with(b""), 1) is None
    assert decode(HALVES, halves[:3], 6) is None
    assert decode(HALVES, halves[:2], 6) is None
    assert decode(PLAIN, halves, len(halves) + 1) is None


def test_golden_chunks() -> None:
    """Frames of today's zstd are read for ever: stored blocks, repeated ones."""
    stored = bytes.fromhex("28b52ffd 2003 190000 616263")
    assert decode(ZSTD, stored, 3) == b"abc"
    repeated = bytes.fromhex("28b52ffd 2064 230300 00")
    assert decode(ZSTD, repeated, 100) == bytes(100)
    assert decode(HALVES, b"\x11\x22\x33" + stored, 6) == b"\x11a\x22b\x33c"
    assert decode(HALVES, b"\x11\x22\x33\x44" + stored, 7) == b"\x11a\x22b\x33c\x44"
    assert decode(HALVES, b"\x11", 1) is None


def test_without_zstd() -> None:
    lib.fkv_use_zstd(0)
    try:
        assert not lib.fkv_zstd_there()
        assert encode(ZSTD, bytes(1000)) == b""
        out = np.zeros(10, np.uint8)
        assert lib.fkv_zstd_decode(3, _u8(out), _u8(out), 3) == lib.FKV_NO_MEMORY
    finally:
        lib.fkv_use_zstd(1)
    assert lib.fkv_zstd_there()


@pytest.mark.skipif(not realkv.SAMPLE.exists(), reason="the sample of real tensors is not there")
def test_halves_of_real_tensors() -> None:
    """16-bit floats: their upper bytes apart are worth more than the whole."""
    streams = [stream for _, is_fp16, stream in streams_of(realkv.SAMPLE) if not is_fp16]
    content = np.concatenate([stream.ravel() for stream in streams]).tobytes()[:CHUNK]
    assert len(content) == CHUNK
    halves, whole = encode(HALVES, content), encode(ZSTD, content)
    assert CHUNK / len(halves) > 1.38
    assert len(halves) < 0.93 * len(whole)
