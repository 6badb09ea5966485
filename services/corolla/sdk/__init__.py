"""The Python client: a thin, typed layer over the generated stubs."""
