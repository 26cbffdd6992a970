"""The paged KV cache's bookkeeping: block tables with prefix reuse. Numpy only; keys and values themselves belong to the backends."""
