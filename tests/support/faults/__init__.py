"""Faults that tests put into what they run, from outside: nothing of the product knows of them."""
