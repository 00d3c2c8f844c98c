"""Makes the corpus to start from: what the real encoder writes, in the form that the targets take.

`python tests/fuzz/make_corpus.py` writes corpus/TARGET/real-*; `./run fuzz TARGET 300` and
`./run fuzz --merge` then add what fuzzing finds. The stores are small on purpose: a file of the
corpus is some hundred bytes to a few KiB.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from flashkv.tools.inspection import StoreView  # noqa: E402
from store_support import open_store  # noqa: E402

from flashkv import Identity, KVGeometry, directory  # noqa: E402
from flashkv.geometry import Group, GroupKind, Plane, Role  # noqa: E402
from flashkv.manifest_log import KILL, encode_entry, retired_row, segment_row  # noqa: E402
from flashkv.native import lib, pointer  # noqa: E402
from flashkv.segments import DIR_BLOCK, DIR_RECORD  # noqa: E402

PAGE = 4096
# Planes that differ in layers, heads and length.
UNLIKE = KVGeometry(
    (
        Group(
            "kv",
            GroupKind.FULL,
            (Plane(Role.K, 2, 3, 16, "bfloat16"), Plane(Role.V, 1, 1, 20, "float16")),
        ),
    )
)
# (geometry, codec, tokens a block, largest byte of the content, blocks)
SHAPES: list[tuple[Any, str, int, int, int]] = [
    (KVGeometry.gqa(1, 1, 16, "bfloat16"), "lossless", 4, 70, 3),
    (KVGeometry.gqa(2, 2, 8, "float16"), "lossless", 3, 256, 2),
    (KVGeometry.mla(2, 20, 4, "bfloat16"), "lossless", 5, 70, 3),
    (KVGeometry.gqa(1, 1, 256, "bfloat16"), "lossless", 12, 4, 2),  # full pages
    (KVGeometry.gqa(1, 2, 10, "float32"), "lossless", 6, 256, 1),
    (KVGeometry.gqa(2, 2, 16, "bfloat16"), "raw", 4, 4, 2),  # inline
    (KVGeometry.gqa(2, 1, 128, "bfloat16"), "raw", 6, 4, 2),  # packed
    (KVGeometry.gqa(1, 1, 256, "bfloat16"), "raw", 12, 3, 1),  # aligned, with a tail
    (UNLIKE, "lossless", 5, 70, 2),
    (UNLIKE, "raw", 5, 70, 2),
    (KVGeometry.opaque(4096), "raw", 1, 3, 2),
    (KVGeometry.opaque(9000), "raw", 1, 2, 1),
    (KVGeometry.opaque(50), "raw", 1, 256, 4),
    (KVGeometry.gqa(1, 2, 24, "float8_e5m2"), "lossless", 16, 70, 2),
    (KVGeometry.gqa(1, 1, 24, "float8_e4m3fn"), "lossless", 16, 60, 2),
    (KVGeometry.gqa(1, 1, 32, "float32"), "fast", 8, 64, 2),
    (KVGeometry.opaque(30_000), "lossless", 1, 3, 2),  # chunks
    (KVGeometry.gqa(1, 2, 10, "int8"), "fast", 9, 1, 2),  # zeros: token delta
]


def pages_of(data: bytes) -> bytes:
    """Pages as the targets read them: each as its used length and that many bytes."""
    out = b""
    for at in range(0, len(data), PAGE):
        used = data[at : at + PAGE].rstrip(b"\0")
        out += struct.pack("<H", len(used)) + used
    return out


def records(folder: Path) -> Iterator[tuple[bytes, bytes]]:
    """(a data record, the pages that its segment holds) of each shape."""
    for number, (geometry, codec, tokens, top, count) in enumerate(SHAPES):
        size = geometry.block_bytes(0, tokens)
        rng = np.random.default_rng(number)
        data = rng.integers(0, top, (count, size)).astype(np.uint8)
        keys = [b"%d" % i * (1 + i) for i in range(count)]
        path = folder / str(number)
        with open_store(path, geometry, codec=codec) as store:
            namespace = store.namespace(Identity(model="m"))
            how = {"tokens": tokens} if codec == "lossless" or tokens > 1 else {}
            assert namespace.put(keys, data, parents=[b"", *keys[:-1]], **how).all_ok
        for segment in StoreView(path).segments.values():
            walked = [w for w in segment.walked if w.view["kind"] == lib.FKV_KIND_DATA]
            if not walked:
                continue
            whole = segment.path.read_bytes()
            end = max(w.end_page for w in walked) * PAGE
            for w in walked:
                yield whole[w.view.page * PAGE : w.end_page * PAGE], whole[:end]


def asks(number: int) -> Iterator[bytes]:
    """What a reader wants: see `ask` in fuzz_page.c."""
    everything = [0, 0, 0, 1, 0, 0, 2, 0, 0, 3, 0, 0]
    part = [0, 1, 1, 1, 0, 2, 2, 1, 0, 3, 2, 1]
    yield bytes([0, 0, 12, 2, 25, 3, *everything])
    yield bytes([(4, 8, 16, 32, 64, 128)[number % 6], 0, 12, 2, 25, 3, *part])
    yield bytes([4, number % 11, 12, 0, 0, number % 4, *everything])


def vectors(rng: np.random.Generator, mode: int, rows: int, values: int) -> np.ndarray:
    """uint16[rows, values]: bits of normal numbers, a few of them far off."""
    numbers = rng.normal(size=(rows, values)) * np.where(rng.random((rows, values)) < 0.03, 1e4, 1)
    if mode == lib.FKV_STREAM_FXP_FP16:
        return numbers.astype(np.float16).view(np.uint16)
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def stripes() -> Iterator[tuple[bytes, bytes]]:
    """Inputs of (codec, roundtrip)."""
    rng = np.random.default_rng(5)
    for mode, rows, values in [(1, 3, 8), (2, 4, 21), (1, 9, 64), (2, 2, 100), (1, 1, 300)]:
        bits = np.ascontiguousarray(vectors(rng, mode, rows, values))
        starts = np.array([bits.ctypes.data + r * 2 * values for r in range(rows)], np.uint64)
        parameters = np.zeros(1 + (values + 1) // 2, np.uint8)
        out = np.zeros(rows * values * 3, np.uint8)
        args = (pointer(starts, "uint64_t *"), rows, 2 * values, mode)
        lib.fkv_fxp_choose(*args, pointer(parameters, "uint8_t *"))
        room = pointer(out, "uint8_t *")
        length = lib.fkv_fxp_encode(*args, pointer(parameters, "uint8_t *"), room)
        head = struct.pack("<BBHB", mode, rows, values, 0xFF)
        yield (
            head + parameters.tobytes() + out[:length].tobytes(),
            struct.pack("<BH", mode, values - 1) + bits.tobytes(),
        )
    plain = rng.integers(0, 256, 60).astype(np.uint8).tobytes()
    yield struct.pack("<BBHB", 0, 3, 20, 0xFF) + bytes(6) + plain, struct.pack("<BH", 0, 9) + plain


def prefix_stripes() -> Iterator[bytes]:
    """Inputs of prefix: stripes that are right, and rows."""
    rng = np.random.default_rng(6)
    bf16, fp16 = int(lib.FKV_STREAM_PREFIX_BF16), int(lib.FKV_STREAM_PREFIX_FP16)
    e4m3, e5m2 = int(lib.FKV_STREAM_PREFIX_E4M3), int(lib.FKV_STREAM_PREFIX_E5M2)
    shapes = [(bf16, 3, 8), (fp16, 4, 21), (bf16, 9, 64), (fp16, 2, 100), (e4m3, 9, 64)]
    for mode, rows, values in [*shapes, (e5m2, 3, 70)]:
        fxp_mode = lib.FKV_STREAM_FXP_BF16 if mode == bf16 else lib.FKV_STREAM_FXP_FP16
        bits = np.ascontiguousarray(vectors(rng, fxp_mode, rows, values))
        bits[:, ::3] |= 0x8000
        bits &= {e4m3: 0xBF80, e5m2: 0xFF00}.get(mode, 0xFFFF)
        starts = np.array([bits.ctypes.data + r * 2 * values for r in range(rows)], np.uint64)
        parameters, out = np.zeros(1 + values, np.uint8), np.zeros(rows * values * 4, np.uint8)
        args = (pointer(starts, "uint64_t *"), rows, 2 * values, mode)
        lib.fkv_prefix_choose(*args, pointer(parameters, "uint8_t *"))
        chosen, room = pointer(parameters, "uint8_t *"), pointer(out, "uint8_t *")
        length = lib.fkv_prefix_encode(*args, chosen, room)
        control = {bf16: 0, fp16: 1, e4m3: 8, e5m2: 9}[mode]
        head = struct.pack("<BHB", rows - 1, values - 1, 0xFF) + parameters.tobytes()
        yield bytes([2 | control]) + head + out[:length].tobytes()
        yield bytes([control]) + head + bits.tobytes()
        yield bytes([4 | control]) + head + bits.tobytes()


def halves_stripes() -> Iterator[bytes]:
    """Inputs of halves: stripes that are right, and rows."""
    rng = np.random.default_rng(7)
    first = int(lib.FKV_STREAM_FXP_FP32)
    for number, (rows, values) in enumerate([(3, 8), (4, 21), (2, 64), (5, 16), (9, 64), (2, 100)]):
        mode, element = first + number, 4 if number < 4 else 1
        bits = rng.integers(0, 256, (rows, values, element)).astype(np.uint8)
        bits[..., -1] = rng.integers(0x3C, 0x40, (rows, values))
        if number in (1, 3):
            bits[..., :2] = 0
        starts = np.array([bits[r].ctypes.data for r in range(rows)], np.uint64)
        bases = number < 2
        parameters = np.full(1 + (values + 1) // 2 if bases else 1 + values, 0x20, np.uint8)
        parameters[0] = 127 if element == 4 else 7
        out = np.zeros(rows * values * 8, np.uint8)
        chosen, room = pointer(parameters, "uint8_t *"), pointer(out, "uint8_t *")
        args = (pointer(starts, "uint64_t *"), rows, element * values, mode)
        length = lib.fkv_halves_encode(*args, chosen, room)
        head = struct.pack("<BHB", rows - 1, values - 1, 0xFF) + parameters.tobytes()
        yield bytes([number]) + head + out[:length].tobytes()
        yield bytes([8 | number]) + head + bits.tobytes()


def delta_stripes() -> Iterator[bytes]:
    """Inputs of delta: stripes that are right, and rows."""
    rng = np.random.default_rng(8)
    for number, (rows, size) in enumerate([(3, 8), (9, 13), (20, 64)]):
        bits = np.repeat(rng.integers(0, 256, (1, size)), rows, axis=0).astype(np.uint8)
        bits[rows // 2 :, number::5] += 1
        starts = np.array([row.ctypes.data for row in bits], np.uint64)
        out = np.zeros(rows * size * 2 + 8, np.uint8)
        room = pointer(out, "uint8_t *")
        length = lib.fkv_delta_encode(pointer(starts, "uint64_t *"), rows, size, room)
        head = struct.pack("<BHB", rows - 1, size - 1, 0xFF)
        yield b"\0" + head + out[:length].tobytes()
        yield b"\1" + head + bits.tobytes()


def chunks() -> Iterator[bytes]:
    """Inputs of zstd: chunks that are right, and bytes."""
    for number, content in enumerate((bytes(700), b"a key, a value; " * 40, bytes(range(256)) * 3)):
        source = np.frombuffer(content, np.uint8)
        for mode in (int(lib.FKV_CHUNK_ZSTD), int(lib.FKV_CHUNK_HALVES)):
            out = np.zeros(len(content), np.uint8)
            place, room = pointer(source, "uint8_t *"), pointer(out, "uint8_t *")
            length = lib.fkv_zstd_encode(mode, place, len(content), room, len(content))
            yield struct.pack("<BHB", mode, len(content), 0) + out[:length].tobytes()
        yield struct.pack("<BHB", 4 | number % 2, len(content), 0) + content


def bounded_stripes() -> Iterator[bytes]:
    """Inputs of bounded: stripes that are right, and rows."""
    rng = np.random.default_rng(9)
    first = int(lib.FKV_STREAM_CHANNELS_BF16)
    shapes = [(9, 8), (4, 21), (5, 16), (7, 64), (3, 30), (4, 9)]
    for kind, (rows, values) in enumerate(shapes):
        numbers = rng.normal(size=(rows, values)).astype(np.float32) * np.float32(3)
        numbers[1, 2] = np.inf
        bits = [numbers.view(np.uint32) >> 16, numbers.astype(np.float16), numbers][kind % 3]
        bits = np.ascontiguousarray(bits.astype(np.uint16) if kind % 3 == 0 else bits)
        step = bits.strides[0]
        starts = np.array([bits.ctypes.data + r * step for r in range(rows)], np.uint64)
        size = 4 + (2 if kind > 2 else 3) * values
        parameters, levels = np.zeros(size, np.uint8), np.zeros(rows, np.uint8)
        out = np.zeros(PAGE, np.uint8)
        chosen, steps = pointer(parameters, "uint8_t *"), pointer(levels, "uint8_t *")
        args = (pointer(starts, "uint64_t *"), rows, step, first + kind)
        lib.fkv_bounded_parameters_of(*args, -0.3, kind % 2, chosen, steps)
        length = lib.fkv_bounded_encode(*args, chosen, steps, 0, pointer(out, "uint8_t *"))
        head = struct.pack("<BHBB", rows - 1, values - 1, 0xFF, 0)
        yield bytes([8 | kind]) + head + parameters.tobytes() + out[:length].tobytes()
        yield bytes([kind | 16 * (kind % 4)]) + head + bits.tobytes()


def logs() -> Iterator[bytes]:
    """Control and log."""
    uuid = bytes([7, 7, 7]).ljust(16, b"\0")
    kills = np.zeros(3, KILL)
    kills["segment"], kills["page"], kills["sequence"] = 1, 5, [7, 8, 9]
    entries = [
        (lib.FKV_MANIFEST_BEGIN, uuid + struct.pack("<QQ", 3, 9)),
        (lib.FKV_MANIFEST_OPENED, segment_row(1, 2, b"u" * 16)),
        (lib.FKV_MANIFEST_NAMESPACE, b"d" * 32 + b'{"model":"m"}'),
        (lib.FKV_MANIFEST_KILL, kills.tobytes()),
        (lib.FKV_MANIFEST_RETIRED, retired_row(b"d" * 32, 11)),
        (lib.FKV_MANIFEST_FREED, segment_row(1, 2, b"")),
    ]
    log = b"".join(encode_entry(kind, data, at, uuid) for at, (kind, data) in enumerate(entries))
    yield b"\0" + log
    yield b"\1" + log
    yield b"\0" + log[:100] + bytes(24) + log[100:]
    yield b"\6" + struct.pack("<8I", 40, 9, 40, 9, 32, 4, 8, 1)
    yield b"\0" + encode_entry(9, b"", 0, uuid) * 3


def directories() -> Iterator[bytes]:
    """Control, segment pages, footer and sections."""
    for counts in ([], [1], [2, 3, 1]):
        rows = np.zeros(len(counts), DIR_RECORD)
        rows["sequence"] = np.arange(len(counts)) + 4
        rows["page"], rows["pages"] = np.arange(len(counts)) * 5 + 1, 5
        rows["header_pages"], rows["block_count"] = 1, counts
        rows["tokens"] = np.array(counts, np.uint32) * 16
        blocks = np.zeros(sum(counts), DIR_BLOCK)
        blocks["tokens"], blocks["digest"] = 16, np.arange(16 * len(blocks)).reshape(-1, 16)
        blocks["ordinal"] = np.concatenate([np.zeros(0, int), *map(np.arange, counts)])
        whole = directory.Directory(rows, blocks, [b"n" * 32, b"m" * 32], 9)
        uuid = bytes([9, 8, 7]).ljust(16, b"\0")
        body, page = directory.encode(whole, uuid, 5, 20, bloom=len(counts) > 1)
        used = page.rstrip(b"\0")
        for control in (0, 7):
            yield struct.pack("<BHH", control, 64, len(used)) + used + pages_of(body)


def blooms() -> Iterator[bytes]:
    """Length, stride, count, added; digests; the filter."""
    rng = np.random.default_rng(9)
    for length, stride, count in ((64, 0, 5), (31, 4, 3), (4096, 4, 200), (0, 0, 1)):
        digests = rng.integers(0, 256, (16 + stride) * count).astype(np.uint8).tobytes()
        yield struct.pack("<HBBB", length, stride, count, count // 2) + digests


def write(target: str, number: int, data: bytes) -> None:
    folder = HERE / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"real-{number:02d}").write_bytes(data)


def main() -> None:
    """Writes every file of the corpus to start from."""
    with tempfile.TemporaryDirectory() as folder:
        asked = 0
        for number, (record, segment) in enumerate(records(Path(folder))):
            header = int.from_bytes(record[12:14], "little") * PAGE
            write("header", number, b"\1" + pages_of(record[:header]))
            write("scan", number, b"\1" + pages_of(segment))
            for ask in asks(number):
                write("page", asked, ask + pages_of(record))
                asked += 1
    for number, (stripe, rows) in enumerate(stripes()):
        write("codec", number, stripe)
        write("roundtrip", number, rows)
    for target, made in (
        ("prefix", prefix_stripes),
        ("halves", halves_stripes),
        ("zstd", chunks),
        ("bounded", bounded_stripes),
        ("delta", delta_stripes),
        ("manifest", logs),
        ("directory", directories),
        ("bloom", blooms),
    ):
        for number, data in enumerate(made()):
            write(target, number, data)


if __name__ == "__main__":
    main()
