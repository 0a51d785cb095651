"""Data for GEM: batch types, real and synthetic logs, a deterministic resumable loader."""
