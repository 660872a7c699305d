"""Makes the text of the package's page from README.md, whose links to files lead nowhere outside the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]+)\)")


def repository(pyproject: str) -> str | None:
    """Read ``Repository``, the address of the repository, from [project.urls]; None where it is not there."""
    found = re.search(r'^Repository = "(.+?)/?"$', pyproject, re.MULTILINE)
    return found and found[1]


def page(readme: str, repository: str | None) -> str:
    """Return the README with every link to a file of the repository made absolute, or without an address its text."""

    def elsewhere(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        return f"{image}[{text}]({repository}/{'raw' if image else 'blob'}/HEAD/{target})" if repository else text

    return LINK.sub(elsewhere, readme)


def long_description() -> str:
    """Return the page of this tree."""
    readme, pyproject = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "pyproject.toml"))
    return page(readme, repository(pyproject))
