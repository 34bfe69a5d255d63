"""What operators ask for: accounts, checks, and the schedule."""
