"""What the CUDA path does on a GPU, part by part: `python -m benchmarks.gpu`."""
