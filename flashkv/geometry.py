"""What a block's numbers are, and how the caller lays them out.

KVGeometry says what a token's keys and values consist of: groups of planes of (layers, heads,
vector). It is part of the identity and never changes in a store. MemoryView says in which order the
caller's memory holds them: it belongs to a call, never to what is stored.

Invariants
  - all classes here are immutable, validated when made, hashable and equal by value;
  - to_json() gives the same bytes in every process, and from_json(to_json()) the same geometry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from flashkv import checks, limits
from flashkv.dtypes import DType
from flashkv.errors import GeometryError, MemoryViewError
from flashkv.native import ffi

if TYPE_CHECKING:
    from flashkv.identity import Shard

__all__ = ["AXES", "DType", "Group", "GroupKind", "KVGeometry", "MemoryView", "Plane", "Role"]


class Role(Enum):
    """What a plane holds. The order fixes the role's number on flash: append only."""

    K = "k"
    V = "v"
    KV = "kv"
    LATENT = "latent"
    ROPE = "rope"
    INDEX = "index"
    SCALE = "scale"
    STATE = "state"
    OPAQUE = "opaque"

    @property
    def native(self) -> int:
        """The number in fkv_plane_row.role, from 1."""
        return _ROLE_NUMBERS[self]


_ROLE_NUMBERS: Final = {role: number for number, role in enumerate(Role, start=1)}


class GroupKind(Enum):
    """How far a token of a group is of use to later ones."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"


def _positive(name: str, value: object, limit: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise GeometryError(f"{name} must be an int", value=repr(value))
    if not 1 <= value <= limit:
        raise GeometryError(f"{name} is out of range", value=value, limit=f"1 to {limit}")


@dataclass(frozen=True)
class Plane:
    """One kind of vector: `layers` x `heads` of them a token, each of `vector_bytes` bytes."""

    role: Role
    layers: int
    heads: int
    vector_bytes: int
    dtype: DType

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", _member(Role, self.role, "role"))
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        _positive("layers", self.layers, limits.LAYERS_MAX)
        _positive("heads", self.heads, limits.HEADS_MAX)
        _positive("vector_bytes", self.vector_bytes, limits.VECTOR_BYTES_MAX)
        if self.vector_bytes % self.dtype.element_bytes:
            raise GeometryError(
                f"vector_bytes must be a multiple of the {self.dtype.element_bytes} bytes"
                f" of a {self.dtype.value}",
                value=self.vector_bytes,
            )

    @property
    def may_be_lossy(self) -> bool:
        """Whether lossy codecs code it; they leave other types and roles exact."""
        floats = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
        vectors = (Role.K, Role.V, Role.KV, Role.LATENT, Role.ROPE)
        return self.dtype in floats and self.role in vectors

    @property
    def elements(self) -> int:
        """Elements of a vector: head_dim."""
        return self.vector_bytes // self.dtype.element_bytes

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * self.vector_bytes


@dataclass(frozen=True)
class Group:
    """Planes that live and die together; a block key belongs to one group."""

    name: str
    kind: GroupKind
    planes: tuple[Plane, ...]
    window: int = 0  # tokens, of sliding and chunked groups

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _member(GroupKind, self.kind, "group kind"))
        planes = checks.members(GeometryError, "planes", self.planes, Plane)
        object.__setattr__(self, "planes", planes)
        if not isinstance(self.name, str) or not 0 < len(self.name.encode()) <= 64:
            raise GeometryError("a group's name must be text of 1 to 64 bytes", value=self.name)
        if not 1 <= len(self.planes) <= limits.PLANES_MAX:
            raise GeometryError(
                f"group {self.name!r} has the wrong number of planes",
                value=len(self.planes),
                limit=f"1 to {limits.PLANES_MAX}",
            )
        streams = sum(plane.layers * plane.heads for plane in self.planes)
        if streams > limits.GROUP_STREAMS_MAX:
            raise GeometryError(
                f"group {self.name!r} has too many layers x heads over its planes",
                value=streams,
                limit=limits.GROUP_STREAMS_MAX,
            )
        windowed = self.kind in (GroupKind.SLIDING, GroupKind.CHUNKED)
        if not isinstance(self.window, int) or (self.window > 0) != windowed:
            raise GeometryError(
                f"group {self.name!r}: sliding and chunked groups need a window, others have none",
                value=self.window,
            )

    @property
    def token_bytes(self) -> int:
        return sum(plane.token_bytes for plane in self.planes)


@dataclass(frozen=True)
class KVGeometry:
    """What a token's KV consists of, whole model, before any sharding."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        groups = checks.members(GeometryError, "groups", self.groups, Group)
        object.__setattr__(self, "groups", groups)
        if not 1 <= len(self.groups) <= limits.GROUPS_MAX:
            raise GeometryError(
                "wrong number of groups",
                value=len(self.groups),
                limit=f"1 to {limits.GROUPS_MAX}",
            )
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise GeometryError("group names must differ", value=names)
        if len(self.to_json()) > limits.GEOMETRY_JSON_BYTES_MAX:
            raise GeometryError(
                "the geometry has too many groups and planes for the superblock",
                value=f"{len(self.to_json())} bytes of JSON",
                limit=limits.GEOMETRY_JSON_BYTES_MAX,
            )
        # Kept: batches look views up by geometry, and every open and namespace names it.
        object.__setattr__(self, "_hash", hash(self.groups))

    def __hash__(self) -> int:
        number: int = self.__dict__["_hash"]
        return number

    @classmethod
    def gqa(
        cls, layers: int, kv_heads: int, head_dim: int, dtype: object = DType.BFLOAT16
    ) -> KVGeometry:
        """Keys and values of `kv_heads` heads a layer (MHA, GQA, MQA)."""
        kind = DType.parse(dtype)
        _positive("head_dim", head_dim, limits.VECTOR_BYTES_MAX // kind.element_bytes)
        planes = tuple(
            Plane(role, layers, kv_heads, head_dim * kind.element_bytes, kind)
            for role in (Role.K, Role.V)
        )
        return cls((Group("kv", GroupKind.FULL, planes),))

    @classmethod
    def mla(
        cls, layers: int, latent_dim: int, rope_dim: int, dtype: object = DType.BFLOAT16
    ) -> KVGeometry:
        """Multi-head latent attention: a compressed latent and a shared rotary key a layer."""
        kind = DType.parse(dtype)
        planes = []
        for role, dim in ((Role.LATENT, latent_dim), (Role.ROPE, rope_dim)):
            _positive(f"{role.value}_dim", dim, limits.VECTOR_BYTES_MAX // kind.element_bytes)
            planes.append(Plane(role, layers, 1, dim * kind.element_bytes, kind))
        return cls((Group("kv", GroupKind.FULL, tuple(planes)),))

    @classmethod
    def opaque(cls, bytes: int) -> KVGeometry:  # noqa: A002  (the word of the public interface)
        """Blocks of `bytes` bytes that flashkv doesn't look into; a block counts as one token."""
        _positive("bytes", bytes, limits.VECTOR_BYTES_MAX)
        plane = Plane(Role.OPAQUE, 1, 1, bytes, DType.OPAQUE)
        return cls((Group("kv", GroupKind.FULL, (plane,)),))

    def group_index(self, group: int | str) -> int:
        """Number of a group, given by number or name. Raises GeometryError."""
        names = [member.name for member in self.groups]
        if isinstance(group, str) and group in names:
            return names.index(group)
        if isinstance(group, int) and not isinstance(group, bool) and 0 <= group < len(names):
            return group
        raise GeometryError("no such group", value=repr(group), limit=", ".join(names))

    def token_bytes(self, group: int | str = 0) -> int:
        """Bytes of one token of a group."""
        return self.groups[self.group_index(group)].token_bytes

    def block_bytes(self, group: int | str, tokens: int) -> int:
        """Bytes of a block of `tokens` tokens of a group."""
        return self.token_bytes(group) * tokens

    def slice(self, shard: Shard | None) -> KVGeometry:
        """The part that a shard holds. Heads are cut in planes that have several of them."""
        if shard is None or (shard.layers is None and shard.heads is None):
            return self
        return KVGeometry(
            tuple(
                replace(group, planes=tuple(_slice_plane(plane, shard) for plane in group.planes))
                for group in self.groups
            )
        )

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, ASCII; equal geometries give equal bytes."""
        text: bytes | None = self.__dict__.get("_json")
        if text is None:
            plain = asdict(self, dict_factory=_plain)
            text = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode("ascii")
            object.__setattr__(self, "_json", text)
        return text

    @classmethod
    def from_json(cls, text: bytes | str) -> KVGeometry:
        """The geometry of to_json(). Raises GeometryError."""
        return _from_json(text)

    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON: 32 bytes."""
        return hashlib.sha256(b"flashkv geometry 0\0" + self.to_json()).digest()

    def native(self, group: int | str = 0) -> Any:
        """fkv_geometry * of a group; lives as long as the process needs it."""
        return _native_geometry(self, self.group_index(group))


def _member(kind: type[Enum], value: object, name: str) -> Enum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise GeometryError(f"unknown {name}", value=repr(value), limit=known) from None


def _plain(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.value if isinstance(value, Enum) else value for key, value in items}


@lru_cache(maxsize=64)
def _from_json(text: bytes | str) -> KVGeometry:
    try:
        groups = json.loads(text)["groups"]
        return KVGeometry(tuple(_group_from(fields) for fields in groups))
    except (ValueError, TypeError, KeyError) as error:
        raise GeometryError(f"not the JSON of a geometry: {error}") from None


def _group_from(fields: Mapping[str, Any]) -> Group:
    planes = tuple(Plane(**plane) for plane in fields["planes"])
    return Group(**{**fields, "planes": planes})


def _slice_plane(plane: Plane, shard: Shard) -> Plane:
    layers, heads = plane.layers, plane.heads
    if shard.layers is not None:
        layers = _part("layers", shard.layers, plane.layers)
    if shard.heads is not None and plane.heads > 1:
        heads = _part("heads", shard.heads, plane.heads)
    return replace(plane, layers=layers, heads=heads)


def _part(name: str, part: tuple[int, int], whole: int) -> int:
    if part[1] > whole:
        raise GeometryError(
            f"the shard's {name} reach beyond the geometry", value=part, limit=f"0 to {whole}"
        )
    return part[1] - part[0]


@lru_cache(maxsize=256)
def _native_geometry(geometry: KVGeometry, group: int) -> Any:
    native = ffi.new("fkv_geometry *")
    planes = geometry.groups[group].planes
    native.plane_count = len(planes)
    native.group = group
    for row, plane in zip(native.planes, planes, strict=False):
        row.role = plane.role.native
        row.dtype = plane.dtype.native
        row.layers = plane.layers
        row.heads = plane.heads
        row.vector_bytes = plane.vector_bytes
    return native


AXES: Final = ("layer", "plane", "head", "token")
"""Axes of a block; the position is the axis' number FKV_AXIS_* in the data plane."""


@dataclass(frozen=True)
class MemoryView:
    """Order of the axes in the caller's memory, outermost first; a vector's elements come last.

    Tensors tell their strides, those of a vector's elements too: keys that an attention kernel
    keeps transposed are a tensor with swapped axes.

    order         "layer", "plane", "head" and "token", each once. With "plane" last, the vectors of
                  the planes lie side by side: K and V joined in the last dimension.
    regions       axes ("plane", "layer") that are split into separate memory: ("plane",) is K here
                  and V there.
    block_tokens  tokens that the strides of a block are made for, where no shape tells.
    page_tokens   paged memory: tokens of each page that a block is made of, a part of block_tokens;
                  order and regions then describe a page. None: a block is one piece.
    """

    order: str = "layer plane head token"
    regions: tuple[str, ...] = ()
    block_tokens: int | None = None
    page_tokens: int | None = None

    def __post_init__(self) -> None:
        names = self.order.split() if isinstance(self.order, str) else []
        if sorted(names) != sorted(AXES):
            raise MemoryViewError(
                f"order must name each of {', '.join(AXES)} once", value=repr(self.order)
            )
        regions = checks.members(MemoryViewError, "regions", self.regions, str)
        if len(set(regions)) != len(regions) or not set(regions) <= {"layer", "plane"}:
            raise MemoryViewError("regions may name layer and plane, once", value=repr(regions))
        ordered = [name for name in names if name in regions]
        ordered += [name for name in names if name not in regions]
        object.__setattr__(self, "regions", tuple(name for name in ordered if name in regions))
        object.__setattr__(self, "order", " ".join(ordered))
        if self.block_tokens is not None:
            tokens = checks.whole(
                MemoryViewError, "block_tokens", self.block_tokens, 1, limits.BLOCK_TOKENS_MAX
            )
            object.__setattr__(self, "block_tokens", tokens)
        if self.page_tokens is not None:
            room = self.block_tokens or 0
            tokens = checks.whole(
                MemoryViewError, "page_tokens", self.page_tokens, 1, limits.BLOCK_TOKENS_MAX
            )
            if not room or room % tokens:
                raise MemoryViewError(
                    "a block must be made of whole pages",
                    value=f"page_tokens {tokens}",
                    limit=f"a divisor of block_tokens, {self.block_tokens}",
                )
            object.__setattr__(self, "page_tokens", tokens if tokens < room else None)

    @property
    def pages(self) -> int:
        """Pages of a block: 1 where it is one piece."""
        return (self.block_tokens or 1) // self.page_tokens if self.page_tokens else 1

    @property
    def axes(self) -> tuple[int, ...]:
        """FKV_AXIS_* outermost first; the regions' axes lead."""
        return tuple(AXES.index(name) for name in self.order.split())

    @property
    def region_axes(self) -> int:
        """Bit per FKV_AXIS_* that is split into regions."""
        return sum(1 << AXES.index(name) for name in self.regions)
