"""Checks the RocksDB options that a user's `rocksdb_factory` returned: state must stay safe with them.

Python cannot read RocksDB's options back, but an open database has written them to a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from rocksdict import Options

from strandline.errors import ConfigError

Tune: TypeAlias = Callable[[Options], Options]
"""Changes the options of a database before it is opened."""

_SAFE: Final = {
    "compaction_style": (("kCompactionStyleUniversal", "kCompactionStyleLevel"), "other styles drop old entries"),
    "table_factory": (("BlockBasedTable",), "other tables cannot be read without the factory"),
    "num_levels": (("7",), "with more or fewer levels, the files cannot be opened without the factory"),
    "prefix_extractor": (("nullptr",), "with prefixes, a scan may skip keys"),
    "inplace_update_support": (("false",), "updates in place change what was read or frozen before"),
    "enable_blob_files": (("false",), "checkpoints do not share blob files"),
}


def check_tuned(directory: Path) -> None:
    """Raise `ConfigError` if the open database in `directory` has options that make state unsafe."""
    if not json.loads((directory / "rocksdict-config.json").read_text())["raw_mode"]:
        raise ConfigError(
            f"{directory}: rocksdb_factory returned options without raw_mode; change and return those that it gets, "
            "or begin with Options(raw_mode=True)"
        )
    newest = max(directory.glob("OPTIONS-*"), key=lambda path: int(path.name.partition("-")[2]))
    written = dict(line.strip().split("=", 1) for line in newest.read_text().splitlines() if "=" in line)
    for name, (safe, why) in _SAFE.items():
        if written[name] not in safe:
            raise ConfigError(
                f"{directory}: rocksdb_factory set {name} to {written[name]}; it must be {' or '.join(safe)}: {why}"
            )
