"""Connectors: each ties one inference engine to a store and alone imports that engine."""
