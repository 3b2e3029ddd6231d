"""The command line, `strandline`: one module per group of commands.

Nothing imports it. Each command imports what it needs when it runs, so that `strandline --help` is quick.
"""
