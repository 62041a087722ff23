"""Imported last by the server that tests fork from: forks neither search nor copy the objects that it has imported.

A collection in a fork would write to the pages of a million objects, which takes a fifth of the time of a small job.
"""

import gc

gc.collect()
gc.freeze()
