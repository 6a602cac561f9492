"""Checkpoints: directories in which every rank writes its part, and the files that they become."""
