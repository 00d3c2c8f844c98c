"""The token delta: exact, one form for everything, chosen where vectors stand still and only there.

The reference is written from docs/format.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import realkv
from codec_contents import KINDS, make, streams_of
from flashkv.tools.inspection import StoreView
from flashkv.tools.record_facts import record_detail, segment_records
from fxp_reference import CANARY, _u8, _u64, addresses, decoded_rows
from hypothesis import given
from hypothesis import strategies as st
from store_support import open_store

from flashkv import Identity, KVGeometry
from flashkv.native import ffi, lib

PAGE_BYTES = 4096


def reference_encode(values: np.ndarray) -> bytes:
    changed, body = 0, b""
    before = np.zeros(values.shape[1], np.uint8)
    for number, row in enumerate(values):
        difference = row ^ before
        if difference.any():
            changed |= 1 << number
            body += np.packbits(difference != 0, bitorder="little").tobytes()
            body += difference[difference != 0].tobytes()
        before = row
    return changed.to_bytes(-(-len(values) // 8), "little") + body


def encode(values: np.ndarray) -> bytes:
    rows, costs = addresses(values), np.zeros(len(values), np.uint16)
    target = ffi.cast("uint16_t *", costs.ctypes.data)
    lib.fkv_delta_costs(_u64(rows), len(rows), values.shape[1], target)
    room = -(-int(costs.astype(np.int64).sum()) // 8)
    out = np.full(room + 64, CANARY, np.uint8)
    assert lib.fkv_delta_encode(_u64(rows), len(rows), values.shape[1], _u8(out)) == room
    assert (out[room:] == CANARY).all()
    return out[:room].tobytes()


def decode(stripe: bytes, shape: tuple[int, int], **how: object) -> np.ndarray | None:
    def call(source: object, rows: object) -> int:
        return lib.fkv_delta_decode(source, len(stripe), *shape, rows)

    return decoded_rows(call, stripe, shape, behind=0xFF, **how)  # type: ignore[arg-type]


def standing(rows: int, size: int, share: float, seed: int) -> np.ndarray:
    """uint8 vectors of which this share of bytes changes from one to the next."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(0, 256, (rows, size)) * (rng.random((rows, size)) < share)
    return np.bitwise_xor.accumulate(steps.astype(np.uint8))


@given(
    rows=st.integers(1, 70),
    size=st.one_of(st.integers(1, 100), st.sampled_from([7, 8, 9, 64, 2048])),
    share=st.sampled_from([0, 0.01, 0.2, 1]),
    seed=st.integers(0, 1 << 32),
)
def test_round_trip(rows: int, size: int, share: float, seed: int) -> None:
    values = standing(rows, size, share, seed)
    stripe = encode(values)
    assert stripe == reference_encode(values)
    back = decode(stripe, values.shape)
    assert back is not None
    assert (back == values).all()
    wanted = np.random.default_rng(seed).random(rows) < 0.5
    some = decode(stripe, values.shape, wanted=wanted)
    assert some is not None
    assert (some == np.where(wanted[:, None], values, CANARY)).all()


@given(kind=st.sampled_from(KINDS), values=st.integers(1, 80), seed=st.integers(0, 1 << 32))
def test_contents_of_the_other_codes(kind: str, values: int, seed: int) -> None:
    rows = make(kind, 20, values, seed).view(np.uint8)
    stripe = encode(rows)
    assert stripe == reference_encode(rows)
    back = decode(stripe, rows.shape)
    assert back is not None
    assert (back == rows).all()


@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 70),
    seed=st.integers(0, 1 << 32),
    cut=st.integers(1, 50),
    flips=st.lists(st.integers(0, 1 << 31), min_size=1, max_size=5),
)
def test_damaged_stripes(rows: int, size: int, seed: int, cut: int, flips: list[int]) -> None:
    """Refused, or what the encoder gives for the rows that came out."""
    stripe = encode(standing(rows, size, 0.1, seed))
    assert decode(stripe + bytes(cut), (rows, size)) is None
    assert decode(stripe[:-cut], (rows, size)) is None
    mutated = bytearray(stripe)
    for flip in flips:
        mutated[flip // 8 % len(mutated)] ^= 1 << flip % 8
    back = decode(bytes(mutated), (rows, size))
    if back is not None:
        assert reference_encode(back) == bytes(mutated)


def test_golden_stripes() -> None:
    """Bytes that were worked out by hand."""
    rows = np.array([[0, 0, 0, 0], [1, 2, 0, 255], [1, 2, 0, 255], [1, 3, 0, 255]], np.uint8)
    stripe = bytes.fromhex("0a 0b 01 02 ff 02 01")
    assert encode(rows) == stripe
    back = decode(stripe, (4, 4))
    assert back is not None
    assert (back == rows).all()
    for wrong in (
        "1a 0b 01 02 ff 02 01",  # a vector that isn't there
        "0a 0b 01 00 ff 02 01",  # a zero among what changed
        "0a 0b 01 02 ff 12 01 01",  # a byte past the vector's end
        "0a 0b 01 02 ff 00",  # nothing changed, but said so
        "0e 0b 01 02 ff 02 01",
        "0a 0b 01 02 ff 02",
        "0a",
        "",
    ):
        assert decode(bytes.fromhex(wrong), (4, 4)) is None, wrong


def test_absurd_shapes_are_refused() -> None:
    stripe, rows = np.zeros(64, np.uint8), np.zeros(4096, np.uint64)
    for length, count, size in ((64, 2**32 - 1, 8), (64, 4096, 8), (1, 8, 0), (1, 8, 2049)):
        assert lib.fkv_delta_decode(_u8(stripe), length, count, size, _u64(rows)) == -1


# ---- where it is chosen -----------------------------------------------------------------------


def modes_of(path: Path) -> list[str]:
    """The mode of every stream in a store."""
    view = StoreView(path)
    return [
        stream.mode
        for number, segment in view.segments.items()
        for record in segment_records(view, segment)
        if record.kind == "data"
        for stream in record_detail(view, number, record.page).streams
    ]


def through_a_store(
    path: Path, dtype: str, data: np.ndarray, codec: str = "lossless"
) -> tuple[list[str], float]:
    """Modes and ratio of uint8[block, layer, 2, head, token, bytes]; what came back was right."""
    blocks, layers, _, heads, _, size = data.shape
    element = {"int8": 1, "bfloat16": 2, "float32": 4}[dtype]
    geometry = KVGeometry.gqa(layers, heads, size // element, dtype)
    words = data.view({1: np.uint8, 2: np.uint16, 4: np.float32}[element])
    keys = [b"%d" % number for number in range(blocks)]
    with open_store(path, geometry, codec=codec) as store:
        namespace = store.namespace(Identity(model="delta"))
        assert namespace.put(keys, words, position=0).all_ok
        store.flush()
        ratio = store.stats().compression
        back = np.empty_like(words)
        assert namespace.get(keys, back).all_ok
        assert back.tobytes() == words.tobytes()
        one = np.empty_like(words[:1])
        assert namespace.get(keys[2:3], one).all_ok  # its stripes begin in the middle of streams
        assert one.tobytes() == words[2:3].tobytes()
    return modes_of(path), ratio


@pytest.mark.parametrize("codec", ["lossless", "fast"])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
@pytest.mark.parametrize(("share", "least"), [(0, 20), (0.01, 4), (0.2, 1.5)])
def test_streams_that_stand_still(
    tmp_path: Path, codec: str, dtype: str, share: float, least: float
) -> None:
    """Constant ones, and such that change little: scales, states, repeated tokens."""
    data = np.stack([standing(4 * 96, 256, share, seed) for seed in range(16)])
    data = data.reshape(2, 2, 4, 4, 96, 256).transpose(3, 0, 1, 2, 4, 5)
    modes, ratio = through_a_store(tmp_path / "store", dtype, np.ascontiguousarray(data), codec)
    assert set(modes) == {"token delta"}
    assert ratio > least


def test_only_the_streams_that_stand_still(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (4, 2, 2, 2, 64, 64)).astype(np.uint8)
    noise[:, 0, 1] = np.arange(64) // 9
    modes, _ = through_a_store(tmp_path / "store", "int8", noise)
    assert modes == ["plain"] * 2 + ["token delta"] * 2 + ["plain"] * 4


@pytest.mark.skipif(not realkv.SAMPLE.exists(), reason="the sample of real tensors is not there")
def test_not_on_real_tensors(tmp_path: Path) -> None:
    """There the exponents of channels are worth more than any difference of tokens."""
    streams = [stream for _, is_fp16, stream in streams_of(realkv.SAMPLE) if not is_fp16]
    for stream in streams[::5]:
        bits = 8 * len(reference_encode(stream[:64].view(np.uint8))) / stream[:64].size
        assert bits > 14
    data = np.stack([stream[:256] for stream in streams[:8]]).view(np.uint8)
    shaped = data.reshape(2, 2, 2, 4, 64, 128).transpose(3, 0, 1, 2, 4, 5)
    modes, _ = through_a_store(tmp_path / "store", "bfloat16", np.ascontiguousarray(shaped))
    assert set(modes) == {"prefix code, bfloat16"}
