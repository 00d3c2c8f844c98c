"""fkv_view_fill: orders, regions and geometries that don't go together are refused; the rest is
checked against the definition, axis by axis.
"""

from __future__ import annotations

import errno
import itertools
from typing import Any

import numpy as np
import pytest

from flashkv.native import dtype_of, ffi, lib, pointer

LAYER, PLANE, HEAD, TOKEN = (
    *(lib.FKV_AXIS_LAYER, lib.FKV_AXIS_PLANE),
    *(lib.FKV_AXIS_HEAD, lib.FKV_AXIS_TOKEN),
)
AXES = (LAYER, PLANE, HEAD, TOKEN)
PLACE = dtype_of("fkv_place_in_memory")


def geometry(*planes: tuple[int, int, int]) -> Any:
    """planes: (layers, heads, vector_bytes)."""
    made = ffi.new("fkv_geometry *")
    made.plane_count = len(planes)
    for row, (layers, heads, size) in zip(made.planes, planes, strict=False):
        row.layers, row.heads, row.vector_bytes = layers, heads, size
    return made


def fill(
    made: Any, axes: tuple[int, ...], regions: int = 0, tokens: int = 3
) -> tuple[int, np.ndarray, np.ndarray]:
    """(status or region count, entries, region bytes)"""
    order = ffi.new("fkv_order_row *")
    order.axes = list(axes)
    order.block_tokens = tokens
    entries = np.zeros(sum(row.layers for row in made.planes[0 : made.plane_count]), PLACE)
    sizes = np.zeros(len(entries), np.uint64)
    status = lib.fkv_view_fill(
        made,
        order,
        regions,
        pointer(entries, "fkv_place_in_memory *"),
        pointer(sizes, "uint64_t *"),
    )
    return status, entries, sizes


@pytest.mark.parametrize(
    "axes", [(0, 1, 2, 4), (0, 0, 1, 2), (3, 3, 3, 3), (255, 1, 2, 3), (0, 1, 1, 3)]
)
def test_no_order_of_axes(axes: tuple[int, ...]) -> None:
    assert fill(geometry((2, 2, 8)), axes)[0] == -errno.EINVAL


@pytest.mark.parametrize(
    ("axes", "regions"),
    [
        (AXES, 1 << HEAD),
        (AXES, 1 << TOKEN | 1 << LAYER),
        (AXES, 1 << 9),
        (AXES, 1 << PLANE),  # not outermost
        ((LAYER, HEAD, PLANE, TOKEN), 1 << PLANE | 1 << LAYER),
    ],
)
def test_no_regions(axes: tuple[int, ...], regions: int) -> None:
    assert fill(geometry((2, 2, 8), (2, 2, 8)), axes, regions)[0] == -errno.EINVAL


def huge(layers: int, heads: int, size: int, count: int = 1) -> Any:
    made = geometry((1, 1, 1))
    made.plane_count = count
    for row in made.planes[0 : min(count, 8)]:
        row.layers, row.heads, row.vector_bytes = layers, heads, size
    return made


@pytest.mark.parametrize(
    ("made", "tokens"),
    [
        (huge(1, 1, 8, 0), 3),
        (huge(1, 1, 8, 9), 3),
        (huge(0, 1, 8), 3),
        (huge(1, 0, 8), 3),
        (huge(1, 1, 0), 3),
        (huge(1, 1, 8), 0),
        (huge((1 << 32) - 1, (1 << 32) - 1, (1 << 32) - 1), 1),
        (huge((1 << 32) - 1, (1 << 30), 2), (1 << 32) - 1),
        (huge((1 << 31), (1 << 31), 2), 1),
        (huge((1 << 31), (1 << 30), 3, 8), 1),
    ],
)
def test_no_geometry(made: Any, tokens: int) -> None:
    order = ffi.new("fkv_order_row *", {"axes": list(AXES), "block_tokens": tokens})
    assert lib.fkv_view_fill(made, order, 0, NULL, NULL) == -errno.EINVAL


NULL = ffi.NULL


def test_heads_outside_planes_of_unlike_heads() -> None:
    made = geometry((2, 2, 8), (2, 3, 8))
    assert fill(made, (LAYER, HEAD, PLANE, TOKEN))[0] == -errno.EINVAL
    assert fill(made, (LAYER, PLANE, HEAD, TOKEN))[0] == 1


def expected(
    planes: list[tuple[int, int, int]], axes: tuple[int, ...], regions: int, tokens: int
) -> tuple[dict[tuple[int, int, int, int], tuple[int, int]], list[int]]:
    """(region, offset) of every vector (plane, layer, head, token), by walking in order; sizes."""
    vectors = [
        (p, layer, head, token)
        for p, (layers, heads, _) in enumerate(planes)
        for layer in range(layers)
        for head in range(heads)
        for token in range(tokens)
    ]
    names = {PLANE: 0, LAYER: 1, HEAD: 2, TOKEN: 3}
    split = [axis for axis in axes if regions >> axis & 1]
    rest = [axis for axis in axes if not regions >> axis & 1]
    order = sorted(vectors, key=lambda v: tuple(v[names[axis]] for axis in axes))
    sizes: list[int] = []
    numbers: dict[tuple[int, ...], int] = {}
    places = {}
    for vector in order:
        key = tuple(vector[names[axis]] for axis in split)
        region = numbers.setdefault(key, len(numbers))
        if region == len(sizes):
            sizes.append(0)
        places[vector] = (region, sizes[region])
        sizes[region] += planes[vector[0]][2]
    assert rest
    return places, sizes


GEOMETRIES = [
    [(2, 2, 8), (2, 2, 8)],
    [(3, 2, 8), (1, 2, 24)],
    [(1, 2, 8), (3, 2, 4), (2, 2, 16)],
    [(2, 1, 5)],
]


@pytest.mark.parametrize("planes", GEOMETRIES)
def test_every_order_and_split(planes: list[tuple[int, int, int]]) -> None:
    taken = 0
    for axes in itertools.permutations(AXES):
        for regions in (0, 1 << LAYER, 1 << PLANE, 1 << LAYER | 1 << PLANE):
            count, entries, sizes = fill(geometry(*planes), axes, regions)
            if count < 0:
                continue
            places, wanted = expected(planes, axes, regions, 3)
            assert count == len(wanted)
            assert sizes[:count].tolist() == wanted
            first = np.cumsum([0, *(layers for layers, _, _ in planes)])
            for (p, layer, head, token), (region, offset) in places.items():
                entry = entries[first[p] + layer]
                at = entry["offset"] + head * entry["head_stride"] + token * entry["token_stride"]
                assert (entry["region"], at) == (region, offset), (axes, regions, p, layer)
            taken += 1
    assert taken >= 24 + 6
