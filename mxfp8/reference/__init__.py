"""The exact meaning of every op, in plain torch: slow enough to read, fast enough to train a small model on a CPU."""
