"""The controller: watches GRPOJobs and their children and brings the cluster to what they ask for."""
