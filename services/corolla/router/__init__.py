"""The control plane: which servers host which blocks, the chain of each session, and the sessions' records."""
