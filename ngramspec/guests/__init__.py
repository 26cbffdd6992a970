"""Our drafts in other people's engines: `guest` is the object that all hosts share, `vllm`, `transformers` and `llama_cpp` fit it into one.

A host's tokens come in, drafts go out, the host verifies them. What is computed, and how exactly, is the host's business alone.
"""
