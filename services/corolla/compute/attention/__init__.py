"""A backend for each way to attend to keys and values on pages; `batch` has what they share."""
