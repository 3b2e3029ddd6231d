"""What a person does to a job's folder: inspect it, verify it, collect garbage, dispose of savepoints.

Nothing imports it but its own `cli`. Of the runtime it imports `driver/restore` alone; else `checkpoint`, `storage`,
`config` and `errors`.
"""
