"""The control plane: who hosts which blocks, which chain a session is pinned to, and the sessions' records."""
