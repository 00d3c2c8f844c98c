"""What flashkv must know of a model as vLLM runs it: identity, geometry, and how its KV is paged.

Invariants
  - all that changes the meaning of the KV is in the identity, which is the one that other engines
    give the same checkpoint; a setup whose KV can't be told apart is refused with its reason;
  - a cache whose bytes are not understood is stored as opaque blocks of vLLM's own size, under an
    identity of its own, and says why;
  - vLLM is only imported where its own configuration of the checkpoint is asked for.

Since 0.32 every attention backend's cache of a layer is one tensor [page, head, token, content] in
some order of strides; content is K and V side by side, or a latent with its rotary key. A backend
that packs it otherwise says so in the layer's spec, except on CPUs: there a page of a head is its
keys, then its values, and the kernels keep keys in an order of their own. What that is here is
asked of the kernel itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flashkv.connectors.checkpoint import Checkpoint
from flashkv.errors import GeometryError, IdentityError
from flashkv.geometry import DType, Group, GroupKind, KVGeometry, MemoryView, Plane, Role
from flashkv.identity import CHAIN_TOKENS, Identity

WITHOUT_DRAFT_KV: Final = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Ways of speculative decoding whose drafts keep no KV."""
LENGTH_DEPENDENT_ROPE: Final = ("longrope", "su", "dynamic")
"""Rotary embeddings that vLLM computes by the longest context it was started with."""


class UnsupportedSetupError(IdentityError):
    """The model, or how vLLM runs it, is not one whose KV this connector can store."""


@dataclass(frozen=True)
class PagedLayout:
    """How vLLM keeps the KV that this rank holds, as far as its configuration tells.

    geometry      of the whole model.
    layers        vLLM's names, in the order of the geometry's layers.
    block_tokens  tokens of vLLM's block: what it allocates and reports as failed.
    granule       tokens of a flashkv block.
    form          "joined": content is K and V; "latent": latent and rotary key; "split": a page of
                  a head is K, then V; "transposed": so, and K with its tokens innermost;
                  "opaque": bytes.
    heads         KV heads of this rank.
    reason        why it is opaque.
    """

    geometry: KVGeometry
    layers: tuple[str, ...]
    block_tokens: int
    granule: int
    form: str
    heads: int
    reason: str = ""

    def view(self, page_tokens: int, tokens: int) -> MemoryView:
        """Of blocks of so many tokens in pages of so many."""
        if self.form == "opaque":
            return MemoryView(regions=("layer",))
        split = self.form in ("split", "transposed")
        return MemoryView(
            "layer plane head token" if split else "layer head token plane",
            regions=("layer", "plane") if split else ("layer",),
            block_tokens=tokens,
            page_tokens=min(page_tokens, tokens),
        )


def paged_layout(
    vllm_config: Any, kv_cache_config: Any, kernel_form: Callable[[Any, str], str] | None = None
) -> PagedLayout:
    """The layout of the KV of this rank.

    kernel_form: form of a spec's pages on a CPU, for a cache dtype; None: on another device.
    Raises UnsupportedSetupError, GeometryError.
    """
    _refuse_unsupported(vllm_config)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedSetupError(
            "the model keeps its KV in several groups",
            value=", ".join(type(group.kv_cache_spec).__name__ for group in groups),
            limit="one group of full attention",
            advice="Leave the hybrid KV cache manager off (disable_hybrid_kv_cache_manager=True);"
            " models with recurrent state are not supported",
        )
    layers = tuple(sorted(groups[0].layer_names, key=_layer_number))
    specs = _specs_of_layers(groups[0], layers)
    for spec in specs:
        _check_spec(spec)
    block_tokens = int(specs[0].block_size)
    known = _known_form(vllm_config, specs, kernel_form)
    if isinstance(known, str):
        return _opaque(specs, layers, known)
    if block_tokens % CHAIN_TOKENS and CHAIN_TOKENS % block_tokens:
        raise UnsupportedSetupError(
            "vLLM's blocks neither divide nor are made of blocks of flashkv",
            value=f"block_size {block_tokens}",
            limit=f"a divisor or a multiple of {CHAIN_TOKENS}",
        )
    form, geometry, heads = known
    return PagedLayout(geometry, layers, block_tokens, CHAIN_TOKENS, form, heads)


def _refuse_unsupported(vllm_config: Any) -> None:
    """What would make KV that can't be told from other KV, or that lies in other processes."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedSetupError(
                "context parallelism is not supported", value=f"{name}={getattr(parallel, name)}"
            )
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedSetupError(
            "pipeline parallelism is not supported", value=parallel.pipeline_parallel_size, limit=1
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in WITHOUT_DRAFT_KV:
        raise UnsupportedSetupError(
            "the draft model of speculative decoding keeps KV of its own, which is not supported",
            value=f"method {speculative.method!r}",
            limit=", ".join(WITHOUT_DRAFT_KV),
        )


def _layer_number(name: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", name)], name


def _specs_of_layers(group: Any, layers: Sequence[str]) -> list[Any]:
    """The spec of each layer; a group may have one for all."""
    spec = group.kv_cache_spec
    of_layers: Mapping[str, Any] = getattr(spec, "kv_cache_specs", {})
    return [of_layers.get(name, spec) for name in layers]


def _check_spec(spec: Any) -> None:
    kind = type(spec).__name__
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise UnsupportedSetupError(
            "a layer keeps something else than the KV of all tokens",
            value=kind,
            limit="full attention",
        )
    if getattr(spec, "non_causal", False) or spec.tokens_per_state != 1:
        raise UnsupportedSetupError(
            "KV of a token that depends on later ones, or stands for several, is not supported",
            value=f"non_causal={spec.non_causal}, tokens_per_state={spec.tokens_per_state}",
        )


def _known_form(
    vllm_config: Any, specs: Sequence[Any], kernel_form: Callable[[Any, str], str] | None
) -> tuple[str, KVGeometry, int] | str:
    """(form, geometry, heads of this rank), or why the bytes are not understood."""
    spec, layers = specs[0], len(specs)
    if any(other != spec for other in specs[1:]):
        return "layers differ in the shape of their KV"
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    dtype = _element_type(spec, cache_dtype)
    if dtype is None:
        return f"elements of the KV are {spec.dtype}, {cache_dtype}"
    heads, key_dim, value_dim = int(spec.num_kv_heads), int(spec.head_size), int(spec.head_size_v)
    content = int(spec.state_content_size_bytes)
    if type(spec).__name__ == "MLAAttentionSpec":
        config = vllm_config.model_config.hf_text_config
        latent, rope = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
        if content != (latent + rope) * dtype.element_bytes or spec.num_heads != 1:
            return "the latent is packed with something else"
        return "latent", KVGeometry.mla(layers, latent, rope, dtype), 1
    if key_dim != value_dim:
        return "keys and values differ in size"
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    geometry = KVGeometry.gqa(layers, max(total, heads), key_dim, dtype)
    if spec.num_heads != heads or content != 2 * key_dim * dtype.element_bytes:
        return f"a token's content is packed: {spec.num_heads} slots of {content} bytes"
    form = "joined" if kernel_form is None else kernel_form(spec, cache_dtype)
    if form == "opaque":
        return "the attention kernel packs keys or values"
    return form, geometry, heads


def _element_type(spec: Any, cache_dtype: str) -> DType | None:
    """Type of the cache's elements; None where scales or the like lie among them."""
    mode = int(getattr(spec, "kv_quant_mode", 0))
    if mode not in (0, 1):  # none, or one scale a tensor, which the checkpoint holds
        return None
    try:
        return DType.parse(cache_dtype if mode == 1 else spec.dtype)
    except GeometryError:
        return None


def _opaque(specs: Sequence[Any], layers: tuple[str, ...], reason: str) -> PagedLayout:
    sizes = {int(spec.page_size_bytes) for spec in specs}
    if len(sizes) > 1:
        raise UnsupportedSetupError(f"{reason}, and in its size", value=sorted(sizes))
    plane = Plane(Role.OPAQUE, len(layers), 1, sizes.pop(), DType.OPAQUE)
    geometry = KVGeometry((Group("kv", GroupKind.FULL, (plane,)),))
    block_tokens = int(specs[0].block_size)
    return PagedLayout(geometry, layers, block_tokens, block_tokens, "opaque", 1, reason)


def fp8_is_fnuz() -> bool:
    """Whether this platform's 8-bit floats are those with one zero and other exponents."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_fp8_fnuz())


def own_config(model_config: Any) -> dict[str, Any]:
    """What vLLM reads from the checkpoint alone, without what an operator overrode."""
    from vllm.transformers_utils.config import get_config

    config = get_config(
        model_config.model,
        model_config.trust_remote_code,
        model_config.revision,
        model_config.code_revision,
        model_config.config_format,
        token=model_config.hf_token,
    )
    plain: dict[str, Any] = config.to_dict()
    return plain


def model_identity(vllm_config: Any, layout: PagedLayout, own: Mapping[str, Any]) -> Identity:
    """Identity of the KV of the model that vLLM runs. own: see own_config().

    A LoRA adapter is not part of it but of its requests' keys. Raises IdentityError.
    """
    model, cache_dtype = vllm_config.model_config, str(vllm_config.cache_config.cache_dtype)
    resolved = str(model.dtype).removeprefix("torch.")
    extras: dict[str, str | int | float | bool] = {}
    if cache_dtype in ("auto", resolved):
        cache_dtype = resolved
    else:
        extras["dtype"] = resolved
    if cache_dtype.startswith("fp8") and fp8_is_fnuz():
        extras["fp8"] = "fnuz"
    config = model.hf_text_config
    if model.quantization and not getattr(model.hf_config, "quantization_config", None):
        extras["quantization"] = str(model.quantization)
    if vllm_config.load_config.load_format == "dummy":
        extras["weights"] = f"dummy {model.seed}"
    if model.disable_sliding_window and getattr(config, "sliding_window", None):
        extras["sliding_window"] = "off"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) in LENGTH_DEPENDENT_ROPE:
        extras["max_model_len"] = int(model.max_model_len)
    if layout.form == "opaque":
        extras["layout"] = f"vLLM {layout.block_tokens} tokens; {layout.reason}"
    return Checkpoint.read(model.model, model.revision).identity(
        layout.geometry,
        kv_dtype=cache_dtype,
        running=model.hf_config.to_dict(),
        own=own,
        extras=extras,
    )
