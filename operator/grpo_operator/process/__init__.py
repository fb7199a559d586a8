"""How one operator process is put together: settings, kopf's handlers, metrics, wiring."""
