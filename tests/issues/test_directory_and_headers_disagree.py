"""A directory and the headers of its records, each with right checksums, say different things of a
block's tokens.

The memory of a read is made for what the directory says. Believing the header alone, a read wrote
behind it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_support import open_store, segment_file

from flashkv import BlockStatus, Identity, KVGeometry, directory
from flashkv.segments import decode_header

PAGE = 4096
TOKENS = 8


def change_tokens(path: Path, tokens: list[int]) -> None:
    """Gives the blocks of segment 0 other tokens, in a directory with right checksums."""
    data = bytearray(path.read_bytes())
    header = decode_header(bytes(data[:PAGE]))
    assert header is not None
    place = (header.segment_uuid, header.epoch)
    footer = directory.decode_footer(bytes(data[-PAGE:]), *place, len(data))
    assert footer is not None
    first, end = footer.span()
    rows = directory.decode(footer, bytes(data[first:end]), first)
    assert rows is not None
    blocks = rows.blocks.copy()
    blocks["tokens"] = tokens
    changed = directory.Directory(rows.records, blocks, rows.namespaces, rows.last_sequence)
    bloom = len(footer.sections) > 3
    body, page = directory.encode(changed, *place, first // PAGE, bloom=bloom)
    data[first : first + len(body)] = body
    data[-PAGE:] = page
    path.write_bytes(data)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("width", [16, 512])  # inline, and in pages of its own
def test_reads_stay_in_their_memory(store_path: Path, codec: str, width: int) -> None:
    geometry = KVGeometry.gqa(1, 1, width, "bfloat16")
    size = geometry.block_bytes(0, TOKENS)
    data = np.random.default_rng(3).integers(0, 256, (2, size)).astype(np.uint8)
    keys = [b"first", b"second"]
    with open_store(store_path, geometry, codec=codec) as store:
        namespace = store.namespace(Identity(model="m"))
        assert namespace.put(keys, data, tokens=TOKENS, parents=[b"", keys[0]]).all_ok
        store.flush()
        store.writer.seal()
    # One record of 8 + 8 tokens: by the new directory of 15 + 1.
    change_tokens(segment_file(store_path, 0), [2 * TOKENS - 1, 1])
    with open_store(store_path, None) as store:
        assert store.stats().recovery["sealed_segments"] == 1
        namespace = store.namespace(Identity(model="m"))
        room = geometry.block_bytes(0, 1)
        memory = np.full(size + room, 0xA5, np.uint8)
        result = namespace.get(keys[1:], memory[None, :room], tokens=1)
        assert (memory[room:] == 0xA5).all(), "written behind the destination"
        assert result.statuses[0] != BlockStatus.OK
        assert not namespace.contains(keys[1:])[0], "damage, once"
