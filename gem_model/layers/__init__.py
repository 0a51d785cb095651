"""The parts of GEM, one file each: embedding, sequence, interaction, experts, heads; norms, MLPs and gates in basic."""
