"""The step, for all running sequences at once: schedule, draft, pack, forward, accept, commit.

Sequences enter, and get tokens pass by pass until they finish; what requests gain leaves through `request`.
Of devices it knows the contract of `model.runner` alone, and of drafting `drafting.base.Speculator`.
"""
