"""An archive of Spark's classes: a JVM that maps it starts with half the work of one that reads the classes from jars.

    python -m tests.spark_classes FILE

runs a small job and writes the archive. The archive holds for one Java and one PySpark. A JVM that finds another Java
or other jars does without it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyspark

OPTIONS = "SPARK_SUBMIT_OPTS"


def use_archive(folder: Path) -> None:
    """Let every JVM that this process and its children start use the archive in `folder`, which is made if need be."""
    os.environ[OPTIONS] += f" -XX:SharedArchiveFile={_archive(folder)} -Xlog:disable"


def _archive(folder: Path) -> Path:
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else "java"
    version = subprocess.run([java, "-version"], capture_output=True, check=True).stderr
    jars = Path(pyspark.__file__).parent / "jars"
    identity = hashlib.sha256(version + f"{pyspark.__version__} {jars} {os.environ[OPTIONS]}".encode()).hexdigest()
    archive = folder / f"{identity[:16]}.jsa"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            for old in folder.glob("*.jsa"):
                old.unlink()
            unfinished = archive.with_suffix(".new")
            options = f"{os.environ[OPTIONS]} -XX:ArchiveClassesAtExit={unfinished} -Xlog:disable"
            unfinished.unlink(missing_ok=True)
            made = subprocess.run(
                [sys.executable, "-m", "tests.spark_classes", str(unfinished)],
                cwd=Path(__file__).parents[1],
                env={**os.environ, OPTIONS: options},
                capture_output=True,
                check=False,
            )
            assert made.returncode == 0, made.stderr.decode(errors="replace")[-3000:]
            unfinished.rename(archive)
    return archive


def main() -> None:
    from tests.jobs.place import Place, batches, start_spark

    spark = start_spark()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), spark)
        for batch in batches(2):
            place.write(batch)
        with place.sums().start() as run:
            run.process_all_available()
        spark.read.parquet(str(place.output)).groupBy("user").count().collect()
    gateway: Any = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM ends, and writes the archive
    gateway.proc.wait()


if __name__ == "__main__":
    main()
