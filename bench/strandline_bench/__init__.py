"""Benchmarks: measured workloads whose results are checked, here and on Spark's own operators.

`strandline bench` runs `cli.app`, `strandline demo` runs `demo.cli.app`, `strandline chaos` runs `chaos.cli.app`. The
wheel of `strandline` has none of them.
"""
