"""Other frameworks' names for what is done here."""
