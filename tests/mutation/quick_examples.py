"""pytest plugin of mutate.py: few examples a property, and none made smaller once one fails."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile(
    "mutation", phases=(Phase.explicit, Phase.generate), max_examples=25, database=None
)
settings.load_profile("mutation")
