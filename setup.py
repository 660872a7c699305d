"""Build entry point; metadata and tool settings live in pyproject.toml, the rest in build_cuda.py and build_page.py."""

import os
import sys

import setuptools

NEEDED = 77  # as in pyproject.toml, which an older one fails to read, in a page of its own words
if int(setuptools.__version__.partition(".")[0]) < NEEDED:
    sys.exit(
        f"error: setuptools {setuptools.__version__} is too old to build prokl: must be at least {NEEDED}. "
        f"pip install -U 'setuptools>={NEEDED}', or leave out --no-build-isolation."
    )

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # which an isolated build leaves out

from build_cuda import BuildCuda, ToolkitError, extensions  # noqa: E402
from build_page import long_description  # noqa: E402

try:
    modules = extensions(os.environ, sys.argv[1:])
except ToolkitError as error:
    sys.exit(f"error: {error}")
# An editable install puts src/ on the path, where nothing but a link to prokl/ lies: type checkers know of no finders.
editable = "editable_wheel" in sys.argv and os.path.isdir(os.path.join("src", "prokl"))
setuptools.setup(
    package_dir={"": "src"} if editable else {},
    ext_modules=modules,
    cmdclass={"build_ext": BuildCuda},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
