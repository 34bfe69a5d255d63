"""What a server keeps beside objects: accounts, the changed schedule."""
