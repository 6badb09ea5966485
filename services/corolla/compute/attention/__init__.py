"""The backends that attend to keys and values on pages; `batch` has the parts that they share."""
