"""Imports the connector with vLLM's interface as it is, and as it might become: what is told."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from flashkv.errors import FlashKVError


def told() -> str:
    """What importing the connector says; nothing where it succeeds."""
    sys.modules.pop("flashkv.connectors.vllm_connector", None)
    try:
        importlib.import_module("flashkv.connectors.vllm_connector")
    except FlashKVError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def match(self: Any, request: Any, computed: int) -> tuple[int, bool]:
    """As vLLM might name its parameters."""
    return 0, False


def main() -> None:
    result = {"as it is": told()}
    owner = base.KVConnectorBase_V1
    original = owner.get_num_new_matched_tokens
    owner.get_num_new_matched_tokens = match
    result["other parameters"] = told()
    owner.get_num_new_matched_tokens = original
    new_request = owner.on_new_request
    del owner.on_new_request
    result["a method less"] = told()
    owner.on_new_request = new_request
    del base.KVConnectorHandshakeMetadata
    result["a name less"] = told()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
