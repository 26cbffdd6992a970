"""Drafters of the literature, behind the contract of `drafting.base`.

From committed tokens, some also from the model's states or logits, they make candidate trees. `names` makes drafters from command lines.
A drafter does not know the step, nor how its drafts are mixed with others or accepted.
"""
