"""Backends run forward passes of the target: `cpu` and `cuda`, behind the contract in `base`. They know no requests and no drafters."""
