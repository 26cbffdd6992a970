"""Generate machine code that numba cannot express: LLVM IR for integer dot products and vector operations. `README.md` explains how."""
