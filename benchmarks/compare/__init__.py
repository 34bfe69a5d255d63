"""The same prefixes through ObjectCache and through what users would pick, side by side."""
