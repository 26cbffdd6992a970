"""The CPU backend: one forward pass over any mix of rows, on the host's cores.

A loaded model becomes a `CpuRunner` (or a `LlamaRunner`, for Llama-style decoders in one compiled call), which turns batches into logits.
It knows no requests, drafters or stop rules. What all backends share is in `backends.base`.
"""
