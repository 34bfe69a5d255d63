"""Who may do what: the accounts as this gateway follows them, and what they allow."""
