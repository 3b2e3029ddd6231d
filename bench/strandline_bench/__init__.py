"""Benchmarks: measured workloads whose results are checked, here and on Spark's own operators.

`strandline bench` runs `cli.app`, `strandline demo` runs `demo.cli.app`. The wheel of `strandline` has neither of them.
"""
