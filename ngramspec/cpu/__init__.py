"""The CPU target: one pass over any mix of rows, on the host's cores.

A loaded model becomes a `CpuRunner`, which turns batches into rows of logits.
It does not know what a request, a drafter or a stop is; what it has in common with other devices is in `model.runner`.
"""
