"""Checks the documentation's links: of the pages in the repository, or with a folder as argument, of the built site.

In the repository every relative link and picture must lead to a file, and every anchor to a heading. In the site the
same holds for the HTML, and no page may load a script, a style sheet, a font or a picture from elsewhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
WEB = ("http://", "https://", "mailto:")
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Elements that make a browser fetch something when the page opens, and the attribute that says what."""


def pages() -> list[Path]:
    """Every page of documentation in the repository."""
    return sorted(
        [
            *ROOT.glob("*.md"),
            *(ROOT / "docs").rglob("*.md"),
            *(ROOT / "bench").glob("*.md"),
            *(ROOT / "examples").rglob("*.md"),
        ]
    )


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def broken_links(page: Path) -> Iterator[str]:
    """The links of a page that lead nowhere. Links to the web are not followed."""
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(WEB):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield f"{page.relative_to(ROOT)}: {link}"


class _Html(HTMLParser):
    """Collects the links, the anchors and the loaded files of one HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value is not None}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if LOADED.get(tag) in values and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values[LOADED[tag]])


def broken_in_site(site: Path) -> Iterator[str]:
    """The links of a built site that lead nowhere, and what its pages load from elsewhere."""
    parsed = {path.resolve(): _Html(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, html in parsed.items():
        if path.name == "404.html":
            continue  # its links begin at the root of a server
        where = path.relative_to(site.resolve())
        for link in (*html.links, *html.loaded):
            if link.startswith(WEB):
                if link in html.loaded:
                    yield f"{where} loads {link}"
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file.split("?")[0]).resolve() if file else path
            if target.is_dir():
                target = target / "index.html"
            if not target.exists():
                yield f"{where}: {link}"
            elif anchor and target in parsed and anchor not in parsed[target].anchors:
                yield f"{where}: {link} (no such anchor)"


def main(arguments: list[str]) -> int:
    broken = (
        list(broken_in_site(Path(arguments[0]))) if arguments else [x for page in pages() for x in broken_links(page)]
    )
    sys.stderr.writelines(f"{link}\n" for link in broken)
    sys.stdout.write(f"{arguments[0] if arguments else 'pages'}: {len(broken)} broken links\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
