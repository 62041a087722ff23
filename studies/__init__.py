"""The studies: a package of its own in src, and its tests, which are imported as ``studies.tests``."""
