//go:build tools

// Package tools pins krew, which checks and installs the plugin of a release.
package tools

import (
	_ "sigs.k8s.io/krew/cmd/krew"
	_ "sigs.k8s.io/krew/cmd/validate-krew-manifest"
)
