"""What demos and tests bring along: real KV tensors and a document; README.md says where from.

Invariants
 - read with numpy alone: no torch, no safetensors;
 - bfloat16 comes as its uint16 bits, numpy having no such type; `Sample.dtypes` names the true one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).resolve().parent
SAMPLE_PATH = FOLDER / "realkv_sample.safetensors"
DOCUMENT_PATH = FOLDER / "document.txt"

_NUMPY_TYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "I32": np.int32}
_KV_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I32": "int32"}


@dataclass(frozen=True)
class Sample:
    """Tensors by name, their element types as KVGeometry names them, and the file's remarks."""

    tensors: dict[str, npt.NDArray[np.generic]]
    dtypes: dict[str, str]
    metadata: dict[str, str]


def load_sample(path: Path = SAMPLE_PATH) -> Sample:
    """Reads a safetensors file.

    Tensors of the sample: `K`, `V` bfloat16 `[layer, kv_head, token, dim]` of the layers named in
    `metadata["layers"]`; `K_fp16`, `V_fp16` float16 of the layers in `metadata["layers_fp16"]`;
    `token_ids` int32 `[token]`.
    """
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    metadata = header.pop("__metadata__", {})
    body = np.frombuffer(data, dtype=np.uint8, offset=8 + header_bytes)
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    dtypes: dict[str, str] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = body[begin:end].view(_NUMPY_TYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
        dtypes[name] = _KV_DTYPES[entry["dtype"]]
    return Sample(tensors, dtypes, metadata)


def load_document() -> str:
    """The document that `flashkv demo` prefills: about 4,000 tokens of SmolLM2's tokenizer."""
    return DOCUMENT_PATH.read_text(encoding="utf-8")
