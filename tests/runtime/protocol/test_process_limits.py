"""What a slot sets up when it starts."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import numpy as np
import pyarrow as pa
from strandline.runtime.protocol.process_limits import set_up_process

set_up_process()
buffer = pa.py_buffer(np.zeros(801, np.uint8)).slice(1, 800)
column = pa.Array.from_buffers(pa.int64(), 100, [None, buffer])
assert pa.table({"k": column, "v": column}).group_by("k").aggregate([("v", "count")]).to_pylist() == [
    {"k": 0, "v_count": 100}
]
"""


def test_arrow_groups_rows_of_a_badly_aligned_buffer_in_silence() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stderr == ""
