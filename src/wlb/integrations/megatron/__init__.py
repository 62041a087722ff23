"""Megatron-Core and Megatron Bridge; each file imports what it needs of them."""
