"""Test support for users and for this project: a harness for processors, a storage with faults, contract tests.

The library does not import it. It is a storage plugin for URLs that begin with `faulty+`. The contracts need pytest.
"""

from strandline.testing.harness import ProcessorHarness

__all__ = ["ProcessorHarness"]
