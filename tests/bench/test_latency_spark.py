"""`strandline bench latency`: when Spark's operator has written what a message made."""

from __future__ import annotations

import numpy as np
import pytest

from strandline_bench.latency import Stream
from strandline_bench.latency_spark import _written_at
from strandline_bench.servers.kafka import KafkaBroker
from strandline_bench.workload import WrongResultError


def test_a_message_is_written_with_the_first_count_of_its_key_that_covers_it(kafka: KafkaBroker) -> None:
    topic = kafka.create_topic()
    stream = Stream(kafka.servers, topic, 2, 10, 40, 3, 100, 1_700_000_000_000_000)
    keys = stream.keys_of(np.arange(stream.rows, dtype=np.int64))
    began = stream.start_us // 1000
    wanted = np.empty(stream.rows)
    for key in range(stream.keys):
        numbers = np.flatnonzero(keys == key)
        for at, number in enumerate(numbers):
            # Every third count is never written on its own: the next one of its key has it.
            covering = min(at + (at % 3 == 0), len(numbers) - 1)
            wanted[number] = (began + 100 * key + 10 * covering) / 1000
            if covering == at:
                kafka.produce(topic, (str(key), at + 1), timestamp=began + 100 * key + 10 * at)
    assert np.abs(_written_at(kafka, topic, stream) - wanted).max() < 0.001

    kafka.produce(topic, ("0", 1000))
    with pytest.raises(WrongResultError, match="not there"):
        _written_at(kafka, topic, stream)
    with pytest.raises(WrongResultError, match="not counted all"):
        _written_at(kafka, kafka.create_topic(), stream)
