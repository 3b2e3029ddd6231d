"""The changelog: state changes made durable batch by batch, and the state itself now and then in the background.

It imports `state`, `storage` and the structures of `checkpoint`, nothing of the runtime.
"""
