"""A slot finds for a key the key group that Spark finds for it: the hash equals Spark's own, bit by bit."""

from __future__ import annotations

import random
from datetime import timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from strandline.operators.columns.schemas import arrow_schema
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.spark_hash import hashes_as_spark, key_groups, spark_hash

ROWS = 2_000
SEED = random.SystemRandom().randrange(1 << 31)


def values(kind: pa.DataType, chance: random.Random, count: int) -> list[Any]:
    """Random values of a type: nulls, the ends of its range, and what lies between."""
    return [None if chance.random() < 0.1 else value(kind, chance) for _ in range(count)]


def value(kind: pa.DataType, chance: random.Random) -> Any:
    types = pa.types
    if types.is_boolean(kind):
        return chance.random() < 0.5
    if types.is_integer(kind):
        most = (1 << kind.bit_width - 1) - 1
        return chance.choice([0, -1, most, -most - 1, chance.randint(-most, most), chance.randint(-9, 9)])
    if types.is_floating(kind):
        found = chance.choice([0.0, -0.0, float("nan"), float("inf"), -1.5, chance.gauss(0, 1e6), 1e-320])
        return float(np.float32(found)) if types.is_float32(kind) else found
    if types.is_decimal(kind):
        digits = chance.randint(1, kind.precision)
        unscaled = chance.choice([0, 1, -1, 127, -128, -(1 << 63), 10**digits - 1, -(10**digits) + 1])
        while abs(unscaled) >= 10**kind.precision:
            unscaled = int(unscaled / 10)
        return Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -kind.scale))
    if types.is_date(kind):
        return chance.randint(-100_000, 100_000)
    if types.is_timestamp(kind):
        return chance.randint(-(1 << 50), 1 << 50)
    if types.is_duration(kind):
        return timedelta(microseconds=chance.randint(-(1 << 50), 1 << 50))
    if types.is_string(kind):
        return "".join(chance.choice("aé≤🙂 \0") for _ in range(chance.choice([0, 1, 3, 4, 7, 8, 15, 31, 33, 80])))
    if types.is_binary(kind):
        return chance.randbytes(chance.choice([0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 31, 32, 33, 63, 64, 65, 100, 300]))
    if types.is_list(kind):
        return values(kind.value_type, chance, chance.choice([0, 1, 2, 5]))
    assert types.is_struct(kind)
    return {kind.field(at).name: values(kind.field(at).type, chance, 1)[0] for at in range(kind.num_fields)}


KINDS = (
    "boolean",
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "float",
    "double",
    "date",
    "timestamp",
    "timestamp_ntz",
    "string",
    "binary",
    "decimal(9,2)",
    "decimal(18,0)",
    "decimal(19,3)",
    "decimal(38,10)",
    "interval day to second",
    "array<string>",
    "array<array<int>>",
    "struct<a: int, b: string, c: array<bigint>>",
)


@pytest.mark.spark
def test_the_hash_of_a_slot_is_that_of_spark_for_every_type_of_key(spark: SparkSession) -> None:
    chance = random.Random(SEED)
    struct = parse_schema(", ".join(f"c{number} {kind}" for number, kind in enumerate(KINDS)))
    schema = arrow_schema(struct)
    table = pa.table([pa.array(values(one.type, chance, ROWS), one.type) for one in schema], schema=schema)
    names = table.column_names
    # one hash for each column, and one for all: a hash of several columns goes on from that of the column before
    wanted = (
        spark.createDataFrame(table, struct)
        .select(
            *(F.xxhash64(name).alias(name) for name in names),
            F.xxhash64(*names).alias("all"),
            F.pmod(F.xxhash64(*reversed(names)), F.lit(128)).alias("group"),
        )
        .toArrow()
        .combine_chunks()
    )
    for first, count in ((0, ROWS), (500, 1_000)):  # a slice of an array begins in the middle of its buffers
        [batch] = table.slice(first, count).to_batches()
        expected = wanted.slice(first, count)
        for name, kind in zip(names, KINDS, strict=True):
            assert hashes_as_spark(batch.column(name).type)
            found = spark_hash([batch.column(name)], count)
            assert found.tolist() == expected[name].to_pylist(), f"{kind}, seed {SEED}"
        assert spark_hash(batch.columns, count).tolist() == expected["all"].to_pylist(), f"seed {SEED}"
        groups = key_groups(batch.columns[::-1], count, 128)
        assert groups.tolist() == expected["group"].to_pylist(), f"seed {SEED}"


def test_a_type_whose_hash_is_not_known_is_told_before_rows_come() -> None:
    unknown = pa.map_(pa.string(), pa.int64())
    assert not hashes_as_spark(unknown)
    assert not hashes_as_spark(pa.list_(unknown))
    assert not hashes_as_spark(pa.struct([("a", pa.int32()), ("b", unknown)]))
    with pytest.raises(TypeError, match="is not known"):
        spark_hash([pa.array([[("a", 1)]], unknown)], 1)


def test_no_rows_have_no_hashes() -> None:
    assert spark_hash([pa.array([], pa.string())], 0).tolist() == []
