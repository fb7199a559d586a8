"""What `grpo` can do: a module for each command. No command knows another."""
