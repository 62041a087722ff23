"""Importing and exporting Hugging Face checkpoints.

``weights`` reads from safetensors files just the slices that a rank holds, and ``export`` writes a directory that
``transformers`` opens. The package of that name is not needed. The configuration is read and written by
``wlb.workload.model_json``.
"""
