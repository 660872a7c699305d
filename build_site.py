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
PAGE = re.compile(r"\bdocs/([\w-]+)\.md\b")
"""A page of the documents that a docstring names."""
UNBROKEN = re.compile(r"\s(?=±|/\s)|(?<=±)\s")
"""The place where a figure would come apart from its error, or a slash from what is before it."""
PICTURE = re.compile(r"!\[[^]]*\]\(\.\./([^)]+\.png)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures that pages show."""
    shown = {path for page in Path(config.docs_dir).glob("*.md") for path in PICTURE.findall(page.read_text("utf-8"))}
    for path in sorted(shown):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Name linked pages by their titles, and point links to files outside of docs/ at the repository.

    Without an address these leave their text.
    """
    address = repository((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    def elsewhere(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, _, anchor = target.partition("#")
        if text == path:  # groups.md, as the forge shows it
            return f"[{title(config, path)}]({target})"
        if not path.startswith("../"):
            return link[0]
        inside = posixpath.normpath(posixpath.join("docs", path))
        if image:
            return f"![{text}]({inside})"
        return f"[{text}]({address}/blob/HEAD/{inside}{'#' * bool(anchor)}{anchor})" if address else text

    return LINK.sub(elsewhere, markdown)


def title(config: Any, path: str) -> str:
    """Return the title of a page."""
    return (Path(config.docs_dir) / path).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def on_page_content(html: str, config: Any, **_: Any) -> str:
    """Take Sphinx's roles and double colons out of docstrings, link pages there, and keep errors by their figures."""
    html = PAGE.sub(lambda at: f'<a href="../{at[1]}/">{title(config, f"{at[1]}.md")}</a>', html)
    return UNBROKEN.sub("\N{NO-BREAK SPACE}", ROLE.sub("", html).replace("::</p>", ":</p>"))
