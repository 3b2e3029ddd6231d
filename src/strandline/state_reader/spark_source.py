"""The Spark data source `strandline`: a state as a DataFrame, with a partition for each part of the state.

Every session knows it, because PySpark finds the package `pyspark_strandline`. Spark refuses a source with filter
pushdown in a session that has it switched off, which is the default. So there are two classes: the one that sessions
find, and the one that `register` puts in its place in a session with pushdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

# The rest is imported when a source is used: PySpark imports this module in every session with a Python data source.
if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from strandline.state_reader.reader import StateTable, Wanted
    from strandline.state_reader.tables import Table

FORMAT: Final = "strandline"
PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
OPTIONS: Final = ("path", "operator", "state", "changelog_dir")
STORAGE: Final = "storage."
"""The options of the storage begin with it: `storage.endpoint`."""
_MOST_KEYS: Final = 10_000
"""So many keys are looked up one by one; a filter with more of them is left to Spark."""


def register(spark: SparkSession) -> None:
    """Let a Spark session push filters on key columns and `key_group` down to the format `strandline`.

    The session's setting `spark.sql.python.filterPushdown.enabled` is switched on. Without this call, the format can be
    read as well, but Spark reads the whole state and filters the rows itself.
    """
    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(FilteredStateSource)


class StateSource(DataSource):
    """`spark.read.format("strandline").option("path", ...).option("operator", uid).option("state", name).load()`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        from strandline.pyspark_releases import spark_schema

        return spark_schema(self._wanted().open().table.schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        return StateSourceReader(self._wanted(), schema)

    def _wanted(self) -> Wanted:
        from strandline.errors import ConfigError, UnknownOptionError
        from strandline.state_reader.reader import Wanted

        options = dict(self.options)
        unknown = [name for name in options if name not in OPTIONS and not name.startswith(STORAGE)]
        if unknown:
            raise UnknownOptionError(
                f"the format {FORMAT} has no option {unknown[0]!r}; it has {', '.join(OPTIONS)} and {STORAGE}<option>"
            )
        if not options.get("path"):
            raise ConfigError(
                f'the format {FORMAT} needs a path: .option("path", …) or .load(…), the folder of a checkpoint, of a '
                "savepoint or of a job"
            )
        storage = {name.removeprefix(STORAGE): value for name, value in options.items() if name.startswith(STORAGE)}
        others = tuple(one.strip() for one in options.get("changelog_dir", "").split(",") if one.strip())
        return Wanted(options["path"], options.get("operator"), options.get("state"), storage, others)


class FilteredStateSource(StateSource):
    """The same, with filter pushdown."""

    def reader(self, schema: StructType) -> DataSourceReader:
        return FilteredStateSourceReader(self._wanted(), schema)


@dataclass
class StatePartition(InputPartition):
    """A range of key groups of one checkpoint."""

    path: str
    start: int
    end: int

    @property
    def key_groups(self) -> range:
        return range(self.start, self.end)


class StateSourceReader(DataSourceReader):
    """Reads one checkpoint: the one that is found when Spark plans the query."""

    def __init__(self, wanted: Wanted, schema: StructType) -> None:
        self._wanted = wanted
        self._schema = schema
        self._groups: range | None = None
        self._keys: tuple[tuple[Any, ...], ...] | None = None

    def partitions(self) -> Sequence[InputPartition]:
        """One partition for every part, so that no file is fetched twice."""
        table = self._wanted.open()
        path = table.located.path
        return [StatePartition(path, part.groups.start, part.groups.stop) for part in table.parts(self._groups)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition. Raises `CheckpointNotFoundError` if the job has dropped the checkpoint."""
        from dataclasses import replace

        import pyarrow as pa

        from strandline.pyspark_releases import arrow_schema
        from strandline.state_reader.reader import Selection

        if not isinstance(partition, StatePartition):
            return  # Spark makes a partition of its own if there is none
        table: StateTable = replace(self._wanted, path=partition.path).open()
        schema = arrow_schema(self._schema)
        for batch in table.batches(Selection(partition.key_groups, self._keys)):
            columns = [
                column if column.type == one.type else column.cast(one.type)
                for column, one in zip(batch.columns, schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


class FilteredStateSourceReader(StateSourceReader):
    """Takes filters on `key_group`, and filters that name whole keys."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Filters on the key groups narrow the partitions. Keys are looked up if every key column has a filter."""
        table = self._wanted.open().table
        names = table.key_names
        group_column = table.schema.names[len(names)]
        low, high = 0, 1 << 16
        by_key: dict[str, tuple[list[Any], Filter]] = {}
        left: list[Filter] = []
        for one in filters:
            column = ".".join(getattr(one, "attribute", ()))
            value = getattr(one, "value", None)
            bounds = _bounds(one, value) if column == group_column and type(value) is int else None
            values = _values(one, value) if column in names and column not in by_key else None
            if bounds is not None:
                low, high = max(low, bounds[0]), min(high, bounds[1])
            elif values is not None:
                by_key[column] = values, one
            else:
                left.append(one)
        if (low, high) != (0, 1 << 16):
            self._groups = range(low, max(low, high))
        keys = _whole_keys(table, by_key)
        if keys is None:
            left += [one for _, one in by_key.values()]
        self._keys = keys
        return left


def _whole_keys(table: Table, by_key: dict[str, tuple[list[Any], Filter]]) -> tuple[tuple[Any, ...], ...] | None:
    """The keys that the filters name; None if they do not name whole keys, or too many, or values that misfit."""
    from strandline.errors import StrandlineError
    from strandline.state.handles.query import encode_key

    names = table.key_names
    if by_key.keys() != set(names) or prod(len(values) for values, _ in by_key.values()) > _MOST_KEYS:
        return None
    keys = tuple(product(*(by_key[name][0] for name in names)))
    try:
        for key in keys:
            encode_key(table.keys, key, 0)
    except StrandlineError:
        return None
    return keys


def _bounds(one: Filter, value: int) -> tuple[int, int] | None:
    """The first key group that a filter passes, and the first one after it that it does not; None for other filters."""
    match one:
        case EqualTo() | EqualNullSafe():
            return value, value + 1
        case GreaterThan():
            return value + 1, 1 << 16
        case GreaterThanOrEqual():
            return value, 1 << 16
        case LessThan():
            return 0, value
        case LessThanOrEqual():
            return 0, value + 1
        case _:
            return None


def _values(one: Filter, value: Any) -> list[Any] | None:
    """The values of a key column that a filter passes; None for other filters."""
    match one:
        case EqualNullSafe():
            return [value]
        case EqualTo() if value is not None:
            return [value]
        case In() if all(item is not None for item in value):
            return list(dict.fromkeys(value))
        case _:
            return None
