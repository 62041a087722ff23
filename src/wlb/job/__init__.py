"""The description of a job (``job.Job``) that trainer and simulator share, without torch."""
