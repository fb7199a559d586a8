"""Facts about ranks that tests judge: each module runs in training processes and returns what it
saw."""
