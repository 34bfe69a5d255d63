"""A store that several storage servers share, beside what it can do by itself."""
