"""Training: the smallest program over ``wlb.runtime``, from a token store to a trained model; see ``trainer``."""
