"""What clients see of a server whose chunks are encoded, which is what they see of any."""
