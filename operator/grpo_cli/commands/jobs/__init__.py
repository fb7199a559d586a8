"""Commands that submit jobs, follow them to their end, and change what becomes of them."""
