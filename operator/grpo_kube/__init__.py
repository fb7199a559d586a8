"""An asynchronous client for Kubernetes, in the manner of client-go.

It has the client, informers with their caches, the work queue, leader election and the event
sender. It knows nothing of GRPO and imports nothing of ours.
"""
