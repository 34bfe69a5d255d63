"""Mixed load for as long as one likes, and a judge of what it leaves in the servers."""
