"""The packers that ``packing.py`` compares, ours and others', and the questions it asks of them."""
