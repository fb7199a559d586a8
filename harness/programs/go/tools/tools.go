//go:build tools

// Package tools pins the programs that the cluster is made of and that are built as they are.
package tools

import (
	_ "github.com/containerd/containerd/v2/cmd/containerd"
	_ "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"
	_ "github.com/containerd/containerd/v2/cmd/ctr"
	_ "github.com/opencontainers/runc"
	_ "helm.sh/helm/v4/cmd/helm"
)
