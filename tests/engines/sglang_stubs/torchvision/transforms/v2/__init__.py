"""Stand-in: see torchvision/__init__.py."""

from torchvision import __getattr__  # noqa: F401
