"""The sections of ``gpu_suite.py``, their sizes, and the file that they fill."""
