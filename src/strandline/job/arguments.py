"""Reads what users pass to the methods of a stream: durations, schemas, time modes."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from strandline.config.option import DurationLike, because, parse_duration
from strandline.errors import JobDefinitionError
from strandline.operators.base import TIME_MODES, TimeMode

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def read_time_mode(uid: str, given: str) -> TimeMode:
    """The `time_mode` that a user names in our words or in Spark's."""
    found = TIME_MODES.get(str(given).lower())
    if found is None:
        raise JobDefinitionError(f"operator {uid!r}: time_mode={given!r}; it must be none, processing or event")
    return found


def read_spark_time_mode(uid: str, given: str) -> TimeMode:
    """The `timeMode` of Spark's `transformWithState`; our words are accepted, too."""
    found = TIME_MODES.get(str(given).lower())
    if found is None:
        raise JobDefinitionError(
            f"operator {uid!r}: timeMode={given!r}; it must be 'None', 'ProcessingTime' or 'EventTime'"
        )
    return found


def read_milliseconds(duration: DurationLike, what: str) -> int:
    """A duration in whole milliseconds; `what` is its name in the error."""
    try:
        return round(parse_duration(duration) * 1000)
    except ValueError as error:
        raise JobDefinitionError(
            f"{what}={duration!r} is no duration{because(error)}; write one such as '10s', '5 min' or '1h'"
        ) from None


def read_bounds(uid: str, within: DurationLike | tuple[DurationLike, DurationLike] | None) -> tuple[int, int] | None:
    """The `within` of a join as the least and the greatest distance from a left row to a right row, in milliseconds."""
    if within is None:
        return None
    if not isinstance(within, tuple):
        span = read_milliseconds(within, f"operator {uid!r}: within")
        return -span, span
    if len(within) != 2:
        raise JobDefinitionError(
            f"operator {uid!r}: within={within!r} must have two bounds, such as within=('0s', '1h')"
        )
    lower, upper = (_signed_milliseconds(uid, bound) for bound in within)
    return lower, upper


def _signed_milliseconds(uid: str, bound: DurationLike) -> int:
    if isinstance(bound, str) and bound.strip().startswith("-"):
        return -read_milliseconds(bound.strip()[1:], f"operator {uid!r}: within")
    zero = timedelta() if isinstance(bound, timedelta) else 0
    if isinstance(bound, timedelta | int | float) and bound < zero:  # type: ignore[operator]  # both are of one kind
        return -read_milliseconds(-bound, f"operator {uid!r}: within")
    return read_milliseconds(bound, f"operator {uid!r}: within")


def read_schema(uid: str, schema: str | StructType) -> StructType:
    """The output columns of the step `uid`, which a user gives as a `StructType` or as DDL text."""
    from pyspark.sql.types import StructType

    if isinstance(schema, StructType):
        return schema
    try:
        parsed = StructType.fromDDL(schema)
        if isinstance(parsed, StructType):
            return parsed
        raise ValueError("it is a single type, not a list of columns")
    except Exception as error:  # noqa: BLE001  # Spark's parser raises errors of several kinds
        # The message of Spark's parser goes on with the SQL text and the stack of the JVM.
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise JobDefinitionError(
            f"operator {uid!r}: the output schema {schema!r} cannot be read: {reason}; write DDL such as "
            "'user string, n long', or give a StructType"
        ) from None
