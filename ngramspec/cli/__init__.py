"""The `ngramspec` command: a module a command, and what they share in `common`.

Arguments, files and the environment enter; text, JSON and an exit code leave.
It does not know what a step does: it makes engines, datastores and servers, and calls them.
"""
