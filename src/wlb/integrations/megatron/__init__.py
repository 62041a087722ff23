"""Megatron-Core; each file imports what it needs of it."""
