"""A job whose steps read other steps: through a union, a side output, a join, and three steps in a row.

What its sinks hold at the end does not depend on the batches into which rows fall.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import strandline as sl
from tests.jobs.kafka_place import Rows
from tests.jobs.place import Place

BIG = 900
"""Rows with a greater x go to the side output, too."""


class Each(sl.KeyedProcessor):
    """Numbers the rows of a user."""

    def open(self, context: Any) -> None:
        self.n = context.value_state("n", "long")

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        n = self.n.get() or 0
        for row in rows:
            n += 1
            if row.x > BIG:
                context.emit("big", (*key, row.x))
            yield (*key, "even" if n % 2 == 0 else "odd", n, row.x)
        self.n.update(n)


class Bucket(sl.KeyedProcessor):
    """Counts and sums the rows of a bucket, and emits both for every row."""

    def open(self, context: Any) -> None:
        self.total = context.value_state("total", "n long, s long")

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        n, s = self.total.get() or (0, 0)
        for row in rows:
            n, s = n + 1, s + row.x
            yield (*key, n, s)
        self.total.update((n, s))


def chain(place: Place, first: Any, second: Any, **options: Any) -> sl.Job:
    """`first` and `second` are streaming frames with the columns user and x."""
    job = place.job(**options)
    each = (
        job.source(first)
        .key_by("user")
        .process(
            Each(),
            "user string, bucket string, n long, x long",
            side_outputs={"big": "user string, big long"},
            uid="each",
        )
    )
    plain = job.source(second).transform(lambda df: df.selectExpr("user", "'plain' bucket", "0L n", "x"))
    buckets = each.union(plain).key_by("bucket").process(Bucket(), "bucket string, n long, s long", uid="buckets")
    pairs = each.key_by("user").join(each.side("big").key_by("user"), uid="pairs")
    per_user = pairs.key_by("user").aggregate(n=sl.count(), s=sl.sum("x"), uid="per-user")
    for name, stream in {"each": each, "buckets": buckets, "pairs": pairs, "per-user": per_user}.items():
        stream.sink(sl.ParquetSink(str(place.root / name)))
    return job


def check(place: Place, first: Rows, second: Rows) -> None:
    """Compare all sinks with what the rows must give."""
    users: dict[str, list[int]] = {}
    for user, x in first:
        users.setdefault(user, []).append(x)
    each = place.rows(place.root / "each")
    assert Counter((user, n) for user, _bucket, n, _x in each) == Counter(
        (user, n) for user, some in users.items() for n in range(1, len(some) + 1)
    )
    assert Counter((user, x) for user, _bucket, _n, x in each) == Counter(first)

    wanted: dict[str, tuple[int, int]] = {}
    for bucket, x in [*((bucket, x) for _user, bucket, _n, x in each), *(("plain", x) for _user, x in second)]:
        n, s = wanted.get(bucket, (0, 0))
        wanted[bucket] = (n + 1, s + x)
    buckets = place.rows(place.root / "buckets")
    assert Counter((bucket, n) for bucket, n, _s in buckets) == Counter(
        (bucket, n) for bucket, (total, _s) in wanted.items() for n in range(1, total + 1)
    )
    assert {(bucket, n, s) for bucket, n, s in buckets} >= {(bucket, *last) for bucket, last in wanted.items()}

    big = {user: [x for x in some if x > BIG] for user, some in users.items()}
    pairs = Counter((user, x, other) for user, some in users.items() for x in some for other in big[user])
    assert Counter((user, x, other) for user, _bucket, _n, x, other in place.rows(place.root / "pairs")) == pairs
    last: dict[str, tuple[int, int]] = {}
    for user, n, s in place.rows(place.root / "per-user"):
        last[user] = max(last.get(user, (0, 0)), (n, s))
    assert last == {
        user: (len(some) * len(big[user]), sum(some) * len(big[user])) for user, some in users.items() if big[user]
    }
