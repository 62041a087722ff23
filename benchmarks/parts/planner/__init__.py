"""The corpora that ``planner.py`` packs, the trade-off curves it compares, and its other questions."""
