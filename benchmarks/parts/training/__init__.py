"""Training every preset in turns, for ``training.py`` and ``fidelity.py``, and the trainer outside the project."""
