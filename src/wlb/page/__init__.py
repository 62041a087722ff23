"""The local page of ``wlb serve``: what ``wlb check`` says of a job, anew whenever a slider moves."""
