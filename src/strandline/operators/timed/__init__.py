"""What operators with a clock share: indexes of what is due when, packed timed items, late rows.

Only other operators import it.
"""
