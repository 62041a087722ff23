"""What the benchmark commands are made of; a command in ``benchmarks/`` imports it as ``parts``."""
