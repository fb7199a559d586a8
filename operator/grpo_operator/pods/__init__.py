"""Which objects an attempt consists of: its Jobs, pods, Services and NetworkPolicies, as manifests.
Pure."""
