"""Finding and reading models, and what every device must do with one.

A name becomes a model in evaluation mode with its tokenizer (`loading`); `runner` is the contract between a device and the step.
It does not know which devices there are, nor what a request or a draft is.
"""
