"""Puts the pages outside docs/ (README, CONTRIBUTING, ...) into the documentation's site: a hook of mkdocs.

Links between pages are written for somebody who reads them in the repository. This hook rewrites them for the site. A
link to a file that is no page of the site, such as a source file, becomes plain text there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
README = "readme.md"
"""The README's place in the site: `README.md` itself would be the front page, which docs/index.md is."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def outside_pages() -> dict[str, Path]:
    """The pages outside docs/, by their place in the site."""
    pages = {README: ROOT / "README.md"}
    for path in (ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", ROOT / "bench" / "README.md"):
        pages[str(path.relative_to(ROOT))] = path
    for path in sorted((ROOT / "examples").rglob("README.md")):
        pages[str(path.relative_to(ROOT))] = path
    return pages


def on_config(config: MkDocsConfig, **_rest: Any) -> MkDocsConfig:
    """List every design note in the navigation."""
    notes = sorted((ROOT / "docs" / "design").glob("*.md"))
    for section in config.nav or []:
        if isinstance(section, dict) and "Design notes" in section:
            section["Design notes"] = [f"design/{note.name}" for note in notes]
    return config


def on_files(files: Files, *, config: MkDocsConfig, **_rest: Any) -> Files:
    for place, path in outside_pages().items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_rest: Any) -> str:
    source = page.file.abs_src_path
    if source is None:
        return markdown
    places = {Path(file.abs_src_path).resolve(): file.src_uri for file in files if file.abs_src_path}
    here = Path(source).resolve().parent
    below = os.path.dirname(page.file.src_uri)

    def rewritten(found: re.Match[str]) -> str:
        picture, text, link = found.groups()
        if link.startswith(("http://", "https://", "mailto:", "#")):
            return found[0]
        path, _, anchor = link.partition("#")
        target = (here / path).resolve()
        if target.is_dir():
            target = target / "README.md"
        place = places.get(target)
        if place is None:
            # A file of the repository that is no page. A link that leads nowhere stays, so that mkdocs complains.
            return text if target.exists() else found[0]
        return f"{picture}[{text}]({os.path.relpath(place, below or '.')}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(rewritten, part) for part in parts)
