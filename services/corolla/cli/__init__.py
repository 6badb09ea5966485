"""The `corolla` command."""
