"""The page of a server: the static files that a browser loads, and nothing else.

Plain ES modules, one style sheet and `index.html`; no build step and no other host. The page reads the JSON of
`strandline.rest`, which serves these files. Only `rest` imports this package.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
"""Where the files are: `index.html`, served at `/`, and those that it loads, served at `/web/`."""
