"""Real servers on loopback, in processes of their own, that tests, benchmarks and `strandline chaos sinks` disturb.

They use the programs that `make setup` fetches, and raise `ServerMissingError` where one is missing.
"""
