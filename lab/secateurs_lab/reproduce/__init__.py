"""The tables of the paper; nothing else imports this package."""
