"""What every route of the admin API is served with."""
