"""Plans which servers form a chain. The router plans on the store's data, a client service on its snapshot."""
