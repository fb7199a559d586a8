"""How results appear in a terminal: tables, charts, errors, and YAML as kubectl reads it."""
