"""What each operation does."""
