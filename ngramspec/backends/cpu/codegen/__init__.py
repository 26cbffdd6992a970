"""Machine code of the CPU backend that numba cannot express: LLVM IR for integer dot products and vector operations."""
