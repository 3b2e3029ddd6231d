"""A sink of PostgreSQL: rows and marker in one transaction.

`sink.py` is what users write, `target.py` writes from the driver, `session.py` is one connection, and `types.py` has
the types of columns and the text that COPY reads.
"""
