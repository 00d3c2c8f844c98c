"""A model's identity from its checkpoint's files: the same in every engine that loads it.

Invariants
  - two engines that run one checkpoint with the same settings get equal identities, so that one
    loads what the other stored; a setting that an operator changed for the run is part of it;
  - what names the weights is the hub's commit, else a fingerprint of the files: megabytes are read,
    never the weights;
  - no engine is imported; huggingface_hub only to find what is cached, and nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flashkv.errors import IdentityError
from flashkv.geometry import KVGeometry
from flashkv.identity import Extra, Identity, weights_fingerprint

# Settings that don't change what the numbers of the KV mean, or are told elsewhere in the identity.
NOT_IDENTITY: Final = frozenset(
    """_name_or_path architectures dtype torch_dtype transformers_version
    use_cache bos_token_id eos_token_id pad_token_id unk_token_id initializer_range
    attention_dropout output_hidden_states output_attentions return_dict tie_word_embeddings
    id2label label2id problem_type chunk_size_feed_forward is_encoder_decoder pretraining_tp
    _model_name_or_path _commit_hash auto_map""".split()
)
ROPE: Final = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
TEXT_MAX: Final = 512
"""Settings longer than this are given by their digest."""


@dataclass(frozen=True)
class Checkpoint:
    """What a folder of weights says of itself.

    name                 the hub's name, or the folder's.
    revision             the hub's commit; "" for a folder.
    weights_fingerprint  of a folder; "" where the revision names the weights.
    settings             digest of config.json, without what doesn't change the KV.
    config               what config.json says; told by the digest.
    """

    name: str
    revision: str
    weights_fingerprint: str
    settings: str
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def read(cls, source: str | Path, revision: str | None = None) -> Checkpoint:
        """The checkpoint that an engine was given: a folder, or a name on the hub, cached here.

        Raises IdentityError where there is none, or no config.json in it.
        """
        folder = Path(source)
        if folder.is_dir():
            config = _config(folder / "config.json")
            fingerprint = weights_fingerprint(folder)
            return cls(folder.resolve().name, "", fingerprint, settings_digest(config), config)
        path = _cached(str(source), revision)
        config = _config(path)
        return cls(str(source), path.parent.name, "", settings_digest(config), config)

    def identity(
        self,
        geometry: KVGeometry,
        *,
        kv_dtype: str,
        running: Mapping[str, Any],
        own: Mapping[str, Any],
        adapter: str = "",
        extras: Mapping[str, Extra] | None = None,
    ) -> Identity:
        """Identity of the KV of this checkpoint as an engine runs it.

        running, own: the configuration in use, and the one that the engine reads from the
        checkpoint alone, as plain values; where they differ an operator overrode it.
        """
        changed = differences(running, own)
        rope = {name: changed.pop(name) for name in ROPE if name in changed}
        more: dict[str, Extra] = {"settings": self.settings, **(extras or {})}
        if changed:
            more["overrides"] = _short(canonical(changed))
        return Identity(
            model=self.name,
            revision=self.revision,
            weights_fingerprint=self.weights_fingerprint,
            kv_dtype=kv_dtype,
            rope=_short(canonical(rope)) if rope else "",
            adapter=adapter,
            geometry=geometry,
            extras=more,
        )


def differences(running: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that differ, with their running value; None for one that is gone."""
    names = (set(running) | set(own)) - NOT_IDENTITY
    return {
        name: running.get(name)
        for name in sorted(names)
        if canonical(running.get(name)) != canonical(own.get(name))
    }


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces; what JSON doesn't know as its text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def settings_digest(settings: Mapping[str, Any]) -> str:
    """SHA-256, as hex, over those settings that change what the numbers of the KV mean."""
    told = {name: value for name, value in settings.items() if name not in NOT_IDENTITY}
    return hashlib.sha256(canonical(told).encode()).hexdigest()


def _short(text: str) -> str:
    return text if len(text) <= TEXT_MAX else hashlib.sha256(text.encode()).hexdigest()


def _config(path: Path) -> dict[str, Any]:
    """A checkpoint's config.json."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise IdentityError(
            "the checkpoint has no readable config.json",
            value=str(path),
            advice="Give the folder that the engine loads the model from",
        ) from error
    except ValueError as error:
        raise IdentityError("config.json is no JSON", value=str(error)) from None
    if not isinstance(config, dict):
        raise IdentityError("config.json is no object", value=type(config).__name__)
    return config


def _cached(name: str, revision: str | None) -> Path:
    """config.json of a hub's model, from the cache."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        raise IdentityError(
            "a model of the hub is found through huggingface_hub, which is not installed",
            value=name,
            advice="pip install huggingface_hub, or load the model from a folder",
        ) from error
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # no name that the hub could have: a path
        found = None
    if not isinstance(found, str):
        raise IdentityError(
            "the model is neither a folder nor in the hub's cache",
            value=f"{name} at {revision or 'main'}",
            advice="Load it once, or give its folder",
        )
    return Path(found)
