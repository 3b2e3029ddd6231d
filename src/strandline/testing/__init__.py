"""What users' tests and our own share: a harness for processors, faults, and contracts of our abstract classes.

Nothing in the library imports it, except that a storage URL may ask for `faults`; the contracts need pytest.
"""

from strandline.testing.harness import ProcessorHarness

__all__ = ["ProcessorHarness"]
