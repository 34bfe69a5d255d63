"""What a gateway process counts, and how it is read."""
