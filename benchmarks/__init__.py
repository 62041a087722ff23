"""Commands that measure what the project promises: ``python -m benchmarks.NAME``, from the root."""
