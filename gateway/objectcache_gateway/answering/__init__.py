"""One request in hand: what it brings, and how it is answered."""
