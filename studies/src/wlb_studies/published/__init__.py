"""The simulator against published measurements: kernels, whole steps, and batches with all document lengths."""
