"""The parts of GEM, one file each: embedding, gating, sequence, interaction, experts, heads; norms and MLPs in `basic`."""
