"""What a check of a store found, as plain values.

Invariant: `damage` is what an open, or a read of a block that lives, would meet; all else has
another kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

DAMAGE: Final = "damage"
IN_FLUX: Final = "in flux"
UNFINISHED: Final = "unfinished"
NOTE: Final = "note"


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be. page: of the segment. fault: what a repair goes by."""

    kind: str
    what: str
    file: str
    segment: int | None = None
    epoch: int | None = None
    page: int | None = None
    fault: str = ""


@dataclass
class VerifyReport:
    """What was checked and found. pages: payload pages whose checksum was computed."""

    findings: list[Finding] = field(default_factory=list)
    superblocks: int = 0
    manifest_entries: int = 0
    segments: int = 0
    directories: int = 0
    records: int = 0
    namespace_records: int = 0
    pages: int = 0

    def of(self, *kinds: str) -> list[Finding]:
        """Findings of these kinds."""
        return [finding for finding in self.findings if finding.kind in kinds]
