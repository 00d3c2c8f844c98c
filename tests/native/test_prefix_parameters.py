"""Parameters of the prefix code as headers keep them: packed, unpacked, cut off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flashkv.tools.inspection import StoreView
from flashkv.tools.record_facts import record_detail, segment_records
from hypothesis import given
from hypothesis import strategies as st
from store_support import open_store

from flashkv import Identity, KVGeometry
from flashkv.native import ffi, lib

# docs/format.md: the channels that have a nibble of their own
FREQUENT = bytes.fromhex("23 22 21 20 24 03 02 01 00 C2 82 C1 81 C0 80")


def pack(parameters: bytes) -> bytes:
    values = len(parameters) - 1
    out = ffi.new("uint8_t[]", b"\xc3" * (2 + values + values // 2 + 8))
    length = lib.fkv_prefix_pack(parameters, values, out)
    packed = bytes(ffi.buffer(out))
    assert packed[max(length, 2 + values + values // 2) :].strip(b"\xc3\0") == b""
    return packed[:length]


def reference_pack(parameters: bytes) -> bytes:
    nibbles = [FREQUENT.index(byte) if byte in FREQUENT else 15 for byte in parameters[1:]]
    pairs = zip(nibbles[::2], [*nibbles[1::2], 0], strict=False)
    others = bytes(byte for byte in parameters[1:] if byte not in FREQUENT)
    return parameters[:1] + bytes(low | high << 4 for low, high in pairs) + others


def unpack(packed: bytes, values: int) -> bytes:
    out = ffi.new("uint8_t[]", 1 + values)
    lib.fkv_prefix_unpack(packed, values, out)
    return bytes(ffi.buffer(out))


CHANNELS = st.lists(st.one_of(st.sampled_from(list(FREQUENT)), st.integers(0, 255)), max_size=200)


@given(base=st.integers(0, 255), channels=CHANNELS)
def test_round_trip(base: int, channels: list[int]) -> None:
    parameters = bytes([base, *channels])
    packed = pack(parameters)
    assert packed == reference_pack(parameters)
    assert unpack(packed, len(channels)) == parameters
    for room in (len(packed), len(packed) + 7):
        assert lib.fkv_prefix_packed_bytes(packed, room, len(channels)) == len(packed)
    for room in range(len(packed)):
        assert lib.fkv_prefix_packed_bytes(packed, room, len(channels)) == 0


def test_golden() -> None:
    assert pack(bytes.fromhex("7F 23 80 24 FF")).hex(" ") == "7f e0 f4 ff"
    assert pack(bytes.fromhex("7F 05 C0 1F")).hex(" ") == "7f df 0f 05 1f"


@pytest.mark.parametrize(("step", "parameter_bytes"), [(0, 1 + 32), (2, 1 + 64)])
def test_headers_keep_the_shorter_form(tmp_path: Path, step: int, parameter_bytes: int) -> None:
    """Channels of one scale are packed; channels of many scales keep a byte each."""
    exponent = 127 - np.arange(64) % 16 * step
    rng = np.random.default_rng(3)
    noise, sign = rng.integers(0, 3, (4, 1, 2, 2, 16, 64)), rng.integers(0, 2, (4, 1, 2, 2, 16, 64))
    data = (sign << 15 | (exponent - noise) << 7).astype(np.uint16)
    with open_store(tmp_path / "store", KVGeometry.gqa(1, 2, 64, "bfloat16")) as store:
        namespace = store.namespace(Identity(model="m"))
        keys = [bytes([n]) for n in range(4)]
        assert namespace.put(keys, data).all_ok
        out = np.zeros_like(data)
        assert namespace.get(keys, out).all_ok
        assert (out == data).all()
    view = StoreView(tmp_path / "store")
    record = next(r for r in segment_records(view, view.segments[0]) if r.kind == "data")
    detail = record_detail(view, 0, record.page)
    assert {stream.mode for stream in detail.streams} == {"prefix code, bfloat16"}
    assert {len(stream.parameters) for stream in detail.streams} == {1 + 64}
    (streams,) = [tlv for tlv in detail.tlvs if tlv.name == "streams"]
    assert streams.length_bytes == 4 * (4 + parameter_bytes)
