"""Pure rules by which one user leaves room to others."""
