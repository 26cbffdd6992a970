"""What flows through a step, as plain data, and the functions on it.

Tokens, trees, logits rows and times enter; packed batches, picked tokens, accepted paths and costs leave, all of them numpy.
It does not know what a model is, and imports neither torch nor transformers.
"""
