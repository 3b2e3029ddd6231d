"""What a person does to a job's folder: inspect it, verify it, collect garbage, dispose of savepoints.

Nothing imports it but its own `cli`. It may import everything but the slots, the task managers and the tasks.
"""
