"""Element types: their names, sizes and native numbers.

Invariant: types whose bits mean different things are different members, whatever their size, and so
different geometries and identities; the data plane's FKV_DTYPE_* only tell how to code them.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from flashkv.errors import GeometryError
from flashkv.native import lib


class DType(Enum):
    """Type of a plane's elements; the value is the name that torch and ml_dtypes give it."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"
    UINT8 = "uint8"
    OPAQUE = "opaque"

    @classmethod
    def parse(cls, dtype: object) -> DType:
        """DType of a name ("bf16", "torch.bfloat16"), a torch dtype or a numpy dtype or type."""
        if isinstance(dtype, cls):
            return dtype
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
        name = str(name).removeprefix("torch.")
        try:
            return cls(_DTYPE_ALIASES.get(name, name))
        except ValueError:
            known = ", ".join(member.value for member in cls)
            raise GeometryError("unknown dtype", value=repr(dtype), limit=known) from None

    @property
    def element_bytes(self) -> int:
        return _DTYPE_BYTES[self]

    @property
    def native(self) -> int:
        """FKV_DTYPE_* of the data plane."""
        return _DTYPE_NATIVE[self]

    def accepts(self, name: str) -> bool:
        """Whether memory of the dtype `name` may hold these elements.

        numpy has no bfloat16 or float8: their bits may come as uint16 and uint8.
        """
        return self is DType.OPAQUE or name == self.value or name == _DTYPE_BITS.get(self)


_DTYPE_ALIASES: Final = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "float8_e4m3": "float8_e4m3fn",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "bytes": "opaque",
}
_DTYPE_BYTES: Final = {
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.OPAQUE: 1,
}
_DTYPE_NATIVE: Final[dict[DType, int]] = {
    DType.BFLOAT16: lib.FKV_DTYPE_BF16,
    DType.FLOAT16: lib.FKV_DTYPE_FP16,
    DType.FLOAT32: lib.FKV_DTYPE_FP32,
    DType.FLOAT8_E4M3: lib.FKV_DTYPE_E4M3,
    DType.FLOAT8_E5M2: lib.FKV_DTYPE_E5M2,
    DType.INT8: lib.FKV_DTYPE_BYTES,
    DType.UINT8: lib.FKV_DTYPE_BYTES,
    DType.OPAQUE: lib.FKV_DTYPE_OPAQUE,
}
_DTYPE_BITS: Final = {
    DType.BFLOAT16: "uint16",
    DType.FLOAT8_E4M3: "uint8",
    DType.FLOAT8_E5M2: "uint8",
    DType.INT8: "uint8",
}
