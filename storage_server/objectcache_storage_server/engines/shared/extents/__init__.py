"""How bytes lie in a shared store's objects: cut, written, read and verified."""
