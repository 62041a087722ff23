"""What the trainer and the simulator both need to know of a job before it runs. Nothing here imports torch."""
