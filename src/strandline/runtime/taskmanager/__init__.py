"""The task manager: one process per executor that starts slots and makes their state durable.

Nobody imports it; it is started by its module name. It knows the other processes through `protocol`.
"""
