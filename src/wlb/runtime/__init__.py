"""What runs a plan, without the trainer: batches of tokens, a rank's own lists, level steps, pipeline stages."""
