"""The rules of health, by what they look at: load, checkpoints, state, failures. `observe.health` asks them all.

Each rule is a pure function from the facts of a job to its findings. `observe.catching_up` shares their `measures`;
nobody else imports this package.
"""
