"""What crosses a process border: message structs, clients, the server, addresses, shared local folders.

Every process imports it. It imports none of them.
"""
