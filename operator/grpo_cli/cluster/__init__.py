"""How the command line meets a cluster: kubectl, attempts, claims and downloads."""
