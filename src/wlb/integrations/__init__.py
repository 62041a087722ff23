"""Adapters for other frameworks, one file or folder each; packed.py and batches/ hold what they share."""
