"""Real-time mode in the driver: one long query of Spark, whose rows are cut into epochs every few milliseconds.

An epoch is a batch of the same protocol. Only the driver imports this room, where it plans and opens a generation.
"""
