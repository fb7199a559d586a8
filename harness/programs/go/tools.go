//go:build tools

// Package tools pins the programs that are built as they are. All are in one module, so that each package of the
// Kubernetes client is compiled once: each program alone asks for another version of it.
package tools

import (
	_ "github.com/containerd/containerd/v2/cmd/containerd"
	_ "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"
	_ "github.com/containerd/containerd/v2/cmd/ctr"
	_ "github.com/opencontainers/runc"
	_ "github.com/rancher/local-path-provisioner"
	_ "helm.sh/helm/v4/cmd/helm"
	_ "sigs.k8s.io/kueue/cmd/kueue"
	_ "sigs.k8s.io/kwok/cmd/kwok"
)
