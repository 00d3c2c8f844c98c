"""What flashkv must know of a transformers model: geometry, identity, fingerprint of its weights.

Invariants
 - a model whose cache is not plain keys and values of every token is refused here, with its reason;
 - all that changes the meaning of the KV is in the identity: weights, architecture and its
   settings, rotary settings, adapter, dtype of the KV. Where the model was loaded from is not;
 - the fingerprint reads samples of the weights in memory, megabytes even of large models.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from flashkv.connectors.checkpoint import ROPE, Checkpoint, canonical, settings_digest
from flashkv.connectors.transformers_layers import UnsupportedModelError
from flashkv.geometry import DType, KVGeometry
from flashkv.identity import Identity

SAMPLES_PER_TENSOR: Final = 16
SAMPLE_ELEMENTS: Final = 64
COMPARED_TENSORS: Final = 64
"""Weights of which samples are compared with the checkpoint's."""


def text_config(model: Any) -> Any:
    """The configuration of the model's decoder."""
    return model.config.get_text_config(decoder=True)


def kv_geometry(model: Any, kv_dtype: object = None) -> KVGeometry:
    """Geometry of the model's KV cache, to open a store with.

    kv_dtype: element type that the cache holds; None: the model's own.
    Raises UnsupportedModelError.
    """
    config = text_config(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError("encoder-decoder models are not supported")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            "models with multi-head latent attention are not supported", value=config.model_type
        )
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    head_dim = int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    dtype = DType.parse(model.dtype if kv_dtype is None else kv_dtype)
    return KVGeometry.gqa(int(config.num_hidden_layers), heads, head_dim, dtype)


def model_identity(
    model: Any,
    geometry: KVGeometry,
    *,
    name: str = "",
    revision: str = "",
    weights_fingerprint: str = "",
    adapter: str = "",
) -> Identity:
    """Identity of the model's KV. What is not given is taken from the model.

    Raises UnsupportedModelError where the model doesn't tell enough.
    """
    _check_adapter(model, adapter)
    config = text_config(model)
    settings = config.to_dict()
    settings.pop("quantization_config", None)  # the weights in memory tell how they were quantised
    rope = {name: getattr(config, name, None) for name in ROPE}
    return Identity(
        model=name or _model_name(model),
        revision=revision or getattr(model.config, "_commit_hash", None) or "",
        weights_fingerprint=weights_fingerprint or fingerprint_of_weights(model),
        kv_dtype=geometry.groups[0].planes[0].dtype.value,
        rope=canonical({name: value for name, value in rope.items() if value is not None}),
        adapter=adapter,
        geometry=geometry,
        extras={"architecture": str(config.model_type), "settings": settings_digest(settings)},
    )


def checkpoint_identity(
    model: Any, geometry: KVGeometry, folder: str | Path, *, adapter: str = ""
) -> Identity:
    """The identity that every engine gives the KV of the checkpoint in a folder.

    Raises IdentityError, and UnsupportedModelError where the model isn't that checkpoint's.
    """
    from transformers import AutoConfig

    _check_adapter(model, adapter)
    _check_weights(model, Path(folder))
    return Checkpoint.read(folder).identity(
        geometry,
        kv_dtype=geometry.groups[0].planes[0].dtype.value,
        running=model.config.to_dict(),
        own=AutoConfig.from_pretrained(folder).to_dict(),
        adapter=adapter,
    )


def _check_adapter(model: Any, adapter: str) -> None:
    if getattr(model, "_hf_peft_config_loaded", False) and not adapter:
        raise UnsupportedModelError(
            "the model carries an adapter",
            advice="name the active one, with its version: PrefixCache(..., adapter='NAME')",
        )


def _check_weights(model: Any, folder: Path) -> None:
    """Compares samples of the weights in memory with those of the same name in the folder.

    Raises UnsupportedModelError where one differs, or none can be compared.
    """
    from safetensors import safe_open

    state = model.state_dict()
    compared = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name in state]  # noqa: SIM118  (no mapping)
            for name in names[:: max(1, len(names) // COMPARED_TENSORS)]:
                stored = file.get_slice(name)
                sample = stored[:1] if stored.get_shape() else file.get_tensor(name)
                here = state[name][:1] if stored.get_shape() else state[name]
                compared += 1
                if list(here.shape) == list(sample.shape) and bool(
                    (here.cpu() == sample.to(here.dtype)).all()
                ):
                    continue
                raise UnsupportedModelError(
                    "the weights in memory are not the checkpoint's",
                    value=name,
                    limit=str(path),
                    advice="Leave out checkpoint=, or give the folder that they were loaded from",
                )
    if not compared:
        raise UnsupportedModelError(
            "no weight of the model is found in the checkpoint",
            value=str(folder),
            limit="files *.safetensors with the model's names",
        )


def fingerprint_of_weights(model: Any) -> str:
    """SHA-256, as hex, over name, shape, dtype and evenly spaced samples of every weight.

    Weights that differ in no sample are taken for the same: training changes nearly every number,
    but who edits single ones must name a revision. Raises UnsupportedModelError where weights are
    not in memory.
    """
    sha = hashlib.sha256(b"flashkv model weights 0\0")
    for name, tensor in sorted(model.state_dict().items()):
        if str(tensor.device.type) == "meta":
            raise UnsupportedModelError(
                f"weight {name} is not in memory",
                advice="Give weights_fingerprint= (flashkv.identity.weights_fingerprint(folder))",
            )
        sha.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        sha.update(_samples(tensor))
    return sha.hexdigest()


def _samples(tensor: Any) -> bytes:
    """Runs of elements at even distances, as bytes; a small tensor whole."""
    import torch

    flat = tensor.detach().reshape(-1)
    count = int(flat.numel())
    if count <= SAMPLES_PER_TENSOR * SAMPLE_ELEMENTS:
        chosen = flat
    else:
        last = count - SAMPLE_ELEMENTS
        starts = [last * i // (SAMPLES_PER_TENSOR - 1) for i in range(SAMPLES_PER_TENSOR)]
        chosen = torch.cat([flat[start : start + SAMPLE_ELEMENTS] for start in starts])
    data: bytes = chosen.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return data


def _model_name(model: Any) -> str:
    """The hub's name; of a folder its last part, since the fingerprint tells the weights apart."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    if not name:
        return type(model).__name__
    return Path(name).resolve().name if Path(name).exists() else name
