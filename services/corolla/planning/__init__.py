"""Which servers make a chain: for the router on what the store says, for a client service on its snapshot."""
