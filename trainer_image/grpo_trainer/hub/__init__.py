"""What is fetched of the Hugging Face hub: one commit, once per cache, with patience for what passes."""
