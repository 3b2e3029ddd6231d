"""Keys and values as bytes, and Spark's types and schemas without a JVM.

Everything above `state` may import it. It imports nothing else of `state`.
"""
