"""One small file per foreign framework; each imports its framework, and none imports another."""
