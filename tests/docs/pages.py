"""The pages of the documentation, as `scripts/check_docs.py` knows them, which is no module of a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_check_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_docs", ROOT / "scripts" / "check_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_docs = load_check_docs()
PAGES: list[Path] = check_docs.pages()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))
