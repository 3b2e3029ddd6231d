"""The driver of `strandline chaos realtime`: a job from Kafka in either mode, and what its sinks must hold at the end.

Two steps emit a row for every row that they get, and number them per key. So what they emit does not depend on the
batches or epochs into which rows fall, and the messages of the topic say what it must be.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from confluent_kafka import Producer

import strandline as sl
from strandline.errors import FencedError, StrandlineError
from strandline_bench.chaos.job import JOB, Place, Row
from strandline_bench.chaos.oracle import file_problems, files_below
from strandline_bench.chaos.plan import Variant
from strandline_bench.chaos.sinks_job import differences, notes_of_sinks, rows_of
from strandline_bench.sinks import TOOLS
from strandline_bench.targets import PARTITIONS, KafkaTarget, ParquetTarget, Target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES: Final = "messages"
"""The topic that the job reads."""
EACH: Final = "each"
"""The rows of the first step."""
BUCKETS: Final = "buckets"
"""The rows of the second step, which reads the first one."""
BUCKET_COUNT: Final = 5
MODES: Final[tuple[Literal["realtime", "batch"], ...]] = ("realtime", "realtime", "batch")
"""Two starts of three are in real time."""
MOST_SLOTS: Final = 3
FASTER: Final = 6
"""How many times as many rows are written as for a job that reads files."""
TIMEOUTS: Final = {
    "kafka.default.api.timeout.ms": "3000",
    "kafka.request.timeout.ms": "2000",
    "fetchOffset.numRetries": "1",
    "fetchOffset.retryIntervalMs": "100",
}
"""With these, Spark does not wait minutes for a broker that is down."""


class Each(sl.KeyedProcessor):
    """Numbers and sums the rows of a key."""

    def open(self, context: Any) -> None:
        """Declares the state."""
        self.total = context.value_state("total", "n long, s long")

    def process(self, key: Any, rows: Any, context: Any) -> Iterator[Row]:
        """Yields the count and the sum after every row, and the bucket of the row."""
        n, s = self.total.get() or (0, 0)
        for row in rows:
            n, s = n + 1, s + row.x
            yield (*key, n, s, row.x % BUCKET_COUNT)
        self.total.update((n, s))


class Bucket(sl.KeyedProcessor):
    """Numbers the rows of a bucket."""

    def open(self, context: Any) -> None:
        """Declares the state."""
        self.count = context.value_state("count", "n long")

    def process(self, key: Any, rows: Any, context: Any) -> Iterator[Row]:
        """Yields the count after every row."""
        n = self.count.get() or 0
        for _row in rows:
            n += 1
            yield (*key, n)
        self.count.update(n)


class RealtimePlace(Place):
    """The folders of one round, its topic, its job and its targets."""

    def __init__(self, folder: Path, seed: int, changelog: bool, servers: str) -> None:
        super().__init__(folder, seed, Variant("plain", changelog, "parquet"))
        self.servers = servers
        self.broker = KafkaTarget(folder / "kafka", servers)
        self._files = ParquetTarget(folder / "parquet")
        self._written = 0
        self._producer: Producer | None = None

    def make(self) -> None:
        """Make the topics."""
        for table in (MESSAGES, EACH):
            self.broker.make(table)

    def write(self, count: int) -> None:
        """Write the next messages; a broker that is down gets them later, and each of them once."""
        if self._producer is None:
            options = {"bootstrap.servers": self.servers, "enable.idempotence": True, "message.timeout.ms": 0}
            self._producer = Producer({**options, "reconnect.backoff.max.ms": 500, "log_level": 0})
        for number in range(self._written, self._written + count * FASTER):
            for key, x in self.rows_of(number):
                self._producer.produce(self.broker.topic(MESSAGES), key=key, value=f'{{"key": "{key}", "x": {x}}}')
        self._written += count * FASTER
        self._producer.poll(0)

    def flush(self) -> None:
        """Wait until the broker has all messages. Raises `StrandlineError` if it does not take them."""
        if self._producer is not None and self._producer.flush(60):
            raise StrandlineError("the broker does not take all messages")

    def files(self) -> int:
        return self._written

    def job(self, spark: SparkSession, config: sl.Config) -> sl.Job:
        job = sl.Job(JOB, spark, config)
        options = {"kafka.bootstrap.servers": self.servers, "subscribe": self.broker.topic(MESSAGES), **TIMEOUTS}
        messages = spark.readStream.format("kafka").options(**options).option("startingOffsets", "earliest").load()
        rows = messages.selectExpr(
            "cast(key as string) key", "cast(get_json_object(cast(value as string), '$.x') as long) x"
        )
        each = job.source(rows).key_by("key").process(Each(), "key string, n long, s long, bucket long", uid="each")
        each.sink(self._files.sink(EACH)).sink(self.broker.sink(EACH))
        buckets = each.key_by("bucket").process(Bucket(), "bucket long, n long", uid="buckets")
        buckets.sink(self._files.sink(BUCKETS))
        return job

    def emitted(self) -> tuple[Counter[Row], Counter[Row]]:
        """What the two steps must emit for the messages that the topic holds."""
        totals: dict[str, tuple[int, int]] = {}
        counts: Counter[int] = Counter()
        each: Counter[Row] = Counter()
        buckets: Counter[Row] = Counter()
        for key, x in rows_of(self.broker.read(MESSAGES), ("key", "x")):
            n, s = totals.get(key, (0, 0))
            totals[key] = (n + 1, s + x)
            bucket = x % BUCKET_COUNT
            counts[bucket] += 1
            each[(key, *totals[key], bucket)] += 1
            buckets[(bucket, counts[bucket])] += 1
        return each, buckets

    def problems(self) -> Iterator[str]:
        """What differs from the batch computation, and what is left behind, after the last driver has ended."""
        yield from self.output_problems()
        for target in (self._files, self.broker):
            yield from (f"left: {one}" for one in target.leftovers())
        staged = [path for path in files_below(self.checkpoints / JOB / "staged") if path.suffix == ".arrow"]
        if staged:
            yield f"{len(staged)} staged files are left, such as {min(staged).relative_to(self.folder)}"
        yield from file_problems(self, set(notes_of_sinks(self.checkpoints, [self.broker.sink(EACH).place])))

    def output_problems(self) -> Iterator[str]:
        """What in the targets differs from the batch computation."""
        each, buckets = self.emitted()
        written = self._written * len(self.rows_of(0))
        if each.total() != written:
            yield f"the topic has {each.total()} messages, and {written} were written"
        yield from self._table_problems(self._files, EACH, ("key", "n", "s", "bucket"), each)
        yield from self._table_problems(self.broker, EACH, ("key", "n", "s", "bucket"), each)
        yield from self._table_problems(self._files, BUCKETS, ("bucket", "n"), buckets)

    def _table_problems(
        self, target: Target, table: str, columns: Sequence[str], expected: Counter[Row]
    ) -> Iterator[str]:
        what = f"{type(target).__name__}, {table}"
        try:
            rows = rows_of(target.read(table), columns)
        except StrandlineError as error:
            yield f"{what}: {error}"
            return
        yield from differences(what, Counter(rows), expected)
        last: dict[Any, int] = {}
        for key, n, *_rest in rows if target.ordered else ():
            if n <= last.get(key, 0):
                yield f"{what}: of key {key}, count {n} comes after {last[key]}"
                return
            last[key] = n


def session() -> SparkSession:
    """A Spark session with a core for each partition, and with Spark's connector."""
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(f"local[{PARTITIONS}]")
        .config("spark.jars", ",".join(map(str, (TOOLS / "spark-kafka").glob("*.jar"))))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.memory", "1g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


class _Teller:
    """Runs the job in one mode after the other, and tells what happens."""

    def __init__(self, place: RealtimePlace, number: int) -> None:
        self._place = place
        self._chance = random.Random(f"{place.seed}-driver-{number}")
        self._events = place.folder / f"driver-{number}.events"

    def tell(self, event: str) -> None:
        with self._events.open("a") as events:
            events.write(event.replace("\n", " ") + "\n")

    def enough(self) -> bool:
        return (self._place.folder / "enough").exists()

    def go_on(self, spark: SparkSession) -> None:
        """Start the job in some mode, and stop it after a while, until it is enough; then process what is left."""
        while True:
            mode = self._chance.choice(MODES)
            config = self._place.config({}, restart_attempts=-1, latency_mode=mode)
            try:
                run = self._place.job(spark, config).start(parallelism=self._chance.randint(1, MOST_SLOTS))
            except FencedError:
                raise
            except StrandlineError as error:
                self.tell(f"refused {type(error).__name__}: {error}")
                return
            with run:
                self.tell(f"started {mode}")
                until = time.monotonic() + self._chance.uniform(5.0, 20.0)
                while not self.enough() and time.monotonic() < until:
                    if run.await_termination(0.1):
                        return
                    if self._chance.random() < 0.05:
                        self._steer(run)
                if self.enough():
                    run.process_all_available()
                    break
        self.tell("ended")

    def _steer(self, run: sl.JobRun) -> None:
        """Rescale the run or take a savepoint, which may be refused while something is lost."""
        what = self._chance.choice(("rescaled", "savepoint"))
        try:
            if what == "rescaled":
                run.rescale(self._chance.randint(1, MOST_SLOTS))
            else:
                run.savepoint(str(self._place.savepoints))
            self.tell(what)
        except FencedError:
            raise
        except StrandlineError as error:
            self.tell(f"not-{what} {type(error).__name__}: {error}")


def main() -> None:
    """Run the job until the file `enough` appears; then process what is left, and stop."""
    folder, seed, changelog, servers, number = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    teller = _Teller(RealtimePlace(Path(folder), seed, changelog, servers), number)
    spark = session()
    try:
        teller.go_on(spark)
    except FencedError:
        teller.tell("fenced")
    except StrandlineError as error:
        teller.tell(f"died {type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - an error that is not ours is told, too
        teller.tell(f"foreign {type(error).__name__}: {error}")
    spark.stop()


if __name__ == "__main__":
    main()
