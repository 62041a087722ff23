"""One file, or a small room, for each foreign framework; what they share is in packed.py and checks.py."""
