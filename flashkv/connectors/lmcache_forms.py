"""What LMCache's memory objects hold, as a geometry and a view: one Form for a backend's life.

Invariants
  - a form is exact: an object whose format, shapes or dtypes are not those of its token count is
    not of the form, and is neither stored nor read into;
  - where heads and dimensions are known the per-head page codec applies; where not, blocks are
    opaque and `reason` says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmcache.v1.memory_management import MemoryFormat

from flashkv import limits
from flashkv.errors import GeometryError, OptionsError
from flashkv.geometry import DType, Group, GroupKind, KVGeometry, MemoryView, Plane, Role


@dataclass(frozen=True)
class Form:
    """How LMCache lays out a chunk.

    token_axis  axis of each shape that counts tokens.
    whole       the shapes of a full chunk; dtypes: one each.
    order       of the axes in memory, as in MemoryView.
    reason      why blocks are opaque; "" where they aren't.
    """

    geometry: KVGeometry
    order: str
    format: Any
    token_axis: int
    whole: tuple[Any, ...]
    dtypes: tuple[Any, ...]
    reason: str = ""

    def shapes(self, tokens: int) -> list[Any]:
        """Shapes of a chunk of so many tokens."""
        shapes = []
        for shape in self.whole:
            sizes = list(shape)
            sizes[self.token_axis] = tokens
            shapes.append(type(shape)(sizes))
        return shapes

    def tokens_of(self, memory_object: Any) -> int:
        """Tokens of an object of this form; 0: it is of another form."""
        metadata = memory_object.metadata
        shapes, dtypes = memory_object.get_shapes(), memory_object.get_dtypes()
        if metadata.fmt is not self.format or tuple(dtypes) != self.dtypes or not shapes:
            return 0
        tokens = int(shapes[0][self.token_axis]) if len(shapes[0]) > self.token_axis else 0
        fits = 0 < tokens <= limits.BLOCK_TOKENS_MAX and list(shapes) == self.shapes(tokens)
        whole = self.geometry.block_bytes(0, tokens) if fits else -1
        return tokens if memory_object.get_size() == whole else 0

    def view(self, tokens: int) -> MemoryView:
        return MemoryView(self.order, block_tokens=tokens)


def form_of(config: Any, metadata: Any) -> Form:
    """The form that this configuration makes LMCache use. Raises OptionsError."""
    chunk = int(metadata.chunk_size)
    if not 0 < chunk <= limits.BLOCK_TOKENS_MAX:
        raise OptionsError(
            "LMCache's chunk_size is too large for flashkv",
            value=chunk,
            limit=limits.BLOCK_TOKENS_MAX,
        )
    if getattr(config, "use_layerwise", False):
        return _layerwise(config, metadata, chunk)
    shapes, dtypes = tuple(metadata.get_shapes(chunk)), tuple(metadata.get_dtypes())
    mla = bool(metadata.use_mla)
    kind = MemoryFormat.KV_MLA_FMT if mla else MemoryFormat.KV_2LTD
    if len(shapes) > 1:
        return _opaque(kind, shapes, dtypes, "layers of different shape or dtype in one object")
    planes, layers, _, width = map(int, shapes[0])
    if planes != (1 if mla else 2):
        return _opaque(kind, shapes, dtypes, f"{planes} planes where {1 if mla else 2} are known")
    heads, dimension = (1, width) if mla else _heads(metadata, width)
    try:
        geometry = _geometry(layers, heads, dimension, dtypes[0], joined=mla)
    except GeometryError as error:
        return _opaque(kind, shapes, dtypes, str(error))
    return Form(geometry, "plane layer token head", kind, 2, shapes, dtypes)


def _layerwise(config: Any, metadata: Any, chunk: int) -> Form:
    """A key a layer and chunk: K and V of one layer."""
    blending = bool(getattr(config, "enable_blending", False))
    kind = MemoryFormat.KV_2TD if blending else MemoryFormat.KV_T2D
    _, planes, _, heads, dimension = map(int, metadata.kv_shape)
    width = heads * dimension
    size = type(metadata.get_shapes(chunk)[0])
    shapes = (size((2, chunk, width) if blending else (chunk, 2, width)),)
    dtypes = (metadata.kv_dtype,)
    token_axis = 1 if blending else 0
    order = "layer plane token head" if blending else "layer token plane head"
    if planes != 2 or metadata.use_mla:
        raise OptionsError("flashkv stores LMCache's layerwise objects of K and V only")
    geometry = _geometry(1, heads, dimension, dtypes[0], joined=False)
    return Form(geometry, order, kind, token_axis, shapes, dtypes)


def _heads(metadata: Any, width: int) -> tuple[int, int]:
    """(heads, dimension) where they make the width; else one wide head."""
    heads, dimension = int(metadata.kv_shape[3]), int(metadata.kv_shape[4])
    return (heads, dimension) if heads * dimension == width else (1, width)


def _geometry(layers: int, heads: int, dimension: int, dtype: Any, *, joined: bool) -> KVGeometry:
    """Keys and values; joined: MLA's latent and rotary part, one vector a layer."""
    if not joined:
        return KVGeometry.gqa(layers, heads, dimension, dtype)
    kind = DType.parse(dtype)
    plane = Plane(Role.LATENT, layers, heads, dimension * kind.element_bytes, kind)
    return KVGeometry((Group("kv", GroupKind.FULL, (plane,)),))


def _opaque(kind: Any, shapes: tuple[Any, ...], dtypes: tuple[Any, ...], reason: str) -> Form:
    """The object's bytes, a token's share as the unit: lengths still count tokens."""
    chunk = int(shapes[0][2])
    total = sum(s.numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
    geometry = KVGeometry.opaque(total // chunk)
    return Form(geometry, MemoryView().order, kind, 2, shapes, dtypes, reason)
