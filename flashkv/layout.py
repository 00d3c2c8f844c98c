"""From the caller's memory layout to fkv_view: where each (plane, layer) begins, and its strides.

Invariants
  - a NativeView keeps alive all that its fkv_view points to;
  - views are cached by value: a batch in a layout that was seen before costs a look-up;
  - a selection of layers or heads describes memory that holds only those, in the order given; what
    is not selected has region -1 or slot -1 and is never read or written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.arrays import ArrayInfo, contiguous
from flashkv.errors import MemoryViewError
from flashkv.geometry import AXES, DType, Group, KVGeometry, MemoryView, Plane
from flashkv.native import dtype_of, ffi, lib, pointer

JOINED: Final = -(1 << 62)
"""Plane stride of memory that joins the planes' vectors in its last dimension."""


class Selection(NamedTuple):
    """Layers and heads that the memory holds, in its order; None: all of them."""

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None


ALL: Final = Selection()


class Strides(NamedTuple):
    """Byte strides of one region; those of axes of size 1, or split into regions, don't matter.

    element: from one element of a vector to the next; 0: side by side.
    """

    layer: int
    plane: int
    head: int
    token: int
    element: int = 0


@dataclass(frozen=True, eq=False)
class NativeView:
    """An fkv_view and what it points to.

    pointer       fkv_view *.
    region_count  addresses a block: its regions, or those of its pages, page by page.
    region_bytes  uint64[region_count]: length of each where it is contiguous, else 0.
    block_tokens  tokens that a block has room for.
    group         the planes, layers and heads that the memory holds, after selection.
    """

    pointer: Any
    region_count: int
    region_bytes: NDArray[np.uint64]
    block_tokens: int
    group: Group
    entries: NDArray[Any]
    head_slots: NDArray[np.int32] | None


def selected_group(group: Group, selection: Selection) -> Group:
    """The group with the selected layers and heads only. Raises MemoryViewError."""
    planes = group.planes
    for name, chosen in (("layers", selection.layers), ("heads", selection.heads)):
        if chosen is None:
            continue
        sizes = {getattr(plane, name) for plane in planes}
        if len(sizes) > 1:
            raise MemoryViewError(
                f"{name} can't be selected where planes differ in them", value=sorted(sizes)
            )
        size = sizes.pop()
        if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(size)):
            raise MemoryViewError(
                f"{name} must be different numbers, at least one",
                value=list(chosen),
                limit=f"0 to {size - 1}",
            )
        count = len(chosen)
        if name == "layers":
            planes = tuple(replace(plane, layers=count) for plane in planes)
        else:
            planes = tuple(replace(plane, heads=count) for plane in planes)
    return group if planes is group.planes else replace(group, planes=planes)


@lru_cache(maxsize=512)
def packed_view(
    geometry: KVGeometry,
    group: int,
    view: MemoryView,
    block_tokens: int,
    selection: Selection = ALL,
) -> NativeView:
    """View of blocks, or their pages, that are contiguous, region by region.

    block_tokens: tokens that a block has room for.
    """
    _check_block_tokens(block_tokens)
    chosen = selected_group(geometry.groups[group], selection)
    native = KVGeometry((chosen,)).native(0)
    order = _order_row(view, view.page_tokens or block_tokens)
    entries = np.zeros(
        sum(plane.layers for plane in chosen.planes), dtype_of("fkv_place_in_memory")
    )
    region_bytes = np.zeros(len(entries), np.uint64)
    count = lib.fkv_view_fill(
        native,
        order,
        view.region_axes,
        pointer(entries, "fkv_place_in_memory *"),
        pointer(region_bytes, "uint64_t *"),
    )
    if count < 0:
        raise MemoryViewError(
            "planes with different numbers of heads can't lie inside the head axis",
            value=repr(view.order),
            advice="Put plane before head in the order, or split planes into regions",
        )
    return _finish(
        geometry.groups[group],
        chosen,
        view,
        block_tokens=block_tokens,
        selection=selection,
        entries=entries,
        region_bytes=region_bytes[:count],
    )


@lru_cache(maxsize=512)
def strided_view(
    geometry: KVGeometry,
    group: int,
    view: MemoryView,
    block_tokens: int,
    *,
    strides: tuple[Strides, ...],
    selection: Selection = ALL,
) -> NativeView:
    """View of blocks, or their pages, with byte strides: one Strides a region (region_places)."""
    _check_block_tokens(block_tokens)
    chosen = selected_group(geometry.groups[group], selection)
    entries = np.zeros(
        sum(plane.layers for plane in chosen.planes), dtype_of("fkv_place_in_memory")
    )
    first = np.cumsum([0, *(plane.layers for plane in chosen.planes)])
    for region, (places, stride) in enumerate(
        zip(region_places(chosen, view), strides, strict=True)
    ):
        joined = 0
        for plane, layers in places:
            layer = np.arange(layers.start, layers.stop)
            rows = entries[first[plane] + layer]
            rows["region"] = region
            rows["head_stride"] = stride.head
            rows["token_stride"] = stride.token
            rows["element_stride"] = stride.element
            rows["offset"] = 0 if "layer" in view.regions else layer * stride.layer
            if "plane" not in view.regions:
                rows["offset"] += joined if stride.plane == JOINED else plane * stride.plane
            joined += chosen.planes[plane].vector_bytes
            entries[first[plane] + layer] = rows
    region_bytes = np.zeros(len(strides), np.uint64)
    return _finish(
        geometry.groups[group],
        chosen,
        view,
        block_tokens=block_tokens,
        selection=selection,
        entries=entries,
        region_bytes=region_bytes,
    )


def region_places(group: Group, view: MemoryView) -> list[list[tuple[int, range]]]:
    """Of each region, in their order: the planes that it holds, each with its layers."""
    planes = list(enumerate(group.planes))
    depth = max(plane.layers for plane in group.planes)
    if view.regions == ():
        return [[(number, range(plane.layers)) for number, plane in planes]]
    if view.regions == ("plane",):
        return [[(number, range(plane.layers))] for number, plane in planes]
    single = [[(n, range(i, i + 1)) for n, p in planes if i < p.layers] for i in range(depth)]
    if view.regions == ("layer",):
        return single
    if view.regions == ("layer", "plane"):
        return [[place] for places in single for place in places]
    return [[(n, range(i, i + 1))] for n, p in planes for i in range(p.layers)]


def _finish(
    whole: Group,
    chosen: Group,
    view: MemoryView,
    *,
    block_tokens: int,
    selection: Selection,
    entries: NDArray[Any],
    region_bytes: NDArray[np.uint64],
) -> NativeView:
    head_slots = None
    if selection.layers is not None:
        depth, planes = whole.planes[0].layers, len(whole.planes)
        spread = np.zeros((planes, depth), entries.dtype)
        spread["region"] = -1
        spread[:, list(selection.layers)] = entries.reshape(planes, -1)
        entries = spread.reshape(-1)
    if selection.heads is not None:
        head_slots = np.full(whole.planes[0].heads, -1, np.int32)
        head_slots[list(selection.heads)] = np.arange(len(selection.heads))
    native = ffi.new("fkv_view *")
    native.page_tokens = view.page_tokens or 0
    native.page_regions = len(region_bytes)
    region_bytes = np.tile(region_bytes, view.pages)
    native.region_count = len(region_bytes)
    native.entry_count = len(entries)
    native.entries = pointer(entries, "fkv_place_in_memory *")
    native.head_slots = pointer(head_slots, "int32_t *")
    native.order = _order_row(view, block_tokens)[0]
    return NativeView(
        native, len(region_bytes), region_bytes, block_tokens, chosen, entries, head_slots
    )


def _order_row(view: MemoryView, block_tokens: int) -> Any:
    order = ffi.new("fkv_order_row *")
    order.axes = list(view.axes)
    order.block_tokens = block_tokens
    return order


def _check_block_tokens(block_tokens: int) -> None:
    if not 1 <= block_tokens <= limits.BLOCK_TOKENS_MAX:
        raise MemoryViewError(
            "a block's token count is out of range",
            value=block_tokens,
            limit=f"1 to {limits.BLOCK_TOKENS_MAX}",
        )


def axis_sizes(group: Group, view: MemoryView, region: int, block_tokens: int) -> dict[str, int]:
    """Sizes of a region's axes, by name; its planes must be alike. Raises MemoryViewError."""
    places = region_places(group, view)[region]
    planes = [group.planes[number] for number, _ in places]
    if len({(len(layers), group.planes[n].heads) for n, layers in places}) > 1:
        raise MemoryViewError(
            "planes of different layers or heads have no common shape",
            advice="Split planes into regions, or give contiguous memory as bytes",
        )
    sizes = (len(places[0][1]), len(planes), planes[0].heads, block_tokens)
    return {name: size for name, size in zip(AXES, sizes, strict=True) if name not in view.regions}


@lru_cache(maxsize=512)
def view_regions(geometry: KVGeometry, group: int, view: MemoryView, selection: Selection) -> int:
    """Regions of a block, or of a page of it. Raises MemoryViewError."""
    count = len(region_places(selected_group(geometry.groups[group], selection), view))
    if count * view.pages > limits.REGIONS_MAX:
        raise MemoryViewError(
            "the view splits a block into too many regions",
            value=count * view.pages,
            limit=limits.REGIONS_MAX,
        )
    return count


@lru_cache(maxsize=512)
def opaque_or_packed_view(
    geometry: KVGeometry,
    group: int,
    view: MemoryView,
    block_tokens: int | None,
    selection: Selection,
) -> NativeView:
    """packed_view of bare addresses; opaque blocks have one token unless told otherwise."""
    planes = geometry.groups[group].planes
    if block_tokens is None and any(plane.dtype is not DType.OPAQUE for plane in planes):
        raise MemoryViewError(
            "bare addresses don't say how many tokens a block has room for",
            advice="Give MemoryView(block_tokens=...)",
        )
    return packed_view(geometry, group, view, block_tokens or 1, selection)


@lru_cache(maxsize=512)
def view_of_arrays(
    geometry: KVGeometry,
    group: int,
    view: MemoryView,
    *,
    infos: tuple[ArrayInfo, ...],
    block_tokens: int | None,
    selection: Selection,
) -> NativeView:
    """View of blocks in arrays, one ArrayInfo a region (of a row: without the axes of rows).

    block_tokens: None where the shapes tell. Raises MemoryViewError where they don't fit.
    """
    chosen = selected_group(geometry.groups[group], selection)
    layouts = []
    room = view.page_tokens or block_tokens
    for region, info in enumerate(infos):
        room, strides = _region_layout(chosen, view, region, info, room)
        layouts.append(strides)
    assert room is not None
    block_tokens = view.block_tokens if view.page_tokens else room
    assert block_tokens is not None
    shaped = tuple(strides for strides in layouts if strides is not None)
    if not shaped:
        return packed_view(geometry, group, view, block_tokens, selection)
    if len(shaped) < len(layouts):
        raise MemoryViewError("regions must be all flat or all shaped")
    return strided_view(geometry, group, view, block_tokens, strides=shaped, selection=selection)


def _region_layout(
    group: Group, view: MemoryView, region: int, info: ArrayInfo, room: int | None
) -> tuple[int, Strides | None]:
    """What an array without its row axis says of a region; `room` in tokens: where it is known.

    Returns (tokens that a block has room for, strides, or None where the block is flat).
    Raises MemoryViewError.
    """
    places = region_places(group, view)[region]
    planes = [group.planes[number] for number, _ in places]
    dtypes = {plane.dtype for plane in planes}
    token_bytes = sum(
        len(layers) * plane.heads * plane.vector_bytes
        for plane, (_, layers) in zip(planes, places, strict=True)
    )
    opaque = dtypes == {DType.OPAQUE}
    fits = all(
        dtype.accepts(info.dtype) and (opaque or info.item_bytes == dtype.element_bytes)
        for dtype in dtypes
    )
    flat = opaque or info.flat or (len(info.shape) == 1 and (info.dtype == "uint8" or fits))
    if not flat and not fits:
        raise MemoryViewError(
            "memory has another dtype than the geometry",
            value=info.describe(),
            limit=" and ".join(sorted(dtype.value for dtype in dtypes)),
        )
    room = room or (1 if opaque else max(1, info.nbytes // token_bytes))
    if info.nbytes != token_bytes * room:
        raise _shape_error(group, view, region, info)
    if flat:
        if not contiguous(info.shape, info.strides, info.item_bytes):
            raise MemoryViewError("a flat block must be contiguous", value=info.strides)
        return room, None
    strides = _match_axes(group, view, region, info, room)
    if strides is None:
        raise _shape_error(group, view, region, info)
    return room, strides


def _shape_error(group: Group, view: MemoryView, region: int, info: ArrayInfo) -> MemoryViewError:
    try:
        sizes = axis_sizes(group, view, region, 0)
        names = [name for name in view.order.split() if name in sizes]
        axes = [f"{name} {sizes[name]}" if name != "token" else "token" for name in names]
        elements = group.planes[region_places(group, view)[region][0][0]].elements
        shape = f"shape [{', '.join([*axes, f'dim {elements}'])}]"
    except MemoryViewError:
        shape = "flat"
    return MemoryViewError(
        f"a block{f' in region {region}' if view.regions else ''} doesn't fit the geometry and the"
        f" order '{view.order}'",
        value=f"{info.describe()}, {info.nbytes} bytes",
        limit=shape,
    )


def _check_element_stride(planes: list[Plane], stride: int, *, joined: bool) -> None:
    """Raises MemoryViewError where elements of vectors may not lie so far apart."""
    if joined or any(plane.dtype is DType.OPAQUE for plane in planes):
        raise MemoryViewError(
            "the innermost dimension must be contiguous where it joins planes or is opaque",
            value=f"stride of {stride} bytes",
        )
    if not 0 < stride < 1 << 32:
        raise MemoryViewError(
            "elements of a vector lie too far apart, or backwards",
            value=f"stride of {stride} bytes",
            limit="1 to 4294967295 bytes",
        )


def _match_axes(
    group: Group, view: MemoryView, region: int, info: ArrayInfo, room: int
) -> Strides | None:
    """Strides of the axes if the shape is theirs, leaving out axes of size 1; else None."""
    sizes = axis_sizes(group, view, region, room)
    planes = [group.planes[number] for number, _ in region_places(group, view)[region]]
    axes = [(name, sizes[name]) for name in view.order.split() if name in sizes]
    forms = []
    if len({plane.elements for plane in planes}) == 1:
        forms.append([*axes, ("dim", planes[0].elements)])
    if axes[-1][0] == "plane":
        forms.append([*axes[:-1], ("dim", sum(plane.elements for plane in planes))])
    actual = [(n, s) for n, s in zip(info.shape, info.strides, strict=True) if n != 1]
    for form in forms:
        wanted = [(name, size) for name, size in form if size != 1]
        if [size for _, size in wanted] != [size for size, _ in actual]:
            continue
        strides = {name: stride for (name, _), (_, stride) in zip(wanted, actual, strict=True)}
        joined = "plane" in sizes and not any(name == "plane" for name, _ in form)
        found = {name: strides.get(name, 0) for name in AXES}
        element = strides.get("dim", info.item_bytes)
        if element != info.item_bytes:
            _check_element_stride(planes, element, joined=joined)
            found["element"] = element
        if joined:
            found["plane"] = JOINED
        return Strides(**found)
    return None
