"""Which objects an attempt consists of: Jobs, pods, Services, NetworkPolicies. Pure."""
