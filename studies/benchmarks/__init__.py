"""Commands that compare with peers, simulate and fit: ``python -m studies.benchmarks.NAME``, from the root."""
