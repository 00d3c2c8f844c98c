"""Only what pyproject.toml can't say: the compiled module is built by cffi."""

from setuptools import setup

setup(cffi_modules=["engine_native/build.py:ffibuilder"])
