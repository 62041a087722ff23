"""Models of Hugging Face: Llama, Qwen2 and Qwen3 checkpoints in, and out again.

``weights`` reads from safetensors files just the slices that a rank holds, and ``export`` writes a directory that
``transformers`` opens. The package of that name is not needed. The configuration is read and written by
``wlb.planning.config_json``.
"""
