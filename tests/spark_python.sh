#!/bin/sh
# The Python of Spark's processes in tests. They start with half the work: PySpark comes from where it is installed, because
# Python caches no bytecode of Spark's archive, and the daemon has imported what its workers need before it forks them.
# `tests/jobs/test_cluster.py` has executors with the Python and the daemon that Spark itself would start.
PYTHONPATH="$PYTHONPATH:"
PYTHONPATH=${PYTHONPATH#*/pyspark.zip:}
PYTHONPATH=${PYTHONPATH#*/py4j-*-src.zip:}
PYTHONPATH=${PYTHONPATH#*/spark-core_*.jar:}
export PYTHONPATH="${PYTHONPATH%:}"
if [ "$1 $2" = "-m pyspark.daemon" ]; then
  shift
  exec "$STRANDLINE_TESTS_PYTHON" -P "${0%/*}/spark_daemon.py" "$@"
fi
exec "$STRANDLINE_TESTS_PYTHON" "$@"
