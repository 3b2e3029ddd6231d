"""Benchmarks: measured workloads whose results are checked, here and on Spark's own operators.

The command line mounts `strandline_bench.cli.app`. Nothing else imports this package.
"""
