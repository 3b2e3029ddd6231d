"""What one batch changes in a state: the change set, the sealed segment file, and the merging of segments.

Operators, slots, task managers and `testing` import it. It imports `state/backends`, because a change set lies over a
backend.
"""
