"""Who asks: SigV4 and the credentials behind it."""
