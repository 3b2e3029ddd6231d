"""Rows as messages in a topic of Kafka, exactly once or at least once.

Jobs, the driver, slots and Spark's tasks import this room. It imports the contract of sinks, decisions and storage.
"""
