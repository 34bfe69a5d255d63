"""Where chunks and objects live. `base` is the contract; each other module is one engine."""
