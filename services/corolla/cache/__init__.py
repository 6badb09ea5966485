"""The cache of a block server: accounts of its pages, and the tensors of keys, values and recurrent states."""
