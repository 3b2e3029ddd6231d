"""How a process notices that another process is frozen or that one of its own threads has died.

Every process of a run may import it. It knows nothing of what the processes do.
"""
