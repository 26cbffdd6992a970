"""Benchmarks: programs with a contract. Each prints a table and, as the last line of standard output, one JSON document."""
