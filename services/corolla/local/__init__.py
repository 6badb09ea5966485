"""Runs the whole stack as processes on one machine."""
