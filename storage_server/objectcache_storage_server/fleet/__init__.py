"""The servers of one store: who they are, and what is kept in the store for all of them."""
