"""The slot: one process per subtask that runs the operators and holds their state.

Nobody imports it; it is started by its module name. It knows the other processes through `protocol`, and of sinks their
contract: it stages the output of its steps.
"""
