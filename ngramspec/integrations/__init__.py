"""Drafts inside other engines: `draft_session` is what all integrations share; `vllm`, `transformers` and `llama_cpp` are one host each.

The host's tokens come in, drafts go out, and the host verifies them. What is computed, and how exactly, is up to the host.
"""
