"""Import and export of Hugging Face checkpoints, without the package ``transformers``."""
