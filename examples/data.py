"""Small sample input for the examples: the same rows every time, in files that arrive one after another."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

START = datetime(2026, 1, 1, 9, tzinfo=UTC)
Row = dict[str, Any]


def clicks() -> list[Row]:
    """Five users who come back now and then, and a click that was held up for an hour."""
    random = Random(1)
    rows = []
    for user in ("ann", "ben", "cleo", "dan", "eve"):
        second = random.uniform(0, 900)
        while second < 7200:
            page = random.choice(["home", "search", "item", "cart"])
            cents = random.randrange(500, 9000) if page == "cart" else 0
            rows.append({"user": user, "ts": _at(second), "page": page, "cents": cents})
            second += random.uniform(5, 200) if random.random() < 0.85 else random.uniform(400, 1500)
    held_up = {"user": "eve", "ts": _at(3200), "page": "home", "cents": 0}
    return [*_as_they_arrive(rows, random, seconds=40), held_up]


def charges() -> list[Row]:
    """Mostly ordinary charges; sometimes a small one, sometimes a large one, sometimes both."""
    random = Random(2)
    rows = []
    for number in range(400):
        cents = random.choices([random.randrange(1, 100), random.randrange(500, 20_000), 75_000], [2, 7, 1])[0]
        account = f"account-{random.randrange(8)}"
        rows.append({"account": account, "charge": f"c{number:03d}", "ts": _at(number * 5), "cents": cents})
    return _as_they_arrive(rows, random, seconds=20)


def orders() -> list[Row]:
    """Orders of three shops over six hours."""
    random = Random(3)
    rows = []
    for number in range(120):
        shop = random.choices(["north", "south", "harbour"], [5, 3, 1])[0]
        ts = _at(number * 180 + random.uniform(0, 100))
        rows.append({"order_id": f"o{number:03d}", "shop": shop, "ts": ts, "cents": random.randrange(300, 20_000)})
    return _as_they_arrive(rows, random, seconds=200)


def payments() -> list[Row]:
    """Most orders are paid within the hour, some in two parts, some too late, some never."""
    random = Random(4)
    rows = []
    for order in orders():
        parts, delay = random.choices([(1, 1500), (2, 1500), (1, 5400), (0, 0)], [6, 1, 1, 2])[0]
        for part in range(parts):
            paid_at = order["ts"] + timedelta(seconds=delay + part * 300 + random.randrange(-900, 900))
            rows.append({"order_id": order["order_id"], "paid_at": paid_at, "paid_cents": order["cents"] // parts})
    return _as_they_arrive(rows, random, seconds=200, time="paid_at")


def views() -> list[Row]:
    """Views of ten products over forty minutes; what is popular changes in between."""
    random = Random(5)
    products = [f"product-{letter}" for letter in "abcdefghij"]
    rows = []
    for number in range(800):
        popular = products if number < 400 else products[::-1]
        product = random.choices(popular, [10, 8, 7, 5, 4, 3, 2, 1, 1, 1])[0]
        rows.append({"product": product, "ts": _at(number * 3)})
    return _as_they_arrive(rows, random, seconds=20)


def readings() -> list[Row]:
    """A numbered reading of each device every ten minutes; many are sent two or three times, up to 20 minutes later."""
    random = Random(6)
    rows: list[tuple[float, Row]] = []
    for device in ("boiler", "cellar", "roof"):
        for step in range(36):
            second = step * 600 + random.uniform(0, 60)
            celsius = round(random.gauss(20, 4), 1)
            reading = {"device": device, "number": step, "ts": _at(second), "celsius": celsius}
            sent = [0.0, *(random.uniform(5, 1200) for _ in range(random.choice([0, 0, 1, 2])))]
            rows += [(second + delay, reading) for delay in sent]
    return [row for _, row in sorted(rows, key=lambda sent: sent[0])]


INPUTS: dict[str, dict[str, Callable[[], list[Row]]]] = {
    "sessions": {"clicks": clicks},
    "fraud": {"charges": charges},
    "totals": {"orders": orders},
    "top_products": {"views": views},
    "payments": {"orders": orders, "payments": payments},
    "dedup": {"readings": readings},
}
"""What each example reads: the arguments of its `build`, in their order."""


def write(folder: Path, rows: list[Row], files: int = 4) -> None:
    """Rows as Parquet files, which a stream reads in their order."""
    folder.mkdir(parents=True)
    size = -(-len(rows) // files)
    for number in range(files):
        path = folder / f"{number:03d}.parquet"
        pq.write_table(pa.Table.from_pylist(rows[number * size : (number + 1) * size]), path)
        os.utime(path, (START.timestamp() + number,) * 2)  # Spark reads the oldest file first


def _at(second: float) -> datetime:
    return START + timedelta(milliseconds=round(second * 1000))


def _as_they_arrive(rows: list[Row], random: Random, seconds: float, time: str = "ts") -> list[Row]:
    """In the order of time, but each up to so many seconds late."""
    return sorted(rows, key=lambda row: row[time] + timedelta(seconds=random.uniform(0, seconds)))
