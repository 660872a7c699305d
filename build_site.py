"""Lets the documentation's site show what lies outside of docs/: pictures by copies, other files as the repository's.

A hook of MkDocs (mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from build_page import LINK, ROOT, repository

ROLE = re.compile(r":(?:func|class|mod|meth|data):(?=<code>)")
"""A role of Sphinx in docstrings, which Markdown does not know."""
PICTURE = re.compile(r"!\[[^]]*\]\(\.\./([^)]+\.png)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures that pages show."""
    shown = {path for page in Path(config.docs_dir).glob("*.md") for path in PICTURE.findall(page.read_text("utf-8"))}
    for path in sorted(shown):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Point links to files outside of docs/ at the repository; without an address leave their text."""
    address = repository((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    def elsewhere(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, _, anchor = target.partition("#")
        if not path.startswith("../"):
            return link[0]
        inside = posixpath.normpath(posixpath.join("docs", path))
        if image:
            return f"![{text}]({inside})"
        return f"[{text}]({address}/blob/HEAD/{inside}{'#' * bool(anchor)}{anchor})" if address else text

    return LINK.sub(elsewhere, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Take Sphinx's roles and double colons out of what came from docstrings."""
    return ROLE.sub("", html).replace("::</p>", ":</p>")
