"""Training, a small program on top of ``wlb.runtime``: from a token store to a trained model; see ``trainer``."""
