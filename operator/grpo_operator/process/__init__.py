"""How one operator process is put together: settings, kopf's handlers, metrics and the wiring of
all parts."""
