"""A keyed stream cut into windows of event time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from strandline.operators.aggregate.functions import Aggregate
from strandline.operators.windows.specs import WindowSpec
from strandline.operators.windows.window_operator import WindowOperator

if TYPE_CHECKING:
    from strandline.job.keyed_stream import KeyedStream
    from strandline.job.stream import Stream


class WindowedStream:
    """A keyed stream cut into windows of event time; `KeyedStream.window` returns one."""

    def __init__(
        self,
        keyed: KeyedStream,
        spec: WindowSpec,
        time: str | None,
        allowed_lateness_ms: int,
        emit: Literal["close", "update"],
        late: str,
    ) -> None:
        self._keyed = keyed
        self._spec = spec
        self._time = time
        self._allowed_lateness_ms = allowed_lateness_ms
        self._emit = emit
        self._late = late

    def aggregate(self, *, uid: str | None = None, **aggregates: Aggregate) -> Stream:
        """Returns the aggregates of every window.

        A row has the key columns, then `window_start`, `window_end`, `window_time`, then the values under the names of
        the keywords. `window_time` is the event time of the row: the last microsecond of the window. So a longer window
        of a next step counts the window in the period in which it lies. With `time="window_end"` the next step counts
        it in the period that begins at its end.

        ```python
        clicks.key_by("user").window(sl.tumbling("1m")).aggregate(n=sl.count(), total=sl.sum("amount"))
        ```

        Raises `JobDefinitionError` if there is no aggregate, if one does not fit the type of its column, or if no
        source of the stream has event time, because then no window would ever close.
        """
        keyed = self._keyed
        uid = keyed._uid(uid, "window")
        operator = WindowOperator(
            uid,
            keyed._columns,
            keyed._stream.schema,
            self._spec,
            keyed._stream._time_column(self._time, f"operator {uid!r}"),
            aggregates,
            self._allowed_lateness_ms,
            self._emit,
            self._late,
        )
        return keyed._stateful(operator, operator.needed_columns, operator.output_struct, time=operator.time_column)
