"""Measured workload profiles: the seconds of attention and of everything else on this device."""
