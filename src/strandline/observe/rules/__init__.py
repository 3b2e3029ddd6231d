"""The rules of health, by what they look at: load, checkpoints, state, failures. `observe.health` asks them all.

Each rule is a pure function from the facts of a job to its findings. Only `observe.health` imports this package.
"""
