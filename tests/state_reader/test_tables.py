"""Which state of a checkpoint is meant."""

from __future__ import annotations

import pytest

from strandline.errors import StrandlineError
from strandline.state_reader.tables import find_table
from tests.factories import checkpoint_metadata


def test_a_checkpoint_of_several_steps_names_them() -> None:
    metadata = checkpoint_metadata(7, operators=("per-shop", "alarm"))
    with pytest.raises(StrandlineError) as caught:
        find_table(metadata, None, None, "chk-7")
    assert str(caught.value) == "chk-7 has 2 operators; name one of them: per-shop, alarm"
