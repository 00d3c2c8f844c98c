"""FlashKVClient that tells a test what it did: the adapter of a server in another process.

adapter_params: "report", a file that always holds stats() as of the last completions, as JSON; the
others are FlashKVClient's.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from flashkv.connectors.lmcache import FlashKVClient


class CountedClient(FlashKVClient):
    def __init__(self, *, report: str, **params: Any) -> None:
        super().__init__(**params)
        self._report = Path(report)
        self._writing = threading.Lock()
        self._write()

    def drain_completions(self) -> Any:
        done = super().drain_completions()
        if done:
            self._write()
        return done

    def _write(self) -> None:
        with self._writing:
            new = self._report.with_suffix(".new")
            new.write_text(json.dumps(self.stats(), default=str))
            new.replace(self._report)
