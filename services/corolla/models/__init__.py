"""Models: checkpoints, families, spans of blocks and the demo model."""
