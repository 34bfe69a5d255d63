"""How bytes reach a client. `base` is the contract; each other module is one transport."""
