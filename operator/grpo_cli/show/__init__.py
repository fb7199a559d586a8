"""How results appear in a terminal: tables, charts and errors."""
