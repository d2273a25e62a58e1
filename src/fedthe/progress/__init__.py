"""How far long work is: events, the file that a run keeps of them, and `fedthe watch`, which shows it."""
