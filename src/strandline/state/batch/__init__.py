"""What one batch changes in a state: the change set, the sealed segment file, merging of segments.

Operators, slots and task managers import it.
"""
