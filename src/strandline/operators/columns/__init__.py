"""Arrow columns for operators: gathered, checked, as rows, as bytes, as keys.

Only other operators and the runtime's relay of rows import it.
"""
