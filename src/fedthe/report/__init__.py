"""What a run has found, for people: one page to open and to send, and the same numbers in other formats."""
