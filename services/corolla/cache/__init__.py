"""What sessions keep on a block server: the accounts of pages, and the bytes of keys, values and states."""
