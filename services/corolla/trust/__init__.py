"""Identities of processes by certificates, the verification of other identities, and what each role may call."""
