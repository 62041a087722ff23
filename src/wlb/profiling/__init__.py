"""Measured workload profiles: what attention and everything else cost on this device."""
