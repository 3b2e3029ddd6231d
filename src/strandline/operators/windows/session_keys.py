"""The stored keys of sessions: those of the entries of keys, and those of the index of looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from strandline.operators.columns.binary import binary_from
from strandline.operators.timed.time_index import TIME_BYTES, time_bytes
from strandline.operators.windows.session_entries import Sessions, fixed_bytes, join_bytes
from strandline.state.coding.keys import state_prefix

SESSIONS: Final = "sessions"
LOOKS: Final = "session-ends"
TIMES: Final = "session-times"
_LOOK_HEAD: Final = len(state_prefix(0, LOOKS))
_SESSIONS_NAME: Final = state_prefix(0, SESSIONS)[2:]
_LOOKS_NAME: Final = state_prefix(0, LOOKS)[2:] + time_bytes(0)[:1]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DueKeys:
    """Keys that are looked at: the parts of their stored keys, the times of their looks, and their sessions."""

    groups: Any
    keys: Any
    looks: Int64s
    sessions: Sessions

    def entry_keys(self, places: Int64s) -> list[bytes]:
        """The stored keys of the entries of some of the keys."""
        at = pa.array(places)
        return _joined(self.groups.take(at), _scalar(_SESSIONS_NAME), self.keys.take(at))

    def look_keys(self, places: Int64s, looks: Int64s) -> list[bytes]:
        """The stored keys of the index entries of some of the keys, for looks at the given times."""
        at = pa.array(places)
        times = (looks.view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8")
        return _joined(self.groups.take(at), _scalar(_LOOKS_NAME), fixed_bytes(times), self.keys.take(at))


def parts_of_looks(look_keys: list[bytes]) -> tuple[Any, Any, Any]:
    """The key groups, the keys and the stored keys of the entries that index entries refer to, sorted by the last."""
    array = pa.array(look_keys, pa.binary())
    groups, keys = pc.binary_slice(array, 0, 2), binary_from(array, _LOOK_HEAD + TIME_BYTES)
    entries = join_bytes(groups, _scalar(_SESSIONS_NAME), keys)
    order = pc.sort_indices(entries)
    return groups.take(order), keys.take(order), entries.take(order)


def _scalar(content: bytes) -> Any:
    return pa.scalar(content, pa.binary())


def _joined(*parts: Any) -> list[bytes]:
    joined: list[bytes] = join_bytes(*parts).to_pylist()
    return joined
