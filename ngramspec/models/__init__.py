"""Finding and reading models: names, GGUF and safetensors files, tokenizers' vocabularies, weights as tensors.

A name becomes a model in evaluation mode with its tokenizer (`loader`). It knows no backends, requests or drafts.
"""
