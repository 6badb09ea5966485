"""Reads the states of block servers' pods from Kubernetes, and tags the pods. The router also works without it."""
