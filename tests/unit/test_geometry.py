"""Geometries: constructors, validation, canonical JSON, slices, native form; orders of views."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashkv import limits
from flashkv.errors import GeometryError, MemoryViewError
from flashkv.geometry import DType, Group, GroupKind, KVGeometry, MemoryView, Plane, Role
from flashkv.identity import Shard
from flashkv.native import lib

planes = st.builds(
    Plane,
    role=st.sampled_from(Role),
    layers=st.integers(1, 80),
    heads=st.integers(1, 64),
    vector_bytes=st.integers(1, 64).map(lambda n: 4 * n),
    dtype=st.sampled_from(DType),
)
groups = st.builds(
    lambda name, planes, kind: Group(
        name,
        kind,
        tuple(planes),
        window=128 if kind in (GroupKind.SLIDING, GroupKind.CHUNKED) else 0,
    ),
    name=st.text("abcxyz-_é", min_size=1, max_size=8),
    planes=st.lists(planes, min_size=1, max_size=4),
    kind=st.sampled_from(GroupKind),
)
geometries = st.lists(groups, min_size=1, max_size=4, unique_by=lambda group: group.name).map(
    lambda members: KVGeometry(tuple(members))
)


@given(geometries)
def test_json_round_trip_is_stable(geometry: KVGeometry) -> None:
    text = geometry.to_json()
    again = KVGeometry.from_json(text)
    assert again == geometry
    assert hash(again) == hash(geometry)
    assert again.to_json() == text
    assert again.digest() == geometry.digest()
    text.decode("ascii")


@given(geometries, st.integers(1, 1024))
def test_native_form(geometry: KVGeometry, tokens: int) -> None:
    for number, group in enumerate(geometry.groups):
        native = geometry.native(number)
        assert native.plane_count == len(group.planes)
        assert native.group == number
        assert lib.fkv_block_bytes(native, tokens) == geometry.block_bytes(group.name, tokens)


def test_common_geometries() -> None:
    gqa = KVGeometry.gqa(layers=3, kv_heads=2, head_dim=64, dtype="bf16")
    assert gqa.token_bytes() == 3 * 2 * 64 * 2 * 2
    assert [plane.role for plane in gqa.groups[0].planes] == [Role.K, Role.V]
    mla = KVGeometry.mla(layers=4, latent_dim=512, rope_dim=64, dtype=np.float16)
    assert mla.token_bytes() == 4 * (512 + 64) * 2
    opaque = KVGeometry.opaque(12345)
    assert opaque.block_bytes(0, 1) == 12345


def test_types_of_one_size_differ() -> None:
    kinds = [KVGeometry.gqa(2, 2, 64, dtype) for dtype in ("bfloat16", "float16")]
    kinds += [KVGeometry.gqa(2, 2, 128, dtype) for dtype in ("int8", "float8_e4m3fn", "uint8")]
    assert len({geometry.digest() for geometry in kinds}) == len(kinds)


@pytest.mark.parametrize("name", ["bf16", "torch.bfloat16", "bfloat16"])
def test_dtype_names(name: str) -> None:
    assert DType.parse(name) is DType.BFLOAT16
    assert DType.parse(np.dtype(np.float32)) is DType.FLOAT32
    assert DType.BFLOAT16.accepts("uint16")
    assert not DType.FLOAT16.accepts("uint16")
    assert not DType.FLOAT16.accepts("bfloat16")


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVGeometry.gqa(0, 2, 64),
        lambda: KVGeometry.gqa(limits.LAYERS_MAX + 1, 2, 64),
        lambda: KVGeometry.gqa(2, limits.HEADS_MAX + 1, 64),
        lambda: KVGeometry.gqa(2, 2, 64, "float12"),
        lambda: KVGeometry.gqa(2, 2.0, 64),  # type: ignore[arg-type]
        lambda: KVGeometry.opaque(0),
        lambda: KVGeometry.opaque(limits.VECTOR_BYTES_MAX + 1),
        lambda: KVGeometry(()),
        lambda: Plane(Role.K, 1, 1, 3, DType.FLOAT16),
        lambda: Plane("query", 1, 1, 4, DType.FLOAT16),  # type: ignore[arg-type]
        lambda: Group("", GroupKind.FULL, (Plane(Role.K, 1, 1, 4, DType.FLOAT16),)),
        lambda: Group("g", GroupKind.SLIDING, (Plane(Role.K, 1, 1, 4, DType.FLOAT16),)),
        lambda: Group("g", GroupKind.FULL, ()),
        lambda: Group("g", GroupKind.FULL, (Plane(Role.K, 1, 1, 4, DType.FLOAT16),) * 9),
        lambda: KVGeometry(KVGeometry.gqa(1, 1, 2).groups * 2),
    ],
)
def test_impossible_geometries_are_refused(make: object) -> None:
    with pytest.raises(GeometryError):
        make()  # type: ignore[operator]


def test_a_group_has_no_more_streams_than_the_data_plane_takes() -> None:
    layers, heads = limits.LAYERS_MAX, limits.HEADS_MAX
    most = Plane(Role.K, layers, heads, 4, DType.FLOAT16)
    assert layers * heads == limits.GROUP_STREAMS_MAX
    group = Group("kv", GroupKind.FULL, (most,))
    assert lib.fkv_block_bytes(KVGeometry((group,)).native(), 1) == group.token_bytes
    one = Plane(Role.V, 1, 1, 4, DType.FLOAT16)
    with pytest.raises(GeometryError, match=f"got {layers * heads + 1}.*{1 << 20}"):
        Group("kv", GroupKind.FULL, (most, one))
    assert layers * limits.PLANES_MAX <= 0xFFFF, "(plane, layer) entries would need a check too"


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b'{"groups":[{"name":"kv"}]}', b'{"groups":7}', b"\xff\xff",
     b'{"groups":[{"name":"kv","kind":"full","window":0,"planes":[{"odd":1}]}]}'],
)  # fmt: skip
def test_wrong_json_is_refused(text: bytes) -> None:
    with pytest.raises(GeometryError):
        KVGeometry.from_json(text)


def test_slices() -> None:
    geometry = KVGeometry.gqa(8, 4, 64)
    part = geometry.slice(Shard(layers=(2, 5), heads=(0, 2)))
    assert {(plane.layers, plane.heads) for plane in part.groups[0].planes} == {(3, 2)}
    assert geometry.slice(None) is geometry
    assert geometry.slice(Shard(context=(0, 2))) is geometry
    latent = KVGeometry.mla(8, 512, 64).slice(Shard(heads=(0, 1)))
    assert latent == KVGeometry.mla(8, 512, 64)  # latents have no heads to cut
    with pytest.raises(GeometryError, match="layers"):
        geometry.slice(Shard(layers=(4, 9)))


def test_group_index() -> None:
    geometry = KVGeometry.gqa(1, 1, 4)
    assert geometry.group_index("kv") == geometry.group_index(0) == 0
    for wrong in ("other", 1, -1, True):
        with pytest.raises(GeometryError):
            geometry.group_index(wrong)


def test_view_orders() -> None:
    view = MemoryView("layer plane token head", regions=("plane",))
    assert view.order == "plane layer token head"
    assert view.axes == (
        lib.FKV_AXIS_PLANE,
        lib.FKV_AXIS_LAYER,
        lib.FKV_AXIS_TOKEN,
        lib.FKV_AXIS_HEAD,
    )
    assert view.region_axes == 1 << lib.FKV_AXIS_PLANE
    assert MemoryView(regions=("plane", "layer")) == MemoryView(regions=("layer", "plane"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"order": "layer plane head"},
        {"order": "layer plane head head"},
        {"order": "layer plane head dim"},
        {"regions": ("head",)},
        {"regions": ("plane", "plane")},
        {"block_tokens": 0},
        {"block_tokens": limits.BLOCK_TOKENS_MAX + 1},
    ],
)
def test_impossible_views_are_refused(arguments: dict) -> None:
    with pytest.raises(MemoryViewError):
        MemoryView(**arguments)
