"""Objects in this process's memory: the contract's model."""
