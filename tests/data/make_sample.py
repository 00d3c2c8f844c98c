"""Regenerates flashkv/data/realkv_sample.safetensors from the full set of real KV tensors.

    python tests/data/make_sample.py ../shared/data/realkv

Invariants: at most 5 MB; byte-stable (tensors and metadata in a fixed order); numpy alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flashkv.data import SAMPLE_PATH, load_sample

LAYERS = (0, 7, 15, 29)
LAYERS_FP16 = (15,)
STORED_LAYERS_FP16 = (0, 15, 29)
LIMIT_BYTES = 5_000_000


def write(path: Path, tensors: dict[str, tuple[str, npt.NDArray[np.generic]]]) -> int:
    """Writes a safetensors file; returns its length in bytes."""
    header: dict[str, object] = {
        "__metadata__": {
            "model": "SmolLM2-135M-Instruct",
            "layers": ",".join(map(str, LAYERS)),
            "layers_fp16": ",".join(map(str, LAYERS_FP16)),
            "layout": "layer,kv_head,token,dim",
            "text": "Pride and Prejudice, the first 1024 tokens",
        }
    }
    offset = 0
    for name, (dtype, values) in tensors.items():
        end = offset + values.nbytes
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(np.ascontiguousarray(values).tobytes() for _, values in tensors.values())
    return path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def main(folder: Path) -> None:
    full = load_sample(folder / "austen.safetensors").tensors
    half = load_sample(folder / "austen_fp16.safetensors").tensors
    chosen = list(LAYERS)
    chosen_fp16 = [STORED_LAYERS_FP16.index(layer) for layer in LAYERS_FP16]
    length_bytes = write(
        SAMPLE_PATH,
        {
            "K": ("BF16", full["K"][chosen]),
            "V": ("BF16", full["V"][chosen]),
            "K_fp16": ("F16", half["K"][chosen_fp16]),
            "V_fp16": ("F16", half["V"][chosen_fp16]),
            "token_ids": ("I32", full["token_ids"]),
        },
    )
    if length_bytes > LIMIT_BYTES:
        sys.exit(f"{SAMPLE_PATH} has {length_bytes} bytes, more than {LIMIT_BYTES}")
    print(f"{SAMPLE_PATH}: {length_bytes} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
