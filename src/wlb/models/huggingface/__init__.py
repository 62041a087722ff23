"""Importing and exporting Hugging Face checkpoints.

``weights`` reads from safetensors files just the slices that a rank holds, and ``export`` writes a directory that
``transformers`` opens. The package of that name is not needed. ``config_json`` reads and writes the
configuration.
"""
