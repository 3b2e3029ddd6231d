"""What users' tests and our own share: contracts that every implementation of an abstract class must pass.

Nothing in the library imports it; it needs pytest.
"""
