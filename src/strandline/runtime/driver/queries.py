"""Questions for what a step keeps for one key: how they are read, and how long their answer is waited for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from pyspark.sql.types import StructType

from strandline.errors import SlotLostError, StrandlineError
from strandline.operators.base import Operator
from strandline.runtime.protocol.slot_calls import Query
from strandline.state.handles.query import KEY_GROUP_BYTES, encode_key

log = logging.getLogger(__name__)


def read_query(operators: Iterable[Operator], uid: str, state: str | None, key: Any) -> Query:
    """A user's question as slots take it, with the key as they store it.

    A slot would load pandas to encode the key, which takes seconds on a busy host. Raises `StrandlineError` for an
    unknown step, and `SchemaError` for a key that does not fit its key columns.
    """
    steps = {operator.uid: operator for operator in operators}
    if uid not in steps:
        raise StrandlineError(f"there is no step {uid!r}; there are: {', '.join(steps) or 'none'}")
    step = steps[uid]
    schema = StructType([step.input_struct[name] for name in step.key_columns])
    encoded = encode_key(schema, key if isinstance(key, tuple) else (key,), 0)
    return Query(uid, state, encoded[KEY_GROUP_BYTES:])


def answer_within(timeout: float, ask: Callable[[], Any], job: str) -> Any:
    """The answer of `ask`, which may wait for a restart. Raises `TimeoutError` after `timeout` seconds.

    If a slot is lost, `ask` is called again.
    """
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(_repeated(ask, time.monotonic() + timeout, job))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True, name="query").start()
    return answer.result(timeout)


def _repeated(ask: Callable[[], Any], deadline: float, job: str) -> Any:
    while True:
        try:
            return ask()
        except SlotLostError as error:  # it is being replaced, or so busy that it did not answer
            if time.monotonic() > deadline:
                raise
            log.info("job %s: a query is repeated after: %s", job, error)
            time.sleep(0.1)
