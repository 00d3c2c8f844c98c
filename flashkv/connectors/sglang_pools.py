"""SGLang's host pools as memory of flashkv: pages of K and V, of MLA rows, or plain bytes.

Invariants
  - a page of a pool is one block; where it lies is told by the pool's own tensors and checked
    against the addresses that the pool gives for zero-copy transfers;
  - what one layout stored another one reads, through host indices or as a flat page, bit for bit:
    the geometry doesn't know of the layout;
  - a pool whose layout is not understood is stored as plain bytes of its flat pages, never guessed
    at; `reason` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.connectors.sglang_interface import (
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    torch,
)
from flashkv.dtypes import DType
from flashkv.errors import GeometryError
from flashkv.geometry import Group, GroupKind, KVGeometry, MemoryView, Plane, Role
from flashkv.memory import Regions

# Of each layout: the order of a page's axes, and which axis of the buffer counts pages once the
# axis of slots is cut into (page, token) where the layout has slots.
ORDERS: Final = {
    "layer_first": ("layer token head", 1),
    "page_first": ("token layer head", 0),
    "page_first_direct": ("layer token head", 0),
    "page_head": ("head token layer", 0),
}
SLOTS: Final = {"layer_first": 1, "page_first": 0}  # axis of slots
NO_PAGES: Final = (AttributeError, AssertionError, RuntimeError, TypeError, ValueError)
"""What pools raise where they don't have an interface for their layout."""

Finish = Callable[[NDArray[np.bool_]], None]


class UnknownLayout(Exception):  # noqa: N818  (an answer, not an error)
    """Why a pool's pages can't be described by axes."""


@dataclass(frozen=True, eq=False)
class PoolMemory:
    """A host pool, page by page.

    geometry    of this rank's part of a token.
    page_slots  entries of host_indices a page.
    tokens      tokens of a block: those of a page; 1 where pages are plain bytes.
    tensors     of each region, rows of pages along row_axis; empty where pages are plain bytes.
    flat        shape of a flat page of SGLang's generic interface, in the view's order.
    element     torch's type of flat pages.
    heads       KV heads that tensor parallelism divides; 0 where it doesn't.
    reason      why pages are plain bytes; "" where the page codec knows their vectors.
    """

    pool: Any
    geometry: KVGeometry
    view: MemoryView
    page_slots: int
    tokens: int
    tensors: tuple[Any, ...]
    row_axis: int
    flat: tuple[int, ...]
    element: Any
    heads: int
    reason: str

    def starts(self, host_indices: Any, count: int) -> NDArray[np.int64] | None:
        """First slot of each of `count` pages; None where the indices are not those of pages."""
        if host_indices is None or host_indices.numel() != count * self.page_slots:
            return None
        starts: NDArray[np.int64] = host_indices[:: self.page_slots].cpu().numpy()
        return None if self.tensors and (starts % self.page_slots).any() else starts

    def source(self, starts: NDArray[np.int64]) -> Any:
        """Memory of these pages, to be stored."""
        if self.tensors:
            return self._regions(starts)
        return [self.as_block(self.pool.get_data_page(int(start))) for start in starts]

    def destination(self, starts: NDArray[np.int64]) -> tuple[Any, Finish]:
        """Memory of these pages, to be read into; what to call with those that arrived."""
        if self.tensors:
            return self._regions(starts), _nothing
        pages = [self.new_page() for _ in starts]

        def finish(arrived: NDArray[np.bool_]) -> None:
            for row in np.flatnonzero(arrived):
                self.pool.set_from_flat_data_page(int(starts[row]), pages[row])

        return [self.as_block(page) for page in pages], finish

    def _regions(self, starts: NDArray[np.int64]) -> Regions:
        return Regions(self.tensors, starts // self.page_slots, self.row_axis)

    def new_page(self) -> Any:
        """A flat page of this pool, its content undefined. SGLang's own would be pinned memory,
        which takes longer to get than the page to be read.
        """
        page_bytes = self.geometry.block_bytes(0, self.tokens)
        return torch.empty(page_bytes, dtype=torch.uint8).view(self.element)

    def as_block(self, page: Any) -> Any:
        """A flat page in the shape of a block. Raises GeometryError where it isn't this pool's."""
        page_bytes = self.geometry.block_bytes(0, self.tokens)
        if not isinstance(page, torch.Tensor) or page.nbytes != page_bytes:
            raise GeometryError(
                "not a flat page of this pool",
                value=f"{getattr(page, 'nbytes', type(page).__name__)} bytes",
                limit=page_bytes,
            )
        if not self.tensors:
            return page.contiguous().view(torch.uint8).reshape(-1)
        if len(self.tensors) > 1:
            raise GeometryError("pools with K and V apart have no flat pages")
        if page.dtype != self.element:
            raise GeometryError(
                "a flat page of another dtype", value=page.dtype, limit=self.element
            )
        return page.reshape(self.flat)

    @property
    def form(self) -> str:
        """What decides over the order of plain bytes; "" where axes are known."""
        if not self.reason:
            return ""
        return f"{type(self.pool).__name__} {self.pool.layout} {getattr(self.pool, 'dtype', '')}"


def describe(pool: Any) -> PoolMemory:
    """The pool's memory. Raises UnknownLayout where it has none that pages can be read from."""
    if getattr(pool, "kv_buffer", "absent") is None:
        raise UnknownLayout("the pool has no memory of its own")
    try:
        return _by_axes(pool)
    except UnknownLayout as why:
        return _as_bytes(pool, str(why))


def _by_axes(pool: Any) -> PoolMemory:
    kind = type(pool)
    planes_of = _PLANES.get(kind)
    if planes_of is None:
        raise UnknownLayout(f"{kind.__name__} is no pool whose vectors are known")
    layout = str(pool.layout)
    if layout not in ORDERS:
        raise UnknownLayout(f"layout {layout}")
    if pool.page_size > limits.BLOCK_TOKENS_MAX:
        raise UnknownLayout(f"pages of more than {limits.BLOCK_TOKENS_MAX} tokens")
    if getattr(pool, "dcp_size", 1) != 1:
        raise UnknownLayout("pages shared out to decode context parallel ranks")
    order, row_axis = ORDERS[layout]
    tensors, planes, axes = planes_of(pool, order)
    row_axis += axes.startswith("plane")
    if layout in SLOTS:
        axis = SLOTS[layout] + axes.startswith("plane")
        tensors = tuple(tensor.unflatten(axis, (-1, pool.page_size)) for tensor in tensors)
    regions = ("plane",) if len(tensors) > 1 else ()
    memory = PoolMemory(
        pool=pool,
        geometry=KVGeometry((Group("kv", GroupKind.FULL, planes),)),
        view=MemoryView(axes, regions=regions, block_tokens=pool.page_size),
        page_slots=pool.page_size,
        tokens=pool.page_size,
        tensors=tensors,
        row_axis=row_axis,
        flat=tuple(n for axis, n in enumerate(tensors[0].shape) if axis != row_axis),
        element=tensors[0].dtype,
        heads=planes[0].heads if planes[0].role is Role.K else 0,
        reason="",
    )
    _check_addresses(memory)
    return memory


def _element(pool: Any) -> DType:
    try:
        return DType.parse(pool.dtype)
    except GeometryError:
        raise UnknownLayout(f"elements of type {pool.dtype}") from None


Described = tuple[tuple[Any, ...], tuple[Plane, ...], str]


def _kv(pool: Any, order: str) -> Described:
    """K and V of one tensor, the plane outermost."""
    element = _element(pool)
    vector_bytes = pool.head_dim * element.element_bytes
    planes = tuple(
        Plane(role, pool.layer_num, pool.head_num, vector_bytes, element)
        for role in (Role.K, Role.V)
    )
    return (pool.kv_buffer,), planes, f"plane {order}"


def _kv_apart(pool: Any, order: str) -> Described:
    """K and V in tensors of their own, of different widths."""
    element = _element(pool)
    planes = tuple(
        Plane(role, pool.layer_num, pool.head_num, width * element.element_bytes, element)
        for role, width in ((Role.K, pool.head_dim), (Role.V, pool.v_head_dim))
    )
    return (pool.k_buffer, pool.v_buffer), planes, f"{order} plane"


def _latent(pool: Any, order: str) -> Described:
    """MLA: the latent and the rotary key side by side in a row of one head."""
    element = _element(pool)
    widths = (pool.kv_lora_rank, pool.qk_rope_head_dim)
    if sum(widths) != pool.kv_cache_dim or pool.dsa_kv_cache_store_fp8:
        raise UnknownLayout("MLA rows that are packed")
    planes = tuple(
        Plane(role, pool.layer_num, 1, width * element.element_bytes, element)
        for role, width in zip((Role.LATENT, Role.ROPE), widths, strict=True)
    )
    return (pool.kv_buffer,), planes, f"{order} plane"


# Subclasses may keep something else in the same tensors: only these very classes are known.
_PLANES: Final[dict[type, Callable[[Any, str], Described]]] = {
    MHATokenToKVPoolHost: _kv,
    AsymmetricMHATokenToKVPoolHost: _kv_apart,
    MLATokenToKVPoolHost: _latent,
}


def _check_addresses(memory: PoolMemory) -> None:
    """Refuses a description that differs from what the pool says of its pages' addresses."""
    pool = memory.pool
    last = pool.size // pool.page_size - 1
    slots = torch.arange(last * pool.page_size, (last + 1) * pool.page_size)
    try:
        pointers, sizes = pool.get_page_buffer_meta(slots)
    except NO_PAGES as error:
        raise UnknownLayout(f"layout {pool.layout} without addresses: {error}") from None
    apart = len(memory.tensors) > 1
    planes = 1 if apart or not memory.view.order.startswith("plane") else 2
    layers = pool.layer_num if pool.layout == "layer_first" else 1
    expected = [
        _address(memory, tensor, last, plane, layer)
        for layer in range(layers)
        for plane in range(planes)
        for tensor in memory.tensors
    ]
    if pointers != expected or sum(sizes) != memory.geometry.block_bytes(0, memory.tokens):
        raise UnknownLayout(f"layout {pool.layout} whose pages lie elsewhere than its tensors say")


def _address(memory: PoolMemory, tensor: Any, row: int, plane: int, layer: int) -> int:
    """Of the first element of a plane and layer of a page."""
    names = [name for name in memory.view.order.split() if name not in memory.view.regions]
    strides = [n for axis, n in enumerate(tensor.stride()) if axis != memory.row_axis]
    offset = row * tensor.stride(memory.row_axis)
    for name, number in (("plane", plane), ("layer", layer)):
        if number:
            offset += number * strides[names.index(name)]
    address: int = tensor.data_ptr() + offset * tensor.element_size()
    return address


def _as_bytes(pool: Any, reason: str) -> PoolMemory:
    try:
        page = pool.get_data_page(0)
        page_bytes = int(page.nbytes)
    except NO_PAGES as error:
        raise UnknownLayout(f"{reason}, and no flat pages: {error}") from None
    if not 0 < page_bytes <= limits.VECTOR_BYTES_MAX:
        raise UnknownLayout(f"{reason}, and flat pages of {page_bytes} bytes")
    return PoolMemory(
        pool=pool,
        geometry=KVGeometry.opaque(page_bytes),
        view=MemoryView(),
        page_slots=int(getattr(pool, "logical_page_size", None) or pool.page_size),
        tokens=1,
        tensors=(),
        row_axis=0,
        flat=(page_bytes,),
        element=page.dtype,
        heads=0,
        reason=reason,
    )


def _nothing(_: NDArray[np.bool_]) -> None:
    pass
