"""The whole stack as processes on one machine."""
