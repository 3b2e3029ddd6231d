"""What users' tests and our own share: contracts that every implementation of an abstract class must pass, and faults.

Nothing in the library imports it, except that a storage URL may ask for `faults`; the contracts need pytest.
"""
