"""Runs a span of blocks: the runner, its ways to attend and to run whole blocks, and the choice among them."""
