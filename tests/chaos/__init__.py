"""The crash machine: real runs, real kills, an independent census, and a verdict on each."""
