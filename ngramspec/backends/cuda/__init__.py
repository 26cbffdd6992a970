"""Run the forward pass on a CUDA device: kernels in Triton, the KV pool, captured graphs.

Importing a module of this package imports Triton; nothing outside imports one unless the device is CUDA. The kernels keep the package's
promise by construction: every sum runs in an order that is tied to absolute indices, and neither the number of rows nor the launch grid
enters it. Products that another kernel must repeat bit for bit are never contracted (`enable_fp_fusion=False`).
"""
