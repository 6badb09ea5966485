"""Plans which servers form a chain. Client services plan on the placement pushed last."""
