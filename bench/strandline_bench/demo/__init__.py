"""The demonstration behind `strandline demo`: a click stream counted per user, with a slot killed in the middle.

A user of the public API like any other: it imports `strandline` and asks nothing of the runtime that a user cannot.
`strandline_bench.demo.cli` is its command.
"""

from strandline_bench.demo.runner import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
