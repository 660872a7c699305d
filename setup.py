"""Build entry point; metadata and tool settings live in pyproject.toml, the CUDA extension in build_cuda.py."""

import os
import sys

from setuptools import setup

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # which an isolated build leaves out

from build_cuda import BuildCuda, ToolkitError, extensions  # noqa: E402

try:
    modules = extensions(os.environ, sys.argv[1:])
except ToolkitError as error:
    sys.exit(f"error: {error}")
setup(ext_modules=modules, cmdclass={"build_ext": BuildCuda})
