"""Whose numbers a block holds: identity, shard, and the keys and digests that follow from them.

Invariants
  - all that changes the meaning of the numbers is in the namespace digest; memory order, codec and
    rank layout are not (the shard is in a block's index digest only);
  - digests are SHA-256 over length-prefixed fields in a fixed order: no two identities encode
    alike, and no process, hash seed or dictionary order changes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import checks, limits
from flashkv.errors import GeometryError, IdentityError
from flashkv.geometry import DType, KVGeometry
from flashkv.native import ffi, lib, pointer

_NAMESPACE_TAG: Final = b"flashkv namespace 0\0"
_FINGERPRINT_TAG: Final = b"flashkv weights 0\0"
_SHARD: Final = struct.Struct("<HHHHHHI")
KEY_BYTES: Final = 32
"""A key of the token chain: a whole SHA-256."""
CHAIN_TOKENS: Final = 64
"""Tokens a key of the chain, where an engine has no blocks of its own: those that share agree."""

Extra = str | int | float | bool


def _pair(name: str, given: object, names: str, limit: int) -> tuple[int, int] | None:
    """A checked pair of ints: 0 <= the first < the second <= limit."""
    if given is None:
        return None
    first, second = checks.pair(IdentityError, name, given)
    if not 0 <= first < second <= limit:
        raise IdentityError(
            f"{name} must be ({names})",
            value=(first, second),
            limit=f"0 <= {names.replace(', ', ' < ')} <= {limit}",
        )
    return first, second


@dataclass(frozen=True)
class Shard:
    """The part of the model's KV that one rank holds.

    layers   (start, stop) of pipeline parallelism; None: all.
    heads    (start, stop) of tensor parallelism, counted in KV heads; None: all.
    context  (rank, size) of context parallelism; None: all tokens.
    """

    layers: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None
    context: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, names, limit in (
            ("layers", "start, stop", limits.LAYERS_MAX),
            ("heads", "start, stop", limits.HEADS_MAX),
            ("context", "rank, size", limits.CONTEXT_RANKS_MAX),
        ):
            object.__setattr__(self, name, _pair(name, getattr(self, name), names, limit))

    def normalized(self, geometry: KVGeometry) -> Shard:
        """The same part, with whatever covers all of the geometry as None."""
        planes = [plane for group in geometry.groups for plane in group.planes]
        whole_layers = (0, max(plane.layers for plane in planes))
        whole_heads = (0, max(plane.heads for plane in planes))
        return Shard(
            None if self.layers == whole_layers else self.layers,
            None if self.heads == whole_heads else self.heads,
            None if self.context == (0, 1) else self.context,
        )

    def encode(self) -> bytes:
        """16 bytes, little-endian: layers, heads, context as u16 pairs; zeros: the whole model."""
        return _SHARD.pack(
            *(self.layers or (0, 0)), *(self.heads or (0, 0)), *(self.context or (0, 0)), 0
        )

    @classmethod
    def decode(cls, data: bytes) -> Shard:
        """The shard of encode(). Raises IdentityError."""
        try:
            l0, l1, h0, h1, rank, size, reserved = _SHARD.unpack(data)
        except struct.error:
            raise IdentityError("a shard has 16 bytes", value=len(data)) from None
        if reserved:
            raise IdentityError("reserved bytes of a shard must be zero", value=data.hex())
        return cls(
            (l0, l1) if l1 else None, (h0, h1) if h1 else None, (rank, size) if size else None
        )


WHOLE: Final = Shard()


@dataclass(frozen=True)
class Identity:
    """What the numbers mean: blocks of different identities never meet.

    model                name or path, as the engine knows it.
    revision             hub revision or version of the weights.
    weights_fingerprint  of local weights: see weights_fingerprint(); may be empty with a revision.
    kv_dtype             what the KV was computed in and quantised to: "bfloat16", "fp8_e4m3", ...
    rope                 rotary settings that differ from the model's own, as text.
    adapter              LoRA or the like, as text.
    geometry             None: the store's.
    extras               anything else that changes the numbers: text, ints, floats, bools.
    """

    model: str
    revision: str = ""
    weights_fingerprint: str = ""
    kv_dtype: str = "bfloat16"
    rope: str = ""
    adapter: str = ""
    geometry: KVGeometry | None = None
    extras: Mapping[str, Extra] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_dtype", _dtype_name(self.kv_dtype))
        for name in _TEXT_FIELDS:
            _check_text(name, getattr(self, name))
        if not self.model:
            raise IdentityError("an identity needs a model", advice="Give its name or path")
        if self.geometry is not None and not isinstance(self.geometry, KVGeometry):
            raise IdentityError("geometry must be a KVGeometry", value=repr(self.geometry))
        object.__setattr__(self, "extras", MappingProxyType(_checked_extras(self.extras)))

    def __hash__(self) -> int:
        return hash((self.model, self.revision, self.weights_fingerprint, self.geometry))

    def with_geometry(self, geometry: KVGeometry) -> Identity:
        """This identity with the store's geometry where it has none."""
        if self.geometry is not None:
            return self
        whole: Identity | None = self.__dict__.get("_whole")
        if whole is None or whole.geometry != geometry:
            whole = replace(self, geometry=geometry)
            object.__setattr__(self, "_whole", whole)  # with its digest, for the next time
        return whole

    def fields(self) -> dict[str, Any]:
        """Readable fields, for stores' records and tools; the geometry as plain JSON values."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain["extras"] = dict(self.extras)
        if self.geometry is not None:
            plain["geometry"] = json.loads(self.geometry.to_json())
        return plain

    def to_json(self) -> bytes:
        """Canonical JSON of fields(): sorted keys, no spaces, ASCII."""
        kept: bytes | None = self.__dict__.get("_json")
        if kept is not None:
            return kept
        text = json.dumps(self.fields(), sort_keys=True, separators=(",", ":")).encode("ascii")
        if len(text) > limits.IDENTITY_JSON_BYTES_MAX:
            raise IdentityError(
                "the identity is too long",
                value=f"{len(text)} bytes of JSON",
                limit=limits.IDENTITY_JSON_BYTES_MAX,
            )
        object.__setattr__(self, "_json", text)
        return text

    def digest(self) -> bytes:
        """The namespace digest: 32 bytes. Raises IdentityError where the geometry is missing."""
        if self.geometry is None:
            raise IdentityError(
                "an identity has no digest without a geometry",
                advice="Call with_geometry() with the store's",
            )
        kept: bytes | None = self.__dict__.get("_digest")
        if kept is not None:
            return kept
        parts = [(name, getattr(self, name).encode()) for name in _TEXT_FIELDS]
        parts.append(("geometry", self.geometry.to_json()))
        parts += [(f"extra:{name}", _extra_text(value)) for name, value in self.extras.items()]
        sha = hashlib.sha256(_NAMESPACE_TAG)
        for name, value in parts:
            label = name.encode()
            sha.update(struct.pack("<II", len(label), len(value)) + label + value)
        object.__setattr__(self, "_digest", sha.digest())
        return sha.digest()


_TEXT_FIELDS: Final = ("model", "revision", "weights_fingerprint", "kv_dtype", "rope", "adapter")


def _dtype_name(dtype: object) -> str:
    """Known types by their canonical name, so that "bf16" is "bfloat16"; others as they are."""
    try:
        return DType.parse(dtype).value
    except GeometryError:
        return str(dtype)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise IdentityError(f"{name} must be text", value=repr(value))
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        raise IdentityError(f"{name} is no valid text", value=repr(value)) from None
    if length > limits.IDENTITY_FIELD_BYTES_MAX:
        raise IdentityError(
            f"{name} is too long", value=f"{length} bytes", limit=limits.IDENTITY_FIELD_BYTES_MAX
        )


def _extra_text(value: Extra) -> bytes:
    return json.dumps(value, allow_nan=False).encode("ascii")


def _checked_extras(extras: Mapping[str, Extra]) -> dict[str, Extra]:
    """A sorted copy of the extras."""
    if not isinstance(extras, Mapping) or len(extras) > limits.IDENTITY_EXTRAS_MAX:
        raise IdentityError(
            "extras must be a mapping of few entries",
            value=repr(extras)[:200],
            limit=limits.IDENTITY_EXTRAS_MAX,
        )
    for name, value in extras.items():
        _check_text("a name in extras", name)
        if not isinstance(value, (str, int, float, bool)):
            raise IdentityError(
                f"extras[{name!r}] must be text, int, float or bool", value=repr(value)
            )
        if isinstance(value, str):
            _check_text(f"extras[{name!r}]", value)
        elif isinstance(value, float) and not np.isfinite(value):
            raise IdentityError(f"extras[{name!r}] must be finite", value=value)
        elif isinstance(value, int):
            checks.whole(IdentityError, f"extras[{name!r}]", int(value), -(1 << 63), (1 << 64) - 1)
    return {name: extras[name] for name in sorted(extras)}


def keyspace(
    namespace_digest: bytes,
    shard: Shard,
    namespace_id: int,
    digest_bytes: int = limits.DIGEST_BYTES,
) -> Any:
    """fkv_keyspace * of a namespace and shard. Fewer digest bytes force collisions in tests."""
    space = ffi.new("fkv_keyspace *")
    space.prefix = namespace_digest + shard.encode()
    space.namespace_id = namespace_id
    space.digest_bytes = digest_bytes
    return space


def token_keys(
    namespace_digest: bytes,
    token_ids: Sequence[int] | NDArray[Any],
    block_tokens: int = CHAIN_TOKENS,
    salt: bytes = b"",
    extra: bytes = b"",
    parent: bytes = b"",
) -> NDArray[np.uint8]:
    """Keys of the blocks of a token sequence: uint8[ceil(tokens / block_tokens), 32].

    A Merkle chain: key[-1] = SHA-256(namespace | salt), key[i] = SHA-256(key[i-1] | tokens |
    extra), the tokens as little-endian int32. A shorter last block has a key too. parent: key of
    the block before the first of these tokens; the chain goes on from there, and salt isn't used.
    Raises IdentityError, a ValueError.
    """
    salt = checks.raw(IdentityError, "salt", salt)
    extra = checks.raw(IdentityError, "extra", extra)
    parent = checks.raw(IdentityError, "parent", parent)
    if len(parent) not in (0, KEY_BYTES):
        raise IdentityError("a parent is a key of the chain", value=len(parent), limit=KEY_BYTES)
    ids = checks.array(IdentityError, "token_ids", token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise IdentityError(
            "token_ids must be ints in one dimension", value=f"{ids.dtype}{list(ids.shape)}"
        )
    if ids.size > limits.TOKENS_PER_CHAIN_MAX:
        raise IdentityError("too many tokens", value=ids.size, limit=limits.TOKENS_PER_CHAIN_MAX)
    block_tokens = checks.whole(
        IdentityError, "block_tokens", block_tokens, 1, limits.BLOCK_TOKENS_MAX
    )
    if ids.size and (int(ids.min()) < -(2**31) or int(ids.max()) >= 2**31):
        raise IdentityError("a token id doesn't fit 32 bits", value=int(ids.max()))
    tokens = np.ascontiguousarray(ids, dtype="<i4")
    keys = np.empty((-(-ids.size // block_tokens), KEY_BYTES), np.uint8)
    seed = parent or hashlib.sha256(namespace_digest + salt).digest()
    lib.fkv_token_chain(
        seed,
        pointer(tokens, "int32_t *"),
        tokens.size,
        block_tokens,
        extra,
        len(extra),
        pointer(keys, "uint8_t *"),
    )
    return keys


def weights_fingerprint(path: str | os.PathLike[str]) -> str:
    """SHA-256, as hex, over sizes, headers and samples of the weights in a file or folder.

    Of each file: its size, its safetensors header (of other files the first MiB) and 64 evenly
    spaced samples of 64 KiB: megabytes are read, not the weights. Weights that differ in none of
    these are taken for the same, so prefer a revision. Raises IdentityError, OSError.
    """
    root = Path(path)
    files = [root]
    if root.is_dir():
        suffixes = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
        files = sorted(item for item in root.iterdir() if item.suffix in suffixes)
        safe = [item for item in files if item.suffix == ".safetensors"]
        files = safe or files
    if not files or not files[0].exists():
        raise IdentityError("no weights found", value=str(root))
    sha = hashlib.sha256(_FINGERPRINT_TAG)
    for item in files:
        _hash_samples(sha, item)
    return sha.hexdigest()


def _hash_samples(sha: Any, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = limits.MIB
        if path.suffix == ".safetensors":
            header_bytes = 8 + min(int.from_bytes(file.read(8), "little"), 100 * limits.MIB)
        file.seek(0)
        header = file.read(min(header_bytes, size))
        sha.update(struct.pack("<QQ", size, len(header)) + header)
        span = max(0, size - len(header) - limits.FINGERPRINT_SAMPLE_BYTES)
        for sample in range(limits.FINGERPRINT_SAMPLES):
            file.seek(len(header) + span * sample // (limits.FINGERPRINT_SAMPLES - 1))
            sha.update(file.read(limits.FINGERPRINT_SAMPLE_BYTES))
