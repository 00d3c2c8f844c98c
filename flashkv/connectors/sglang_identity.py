"""What SGLang's pages mean, and which part of the model a rank's pages are.

Invariants
  - the identity names the checkpoint by its files, what the operator changed of its configuration,
    the KV's type, LoRA adapters by their weights, the draft model, the page's tokens and the pool;
  - how ranks divide the model is in the shard, or, where the division can't be told in layers and
    heads, in the identity: pages of different parts never meet;
  - a checkpoint that can't be read is an error that says what to configure, never a guess.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from flashkv.connectors.checkpoint import Checkpoint, canonical
from flashkv.connectors.sglang_interface import PoolName, get_context
from flashkv.connectors.sglang_pools import PoolMemory
from flashkv.errors import IdentityError
from flashkv.geometry import KVGeometry
from flashkv.identity import WHOLE, Extra, Identity, Shard, weights_fingerprint

# Of the engine's settings, those that change the numbers of the KV.
MODEL: Final = """load_format quantization quantization_param_path modelopt_quant rl_quant_profile
    model_impl custom_weight_loader decrypted_config_file""".split()
SPECULATIVE: Final = """speculative_algorithm speculative_draft_model_path
    speculative_draft_model_revision speculative_draft_load_format
    speculative_draft_model_quantization speculative_draft_kv_cache_dtype""".split()
AUTOMATIC: Final = (None, "", "auto")


@dataclass(frozen=True)
class Engine:
    """What the running engine says of itself; all of it empty outside of an engine.

    model       the folder or the hub's name that it loads, and the revision that it asked for.
    overrides   of the checkpoint's configuration.
    kv_dtype    as asked for; "" where it follows the model's.
    dtype       the model's, as asked for.
    settings    of MODEL and SPECULATIVE, those that are set.
    loras       name -> path of the adapters that it started with.
    """

    model: str = ""
    revision: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    kv_dtype: str = ""
    dtype: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    loras: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def running(cls) -> Engine:
        """The engine of this process."""
        context = get_context()
        if not context.is_config_namespace_published("model"):
            return cls()
        model, spec, lora = (context.config_bag(name) for name in ("model", "spec", "lora"))
        settings = {name: getattr(model, name, None) for name in MODEL}
        settings |= {name: getattr(spec, name, None) for name in SPECULATIVE}
        kv_dtype = model.kv_cache_dtype
        return cls(
            model=str(model.model_path),
            revision=model.revision,
            overrides=json.loads(model.json_model_override_args or "{}"),
            kv_dtype="" if kv_dtype in AUTOMATIC else str(kv_dtype),
            dtype=str(model.dtype),
            settings={n: str(v) for n, v in settings.items() if v and v not in AUTOMATIC},
            loras=_loras(lora.lora_paths) if lora.enable_lora else {},
        )


def weights_were_updated() -> bool:
    """Whether SGLang runs other weights than those that it started with, and was told their name.

    It keeps that name where it keeps its settings; what the operator gave at the start stays.
    """
    context = get_context()
    if not context.is_config_namespace_published("serving"):
        return False
    now, begun = context.config_bag("serving").weight_version, context.server_args.weight_version
    return bool(now != begun)


def _loras(given: Any) -> dict[str, str]:
    """Adapters that the engine started with; those that are loaded later get a key of their own."""
    if isinstance(given, Mapping):
        entries = list(given.items())
    else:
        entries = [(one.lora_name, one.lora_path) for one in given or ()]
    return {str(n): str(getattr(path, "lora_path", None) or path) for n, path in entries}


def checkpoint_of(engine: Engine, model_name: str | None, given: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint that the pages are computed with.

    given: flashkv's settings; "model": where the checkpoint is, if not where the engine says;
    "revision": what names the weights, for a checkpoint that can't be read here.
    Raises IdentityError.
    """
    source = str(given.get("model") or engine.model or model_name or "")
    if not source:
        raise IdentityError(
            "SGLang doesn't say which model it runs",
            advice='Set "model" in hicache_storage_backend_extra_config',
        )
    named = given.get("revision")
    if named is not None:
        if not isinstance(named, str) or not named:
            raise IdentityError("revision must be text", value=repr(named))
        return Checkpoint(source, named, "", "")
    try:
        return Checkpoint.read(source, engine.revision)
    except IdentityError as error:
        raise IdentityError(
            f"flashkv can't tell which weights SGLang runs: {error.what}",
            value=error.value if error.value is not None else source,
            advice='Set "model" to the folder of the checkpoint, or "revision" to a text that'
            " changes with the weights, in hicache_storage_backend_extra_config",
        ) from error


def identity_of(
    name: str,
    memory: PoolMemory,
    geometry: KVGeometry,
    engine: Engine,
    checkpoint: Checkpoint,
    extras: Mapping[str, Extra],
) -> Identity:
    """Identity of a pool's pages."""
    more: dict[str, Extra] = {
        "keys": "sglang",  # its own hash chain: other engines' keys mean other things
        "page_tokens": memory.page_slots,
        "pool": name,
        **extras,
    }
    settings = dict(engine.settings)
    for setting in ("quantization_param_path", "decrypted_config_file"):
        if setting in settings:
            settings[setting] = _content(settings[setting])
    if engine.kv_dtype:
        settings["dtype"] = engine.dtype  # else the KV's own type tells
    if "speculative_draft_model_path" in settings:
        draft = Checkpoint.read(
            settings["speculative_draft_model_path"],
            settings.get("speculative_draft_model_revision"),
        )
        settings["speculative_draft_model_path"] = canonical(
            [draft.name, draft.revision, draft.weights_fingerprint, draft.settings]
        )
    if settings:
        more["engine"] = canonical(settings)
    if memory.form:
        more["bytes_of"] = memory.form
    element = str(getattr(memory.pool, "dtype", "bytes")).removeprefix("torch.")
    return checkpoint.identity(
        geometry,
        kv_dtype=engine.kv_dtype or element,
        running={**checkpoint.config, **engine.overrides},
        own=checkpoint.config,
        adapter=_adapters(engine.loras),
        extras=more,
    )


def _adapters(loras: Mapping[str, str]) -> str:
    """SGLang's keys tell adapters apart by name and path: their weights are told here."""
    told = {}
    for name, path in sorted(loras.items()):
        if not Path(path).is_dir():
            raise IdentityError(
                "flashkv can't tell a LoRA adapter's weights: it is no folder",
                value=f"{name}={path}",
                advice="Download it and give its folder in --lora-paths",
            )
        told[name] = weights_fingerprint(path)
    return canonical(told) if told else ""


def _content(path: str) -> str:
    """Digest of a file that a setting names."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise IdentityError("a file of the engine's settings can't be read", value=path) from error


@dataclass(frozen=True)
class Part:
    """The part of the model that this rank's pages are.

    geometry  of the whole model, as far as its division can be told.
    extras    what else tells parts apart.
    """

    geometry: KVGeometry
    shard: Shard
    extras: Mapping[str, str | int]


def part_of(name: str, memory: PoolMemory, config: Any, model: Mapping[str, Any]) -> Part:
    """config: a HiCacheStorageConfig; model: the checkpoint's config.json."""
    geometry, shard = memory.geometry, WHOLE
    extras: dict[str, str | int] = {}
    if config.pp_size > 1:
        layers = _layers(memory.pool, model) if name == PoolName.KV.value else None
        if layers is None:
            extras["pp"] = f"{config.pp_rank} of {config.pp_size}"
        else:
            whole, first, end = layers
            geometry = _resized(geometry, layers=whole)
            shard = replace(shard, layers=(first, end))
    if config.tp_size > 1 and not replicated(name, config):
        if memory.heads:
            total, first = _heads(memory.heads, config.tp_rank, config.tp_size, model)
            geometry = _resized(geometry, heads=total)
            shard = replace(shard, heads=(first, first + memory.heads))
        else:
            extras["tp"] = f"{config.tp_rank} of {config.tp_size}"
    if config.attn_cp_size > 1:
        shard = replace(shard, context=(config.attn_cp_rank, config.attn_cp_size))
    return Part(geometry, shard, extras)


def replicated(name: str, config: Any) -> bool:
    """Whether tensor parallel ranks all hold the same pages: then one of them writes."""
    return bool(config.is_mla_model) and name != PoolName.MAMBA.value


def _text_model(model: Mapping[str, Any]) -> Mapping[str, Any]:
    text = model.get("text_config")
    return text if isinstance(text, Mapping) else model


def _layers(pool: Any, model: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """(layers of the model, first, end) of a pipeline stage; None where that isn't all it has."""
    first, end = getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)
    whole = _text_model(model).get("num_hidden_layers")
    if not all(isinstance(number, int) for number in (first, end, whole)):
        return None
    assert isinstance(first, int)
    assert isinstance(end, int)
    assert isinstance(whole, int)
    return (whole, first, end) if first + pool.layer_num == end <= whole else None


def _heads(heads: int, rank: int, ranks: int, model: Mapping[str, Any]) -> tuple[int, int]:
    """(KV heads of the model, first of this rank's); with fewer heads than ranks, some share."""
    total = _text_model(model).get("num_key_value_heads")
    if isinstance(total, int) and total > 0 and not (heads * ranks) % total and not total % heads:
        return total, rank // (heads * ranks // total) * heads
    return heads * ranks, rank * heads


def _resized(
    geometry: KVGeometry, *, layers: int | None = None, heads: int | None = None
) -> KVGeometry:
    """The geometry with so many layers or heads in each plane."""
    groups = []
    for group in geometry.groups:
        planes = tuple(
            replace(plane, layers=layers or plane.layers, heads=heads or plane.heads)
            for plane in group.planes
        )
        groups.append(replace(group, planes=planes))
    return KVGeometry(tuple(groups))


def rank_folder(path: Path, name: str, config: Any) -> Path:
    """Where this rank's pages of a pool are stored: a store has one writing process.

    Ranks that hold the same pages share the folder of the one that writes.
    """
    parts = []
    if config.pp_size > 1:
        parts.append(f"pp{config.pp_rank}of{config.pp_size}")
    if config.attn_cp_size > 1:
        parts.append(f"cp{config.attn_cp_rank}of{config.attn_cp_size}")
    if config.tp_size > 1 and not replicated(name, config):
        parts.append(f"tp{config.tp_rank}of{config.tp_size}")
    if config.dp_rank:
        parts.append(f"dp{config.dp_rank}")
    return path / "-".join(parts) if parts else path
