"""Drafters of the literature, behind the contract of `drafting.base`.

Committed tokens, and for some the model's states or logits, enter; candidate trees leave. `names` makes them from what a command line says.
A drafter does not know the step, nor how its drafts are mixed with others or accepted.
"""
