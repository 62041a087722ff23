"""What the trainer and the simulator both need to know of a job (``job.Job``) before it runs, without torch."""
