"""Importing and exporting Hugging Face checkpoints, without the package ``transformers``."""
