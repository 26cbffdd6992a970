"""Find and read models: names, GGUF and safetensors files, tokenizers' vocabularies, weights as tensors.

`loader` turns a name into a model in evaluation mode with its tokenizer. The room knows no backends, requests or drafts.
"""
