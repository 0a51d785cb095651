"""Tests of GEM: data, model, training, comparison."""
