"""The paper's evaluation, one experiment a file. The quoted figures are all in ``paper``."""
