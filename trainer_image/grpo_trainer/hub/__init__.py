"""What is fetched of the Hugging Face hub, one commit, once per cache, and what is pushed to it:
with patience for what passes."""
