"""The ways to attend to keys and values on pages, one module each; `base` has what they share."""
