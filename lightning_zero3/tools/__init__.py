"""`zero3` from the shell: what a run will take, and what to do with checkpoints."""
