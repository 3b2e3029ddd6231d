"""Keyed state: how it is coded, kept in a backend, changed by a batch, and given to user code as handles.

Import direction: handles → batch → backends; `coding` and the modules in this folder serve all of them.
Operators, runtime, testing and job may import it; it imports only `config`, `pyspark_releases` and `errors`.
"""
