"""Models of Hugging Face: Llama, Qwen2 and Qwen3 checkpoints in, and out again.

``names`` translates the names of the weights, ``weights`` reads from safetensors files just the slices that a rank
holds, and ``export`` writes a directory that ``transformers`` opens, a package that is not needed for it. The
configuration is read and written by ``wlb.planning.config_json``.
"""
