"""What both ends of a fabric share: addresses, announcements, and the bindings to its library."""
