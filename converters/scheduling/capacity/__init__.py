"""How many users a server can have: its recorded requests and steps, under other settings."""
