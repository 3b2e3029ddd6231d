"""What a person does to jobs: find, see and steer those that run; inspect, verify and clean up the folder of any.

Nothing imports it but its own `cli`. It finds runs through `observe`, steers them over HTTP, and reads checkpoints
through `runtime.driver.restore`.
"""
